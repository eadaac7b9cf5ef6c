"""Files that change between the check of their name and the reading: what is opened lies where it was found to lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from test_app_inputs import content_of, picture, read
from video_files import write_video

from mmspec.app.errors import OutputError
from mmspec.app.io.decode import decode_item
from mmspec.app.io.held import hold
from mmspec.app.io.images import ImageError
from mmspec.app.io.item import Item
from mmspec.app.io.output import OutputJob
from mmspec.app.io.picture_header import picture_sizes
from mmspec.app.io.sidecars import SidecarOutput
from mmspec.vision.video.containers import FileBelow, open_regular_file
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform

pytestmark = pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="folders cannot be opened")
SECRET = (77, 30)


@pytest.fixture(scope="module")
def decoders() -> Iterator[DecoderPool]:
    with DecoderPool() as pool:
        yield pool


def write_list(folder: Path, kind: str, name: str) -> Path:
    file = folder / f"list.{kind.partition(' ')[0]}"
    if file.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        cell = {"cell": name, "struct": {"bytes": None, "path": name}, "list": [name]}[kind.split()[1]]
        pq.write_table(pa.table({"image": [cell]}), file)
    else:
        record = {"images": [name]} if "images" in kind else {"image": name}
        texts = {".txt": name, ".csv": f"image\n{name}", ".jsonl": json.dumps(record)}
        file.write_text(texts[file.suffix])
    return file


def folder_becomes_link(inner: Path, private: Path) -> None:
    os.rename(inner, inner.with_name("old"))
    inner.symlink_to(private)


def outer_folder_becomes_link(inner: Path, private: Path) -> None:
    (private / inner.name).mkdir()
    for file in private.iterdir():
        if file.is_file():
            os.link(file, private / inner.name / file.name)
    folder_becomes_link(inner.parent, private)


def file_becomes_link(inner: Path, private: Path) -> None:
    for file in list(inner.iterdir()):
        file.unlink()
        file.symlink_to(private / file.name)


SWAPS = [folder_becomes_link, outer_folder_becomes_link, file_becomes_link]


@line("a file that is replaced by a link during the job")
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize(
    "kind", ["txt", "csv", "jsonl", "jsonl images", "parquet cell", "parquet struct", "parquet list"]
)
def test_what_becomes_a_link_is_not_followed(
    tmp_path: Path, kind: str, swap: Callable[[Path, Path], None], decoders: DecoderPool
) -> None:
    inner, private = tmp_path / "set" / "outer" / "sub", tmp_path / "private"
    inner.mkdir(parents=True)
    private.mkdir()
    (inner / "a.png").write_bytes(picture())
    (private / "a.png").write_bytes(picture(SECRET[0]))
    (row,) = read(write_list(tmp_path / "set", kind, "outer/sub/a.png"))
    part = row.contents[0]
    assert all(size == (40, 30) for size in sizes(row, decoders))
    swap(inner, private)
    assert sizes(row, decoders) == [None] * 3
    with pytest.raises(ImageError, match="is a link now, or behind one"):
        part.read()


def sizes(row: Item, decoders: DecoderPool) -> list[Any]:
    """The size of the picture of a row in each way that a job reads it; None where it refuses."""
    ways: list[Callable[[], Any]] = [
        lambda: decode_item(row, Uniform(4), 10_000, decoders),
        lambda: decode_item(hold(row), Uniform(4), 10_000, decoders),
        lambda: picture_sizes(row)[0],
    ]
    found: list[Any] = []
    for way in ways:
        try:
            media = way()
            media = media[0] if isinstance(media, tuple) and len(media) == 1 else media
            found.append(getattr(media, "size", media))
        except ImageError:
            found.append(None)
    return found


def test_clips_of_lists_are_opened_where_they_were_checked(tmp_path: Path, decoders: DecoderPool) -> None:
    inner, private = tmp_path / "set" / "sub", tmp_path / "private"
    inner.mkdir(parents=True)
    private.mkdir()
    write_video(inner / "a.mp4", 4)
    write_video(private / "a.mp4", 4)
    (row,) = read(write_list(tmp_path / "set", "txt", "sub/a.mp4"))
    assert len(decode_item(row, Uniform(2), 1_000_000, decoders).frames) == 2  # type: ignore[union-attr]
    folder_becomes_link(inner, private)
    with pytest.raises(ImageError, match="is a link now, or behind one"):
        decode_item(row, Uniform(2), 1_000_000, decoders)


def test_links_that_stay_inside_are_read_and_what_is_opened_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "set" / "real").mkdir(parents=True)
    (tmp_path / "set" / "real" / "b.png").write_bytes(picture(50))
    (tmp_path / "set" / "linked").symlink_to("real")
    (tmp_path / "set" / "a.png").symlink_to("linked/b.png")
    (tmp_path / "named").symlink_to("set")
    for name in ("a.png", "linked/b.png", "real/../linked/b.png"):
        (row,) = read(write_list(tmp_path / "set", "txt", name))
        assert row.contents[0].read() == picture(50)
        (tmp_path / "set" / "list.txt").rename(tmp_path / "set" / "l.txt")
        (row,) = read(tmp_path / "named" / "l.txt")
        assert row.contents[0].read() == picture(50)
    os.mkfifo(tmp_path / "set" / "pipe.png")
    for other in ("pipe.png", "real", "", "none.png", "real/../real/b.png", "a.png"):
        with pytest.raises(OSError, match=r"regular file|No such file|link|resolved"):
            os.close(open_regular_file(FileBelow(str(tmp_path / "set"), other)))
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(OSError, match="is a link now"):
        open_regular_file(FileBelow(str(tmp_path / "set"), "linked/b.png"))
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors
    assert content_of(Item(Path("x"), content=row.contents[0])) == picture(50)


def test_a_split_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    from mmspec.app.io.data_sets import SavedSource
    from mmspec.app.io.item import SourceOptions

    for name, width in (("d", 40), ("private", SECRET[0])):
        rows = datasets.Dataset.from_dict({"image": [picture(width)]})
        datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / name))
    source = SavedSource(str(tmp_path / "d"), SourceOptions())
    files = source._files()
    folder_becomes_link(tmp_path / "d" / "train", tmp_path / "private" / "train")
    for file in files:
        with pytest.raises(OSError, match="is a link now, or behind one"):
            open_regular_file(file)


def test_no_text_file_is_written_where_a_link_leads(tmp_path: Path) -> None:
    inner, private = tmp_path / "set" / "sub", tmp_path / "private"
    inner.mkdir(parents=True)
    private.mkdir()
    for folder in (inner, private):
        (folder / "a.png").write_bytes(picture())
    (item,) = read(write_list(tmp_path / "set", "txt", "sub/a.png"))
    output = SidecarOutput(None, [str(tmp_path / "set" / "list.txt")], lambda: [item], OutputJob())
    output.open()
    output.begin(False)
    folder_becomes_link(inner, private)
    with pytest.raises(OutputError, match="is a link now, or behind one"):
        output.write([{"id": item.id, "caption": "red", "error": None, "prompt_sha1": "0"}], [item])
    assert [file.name for file in private.iterdir()] == ["a.png"]
