"""Hostile Parquet files and folders of `save_to_disk`: no crash, no bytes of the process, no file outside, no bomb."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from test_app_inputs import failure, picture, read

from mmspec.app.errors import UsageError
from mmspec.app.io import data_sets, tables
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.vision.images import ImageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
MIB = 1 << 20


def kinds(rows: list[Item]) -> list[str]:
    """ "ok", or why the picture of a row cannot be read."""
    found = []
    for row in rows:
        try:
            found.append("ok" if row.content and row.content.read() else "")
        except ImageError as error:
            found.append(error.kind)
    return found


def save(folder: Path, **columns: Any) -> Path:
    """A folder of `save_to_disk`; returns its Arrow file."""
    features = datasets.Features({name: feature for name, (feature, _) in columns.items()})
    rows = {name: values for name, (_, values) in columns.items()}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return next(folder.glob("*.arrow"))


def peak_mib() -> int:
    """Most memory that a process which reads tables has had."""
    pids = [worker._process.pid for worker in tables._workers()._all]
    status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
    return max(int(text.split()[1]) >> 10 for text in status.splitlines() if text.startswith("VmHWM"))


def dictionary(size: int, count: int) -> Any:
    """Rows that are all one value of a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([bytes(size)], pa.binary()))


@line("a kilobyte of Parquet that unpacks to gigabytes")
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize(
    "column",
    [dictionary(16 * MIB, 192), pa.ListArray.from_arrays([0, 192], dictionary(16 * MIB, 192))],
    ids=["rows", "one row"],
)
def test_parquet_bombs(tmp_path: Path, column: Any) -> None:
    tables._workers().close()
    tables._workers.cache_clear()
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(pa.table({"image": column}), tmp_path / "t.parquet", **options)
    assert os.path.getsize(tmp_path / "t.parquet") < 4000
    rows = Inputs([str(tmp_path / "t.parquet")], SourceOptions()).rows(lambda ident: False)
    first = next(rows)
    assert kinds([first]) == ["ok" if first.id.endswith("#0") else "Unreadable"] and peak_mib() < 1200
    rows.close()


@line("more rows than a file of its size may have")
def test_rows_are_limited_by_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tables, data_sets):
        monkeypatch.setattr(module, "MAX_ROWS_PER_BYTE", 1)
        monkeypatch.setattr(module, "FREE_ROWS", 1000)
    pq.write_table(pa.table({"image": pa.nulls(10_000_000, pa.binary())}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=r"more than .* rows, too many for a file of"):
        read(tmp_path / "t.parquet")
    file = save(tmp_path / "d", image=(datasets.Value("binary"), [picture()]))
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, pa.schema({"image": pa.null()})) as writer:
        writer.write_batch(pa.record_batch({"image": pa.nulls(10_000_000)}))
    rows = Inputs([str(tmp_path / "d")], SourceOptions()).rows(lambda ident: False)
    assert sum(1 for _ in rows) < 9000


def corrupt(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


@line("a damaged Arrow file in a folder of `save_to_disk`")
@pytest.mark.parametrize("end", [3000, 0x3FFFFFFF, 0x7FFFFFFF, -1, 0])
@pytest.mark.parametrize("column", ["binary", "image", "string", "compressed"])
def test_offsets_beyond_the_data(tmp_path: Path, column: str, end: int) -> None:
    first, second = picture(), picture(41)
    if column == "string":
        texts = ["a.png" * 20, "b.png" * 20]
        file, sizes = save(tmp_path / "d", image=(datasets.Value("string"), texts)), [100, 100]
    else:
        feature = datasets.Image(decode=False) if column == "image" else datasets.Value("binary")
        file, sizes = save(tmp_path / "d", image=(feature, [first, second])), [len(first), len(second)]
    if column == "compressed":
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.OSFile(str(file), "wb") as out:
            batch = pa.record_batch({"image": pa.array([first, second], pa.binary())})
            with pa.ipc.new_stream(out, batch.schema, options=options) as writer:
                writer.write_batch(batch)
    corrupt(file, struct.pack("<3i", 0, sizes[0], sum(sizes)), struct.pack("<3i", 0, sizes[0], end))
    rows = read(tmp_path / "d")
    assert "ok" not in kinds(rows[1:]) and all(row.content is not None for row in rows[1:])
    for row in rows[:1]:
        assert row.content is not None
        if kinds([row]) == ["ok"]:
            assert row.content.read() == first


@line("a damaged Arrow file in a folder of `save_to_disk`")
@pytest.mark.parametrize("data", [b"", b"x" * 99, b"\xff\xff\xff\xff\xff\xff\xff\x7f", None])
def test_damaged_arrow_files(tmp_path: Path, data: bytes | None) -> None:
    file = save(tmp_path / "d", image=(datasets.Value("binary"), [picture()] * 4))
    file.write_bytes(file.read_bytes()[:-200] if data is None else data)
    if data is None:
        assert kinds(read(tmp_path / "d"))[-1] == "Unreadable"
        return
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "d")


@line("a folder of `save_to_disk` that names files outside, or one twice")
@pytest.mark.parametrize(
    "name", ["../../private/{file}", "{private}/{file}", "link.arrow", "linked/{file}", "", ".", "a\0b", 7, None, ["x"]]
)
def test_state_json_stays_in_the_folder(tmp_path: Path, name: object) -> None:
    inner, private = tmp_path / "public" / "set", tmp_path / "private"
    secret = save(private, image=(datasets.Value("binary"), [picture()]))
    save(inner, image=(datasets.Value("binary"), [picture()]))
    (inner / "link.arrow").symlink_to(secret)
    (inner / "linked").symlink_to(private)
    name = name.format(file=secret.name, private=private) if isinstance(name, str) else name
    state = json.loads((inner / "state.json").read_text())
    (inner / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
    with pytest.raises(UsageError, match=r"leads out of the folder|cannot read"):
        read(inner)
    own = next(inner.glob("data*.arrow")).name
    (inner / "state.json").write_text(
        json.dumps(state | {"_data_files": [{"filename": own}, {"filename": f"./{own}"}]})
    )
    with pytest.raises(UsageError, match="names a file twice"):
        read(inner)


def test_splits_and_json_files_stay_in_the_folder(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [picture()]})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "d"))
    rows.save_to_disk(str(tmp_path / "private"))
    assert kinds(read(tmp_path / "d")) == ["ok"]
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["../private", "train", 7]}))
    with pytest.raises(UsageError, match="leads out"):
        read(tmp_path / "d", split="../private")
    os.rename(tmp_path / "d" / "train", tmp_path / "d" / "old")
    (tmp_path / "d" / "train").symlink_to(tmp_path / "private")
    with pytest.raises(UsageError, match=r"leads out|is a link now"):
        read(tmp_path / "d")
    os.remove(tmp_path / "private" / "state.json")
    for text in ("[" * 100_000, "[]", "{", "{}", '{"_data_files": 7}', '{"_data_files": [7]}'):
        (tmp_path / "private" / "state.json").write_text(text)
        with pytest.raises(UsageError):
            read(tmp_path / "private")


def test_values_of_every_type(tmp_path: Path) -> None:
    image = picture()
    cells = [
        pa.array([image, None], pa.large_binary()), pa.array([image, None], pa.binary_view()),
        pa.array([{"bytes": image, "path": None}, None]), pa.array([[image], []]), pa.array([[[image]], None]),
        pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array([image])),
        pa.array([image, None], pa.binary(len(image))),
    ]  # fmt: skip
    for column in cells:
        pq.write_table(pa.table({"image": column}), tmp_path / "t.parquet", store_schema=True)
        first, second = read(tmp_path / "t.parquet")
        assert first.content is not None and first.content.read() == image and failure(second) == "Missing", column.type
    other = [pa.array([0, 1], pa.timestamp("us", tz="Europe/Paris")), pa.array([1, 2]), pa.array([[1.5], [2.5]])]
    for column in other:
        pq.write_table(pa.table({"image": column}), tmp_path / "t.parquet")
        assert kinds(read(tmp_path / "t.parquet")) == ["BadCell"] * 2
