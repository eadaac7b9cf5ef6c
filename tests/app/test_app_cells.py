"""Cells of tables: where they are decoded, and what each kind of cell becomes."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_table import line
from PIL import Image
from test_app_inputs import content_of, picture, read
from test_app_videos import write_video

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.caption.ray_actor import NEW_COLUMNS, column
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.cells import Reach, cell_content, is_missing
from mmspec.app.io.content import Unreadable
from mmspec.app.io.data_sets import is_hub_dataset
from mmspec.app.io.decode import decode_item
from mmspec.app.io.images import Video
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.kinds import media_kind
from mmspec.app.io.output import StreamOutput
from mmspec.app.modeling.chat import takes_several_pictures
from mmspec.app.modeling.load import load_model
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform


def nested_dataset(datasets: Any) -> Any:
    """A dataset with pictures in lists and structs; the second of its three rows holds no picture but junk."""
    image = datasets.Image()
    features = {"image": image, "images": [image], "struct": {"image": image}, "deep": [{"views": [image]}]}
    cells = [{"bytes": data, "path": None} for data in (picture(), b"junk", picture(50))]
    rows = {
        "image": cells,
        "images": [[cell] for cell in cells],
        "struct": [{"image": cell} for cell in cells],
        "deep": [[{"views": [cell, cell]}] for cell in cells],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@line("pictures in lists and structs of `datasets`")
@pytest.mark.parametrize("name_of_column", ["image", "images", "struct", "deep"])
@pytest.mark.parametrize("streamed", [False, True])
def test_no_picture_of_a_dataset_is_decoded_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name_of_column: str, streamed: bool
) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    saved = nested_dataset(datasets)
    name = str(tmp_path / "saved")
    if streamed:
        load, file = datasets.load_dataset, str(tmp_path / "t.parquet")
        saved.to_parquet(file)
        monkeypatch.setattr(
            datasets,
            "load_dataset",
            lambda _, **options: load("parquet", data_files=file, **options | {"revision": None}),
        )
        name = "hf://datasets/owner/name"
    else:
        saved.save_to_disk(name)

    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("a picture is decoded in the main process")

    monkeypatch.setattr("PIL.Image.open", decode)
    inputs = Inputs([name], SourceOptions(tmp_path, image_column=name_of_column))
    inputs.check()
    found = list(inputs.rows(lambda ident: False))
    assert [item.id.rpartition("#")[2] for item in found] == ["0", "1", "2"], (
        "each row, also after one without a picture"
    )
    if name_of_column == "image":
        assert [content_of(item) for item in found] == [picture(), b"junk", picture(50)]


FORMS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "struct": lambda data: {"bytes": data, "path": None},
    "named": lambda data: {"bytes": data, "path": "any.bin"},
    "list": lambda data: [{"bytes": data, "path": None}],
    "nested": lambda data: {"image": {"bytes": data, "path": "x"}},
    "base64": lambda data: base64.b64encode(data).decode(),
    "base64 without padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "base64 for addresses": lambda data: base64.urlsafe_b64encode(data).decode(),
    "base64 in lines": lambda data: base64.encodebytes(data).decode(),
    "base64 as bytes": lambda data: base64.b64encode(data),
    "data URL": lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}",
    "data URL with parameters": lambda data: f"DATA:;charset=x;base64,{base64.b64encode(data).decode()}",
    "data URL in percents": lambda data: "data:image/png," + urllib.parse.quote_from_bytes(data),
}


@line("base64 and data URLs")
@pytest.mark.parametrize("form", FORMS)
def test_pictures_in_cells(form: str) -> None:
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        file = io.BytesIO()
        Image.new("RGB", (7, 5), "red").save(file, kind)
        content, name = cell_content(FORMS[form](file.getvalue()), Reach("."))
        assert content.read() == file.getvalue() and name in ("", "any.bin", "x"), kind


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("data:image/png;base64,iVBORw0KGgo?", "BadText"),
        ("A" * 900_000, "BadCell"),
        ("a/" * 9000, "BadCell"),
        ("a\0.png", "BadCell"),
        ("", "Missing"),
        (None, "Missing"),
        (float("nan"), "Missing"),
        (3, "BadCell"),
        ([1, 2, 3] * 9999, "BadCell"),
        ([], "Missing"),
        ([None], "Missing"),
        ([[[[[[[picture()]]]]]]], "Missing"),
        ([picture()] * 65, "TooMany"),
        ({"bytes": None, "path": None}, "Missing"),
        ({"x": 1}, "Missing"),
        ({"left": picture(), "right": picture()}, "BadCell"),
        ("../a.png", "OutsideInput"),
        ("http://example.org/a.png", "AddressNotAllowed"),
    ],
)
def test_cells_without_a_picture_are_error_rows_of_one_short_line(tmp_path: Path, cell: Any, kind: str) -> None:
    content, name = cell_content(cell, Reach(str(tmp_path / "t")))
    assert isinstance(content, Unreadable) and len(name) <= 300
    assert content.kind == kind, content
    assert len(content.message.replace(str(tmp_path), "")) <= 300 and "\n" not in content.message


@line("a list of pictures in a cell")
def test_a_list_is_several_pictures_of_one_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    cells = [
        [{"bytes": data, "path": None} for data in row] for row in ([picture()], [picture(), picture(50)], [b"junk"])
    ]
    pq.write_table(pa.table({"images": cells}), tmp_path / "t.parquet")
    args = ["caption", str(tmp_path / "t.parquet"), "--max-new-tokens", "2", "--drafter", "none"]
    assert main([*args, "--model", "tiny"]) == 1
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(row["error"] or {}).get("type") for row in rows] == [None, None, "NotAnImage"]
    assert rows[1]["n_prompt_tokens"] > rows[0]["n_prompt_tokens"] + 1, "two pictures are in the prompt"


def test_a_list_of_pictures_is_stored_beside_its_caption(tmp_path: Path) -> None:
    both, one = [base64.b64encode(picture(width)).decode() for width in (40, 50)], "gone.png"
    rows = [{"images": both, "id": "both"}, {"images": [one, one], "id": "none"}, {"images": both[:1], "id": "one"}]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ["caption", str(tmp_path / "l.jsonl"), "--model", "tiny", "--max-new-tokens", "2", "--drafter", "none"]
    assert main([*args, "--out", str(tmp_path / "out"), "--format", "webdataset"]) == 1
    with tarfile.open(tmp_path / "out" / "part-00000-00000.tar") as archive:
        stored = {name.partition(".")[2]: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    assert {"0.png", "1.png", "png", "txt", "json"} == set(stored)
    assert (stored["0.png"], stored["1.png"], stored["png"]) == (picture(40), picture(50), picture(40))
    errors = (tmp_path / "out" / "part-00000-00000.errors.jsonl").read_text()
    assert json.loads(errors)["error"]["message"].endswith("l.jsonl line 2)")


def test_a_model_of_one_picture_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, processor = load_model("tiny")
    assert takes_several_pictures(processor)

    class Last:
        """A processor that drops all pictures but one."""

        chat_template = None
        image_token = "<image>"

        def __call__(self, text: list[str], images: list[Any], **options: Any) -> Any:
            one = text[0].replace("<image>\n", "", len(images) - 1)
            return processor(text=[one], images=images[:1], **options)

    class Strict(Last):
        def __call__(self, text: list[str], images: list[Any], **options: Any) -> Any:
            raise ValueError("one image per prompt")

    for kind in (Last, Strict):
        assert not takes_several_pictures(kind())  # type: ignore[arg-type]
    monkeypatch.setattr("mmspec.app.modeling.load._processor", lambda name: (Strict(), {}, None))
    (tmp_path / "l.jsonl").write_text('{"images": ["a.png", "b.png"]}\n')
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(picture())
    config = CaptionConfig((str(tmp_path / "l.jsonl"),), "owner/name")
    executor = LocalExecutor(config, lambda: pytest.fail("loaded"))
    job = CaptionJob(config, StreamOutput(io.BytesIO()), executor)
    with pytest.raises(UsageError, match="owner/name takes one picture per prompt"):
        job.run()


@line("a clip named like a picture, or a picture like a clip")
def test_content_says_what_is_a_clip(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="optional: mmspec[video]")
    clip = write_video(tmp_path / "c.mp4", 5).read_bytes()
    cells = [clip, {"bytes": clip, "path": "c"}, {"bytes": picture(), "path": "c.mp4"}, picture()]
    items = [Item(Path(name), "", name, content=cell_content(cell, Reach("."))[0]) for cell, name in
             zip(cells, ("t#0", "c", "c.mp4", "t#3"), strict=True)]  # fmt: skip
    (tmp_path / "clip.jpg").write_bytes(clip)
    (tmp_path / "photo.mp4").write_bytes(picture())
    items += [Item(tmp_path / "clip.jpg"), Item(tmp_path / "photo.mp4")]
    with DecoderPool() as decoders:
        kinds = [isinstance(decode_item(item, Uniform(2), 1 << 24, decoders), Video) for item in items]
    assert kinds == [True, True, False, False, True, False]
    for url, is_video in (("c.mp4?sig=1", True), ("c.mp4#t=1", True), ("c.jpg?file=x.mp4", False)):
        assert Item(Path(f"http://h/{url}"), "", f"http://h/{url}").is_video is is_video


@pytest.mark.parametrize("kind", ["heic", "avif", "mif1"])
def test_pictures_in_boxes_are_no_clips(kind: str) -> None:
    assert media_kind(b"\0\0\0\x20ftyp" + kind.encode() + bytes(20)) == "image"
    assert media_kind(b"\0\0\0\x20ftypisom" + bytes(20)) == "video" and media_kind(b"text") is None


@line("a saved data set without the split, several configurations on the hub")
def test_the_splits_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    rows = datasets.Dataset.from_dict({"image": [picture()]})
    datasets.DatasetDict({"test": rows, "val": rows}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match=r"d has no split 'train'; give --split, of test, val"):
        read(tmp_path / "d")
    assert len(read(tmp_path / "d", split="val")) == 1
    (tmp_path / "outer").mkdir()
    rows.save_to_disk(str(tmp_path / "outer" / "inner"))
    with pytest.raises(UsageError, match="a folder of save_to_disk is read by its own name"):
        read(tmp_path / "outer")


@line("a saved data set without the split, several configurations on the hub")
def test_configurations_of_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    seen: list[Any] = []

    def load(*names: str, **options: Any) -> Any:
        seen.append((*names, options["revision"]))
        raise ValueError(f"Config name is missing.\nPlease pick one among: {[f'c{i}' for i in range(99)]}\nExample")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name, expected in {
        "hf://datasets/o/n": ("o/n", None),
        "hf://datasets/o/n/": ("o/n", None),
        "hf://datasets/o/n/c7": ("o/n", "c7", None),
        "hf://datasets/o/n@v1/20220301.en": ("o/n", "20220301.en", "v1"),
        "hf://datasets/o/n@refs/convert/parquet": ("o/n", "refs/convert/parquet"),
    }.items():
        with pytest.raises(UsageError, match=r"name one: \.\.\./c0; they are c0, c1, .*, \.\.\. \(99\)") as failed:
            Inputs([name], SourceOptions()).check()
        assert seen[-1] == expected and len(str(failed.value)) <= 300
    for file in (
        "hf://datasets/o/n/a.parquet",
        "hf://datasets/o/n/a.png",
        "hf://datasets/o/n/data/x",
        "hf://datasets/o/n/x/",
    ):
        assert not is_hub_dataset(file)


@line("none: None, NaN, NA")
def test_missing_prompts(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [picture()] * 2, "q": [float("nan")] * 2}), tmp_path / "t.parquet")
    assert [item.prompt for item in read(tmp_path / "t.parquet", prompt_column="q")] == [None, None]
    values: list[Any] = [None, float("nan"), np.float64("nan"), np.datetime64("NaT")]
    with suppress(ImportError):
        import pandas

        values += [pandas.NA, pandas.NaT]
    assert all(map(is_missing, values)) and not any(map(is_missing, ["", "nan", 0, [], b"", np.zeros(2)]))


def test_columns_of_the_public_actor_have_one_type_each() -> None:
    pa = pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    good = {"caption": "a", "error": None, "n_new_tokens": 3, "tau": 1.5, "finish_reason": "eos"}
    bad = {
        "caption": None,
        "error": {"type": "T", "message": "m"},
        "n_new_tokens": None,
        "tau": None,
        "finish_reason": "error",
    }
    types = {
        tuple(str(pa.array(list(column(rows, name))).type) for name in NEW_COLUMNS)
        for rows in ([good], [bad], [good, bad])
    }
    assert types == {("string", "string", "int64", "double", "string")}


def test_no_cell_is_printed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    junk = base64.b64encode(os.urandom(90_000)).decode()
    pq.write_table(pa.table({"image": [junk, junk], "id": [junk, "b"]}), tmp_path / "t.parquet")
    args = [str(tmp_path / "t.parquet"), "--id-column", "id", "--model", "tiny", "--max-new-tokens", "2"]
    assert main(["caption", *args]) == 1
    said = capsys.readouterr()
    assert max(map(len, said.err.splitlines())) < 700 and max(map(len, said.out.splitlines())) < 2000
