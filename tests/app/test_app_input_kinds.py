"""What PATH may be, and what of it is left out: folders, links, globs, suffixes, archives by WebDataset's keys."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from input_table import documented, line
from input_table import tested as lines_of_tests
from test_app_inputs import content_of, failure, picture, read, write_tar

from mmspec.app.errors import UsageError
from mmspec.app.io import gzipped
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.sources import find_matches


def look(*paths: Path | str, base: Path | None = None, **options: str) -> tuple[list[Item], str]:
    """The rows, and what is said about the rest."""
    inputs = Inputs([str(path) for path in paths], SourceOptions(base or Path(paths[0]).parent, **options))
    inputs.check()
    rows = list(inputs.rows(lambda ident: False))
    return rows, "; ".join(inputs.left_out())


def write(path: Path, data: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def ids(rows: list[Item]) -> list[str]:
    return [row.id for row in rows]


def test_the_table_of_the_docs_is_what_is_tested() -> None:
    assert len(documented()) > 20 and set(documented()) == lines_of_tests()


@line("names with dots: `2024.01.05.png`, `v1.7_003.jpg`")
def test_names_with_dots_are_pictures_of_one_key_each_a_row(tmp_path: Path) -> None:
    members = {f"d/2024.01.{day:02}.{kind}": f"{day} {kind}".encode() for day in range(9) for kind in ("png", "txt")}
    rows, said = look(write_tar(tmp_path / "x.tar", members), prompt_column="txt")
    assert ids(rows) == [f"x.tar/d/2024.01.{day:02}.png" for day in range(9)] and len({row.index for row in rows}) == 9
    assert [row.prompt for row in rows] == [f"{day} txt" for day in range(9)], "each has its own text"
    assert "x.tar: 1 sample with several pictures (01.00.png, 01.01.png, ...): one row each" in said
    by_suffix, _ = look(tmp_path / "x.tar", image_column="png")
    assert ids(by_suffix) == ids(rows)


def test_a_sample_of_any_size_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.io.tars.MAX_SAMPLE_MEMBERS", 5)
    members = {f"v1.{i}_003.{kind}": f"{i}".encode() for i in range(23) for kind in ("jpg", "txt")}
    rows = read(write_tar(tmp_path / "x.tar", members | {"v2.jpg": b"x"}), prompt_column="txt")
    assert ids(rows) == [*(f"x.tar/v1.{i}_003.jpg" for i in range(23)), "x.tar/v2"]
    assert [row.prompt for row in rows[:23]] == [str(i) for i in range(23)], "each has its own text"


@line("several pictures of one key: `0.left.jpg`, `0.right.jpg`")
def test_each_picture_of_a_key_is_a_row(tmp_path: Path) -> None:
    members = {"0.left.jpg": b"l", "0.right.jpg": b"r", "0.txt": b"both ?", "0.json": b'{"n": 7}', "1.jpg": b"one"}
    path = write_tar(tmp_path / "x.tar", members)
    rows, said = look(path, prompt_column="txt", id_column="n")
    assert ids(rows) == ["7", "7.right.jpg", "x.tar/1"] and [row.prompt for row in rows] == ["both ?", "both ?", None]
    assert "--image-column" in said and ids(look(path)[0]) == ["x.tar/0.left.jpg", "x.tar/0.right.jpg", "x.tar/1"]
    left, said = look(path, image_column="LEFT.jpg")
    assert [failure(row) if row.id == "x.tar/1" else row.file_name for row in left] == ["x.tar/0.left.jpg", "Missing"]
    assert said == ""


@line("two members with one name")
def test_repeated_names_are_error_rows_and_the_others_rows(tmp_path: Path) -> None:
    names = ("0.a.jpg", "0.a.jpg", "0.b.jpg", "1.jpg", "1.txt", "1.txt")
    members = [(name, str(number).encode()) for number, name in enumerate(names)]
    rows = read(write_tar(tmp_path / "x.tar", members), prompt_column="txt")
    assert failure(rows[0]) == "DuplicateKey" and content_of(rows[1]) == b"2"
    assert failure(rows[2]) == "DuplicateKey", "which of two prompts is meant is not known"


@line("members that are links, or have no suffix")
def test_members_without_content_or_suffix_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("0.png", "IMG_0001", "d/README"):
            info = tarfile.TarInfo(name)
            info.size = len(picture())
            archive.addfile(info, io.BytesIO(picture()))
        for kind, name in ((tarfile.LNKTYPE, "1.png"), (tarfile.SYMTYPE, "2.jpg"), (tarfile.LNKTYPE, "1.txt")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "0.png"
            archive.addfile(info)
    rows, said = look(path)
    assert ids(rows) == ["x.tar/0"]
    assert "x.tar: skipped 2 members of samples without a picture by name: 2 no suffix (IMG_0001, d/README); " in said
    assert "x.tar: skipped 2 pictures stored as links (1.png, 2.jpg): pack the files themselves" in said
    assert "--image-column no" not in said


@line("lists or archives that were joined by `cat`")
def test_joined_archives_are_read_to_the_end(tmp_path: Path) -> None:
    parts = [
        write_tar(tmp_path / f"{number}.tar", {f"{number}.png": picture(10 + number), f"{number}.txt": b"hi"})
        for number in range(3)
    ]
    data = b"".join(path.read_bytes() for path in parts)
    rows = read(write(tmp_path / "x.tar", data + bytes(5000)), prompt_column="txt")
    assert ids(rows) == ["x.tar/0", "x.tar/1", "x.tar/2"] and {row.prompt for row in rows} == {"hi"}
    assert [content_of(row) for row in rows] == [picture(10 + number) for number in range(3)]
    rows = read(write(tmp_path / "x.tar", data[:-9500] + b"no header" * 99))
    assert [row.id for row in rows][-1] == "x.tar#rest" and failure(rows[-1]) == "DamagedTar"


@line("hidden files and what macOS packs (`._a.jpg`, `__MACOSX/`)")
def test_hidden_files_are_left_out_of_folders_archives_and_remote_folders(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="optional: mmspec[data]")
    names = ("a/._0.jpg", "a/0.jpg", "__MACOSX/a/._0.jpg", "a/.hidden.jpg", "./1.jpg", ".git/2.jpg", "a/.DS_Store")
    write_tar(tmp_path / "x.tar", [(name, picture()) for name in names])
    for name in names:
        write(tmp_path / "p" / name, picture())
        fsspec.filesystem("memory").pipe(f"/hidden/{name.removeprefix('./')}", picture())
    for path, expected in (
        (tmp_path / "x.tar", ["x.tar/a/0", "x.tar/./1"]),
        (tmp_path / "p", ["p/1.jpg", "p/a/0.jpg"]),
        ("memory://hidden", ["memory:///hidden/1.jpg", "memory:///hidden/a/0.jpg"]),
    ):
        rows, said = look(path, base=tmp_path)
        assert sorted(ids(rows)) == sorted(expected), path
        assert "hidden picture" in said and ".hidden.jpg" in said and "._0" not in said
    assert ids(read(tmp_path / "p" / "a" / ".hidden.jpg")) == [".hidden.jpg"], "named by the user"


@line("members with other suffixes: `0.img`, `0.cap`")
def test_members_of_unknown_suffixes_are_counted_with_the_remedy(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "x.tar", {"0.img": picture(), "0.cap": b"hi", "1.img": b"y", "2.jpg": b"z", "2.cls": b"1"}
    )
    rows, said = look(path)
    assert ids(rows) == ["x.tar/2"]
    assert said == (
        "x.tar: skipped 3 members of samples without a picture by name: 2 .img (0.img, 1.img), 1 .cap (0.cap); "
        "--image-column img reads one kind"
    )
    for column in ("img", "IMG", ".img"):
        assert ids(read(path, image_column=column)) == ["x.tar/0", "x.tar/1", "x.tar/2"]
    write_tar(path, {"0.img": picture(), "0.cap": b"hi"})
    with pytest.raises(UsageError, match=r"no images or videos in .*1 \.img \(0\.img\); --image-column img"):
        read(path)


@line("`.tar.gz`, `.tgz`, `.zip`, `.xlsx`, `.arrow` and other unknown files")
def test_what_is_not_read_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.png", picture())
    for name, remedy in (
        ("x.tar.gz", "unpack it"), ("x.tgz", "unpack it"), ("x.zip", "unpack it"), ("x.xlsx", "CSV"),
        ("x.arrow", "Parquet"), ("y.tar", "it is compressed .gzip.*unpack it"),
        ("x.lance", "Parquet"), ("x.pdf", "PDF"), ("x.txt.bak", "PATH is"), ("x.svg", "PATH is"), ("x", "PATH is"),
    ):  # fmt: skip
        path = tmp_path / name
        if not path.exists():
            write(path, {"x.pdf": b"%PDF-1.4", "y.tar": gzip.compress(b"x")}.get(name, b"something else"))
        with pytest.raises(UsageError, match=remedy) as failed:
            read(path)
        assert len(str(failed.value).replace(str(tmp_path), "")) < 300
    with pytest.raises(UsageError, match="unpack it"):
        Inputs(["memory://bucket/x.tar.gz"], SourceOptions())
    with pytest.raises(UsageError, match="lists are read from this machine"):
        Inputs(["memory://bucket/x.jsonl"], SourceOptions())
    assert ids(read(write(tmp_path / "download", picture()))) == ["download"], "a picture without a suffix"


@line("a folder of archives or tables")
def test_a_folder_of_shards_names_the_glob(tmp_path: Path) -> None:
    for name in ("cc3m/0.tar", "cc3m/1.tar", "cc3m/0_stats.json"):
        write(tmp_path / name)
    with pytest.raises(UsageError, match=r"no images or videos in .*2 \.tar \(0\.tar, 1\.tar\).*/cc3m/\*\.tar'"):
        read(tmp_path / "cc3m")
    write(tmp_path / "cc3m" / "more" / "2.tar")
    with pytest.raises(UsageError, match=r"/cc3m/\*\*/\*\.tar'"):
        read(tmp_path / "cc3m")
    write(tmp_path / "cc3m" / "a.png")
    rows, said = look(tmp_path / "cc3m")
    assert ids(rows) == ["cc3m/a.png"] and "skipped 3 files" in said and "*.tar'" in said


@line("a glob of archives, tables and pictures")
def test_what_a_glob_reads_is_not_called_skipped(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "d" / "a.png")
    write_tar(tmp_path / "d" / "0.tar", {"0.png": picture()})
    pq.write_table(pa.table({"image": [picture()]}), tmp_path / "d" / "0.parquet")
    for pattern, count in (("*.tar", 1), ("*.parquet", 1), ("*", 3), ("0.{tar,parquet}", 2), ("**", 3)):
        rows, said = look(tmp_path / "d" / pattern)
        assert len(rows) == count and said == "", (pattern, said)
    write_tar(tmp_path / "d" / "a[1].tar", {"0.png": picture()})
    assert ids(look(tmp_path / "d" / "a[1].tar")[0]) == ["a[1].tar/0"], "a name that is there is no pattern"
    (tmp_path / "d" / "a[1].tar").unlink()
    write(tmp_path / "d" / "notes.md")
    rows, said = look(tmp_path / "d" / "*")
    assert len(rows) == 3 and said == "skipped 1 file of unsupported formats: 1 .md (notes.md)"
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    datasets.Dataset.from_dict({"image": [picture()]}).save_to_disk(str(tmp_path / "saved"))
    assert look(tmp_path / "saved")[1] == ""


@line("links to folders, loops of links")
def test_links_to_folders_are_counted_and_loops_end(tmp_path: Path) -> None:
    write(tmp_path / "else" / "a.png")
    write(tmp_path / "in" / "x.png")
    (tmp_path / "in" / "photos").symlink_to(tmp_path / "else")
    for name in ("one", "two"):
        (tmp_path / "in" / name).symlink_to(".")
    rows, said = look(tmp_path / "in")
    assert ids(rows) == ["in/x.png"] and "3 links to folders not followed" in said and "name a link" in said
    for pattern in ("in/**", "in/**/*.png", "**/x.png", "in/*"):
        assert ids(look(tmp_path / pattern, base=tmp_path)[0]) == ["in/x.png"], pattern
    assert len(find_matches(str(tmp_path / "**" / "**" / "x.png"))) == 1
    (tmp_path / "link").symlink_to("else")
    assert ids(read(tmp_path / "link")) == ["link/a.png"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "photos").symlink_to(tmp_path / "else")
    with pytest.raises(UsageError, match=r"no images or videos in .*1 link to folders not followed"):
        read(tmp_path / "only")


@line("a sub-folder that cannot be read")
def test_an_unreadable_sub_folder_is_named_and_the_rest_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in" / "a.png")
    write(tmp_path / "in" / "sub" / "b.png")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("/sub") or str(path).endswith("/closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    rows, said = look(tmp_path / "in")
    assert ids(rows) == ["in/a.png"] and "1 folder cannot be read: " in said and "sub (Permission denied)" in said
    (tmp_path / "closed").mkdir()
    with pytest.raises(UsageError, match="cannot read folder"):
        read(tmp_path / "closed")


@pytest.mark.every(2)
@line("kilobytes that unpack to millions of lines, JSON a thousand levels deep")
@pytest.mark.parametrize("unit", [b"\n", b"\r", b"a.png\n", b"#\n", b"{},", b" ", b"[", b'{"messages": []},'])
@pytest.mark.parametrize("name", ["l.txt.gz", "l.csv.gz", "l.jsonl.gz", "l.json.gz"])
def test_gzip_bombs_end_soon(tmp_path: Path, name: str, unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzipped, "FREE_BYTES", 1 << 16)
    monkeypatch.setattr(gzipped, "FREE_LINES", 1 << 12)
    write(tmp_path / "a.png", picture())
    first = {"l.txt.gz": b"a.png\n", "l.csv.gz": b"image\na.png\n"}.get(name, b'[{"file_name": "a.png"},\n')
    first = first if name != "l.jsonl.gz" else b'{"file_name": "a.png"}\n'
    block, packer = unit * (1_000_000 // len(unit)), zlib.compressobj(9, wbits=31)
    data = packer.compress(first) + b"".join(packer.compress(block) for _ in range(2))
    write(tmp_path / name, data + packer.flush())
    with pytest.raises(UsageError) as raised:
        read(tmp_path / name)
    assert len(str(raised.value)) <= 400


def test_gzipped_lists_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    for name, text in (
        ("l.jsonl.gz", '{"file_name": "a.png"}\n'),
        ("l.csv.gz", "image\na.png\n"),
        ("l.txt.gz", "a.png"),
    ):
        write(tmp_path / name, gzip.compress(text.encode()))
        assert ids(read(tmp_path / name)) == ["a.png"]
    write(tmp_path / "cut.jsonl.gz", gzip.compress(b'{"file_name": "a.png"}\n' * 99)[:40])
    with pytest.raises(UsageError, match=r"cannot read list .*cut\.jsonl\.gz"):
        read(tmp_path / "cut.jsonl.gz")


@pytest.mark.skipif(not shutil.which("setpriv") or os.name != "posix", reason="needs a user without privileges")
def test_a_folder_without_permission_of_a_real_user(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "sub").mkdir(mode=0o000)
    code = (
        "import sys; from pathlib import Path; from mmspec.app.io.inputs import Inputs; "
        "from mmspec.app.io.item import SourceOptions; i = Inputs([sys.argv[1]], SourceOptions()); i.check(); "
        "print(len(list(i.rows(lambda _: True))), i.left_out())"
    )
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    done = subprocess.run([*drop, sys.executable, "-c", code, str(tmp_path / "in")], capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("setpriv is not permitted here")
    assert done.stdout.startswith("1 ['1 folder cannot be read: "), done.stderr
