"""Files, folders, globs and manifests, in a stable order and never outside of what was named."""

from __future__ import annotations

from pathlib import Path

import pytest
from collected import collect_items

from mmspec.app.errors import UsageError
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.sources import natural_key


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that look like pictures, as the current one."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "p/img10.png",
        "p/img2.png",
        "p/img1.JPG",
        "p/sub/a.png",
        "p/.hidden.png",
        "p/.git/x.png",
        "p/notes.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def names(items: list[Item]) -> list[str]:
    assert [item.index for item in items] == list(range(len(items)))
    return [item.file_name for item in items]


def left_out(paths: list[str], skip: list[Path] | None = None) -> str:
    return "; ".join(Inputs(paths, SourceOptions(), skip or []).left_out())


def test_natural_order() -> None:
    assert sorted(["b", "a10", "a9", "A1", "a09", "1", "é"], key=natural_key) == [
        "1",
        "A1",
        "a09",
        "a9",
        "a10",
        "b",
        "é",
    ]


def test_a_folder_is_read_with_its_sub_folders(here: Path) -> None:
    assert names(collect_items(["p"], Path())) == ["p/img1.JPG", "p/img2.png", "p/img10.png", "p/sub/a.png"]


def test_paths_keep_their_order_without_duplicates(here: Path) -> None:
    assert names(collect_items(["p/sub", "p/img2.png", "p", "p/./img2.png"], Path()))[:2] == [
        "p/sub/a.png",
        "p/img2.png",
    ]
    assert len(collect_items(["p", "p"], Path())) == 4


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("p/*.png", ["p/img2.png", "p/img10.png"]),
        ("p/img?.*", ["p/img1.JPG", "p/img2.png"]),
        ("**/a.png", ["p/sub/a.png"]),
        ("p/su*", ["p/sub/a.png"]),
    ],
)
def test_globs(here: Path, pattern: str, expected: list[str]) -> None:
    assert names(collect_items([pattern], Path())) == expected


def test_a_file_with_glob_characters_in_its_name(here: Path) -> None:
    (here / "a[1].png").write_bytes(b"x")
    assert names(collect_items(["a[1].png"], Path())) == ["a[1].png"]


def test_names_are_relative_to_the_output(here: Path) -> None:
    assert names(collect_items(["p"], here / "p"))[-1] == "sub/a.png"
    assert names(collect_items(["p/img2.png"], here / "p" / "sub")) == [str(here / "p" / "img2.png")]


def test_the_output_is_no_input(here: Path) -> None:
    (here / "p" / "metadata.jsonl").write_text('{"file_name": "img2.png"}\n')
    assert len(collect_items(["p/metadata.jsonl", "p"], Path(), [here / "p" / "metadata.jsonl"])) == 4


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "sub/../../secret.png", "link.png", "out/secret.png"])
def test_a_manifest_cannot_lead_out_of_its_folder(here: Path, name: str) -> None:
    (here / "secret.png").write_bytes(b"x")
    (here / "p" / "link.png").symlink_to(here / "secret.png")
    (here / "p" / "out").symlink_to(here)
    (here / "p" / "m.txt").write_text(f"img2.png\n{name}\n")
    with pytest.raises(UsageError, match=r"line 2.*leads out of"):
        collect_items(["p/m.txt"], Path())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file_name": "img2.png"}\n{"file_name": ', "line 2 is not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"caption": "x"}\n', "names no file"),
        ('{"file_name": 3}\n', "names no file"),
        ('{"file_name": "img2.png", "prompt": 3}\n', "'prompt' is text"),
        ('{"file_name": "img2.png", "id": [1]}\n', "'id' is text"),
        ('{"file_name": "img2.png", "id": 1}\n{"file_name": "img10.png", "id": 1}\n', "two rows have the id '1'"),
        ('{"file_name": "img2.png"}\n{"file_name": "img2.png", "prompt": "x"}\n', "two rows have the id"),
        ('{"file_name": "img2.png"}\n{"file_name": "img2.png", "prompt": "\\ud83d"}\n', "two rows have the id"),
        ("\x00\ud800", "not UTF-8"),
        ("[" * 100_000, "nested too deeply|is not JSON"),
        ('{"file_name": "' + "a" * 300 + '.png"}', "line 1 names no file"),
        ('{"file_name": "\\ud800.png"}', "line 1 names no file"),
        ('{"file_name": "a\\nb.png"}', "line 1 names no file"),
    ],
)
def test_bad_manifests_name_the_line(here: Path, text: str, message: str) -> None:
    (here / "p" / "m.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match=message) as failed:
        collect_items(["p/m.jsonl"], Path())
    assert str(failed.value).isprintable() and len(str(failed.value)) <= 300


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("empty", "no images or videos in empty"),
        ("nowhere", "no such file or folder: nowhere"),
        ("nothing.png", "no such file: nothing.png"),
        ("nothing.jsonl", "cannot read manifest"),
        ("*.gif", "nothing matches"),
    ],
)
def test_nothing_to_do_is_an_error(here: Path, path: str, message: str) -> None:
    (here / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        collect_items([path], Path())


def test_one_missing_file_among_others_is_left_to_the_job(here: Path) -> None:
    assert len(collect_items(["p", "gone.png"], Path())) == 5


def test_skipped_files_are_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.io.sources.MEDIA_SUFFIXES", frozenset({".png", ".mp4"}))
    for name in ("a.png", "b.heic", "sub/c.HEIC", "d.svg", "rows.jsonl", "out.json", ".hidden.pdf", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    line = left_out([str(tmp_path), str(tmp_path / "a.png")], [tmp_path / "out.json"])
    counts = "2 .heic (b.heic, c.HEIC), 1 .svg (d.svg), 1 no suffix (LICENSE)"
    hint = "pip install pillow-heif to read .heic"
    assert line == f"skipped 4 files of unsupported formats: {counts}; {hint}"
    assert left_out([str(tmp_path / "a.png")]) == ""
    (tmp_path / "sub" / "c.HEIC").rename(tmp_path / "sub" / "c.pdf")
    assert left_out([str(tmp_path / "sub")]) == "skipped 1 file of unsupported formats: 1 .pdf (c.pdf)"
    with pytest.raises(UsageError, match=r"no images or videos in .*skipped 1 file of unsupported formats: 1 \.pdf"):
        collect_items([str(tmp_path / "sub")], Path())


def test_skipped_files_of_a_glob_are_counted_and_named(tmp_path: Path) -> None:
    for name in ("a.png", "b.svg", "c.pdf", "d.pdf", "e.pdf", "sub/f.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    line = left_out([str(tmp_path / "*"), str(tmp_path / "?.svg")])
    assert line == "skipped 5 files of unsupported formats: 4 .pdf (c.pdf, d.pdf, ...), 1 .svg (b.svg)"
    assert left_out([str(tmp_path / "*.png")]) == ""
