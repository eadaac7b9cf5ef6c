"""The rows of a finished job, read by other tools than those that wrote them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines as they stand there; of a folder of shards by index."""
    if not out.is_dir():
        return list(map(json.loads, out.read_bytes().splitlines()))
    return sorted(_stored(out), key=lambda row: row["index"])


def _stored(out: Path) -> Iterator[dict[str, Any]]:
    for shard in out.glob("part-*.parquet"):
        import pyarrow.parquet as pq

        yield from pq.read_table(shard).to_pylist()
    for sample in samples(out).values():
        row = json.loads(sample["json"])
        assert sample["txt"].decode() == row["caption"]
        yield row
    for errors in out.glob("part-*.errors.jsonl"):
        yield from map(json.loads, errors.read_bytes().splitlines())


def samples(out: Path) -> dict[str, dict[str, bytes]]:
    """Members of all archives by key and extension; fails on two of one name, as `webdataset` does."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted(out.glob("part-*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                key, _, extension = member.name.partition(".")
                sample = found.setdefault(key, {})
                assert extension not in sample, f"two members {member.name}"
                sample[extension] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return found


def check_widths(out: Path) -> None:
    """Each stored picture is that of its caption, which begins with its width (`caption_jobs.Fake`)."""
    for sample in samples(out).values():
        (kind,) = sample.keys() - {"txt", "json"}
        if kind != "mp4":
            assert Image.open(io.BytesIO(sample[kind])).width == int(sample["txt"].split()[0])
