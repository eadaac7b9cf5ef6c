"""Quantised copies that are kept in the user's cache folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

import mmspec
from mmspec.app.cli.main import main
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.files import CACHE_VARIABLE
from mmspec.patching import patch_state
from mmspec.targets import products, saved_copy

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="needs the C kernel")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights that are quantised, not read."""
    names: list[str] = []
    original = products.quantise
    monkeypatch.setattr(products, "quantise", lambda *args: names.append("") or original(*args))
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "copies"


def patched(is_saved: bool = True, bits: int | None = None, scale: float = 1.0) -> Any:
    model = tiny.build_model(tiny.ModelSpec("llava", layers=2))
    with torch.no_grad():
        model.get_input_embeddings().weight[5] *= scale
    return mmspec.patch(model, QuantizedDrafter(bits, is_saved=is_saved))


def weights(model: Any) -> dict[str, list[int]]:
    (found,) = patch_state(model).adapter.__dict__["_quantised_copies"].values()
    return {name: [one.weight.bits, *one.weight.data.tolist()] for name, one in found.layers.items()}


def test_nothing_is_written_unless_asked(folder: Path) -> None:
    patched(is_saved=False)
    assert not folder.exists()


def test_a_copy_is_made_once_for_the_same_weights(folder: Path, made: list[str]) -> None:
    first = weights(patched())
    count = len(made)
    assert count and weights(patched()) == first and len(made) == count
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    patched(bits=8)  # other bits
    patched(scale=2.0)  # a weight that is not copied, but decides how large the inputs of others are
    assert len(made) == 3 * count and len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("fault", ["cut", "not a file", "missing", "other size", "other type", "empty"])
def test_files_that_are_not_the_copy_are_ignored(fault: str, folder: Path, made: list[str]) -> None:
    first = weights(patched())
    count, (file,) = len(made), folder.iterdir()
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".data"))
    if fault == "missing":
        tensors.pop(name)
    if fault == "other size":
        tensors[name] = tensors[name][:-1].clone()
    if fault == "other type":
        tensors[name] = tensors[name].view(torch.int8)
    save_file(tensors, file)
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    if fault == "empty":
        file.write_bytes(b"")
    if fault == "not a file":
        file.unlink()
        file.mkdir()
    assert weights(patched()) == first and len(made) == 2 * count


def test_old_files_go_and_closed_folders_do_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saved_copy, "MAX_FILES", 2)
    for scale in (1.0, 2.0, 3.0):
        patched(scale=scale)
    assert len(list(folder.iterdir())) == 2
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    assert weights(patched())


def test_copies_are_listed_and_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patched()
    other = folder / "notes.txt"
    other.write_text("of another program")
    (folder / f".{'a' * 64}.safetensors.0f.part").touch()
    assert main(["cache", "list"]) == 0
    assert "2 files of copies of models" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert list(folder.iterdir()) == [other]
