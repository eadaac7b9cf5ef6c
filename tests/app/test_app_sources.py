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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("empty", "no images or videos in empty"),
        ("nowhere", "no such file or folder: nowhere"),
        ("nothing.png", "no such file: nothing.png"),
        ("nothing.jsonl", "cannot read list"),
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
