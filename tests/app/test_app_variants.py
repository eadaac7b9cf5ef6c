"""Several captions of one picture: `--prompts`, `--num-captions`, and what their rows share."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from job_rows import rows_of
from test_app_inputs import write_tar

import mmspec
from mmspec.app.caption import command, executor
from mmspec.app.cli.main import main
from mmspec.app.modeling.captioner import Captioner
from research.synthetic_images import write_images

PROMPTS = ["Describe the image.", "How many things are there?", "What is in the middle?"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", 5)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return tmp_path / "photos"


def caption(*args: object, model: str = "tiny", tokens: int = 6) -> int:
    try:
        return main(["caption", *map(str, args), "--no-progress", "--max-new-tokens", str(tokens), "--model", model])
    except SystemExit as end:  # of argparse
        return int(end.code or 0)


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = rows_of(path)
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_each_prompt_is_a_row(pictures: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "all.jsonl"
    assert caption(pictures, "--prompts", prompts, "--out", out) == 0
    found = rows(out)
    assert len(found) == 15 and {row["prompt"] for row in found.values()} == set(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        alone = tmp_path / f"{number}.jsonl"
        assert caption(pictures, "--prompt", prompt, "--out", alone) == 0
        for ident, row in rows(alone).items():
            assert found[f"{ident}#{number + 1}"]["caption"] == row["caption"]


def test_a_job_is_resumed_row_by_row(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    options = ("--prompts", tmp_path / "prompts.txt", "--num-captions", "2", "--temperature", "1", "--compare", "all")
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    for out in (whole, part):
        assert caption(pictures, *options, "--out", out) == 0
    lines = part.read_text().splitlines()
    assert len(lines) == 30
    part.write_text("".join(f"{line}\n" for line in lines[:13]))
    assert caption(pictures, *options, "--out", part) == 0
    assert {ident: row["caption"] for ident, row in rows(part).items()} == {
        ident: row["caption"] for ident, row in rows(whole).items()
    }
    assert "17 captioned, 0 failed" in capsys.readouterr().err
    assert caption(pictures, *options[:3], "3", *options[4:], "--out", part) == 2


def test_samples_of_a_prompt_differ_and_repeat(pictures: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert caption(pictures, "--num-captions", 3, "--temperature", 1.5, "--out", tmp_path / f"{name}.jsonl") == 0
    a, b = rows(tmp_path / "a.jsonl"), rows(tmp_path / "b.jsonl")
    assert len(a) == 15 and {ident: row["caption"] for ident, row in a.items()} == {
        i: r["caption"] for i, r in b.items()
    }
    first = [row["caption"] for ident, row in a.items() if ident.startswith(next(iter(a))[:-2])]
    assert len(first) == 3 and len(set(first)) > 1


def test_a_rows_own_prompt_is_the_only_one(pictures: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in pictures.iterdir())
    lines = [{"file_name": names[0], "prompt": "its own"}, {"file_name": names[1]}]
    (pictures / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "o.jsonl"
    for _ in range(2):
        assert caption(pictures / "list.jsonl", "--prompts", tmp_path / "prompts.txt", "--out", out) == 0
    assert [row["prompt"] for row in rows(out).values() if row["file_name"].endswith(names[0])] == ["its own"]
    assert len(rows(out)) == 4


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_other_forms_of_output(pictures: Path, tmp_path: Path, form: str, capsys: Any) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    out = tmp_path / "out"
    options = (pictures, "--prompts", tmp_path / "prompts.txt", "--format", form, "--out", out)
    assert caption(*options) == 0 and caption(*options) == 0
    assert "0 captioned, 0 failed, 15 skipped" in capsys.readouterr().err
    if form == "webdataset":
        names = set()
        for file in out.glob("*.tar"):
            with tarfile.open(file) as tar:
                names |= {name.partition(".")[0] for name in tar.getnames() if name.endswith(".txt")}
        assert len(names) == 15


@pytest.mark.usefixtures("scenes_once")
def test_pictures_are_encoded_once(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same captions; from the third prompt on, what comes before the question is not computed again."""
    made: list[Captioner] = []
    build = command.build_captioner

    def build_captioner(*args: Any) -> Captioner:
        made.append(build(*args))
        return made[-1]

    monkeypatch.setattr(command, "build_captioner", build_captioner)
    monkeypatch.setattr(Captioner, "close", lambda self: None)
    texts = []
    for flag in ("--reuse-prefix", "--no-reuse-prefix"):
        out = tmp_path / f"{flag}.jsonl"
        options = ("--prompts", tmp_path / "prompts.txt", "--drafter", "hybrid", "--limit", 2, "--out", out, flag)
        assert caption(pictures, *options, model="scenes", tokens=8) == 0
        texts.append({ident: row["caption"] for ident, row in rows(out).items()})
        stats = mmspec.stats(made[-1].model)
        assert stats.reused_positions == (2 * 151 if flag == "--reuse-prefix" else 0)
        mmspec.unpatch(made[-1].model)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["jsonl", "webdataset"])
def test_pictures_are_decoded_once(pictures: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all prompts of a batch, in whatever form; one that cannot be decoded is an error of each of its rows."""
    (pictures / "broken.png").write_bytes(b"no picture")
    decoded: list[str] = []
    decode = executor.decode_item

    def count_decoded(item: Any, *args: Any) -> Any:
        decoded.append(item.path.name)
        return decode(item, *args)

    monkeypatch.setattr(executor, "decode_item", count_decoded)
    options = ("--prompts", tmp_path / "prompts.txt", "--batch-size", "4", "--format", form)
    assert caption(pictures, *options, "--out", tmp_path / "out") == 1
    assert sorted(decoded) == sorted(path.name for path in pictures.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must have 1 to 1000 lines, a prompt each; got 0"),
        (b"one\n\ntwo\n", "line 2 is empty"),
        (b"one\ntwo\none\n", "line 3 is that of line 1"),
        (b"a\n" * 1001, "must have 1 to 1000 lines"),
        (b"x" * (10 << 20), "is larger than 1 MiB"),
        (b"\xff\xfe\xff", "is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_of_prompts(
    pictures: Path, tmp_path: Path, content: bytes | None, message: str, capsys: Any
) -> None:
    file = tmp_path / "p.txt"
    if content is not None:
        file.write_bytes(content)
    assert caption(pictures, "--prompts", file, model="/nowhere/at/all") == 2
    err = capsys.readouterr().err
    assert message in err and "nowhere" not in err.replace("/nowhere/at/all ...", "")


def test_an_archive(pictures: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {file.name: file.read_bytes() for file in sorted(pictures.iterdir())})
    out = tmp_path / "o.jsonl"
    for _ in range(2):
        assert caption(tmp_path / "a.tar", "--prompts", tmp_path / "prompts.txt", "--out", out) == 0
        assert len(rows(out)) == 15
