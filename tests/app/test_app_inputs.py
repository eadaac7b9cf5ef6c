"""Archives, tables, datasets and addresses as inputs of `mmspec caption`; what can be wrong with them."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from PIL import Image
from test_app_web import failure as failure_of_fetch
from test_app_web import send, serve

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io import content, tar_members, web
from mmspec.app.io.inputs import Inputs, expand_braces
from mmspec.app.io.item import Item, SourceOptions
from mmspec.vision.images import ImageError

__all__ = ["serve"]


def picture(width: int = 40) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 30), (width, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def read(*paths: Path | str, **options: Any) -> list[Item]:
    inputs = Inputs([str(path) for path in paths], SourceOptions(Path(paths[0]).parent, **options))
    inputs.check()
    found = list(inputs.rows(lambda ident: False))
    assert [item.index for item in found] == list(range(len(found)))
    return found


def failure(item: Item) -> str:
    assert item.content is not None
    with pytest.raises(ImageError) as failed:
        item.content.read()
    return failed.value.kind


def content_of(item: Item) -> bytes:
    assert item.content is not None
    return item.content.read()


def test_a_tar_is_read_by_keys_without_extraction(tmp_path: Path) -> None:
    members = {"a/1.txt": b"what ?\n", "a/1.jpg": b"one", "a/1.cls": b"3", "README": b"x", "a/2.seg.png": b"two"}
    first, second = read(write_tar(tmp_path / "x.tar", members), prompt_column="txt")
    assert (first.id, first.file_name, first.prompt) == ("x.tar/a/1", "x.tar/a/1.jpg", "what ?")
    assert (second.id, second.prompt, content_of(second)) == ("x.tar/a/2", None, b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]
    by_json = write_tar(tmp_path / "y.tar", {"1.png": b"1", "1.json": b'{"q": "why ?", "n": 7}'})
    row = read(by_json, prompt_column="q", id_column="n")[0]
    assert (row.prompt, row.id) == ("why ?", "7")


def test_names_in_a_tar_lead_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for kind, name, target in ((tarfile.SYMTYPE, "1.png", "/etc/passwd"), (tarfile.LNKTYPE, "2.png", "../secret"),
                                   (tarfile.FIFOTYPE, "3.png", ""), (tarfile.DIRTYPE, "4.png", "")):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
        info = tarfile.TarInfo("../../5.png")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"here"))
    (only,) = read(path)
    assert content_of(only) == b"here" and not (tmp_path.parent / "5.png").exists()


@line("a truncated or damaged archive")
def test_a_truncated_or_damaged_tar_is_an_error_row_after_the_rows_before_it(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "x.tar", {f"{i}.png": picture() * 9 for i in range(4)}).read_bytes()
    numbers = set()
    for cut in range(600, 5000, 500):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        found = read(tmp_path / "cut.tar")
        assert found[-1].id == "cut.tar#rest" and failure(found[-1]) == "DamagedTar"
        assert all(content_of(item).startswith(b"\x89PNG") for item in found[:-2])
        numbers.add(len(found))
    assert numbers == {2, 3, 4}
    damaged = bytearray(whole)
    start = read(tmp_path / "x.tar")[2].content.start - 512  # type: ignore[union-attr]
    damaged[start : start + 200] = b"?" * 200
    (tmp_path / "bad.tar").write_bytes(damaged)
    assert [item.id for item in read(tmp_path / "bad.tar")] == ["bad.tar/0", "bad.tar/1", "bad.tar#rest"]


def test_a_huge_extended_header_is_not_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    (tmp_path / "x.tar").write_bytes(info.tobuf() + bytes(2048))
    assert failure(read(tmp_path / "x.tar")[0]) == "DamagedTar"


def test_members_beyond_the_limit_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_CONTENT_BYTES", 100)
    first, second, third = read(write_tar(tmp_path / "x.tar", {"1.png": b"x" * 101, "2.png": b"", "3.png": b"y"}))
    assert [failure(first), failure(second)] == ["TooLarge", "Empty"] and content_of(third) == b"y"


@pytest.mark.parametrize(("text", "message"), [(b"no tar" * 200, "not an uncompressed tar"), (b"", "is empty")])
def test_what_is_no_tar_is_refused_before_the_job(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "x.tar").write_bytes(text)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / "x.tar")


@line("two rows with one id")
def test_duplicate_keys_are_error_rows_with_ids_of_their_own(tmp_path: Path) -> None:
    members = [("1.png", b"a"), ("1.png", b"b"), ("2.png", b"c"), ("3.png", b"d"), ("2.png", b"e"), ("2.png", b"f")]
    found = read(write_tar(tmp_path / "x.tar", members))
    assert [item.id for item in found] == ["x.tar/1", "x.tar/2", "x.tar/3", "x.tar/2#2"]
    assert failure(found[0]) == "DuplicateKey" and failure(found[3]) == "DuplicateId"
    assert content_of(found[1]) == b"c"


def test_braces(tmp_path: Path) -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    assert expand_braces("a{b}c{") == ["a{b}c{"] and expand_braces("{9..11}") == ["9", "10", "11"]
    with pytest.raises(UsageError, match="more than"):
        expand_braces("{1..9999}{1..9999}")
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", {"1.png": b"x"})
    assert [item.id for item in read(tmp_path / "{0..1}.tar")] == ["0.tar/1", "1.tar/1"]
    assert [item.id for item in read(tmp_path / "*.tar")] == ["0.tar/1", "1.tar/1"]
    with pytest.raises(UsageError, match=r"no such file: .*2\.tar"):
        read(tmp_path / "{0..2}.tar")


def test_parquet_rows(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(b"file")
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "p" / "link.png").symlink_to(tmp_path / "secret.png")
    paths = ("a.png", "/etc/hosts", "../secret.png", "link.png", None, "http://127.0.0.1/x.png")
    cells = [{"bytes": b"inline", "path": "x.jpg"}, *(path and {"bytes": None, "path": path} for path in paths)]
    table = pa.table({"image": cells, "q": ["one ?", None, *"abcde"], "n": [1, 2, 3, 4, 5, 1, 6]})
    pq.write_table(table, tmp_path / "p" / "t.parquet", row_group_size=3)
    found = read(tmp_path / "p" / "t.parquet", prompt_column="q")
    assert [item.prompt for item in found[:2]] == ["one ?", None] and found[3].id == "t.parquet#3"
    assert [content_of(item) for item in found[:2]] == [b"inline", b"file"] and found[0].file_name == "x.jpg"
    expected = ["OutsideInput", "OutsideInput", "OutsideInput", "Missing", "AddressNotAllowed"]
    assert [failure(item) for item in found[2:]] == expected
    by_id = read(tmp_path / "p" / "t.parquet", id_column="n")
    assert by_id[0].id == "1" and by_id[5].id == "1#2" and failure(by_id[5]) == "DuplicateId"
    inputs = Inputs([str(tmp_path / "p" / "t.parquet")], SourceOptions(tmp_path / "p"))
    assert inputs.count() == 7
    again = list(inputs.rows(lambda ident: ident in {"t.parquet#0", "t.parquet#1", "t.parquet#2", "t.parquet#3"}))
    assert [item.id for item in again] == [item.id for item in found]
    assert failure(again[0]) == "Missing" and failure(again[3]) == "OutsideInput", "finished groups are not read"


@line("a damaged row group of a Parquet file", "a table without the named column, a file that is not an archive")
def test_parquet_without_the_column_or_damaged(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "t.parquet")
    cases: list[tuple[dict[str, str], str]] = [
        ({}, "no column of pictures; it has text, n"),
        ({"image_column": "pic"}, "no column 'pic'"),
        ({"image_column": "text", "prompt_column": "q"}, "no column 'q'"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            read(tmp_path / "t.parquet", **options)
    groups = pa.table({"image": [bytes([i]) * 5000 for i in range(9)]})
    pq.write_table(groups, tmp_path / "g.parquet", row_group_size=3, compression="none", use_dictionary=False)
    data = bytearray((tmp_path / "g.parquet").read_bytes())
    metadata = pq.ParquetFile(tmp_path / "g.parquet").metadata.row_group(1).column(0)
    data[metadata.data_page_offset : metadata.data_page_offset + 40] = b"\xff" * 40
    (tmp_path / "g.parquet").write_bytes(data)
    found = read(tmp_path / "g.parquet")
    assert [item.id for item in found] == [*(f"g.parquet#{i}" for i in (0, 1, 2)), "g.parquet#group1",
                                           *(f"g.parquet#{i}" for i in (6, 7, 8))]  # fmt: skip
    assert failure(found[3]) == "Unreadable" and content_of(found[4]) == b"\x06" * 5000
    (tmp_path / "n.parquet").write_bytes(b"no table")
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "n.parquet")


def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    rows = {"image": [{"bytes": picture(40 + i), "path": None} for i in range(3)], "q": ["a", "b", "c"]}
    features = datasets.Features({"image": datasets.Image(), "q": datasets.Value("string")})
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": saved}).save_to_disk(str(tmp_path / "two"))
    for folder, split in (("one", "train"), ("two", "test")):
        found = read(tmp_path / folder, prompt_column="q", split=split)
        assert [content_of(item) for item in found] == [cell["bytes"] for cell in rows["image"]]
        assert [item.prompt for item in found] == ["a", "b", "c"]


def test_addresses(serve: Any) -> None:
    def answer(handler: Any) -> None:
        if handler.path == "/redirect":
            send(handler, code=302, Location="file:///etc/hosts")
        else:
            send(handler, picture(), 200 if handler.path == "/a.png" else 404)

    server = serve(answer)
    assert web.fetch(f"{server}/a.png", 1 << 20, public_only=False) == picture()
    assert len(web.fetch(f"{server}/a.png", 10, public_only=False)) == 11, "no more than is needed to refuse it"
    for url, public, kind in (
        (f"{server}/a.png", True, "AddressNotAllowed"),
        (f"{server}/gone.png", False, "HttpError"),
        (f"{server}/redirect", False, "HttpError"),
        ("file:///etc/hosts", False, "AddressNotAllowed"),
        ("http://127.0.0.1:9/x", False, "HttpError"),
    ):
        assert failure_of_fetch(url, public_only=public) == kind, url


def test_addresses_that_fsspec_opens(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="optional: mmspec[data]")
    memory = fsspec.filesystem("memory")
    for number in range(2):
        local = write_tar(tmp_path / "x.tar", {f"{number}.png": picture(), f"{number}.txt": b"why ?"})
        memory.pipe(f"/shards/{number}.tar", local.read_bytes())
        memory.pipe(f"/shards/pictures/{number}.png", picture())
    for pattern in ("memory://shards/{0..1}.tar", "memory://shards/*.tar"):
        found = read(pattern, prompt_column="txt")
        assert [content_of(item) for item in found] == [picture()] * 2 and found[0].prompt == "why ?"
    assert [content_of(item) for item in read("memory://shards/pictures")] == [picture()] * 2
    with pytest.raises(UsageError, match="nothing matches"):
        read("memory://nowhere/*.tar")
    with pytest.raises(UsageError, match="nosuchscheme"):
        read("nosuchscheme://x/a.png")


@line("a broken picture, a decompression bomb, an address without a file")
def test_captions_of_a_tar_with_a_bomb_and_a_broken_picture(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    members = {
        "1.png": picture(),
        "2.png": bomb.getvalue(),
        "3.png": b"no picture",
        "4.png": picture(50),
        "4.txt": b"a",
    }
    shard, out = write_tar(tmp_path / "x.tar", members), tmp_path / "out.jsonl"
    command = ["caption", str(shard), "--model", "tiny", "--out", str(out), "--max-new-tokens", "4", "--no-progress",
               "--prompt-column", "txt", "--batch-size", "5"]  # fmt: skip
    assert main(command) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"x.tar/{i}" for i in (1, 2, 3, 4)]
    assert [(row["error"] or {}).get("type") for row in rows] == [None, "TooLarge", "NotAnImage", None]
    before = out.read_bytes()
    assert main(command) == 1 and out.read_bytes() == before
    assert main([*command, "--retry-errors"]) == 1 and len(out.read_text().splitlines()) == 4


def test_many_rows_start_at_once_in_little_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x.png")
    header.size = 1
    with (tmp_path / "x.tar").open("wb") as file:
        for number in range(4_000):
            header.name = f"{number:06d}.png"
            file.write(header.tobuf(tarfile.USTAR_FORMAT) + b"x" + bytes(511))
        file.write(bytes(1024))
    inputs = Inputs([str(tmp_path / "x.tar")], SourceOptions(tmp_path))
    start = time.perf_counter()
    rows = inputs.rows(lambda ident: False)
    next(rows)
    first_s = time.perf_counter() - start
    names = [sys.intern(f"{number:06d}.png") for number in range(4_000)]  # as paths do: the table of them may grow here
    tracemalloc.start()
    assert sum(1 for _ in rows) == 3_999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(names) * 700, f"{peak / 4_000:.0f} bytes per row"
    print(f"first row after {1e3 * first_s:.0f} ms, {peak / 4_000:.0f} bytes per row")


def test_torn_members_are_found(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"1.png": b"x" * 700, "1.json": b"{}", "2.png": b"y" * 700})
    data = path.read_bytes()
    path.write_bytes(data[:4000])
    with path.open("rb") as file:
        assert [end for _, end in tar_members.read_whole_members(file)] == [1536, 2560]


def test_the_last_row_before_damage_keeps_its_text(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"1.png": picture(), "1.txt": b"why ?", "2.png": picture(), "2.txt": b"who ?"})
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data + bytes(-len(data) % 512))  # without its end mark
    found = read(str(path), prompt_column="txt")
    assert [item.prompt for item in found] == ["why ?", "who ?", None]
    assert failure(found[2]) == "DamagedTar"
