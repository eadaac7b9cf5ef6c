"""Captions as WebDataset archives: `KEY.jpg`, `KEY.txt` (the caption) and `KEY.json` (the row) for each picture.

Pictures are stored as they were found. A row without a caption is no sample: it goes to a file of errors beside the
archive, as a loader expects the same members of every sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mmspec.app.io import jsonl
from mmspec.app.io.content import ByteRange
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished
from mmspec.app.io.tars import read_whole_members
from mmspec.vision.images import ImageError

_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
"""First bytes of a picture without a name -> its suffix."""
ROW_SUFFIX = ".json"
"""Of the last member of a sample: with it the sample is complete."""


class TarShards:
    """A growing shard is an archive without its end mark."""

    suffix, open_suffix = ".tar", ".tar"

    def rows(self, growing: Path) -> list[Row]:
        return [*_rows(growing), *jsonl.read_rows(_errors_of(growing))[0]]

    def repair(self, growing: Path) -> None:
        with growing.open("r+b") as file:
            ends = [end for member, end in read_whole_members(file) if member.name.endswith(ROW_SUFFIX)]
            good = ends[-1] if ends else 0
            if file.seek(0, os.SEEK_END) > good:
                file.truncate(good)
                os.fsync(file.fileno())
        if (errors := _errors_of(growing)).exists():
            with errors.open("r+b") as file:
                jsonl.truncate_torn_line(file, jsonl.read_rows(errors)[1])

    def append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> Sequence[Row]:
        written = []
        for row, item in zip(rows, items, strict=True):
            picture = b""
            if row["error"] is None:
                try:
                    picture = _read(item)
                except ImageError as error:  # it was there when it was captioned
                    row = row | {"caption": None, "error": {"type": error.kind, "message": str(error)}}
            if row["error"] is None:
                _add_sample(file, row, item, picture)
            written.append(row)
        file.flush()
        os.fsync(file.fileno())
        if errors := [row for row in written if row["error"]]:
            with _errors_of(Path(file.name)).open("ab") as error_file:
                jsonl.append_rows(error_file, errors)
        return written

    def complete(self, growing: Path, final: Path) -> None:
        with growing.open("ab") as file:
            file.write(bytes(2 * tarfile.BLOCKSIZE))
            file.flush()
            os.fsync(file.fileno())
        os.replace(growing, final)

    def finished(self, shard: Path) -> Iterator[tuple[str, Finished]]:
        for row in _rows(shard):
            yield row["id"], Finished.of(row)
        for row, _ in jsonl.iter_rows(_errors_of(shard)):
            yield row["id"], Finished.of(row)

    def drop_errors(self, shard: Path) -> None:
        _errors_of(shard).unlink(missing_ok=True)


def _errors_of(shard: Path) -> Path:
    """The file of the rows without a caption; the same while the shard grows and when it is complete."""
    return shard.with_name(f"{shard.name.removesuffix('.tar').replace('.open-', 'part-')}.errors.jsonl")


def _rows(shard: Path) -> Iterator[Row]:
    """The rows in the JSON members of an archive, complete or growing."""
    with shard.open("rb") as file, shard.open("rb") as data:
        for member, _ in read_whole_members(file):
            if member.name.endswith(ROW_SUFFIX):
                data.seek(member.start)
                yield json.loads(data.read(member.size))


def _read(item: Item) -> bytes:
    return (item.content or ByteRange(str(item.path))).read()


def _add_sample(file: BinaryIO, row: Row, item: Item, picture: bytes) -> None:
    digest = hashlib.sha1(row["id"].encode(errors="surrogateescape"), usedforsecurity=False).hexdigest()
    key = f"{row['index']:09d}-{digest[:8]}"  # unique, without a dot
    found = next((suffix for magic, suffix in _MAGIC.items() if picture.startswith(magic)), "bin")
    suffix = item.path.suffix[1:].lower() or found
    for name, data in ((suffix, picture), ("txt", row["caption"].encode()), ("json", jsonl.encode_row(row))):
        info = tarfile.TarInfo(f"{key}.{name}")
        info.size = len(data)
        padding = -len(data) % tarfile.BLOCKSIZE
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(padding))


__all__ = ["TarShards"]
