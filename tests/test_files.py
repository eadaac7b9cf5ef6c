"""Folders of the user's cache: for this user only, whatever the umask is and whatever part of the cache comes first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmspec.economy.store import CostStore
from mmspec.files import atomic_write, make_private_folder


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path, top: Path) -> list[int]:
    parents = [one for one in (folder, *folder.parents) if top in one.parents]
    return [stat.S_IMODE(one.stat().st_mode) for one in parents]


def test_all_missing_parents_are_private(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "mmspec" / "costs"
    make_private_folder(folder)
    make_private_folder(folder)
    assert modes(folder, tmp_path) == [0o700] * 3


def test_folders_that_exist_stay_as_they_are(umask: int, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    make_private_folder(tmp_path / "shared" / "mmspec")
    assert modes(tmp_path / "shared" / "mmspec", tmp_path) == [0o700, 0o755]


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_private_folder(folder)


def test_costs_that_come_first_leave_a_cache_that_kernels_trust(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmspec.cpu import c_library

    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MMSPEC_COST_CACHE", raising=False)
    CostStore({"device": "cpu"}).write({})
    assert list((tmp_path / "cache" / "costs").glob("*.json"))
    assert c_library._library_folder() == tmp_path / "cache"


def test_two_writers_of_one_file_have_a_part_each(tmp_path: Path) -> None:
    """Threads of one process, and processes of one id on several machines: the file is what one of them wrote."""
    file = tmp_path / "weights.json"
    with atomic_write(file) as first:
        first.write_text("first")
        with atomic_write(file) as second:
            second.write_text("second")
        assert file.read_text() == "second" and first.read_text() == "first"
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]
