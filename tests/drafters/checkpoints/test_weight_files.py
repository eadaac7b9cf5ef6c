"""Weights of published heads as they lie on the hub: pickles, shards, prefixes; never a model of random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_published import CONFIGS
from tiny_models import ModelSpec, build_model
from torch import Tensor

import mmspec
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.registry import build_drafter
from mmspec.interfaces import TargetInfo
from mmspec.targets.draft_model import is_model_folder
from mmspec.weight_files import load_weights, tensor_names

H, V = 32, 64
ARCHITECTURES = {
    "eagle": "LlamaForCausalLM",
    "msd": "LlavaLlamaForCausalLM",
    "vispec": "LlavaNextForConditionalGeneration",
    "qwen": "Qwen2_5_VLForConditionalGeneration",
    "cloudriver": "LlavaForConditionalGeneration",
}
"""What the config of a published head names, by layout; most are classes of whole models."""


def head_weights(**changes: Tensor) -> dict[str, Tensor]:
    """Of an EAGLE-1/2 head for a target of H and V."""
    rng = torch.Generator().manual_seed(0)
    shapes = {
        "embed_tokens.weight": (V, H), "fc.weight": (H, 2 * H), "fc.bias": (H,),
        **{f"layers.0.self_attn.{name}_proj.weight": (H, H) for name in "qkvo"},
        "layers.0.mlp.gate_proj.weight": (24, H), "layers.0.mlp.up_proj.weight": (24, H),
        "layers.0.mlp.down_proj.weight": (H, 24), "layers.0.post_attention_layernorm.weight": (H,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()} | changes


def head_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return CONFIGS["eagle"] | {
        "architectures": [architecture], "hidden_size": H, "vocab_size": V, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    } | changes  # fmt: skip


def write_pickle(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "pytorch_model.bin")


def write_old_pickle(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_prefixed(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file({f"model.{name}": value for name, value in weights.items()}, folder / "model.safetensors")


def write_shards(folder: Path, weights: dict[str, Tensor], suffix: str = "safetensors") -> None:
    names, stem = sorted(weights), "model" if suffix == "safetensors" else "pytorch_model"
    index = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        tensors = {name: weights[name] for name in part}
        save_file(tensors, folder / file) if suffix == "safetensors" else torch.save(tensors, folder / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / f"{stem}.{suffix}.index.json").write_text(text)


def write_pickled_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    write_shards(folder, weights, "bin")


WRITERS = (write_pickle, write_old_pickle, write_prefixed, write_shards, write_pickled_shards)


def new_folder(folder: Path, write: Callable[[Path, dict[str, Tensor]], None], **config: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    write(folder, head_weights())
    (folder / "config.json").write_text(json.dumps(head_config(**config)))
    return folder


@pytest.mark.parametrize("write", WRITERS)
def test_a_head_is_a_head_however_its_weights_lie(
    write: Callable[[Path, dict[str, Tensor]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By folder and by hub id, from which only what is needed is fetched."""
    source = new_folder(tmp_path / "source", write)
    target = build_model(ModelSpec(family="llama", hidden=H, vocab=V))
    mmspec.patch(target, drafter=str(source))
    drafter = mmspec.patching.patch_state(target).config.drafter
    assert isinstance(drafter, EagleDrafter)
    assert torch.equal(drafter.head.fc.weight, head_weights()["fc.weight"])
    mmspec.unpatch(target)

    local = tmp_path / "cache"
    local.mkdir()

    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        for file in source.iterdir():
            if file.name in allow_patterns:
                (local / file.name).write_bytes(file.read_bytes())
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("mmspec.drafters.hub.unreachable_reason", lambda: None)
    mmspec.patch(target, drafter="owner/head")
    assert isinstance(mmspec.patching.patch_state(target).config.drafter, EagleDrafter)
    assert {file.name for file in local.iterdir()} == {file.name for file in source.iterdir()}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
@pytest.mark.parametrize("write", [write_pickle, write_pickled_shards])
def test_no_class_name_makes_a_head_a_model(
    architecture: str, write: Callable[[Path, dict[str, Tensor]], None], tmp_path: Path
) -> None:
    assert not is_model_folder(new_folder(tmp_path, write, architecture=architecture))


def test_a_pickle_is_looked_into_without_being_read(tmp_path: Path) -> None:
    """Its tensors are mapped: their storage is the file's."""
    folder = new_folder(tmp_path, write_pickle)
    assert set(tensor_names(folder)) == set(head_weights())
    weights = load_weights(folder)
    assert all(torch.equal(value, head_weights()[name]) for name, value in weights.items())


def test_a_model_in_a_pickle_is_still_a_model(tmp_path: Path) -> None:
    model = build_model(ModelSpec(family="llama", hidden=H, vocab=V))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    write_pickle(tmp_path, weights)
    assert is_model_folder(tmp_path)
    mmspec.patch(model, drafter=str(tmp_path))
    assert isinstance(mmspec.patching.patch_state(model).config.drafter, ModelDrafter)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_model_that_lacks_weights_is_refused(name: str, tmp_path: Path) -> None:
    """Transformers would draw them at random."""
    model = build_model(ModelSpec(family="llama", hidden=H, vocab=V))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.pop(name) is not None
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lack 1 tensors of the model .* such as {name}"):
        mmspec.patch(model, drafter=str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        mmspec.patch(model, drafter=str(tmp_path))


TARGET = TargetInfo("llama", H, V, 2)


def _escape(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


def _rename_tensor(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"fc.bias"', '"fc.other"'))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            FileNotFoundError,
            r"model-00002-of-00002\.safetensors is missing",
        ),
        (_escape, ValueError, "must name files of its own folder"),
        (_rename_tensor, ValueError, "names fc.other, which model-00001-of-00002.safetensors does not hold"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 9999), ValueError, "not an index"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ValueError, "not an index"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
            ValueError,
            "not an index",
        ),
    ],
)
def test_damaged_shards(damage: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path) -> None:
    folder = new_folder(tmp_path, write_shards)
    damage(folder)
    with pytest.raises(error, match=message):
        build_drafter(str(folder), TARGET)


def test_a_damaged_pickle_is_reported_as_such(tmp_path: Path) -> None:
    folder = new_folder(tmp_path, write_pickle)
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:200])
    target = build_model(ModelSpec(family="llama", hidden=H, vocab=V))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is .*damaged"):
        mmspec.patch(target, drafter=str(folder))
