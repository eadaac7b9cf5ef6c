"""Outputs that can be read back and resumed, whatever the inputs are named and hold: extensions, bytes, text, sizes."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import Fake, run_config
from input_table import line
from job_rows import rows_of, samples
from PIL import Image

from mmspec.app.caption.command import check_texts
from mmspec.app.caption.config import CaptionConfig
from mmspec.app.errors import UsageError
from mmspec.app.io import content, held
from mmspec.app.io.content import InlineBytes, Unreadable
from mmspec.app.io.held import hold
from mmspec.app.io.images import ImageError, load_image
from mmspec.app.io.item import Item
from mmspec.app.io.kinds import media_suffix
from mmspec.app.io.text import MAX_PROMPT_CHARS, escaped, find_fault
from mmspec.app.modeling.captioner import PromptTooLongError

FORMATS = ("jsonl", "parquet", "webdataset")


def picture(width: int = 10, suffix: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, 8), "red").save(data, suffix)
    return data.getvalue()


@pytest.fixture(autouse=True)
def decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are decoded in this process, for many short jobs."""

    def decode(item: Item, *rest: Any) -> Image.Image:
        return load_image(item.content.read() if item.content else item.path)

    monkeypatch.setattr("mmspec.app.caption.executor.decode_item", decode)


def run(paths: Sequence[str], out: Path, name: str = "webdataset", fake: Fake | None = None, **options: Any) -> int:
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    return run_config(CaptionConfig(tuple(paths), model="m", out=str(out), format=name, batch_size=4, **options), fake)


def table(path: Path, cells: Sequence[Any]) -> str:
    pa = pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    import pyarrow.parquet as pq

    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(cells, type=struct)}), path)
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["a.json", "a.txt", "a.p\0ng", "a.p\nng", "a.my picture", "a." + "é" * 60, "x.tar.png", "a.PNG", "a.cls", "a",
     "a.jpg!wx750", "a.jpg?w=1", "img.php", "x." + "y" * 300, ".json", "a.__key__", "a.png.json", None],
    ids=ascii,
)  # fmt: skip
def test_the_extension_of_a_stored_picture_is_that_of_its_content(name: str | None, tmp_path: Path) -> None:
    data = [picture(11), picture(12, "JPEG")]
    cells = [{"bytes": data[0], "path": name}, {"bytes": data[1], "path": "b.png"}]
    source = table(tmp_path / "t.parquet", cells)
    assert run([source], tmp_path / "out") == 0
    assert run([source], tmp_path / "out", fake=Fake(lambda widths: pytest.fail("all rows are finished"))) == 0
    stored = list(samples(tmp_path / "out").values())
    assert [sorted(sample) for sample in stored] == [["json", "png", "txt"], ["jpg", "json", "txt"]]
    assert [stored[0]["png"], stored[1]["jpg"]] == data


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (picture(), "png"), (picture(suffix="JPEG"), "jpg"), (picture(suffix="GIF"), "gif"), (b"II*\0", "tiff"),
        (picture(suffix="BMP"), "bmp"), (picture(suffix="PPM"), "ppm"), (b"RIFF\1\0\0\0WEBPVP8 ", "webp"),
        (b"\0\0\0\x18ftypheic", "heic"), (b"\0\0\0\x18ftypavif", "avif"), (b"\0\0\0\x18ftypisom", "mp4"),
        (b"\0\0\0\x18ftypqt  ", "mov"), (b"\0\0\0\x18ftyp3gp4", "3gp"), (b"\0\0\0\x08wide", "mov"),
        (b"\x1a\x45\xdf\xa3\0\0webm", "webm"), (b"\x1a\x45\xdf\xa3\0matroska", "mkv"),
        (b"RIFF\1\0\0\0AVI LIST", "avi"), (b"OggS\0", "ogv"), (b"FLV\1\5\0", "flv"), (b"{}", "bin"), (b"", "bin"),
    ],
)  # fmt: skip
def test_suffixes(data: bytes, suffix: str) -> None:
    assert media_suffix(data) == suffix


def test_bytes_are_fetched_once_and_stored_as_they_were_captioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, asked = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), []
    import pyarrow.parquet as pq

    def fetch(url: str, max_bytes: int, *, public_only: bool = True) -> bytes:
        asked.append(url)
        if asked.count(url) > 1:
            raise ImageError("HttpError", "403 Forbidden")
        return picture(20 + int(url[-5]))

    monkeypatch.setattr(content, "fetch", fetch)
    urls = [f"http://pictures.example/{number}.png" for number in range(3)]
    pq.write_table(pa.table({"url": urls}), tmp_path / "t.parquet")
    assert run([str(tmp_path / "t.parquet")], tmp_path / "out", urls="any") == 0
    assert sorted(asked) == urls
    widths = [Image.open(io.BytesIO(one["png"])).width for one in samples(tmp_path / "out").values()]
    assert widths == [20, 21, 22]


def test_a_file_that_is_replaced_after_it_was_captioned(tmp_path: Path) -> None:
    files = [tmp_path / "p" / f"{number}.png" for number in range(3)]
    files[0].parent.mkdir()
    for number, file in enumerate(files):
        file.write_bytes(picture(10 + number))

    def spoil(widths: list[int]) -> None:
        for file in files:
            file.unlink(missing_ok=True)

    assert run([str(tmp_path / "p")], tmp_path / "out", fake=Fake(spoil)) == 0
    for sample in samples(tmp_path / "out").values():
        assert Image.open(io.BytesIO(sample["png"])).width == int(sample["txt"].split()[0])


@line("`--format webdataset`: a file of more than 256 MiB")
def test_sizes_are_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(picture(11))
    (tmp_path / "p" / "b.png").write_bytes(picture(12))
    os.truncate(tmp_path / "p" / "b.png", content.MAX_CONTENT_BYTES + 1)  # a hole, which takes no place
    fake = Fake()
    assert run([str(tmp_path / "p")], tmp_path / "out", fake=fake) == 1
    assert fake.calls == [[11]], "what cannot be stored is not captioned"
    found = rows_of(tmp_path / "out")
    assert [(row["error"] or {}).get("type") for row in found] == [None, "TooLarge"]
    assert "other formats" in found[1]["error"]["message"]


def test_large_content_waits_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_BYTES_IN_MEMORY", 10)
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    item = hold(Item(path))
    path.unlink()
    assert item.content is not None and item.content.num_bytes == 0
    assert item.content.read() == item.content.read() == picture()
    moved = pickle.loads(pickle.dumps(item))  # as Ray moves it to the process that writes
    assert moved.content == InlineBytes(picture())
    with pytest.raises(ImageError, match="no such file"):
        hold(item := Item(path))


BAD = ["\ud83d", "a \udcff b", "\udfff\ud800"]


@line("not valid Unicode")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", BAD, ids=ascii)
def test_text_that_is_no_unicode(text: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(picture(11 + number))
    lines = [{"file_name": "0.png", "prompt": text}, {"file_name": "1.png", "id": text}, {"file_name": "2.png"}]
    (folder / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run([str(folder / "m.jsonl")], tmp_path / "out", name) == 1
    found = rows_of(tmp_path / "out")
    assert [(row["error"] or {}).get("type") for row in found] == ["BadText", None, None]
    assert found[1]["id"] == escaped(text) and "\\u" in escaped(text)
    assert run([str(folder / "m.jsonl")], tmp_path / "out", name, Fake(lambda widths: pytest.fail("resumed"))) == 1


@line("a name or id that is not valid Unicode")
@pytest.mark.parametrize("name", FORMATS)
def test_file_names_that_are_no_unicode(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "b.png").write_bytes(picture(11))
    try:
        Path(os.fsdecode(bytes(folder) + b"/in\xff.png")).write_bytes(picture(12))
        Path(os.fsdecode(bytes(folder) + b"/no\xfe.png")).write_bytes(b"junk")
    except OSError:
        pytest.skip("the file system takes no such name")
    assert run([str(folder)], tmp_path / "out", name) == 1
    found = {row["file_name"].rpartition("/")[2]: row for row in rows_of(tmp_path / "out")}
    assert found["in\\udcff.png"]["caption"].startswith("12 ") and found["b.png"]["caption"].startswith("11 ")
    assert found["no\\udcfe.png"]["error"]["type"] == "NotAnImage"
    assert run([str(folder)], tmp_path / "out", name, Fake(lambda widths: pytest.fail("resumed"))) == 1


def test_text_of_the_command() -> None:
    for options in ({"prompt": "\udcff what"}, {"stop": ("ok", "\udcff")}, {"prompt": "x" * (MAX_PROMPT_CHARS + 1)}):
        with pytest.raises(UsageError, match=r"Unicode|characters"):
            check_texts(CaptionConfig((), model="m", **options))  # type: ignore[arg-type]
    check_texts(CaptionConfig((), model="m", prompt="é 漢 🙂", stop=("\n",)))


def test_texts_of_an_item() -> None:
    item = Item(Path("a.png"), "\udcff", "\ud800.png", "why ?", 3, "\ud83d")
    assert (item.id, item.file_name, item.prompt) == ("\\udcff", "\\ud800.png", "why ?")
    assert item.content is None, "captions do not need the answer"
    half = Item(Path("a.png"), prompt="\ud83d")
    assert isinstance(half.content, Unreadable) and "the prompt" in half.content.message
    long = Item(Path("a.png"), prompt="x" * (MAX_PROMPT_CHARS + 1))
    assert isinstance(long.content, Unreadable) and str(MAX_PROMPT_CHARS) in long.content.message
    assert Item(Path("a.png"), prompt="x" * MAX_PROMPT_CHARS).content is None
    assert find_fault("é 漢 🙂 \0") is None and len(find_fault("x" * 10**6) or "") < 300


@line("more than 65,536 characters, or as many tokens as the model has positions")
def test_rows_that_are_too_long_for_the_model_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    lines = []
    for number in range(4):
        (tmp_path / "p" / f"{number}.png").write_bytes(picture(10 + number))
        lines.append({"file_name": f"{number}.png", "prompt": "long " * 9 if number in (0, 2) else "short"})
    (tmp_path / "p" / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    class Short(Fake):
        def caption(self, images: Any, prompts: Sequence[str], *rest: Any) -> Any:
            if too_long := {row: "too long" for row, prompt in enumerate(prompts) if len(prompt) > 9}:
                raise PromptTooLongError(too_long)
            return super().caption(images, prompts, *rest)

    fake = Short()
    assert run([str(tmp_path / "p" / "m.jsonl")], tmp_path / "out", "jsonl", fake) == 1
    assert [(row["error"] or {}).get("type") for row in rows_of(tmp_path / "out")] == [
        "TooLong", None, "TooLong", None,
    ]  # fmt: skip
    assert fake.calls == [[11, 13]], "in one batch, not one by one"
