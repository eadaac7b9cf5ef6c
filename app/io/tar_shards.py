"""Captions as WebDataset archives: `KEY.jpg`, `KEY.txt` (the caption) and `KEY.json` (the row) for each picture.

Pictures are stored as they were captioned, and named after their content: a name or an address may say anything, and
`KEY.json` is the row. Several pictures of a row are `KEY.0.jpg`, `KEY.1.jpg` and so on. A row without a caption is no
sample: it goes to a file of errors beside the archive, as a loader expects the same members of every sample.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.kinds import media_suffix
from mmspec.app.io.shards import ERRORS_SUFFIX, ShardedOutput
from mmspec.app.io.tar_members import read_whole_members

ROW_SUFFIX = ".json"
"""Of the last member of a sample: with it the sample is complete."""


class TarShards(ShardedOutput):
    """A growing shard is an archive without its end mark."""

    suffix, open_suffix = ".tar", ".tar"

    def _rows(self, shard: Path) -> Iterator[Row]:
        yield from _rows(shard)
        yield from (row for row, *_ in jsonl.iter_rows(_errors_of(shard)))

    def _repair(self, growing: Path) -> None:
        with growing.open("r+b") as file:
            ends = [end for member, end in read_whole_members(file) if member.name.endswith(ROW_SUFFIX)]
            good = ends[-1] if ends else 0
            if file.seek(0, os.SEEK_END) > good:
                file.truncate(good)
                os.fsync(file.fileno())
        if (errors := _errors_of(growing)).exists():
            with errors.open("r+b") as file:
                jsonl.truncate_torn_line(file, jsonl.read_rows(errors)[1])

    def _append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> None:
        for row, item in zip(rows, items, strict=True):
            if not row["error"]:
                _add_sample(file, row, [content.read() for content in item.contents])
        file.flush()
        os.fsync(file.fileno())
        if errors := [row for row in rows if row["error"]]:
            with _errors_of(Path(file.name)).open("ab") as error_file:
                jsonl.append_rows(error_file, errors)

    def _seal(self, growing: Path, final: Path) -> None:
        with growing.open("ab") as file:
            file.write(bytes(2 * tarfile.BLOCKSIZE))
            file.flush()
            os.fsync(file.fileno())
        os.replace(growing, final)

    def _drop_errors(self, shard: Path) -> None:
        _errors_of(shard).unlink(missing_ok=True)


def _errors_of(shard: Path) -> Path:
    """The file of the rows without a caption; the same while the shard grows and when it is complete."""
    return shard.with_name(f"{shard.name.removesuffix('.tar').replace('.open-', 'part-')}{ERRORS_SUFFIX}")


def _rows(shard: Path) -> Iterator[Row]:
    """The rows in the JSON members of an archive, complete or growing."""
    with shard.open("rb") as file, shard.open("rb") as data:
        for member, _ in read_whole_members(file):
            if member.name.endswith(ROW_SUFFIX):
                data.seek(member.start)
                if (row := jsonl.parse_row(data.read(member.size))) is not None:
                    jsonl.check_row_columns(row, f"{shard}, {member.name}")
                    yield row


def _add_sample(file: BinaryIO, row: Row, pictures: Sequence[bytes]) -> None:
    digest = hashlib.sha1(row["id"].encode(), usedforsecurity=False).hexdigest()
    key = f"{row['index']:09d}-{digest[:8]}"  # unique, without a dot
    several = len(pictures) > 1
    media = [(f"{number}." * several + media_suffix(data), data) for number, data in enumerate(pictures)]
    for name, data in (*media, ("txt", row["caption"].encode()), ("json", jsonl.encode_row(row))):
        info = tarfile.TarInfo(f"{key}.{name}")
        info.size = len(data)
        padding = -len(data) % tarfile.BLOCKSIZE
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(padding))
