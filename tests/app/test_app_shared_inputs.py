"""Training, examples, benchmarks and comparisons read what `mmspec caption` reads, as other tools write it; a picture
that cannot be used is skipped and counted."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_app_inputs import write_tar

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.decode import ReadableRows
from mmspec.app.io.held import Spool
from mmspec.app.io.item import SourceOptions
from mmspec.app.modeling.load import load_model
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import FileData, TextRequests, read_questions
from mmspec.vision.video.decoder_pool import DecoderPool

COUNT, BROKEN = 6, (0, 3)
"""Pictures of an input, and those of them that are cut in the middle: the first is one."""


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (value, value, value)).save(buffer, "PNG")
    data = buffer.getvalue()
    return data[:50] if value // 10 in BROKEN else data


PICTURES = [png(10 * number) for number in range(COUNT)]


def write_folder(path: Path) -> str:
    path.mkdir()
    for number, data in enumerate(PICTURES):
        (path / f"{number}.png").write_bytes(data)
    return str(path)


def write_list(path: Path) -> str:
    write_folder(path)
    rows = [{"file_name": f"{number}.png", "prompt": f"what is {number} ?"} for number in range(COUNT)]
    (path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path / "list.jsonl")


def write_webdataset(path: Path) -> str:
    webdataset = pytest.importorskip("webdataset", reason="optional: webdataset")
    with webdataset.TarWriter(str(path)) as writer:
        for number, data in enumerate(PICTURES):
            writer.write({"__key__": f"{number:04}", "png": data, "txt": f"caption {number}"})
    return str(path)


def write_parquet(path: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"image": PICTURES, "n": list(range(COUNT))}), path, row_group_size=2)
    return str(path)


def write_dataset(path: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    cells = [{"bytes": data, "path": f"{number}.png"} for number, data in enumerate(PICTURES)]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": cells}, features=features).save_to_disk(str(path))
    return str(path)


WRITERS: dict[str, Callable[[Path], str]] = {
    "folder": write_folder,
    "jsonl": write_list,
    "tar": lambda path: str(write_tar(path.with_suffix(".tar"), {f"{n}.png": data for n, data in enumerate(PICTURES)})),
    "webdataset": lambda path: write_webdataset(path.with_suffix(".tar")),
    "parquet": lambda path: write_parquet(path.with_suffix(".parquet")),
    "datasets": write_dataset,
}


@pytest.fixture(params=WRITERS)
def named(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return WRITERS[request.param](tmp_path / "x")


def shade(media: Any) -> int:
    return int(media.getpixel((3, 3))[0])


def test_training_skips_broken_pictures_in_every_run_alike(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    for order in (range(COUNT), reversed(range(COUNT))):  # a resumed run sees the same requests, in any order
        data = FileData([named])
        values = {index: shade(data[index].media) for index in order}
        assert [values[index] for index in range(COUNT)] == [10, 10, 20, 40, 40, 50]
        assert data.left_out == set(BROKEN)
        assert "2 of 6 so far" in capsys.readouterr().err
        data.decoders.close()


def test_other_commands_take_the_next_picture(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with DecoderPool() as decoders:
        rows = ReadableRows([named], SourceOptions(), decoders, "x")
        assert shade(rows.peek()[1]) == 10

        def check(item: Any, media: Any) -> None:
            if shade(media) == 20:
                raise ValueError("absolute aspect ratio must be smaller than 200, got 300")

        rows.check = check
        assert [shade(media) for _, media in rows] == [10, 40, 50]
        rows.report()
    assert "skipped 3 of 6 that cannot be used; the first: " in capsys.readouterr().err


def test_nothing_that_can_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "only.png").write_bytes(PICTURES[0])
    assert main(["compare", "--image", str(tmp_path / "only.png"), "--model", "tiny"]) == 2
    assert "only.png: cannot be decoded" in capsys.readouterr().err
    with pytest.raises(UsageError, match="none of the 1 requests can be used"):
        FileData([str(tmp_path / "only.png")])[0]


def test_a_command_on_a_table_whose_first_picture_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_parquet(tmp_path / "x.parquet")
    arguments = ["--image", table, "--drafters", "none", "--new-tokens", "4"]
    assert main(["compare", *arguments, "--model", "tiny"]) == 0
    name = os.path.relpath(table)
    assert f"skipped 1 of 2 that cannot be used; the first: {name}#0: " in capsys.readouterr().err


def test_options_of_tables_are_those_of_caption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.txt").write_text("http://127.0.0.1:9/a.png\n")
    for command in (["compare", "--image"], ["train", "--out", "x", "--data"]):
        model = "--target" if command[0] == "train" else "--model"
        rest = [model, "tiny"]
        assert main([*command, str(tmp_path / "list.txt"), *rest]) == 2
        assert "--urls" in capsys.readouterr().err, "named, and there"
        if command[0] != "train":
            assert main([*command, str(tmp_path / "list.txt"), *rest, "--urls"]) == 2
            assert "not a public address" in capsys.readouterr().err


class Refusing:
    """A captioner whose processor refuses pictures of one shade, and prompts that are long."""

    def __init__(self, captioner: Any, shades: set[int]) -> None:
        self.captioner, self.shades = captioner, shades

    def __getattr__(self, name: str) -> Any:
        return getattr(self.captioner, name)

    def checked_inputs(self, media: Any, prompts: Any) -> Any:
        if self.shades & {shade(one) for one in media if one != ()}:
            raise ValueError("absolute aspect ratio must be smaller than 200, got 300")
        return self.captioner.checked_inputs(media, prompts)


def test_what_the_target_refuses_is_left_out_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"file_name": f"{number}.png", "prompt": f"word {number}"} for number in range(COUNT)]
    rows[4]["prompt"] = "word " * 5000
    rows[5]["answer"] = "five"
    write_folder(tmp_path / "x")
    (tmp_path / "x" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, processor = load_model("tiny", "float32", "cpu")
    answers = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 4], [2, 0]):
        data = FileData([str(tmp_path / "x" / "list.jsonl")])
        teacher = Teacher(model, processor, data)
        teacher.captioner = Refusing(teacher.captioner, {20})  # type: ignore[assignment]
        requests, _ = teacher.build_inputs(data, order)
        answers.append({index: request.question for index, request in zip(order, requests, strict=True)})
    assert answers[0] == {0: "word 1", 1: "word 1", 2: "word 5", 3: "word 5", 4: "word 5", 5: "word 5"}
    assert all(answers[0][index] == text for part in answers[1:] for index, text in part.items())
    said = capsys.readouterr().err
    assert "absolute aspect ratio" in said and "positions: shorten the prompt (" in said

    teacher.generate_answers(tmp_path / "run", 4, 4)
    assert set(teacher.answers) == set(range(COUNT)) and all(teacher.text_lengths.values())
    with_text_only = data.part(range(4), also_text=True)
    with_text_only.reject(4, ValueError("no"))
    assert with_text_only[4].question == "word 5" and len(with_text_only) == 8


def test_held_out_requests_stay_held_out(tmp_path: Path) -> None:
    data = FileData([write_folder(tmp_path / "x")])
    train, held_out = data.part(range(4)), data.part(range(4, 6))
    held_out.reject(1, ValueError("no"))
    assert [shade(held_out[index].media) for index in range(2)] == [40, 40]
    assert [shade(train[index].media) for index in range(4)] == [10, 10, 20, 10], "within its part"


def test_bytes_of_tables_wait_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = FileData([write_parquet(tmp_path / "x.parquet")])
    contents = [item.content for item in data.items]
    assert sum(content.num_bytes for content in contents if content) == 0
    assert [content.read() for content in contents if content] == PICTURES
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: full)
    with pytest.raises(UsageError, match="set TMPDIR"):
        FileData([str(tmp_path / "x.parquet")])
    assert Spool().keep(data.items[0]) is not None


def test_requests_of_a_text_target_that_are_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file as Notepad writes it."""
    (tmp_path / "a.txt").write_text("one ?\n" + "long " * 20_000 + "\n\ntwo ?\n", "utf-16", newline="\r\n")
    questions = read_questions([str(tmp_path / "a.txt")])
    assert questions == ["one ?", "two ?"] and "skipped 1 requests; the first has" in capsys.readouterr().err
    requests = TextRequests(questions)
    requests.reject(0, ValueError("too long"))
    assert requests[0].question == "two ?"
    assert "skipped 'one ?': too long (1 of 2 so far" in capsys.readouterr().err


def test_many_skips_are_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    requests = TextRequests([f"question {number}" for number in range(2000)])
    for _ in range(1500):
        requests.reject(0, ValueError("no"))
    lines = capsys.readouterr().err.splitlines()
    assert requests[0].question == "question 1500" and len(lines) < 20 and "(1024 of 2000 so far" in lines[-1]
