"""Targets that are no longer what their checkpoint holds: their head or assistant is not used, which one line says."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import assistants
import own_heads as own
import pytest
import tiny_models as tiny
import torch
import zoo
from fuzz import patch_model
from parity import GREEDY
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.app.cli.env import describe_drafter
from mmspec.drafters import registry
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.interfaces import OwnHeadError
from mmspec.resolve import resolve_drafter
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILIES = (*own.FAMILIES, *assistants.FAMILIES[:1])


def merge(model: PreTrainedModel) -> None:
    """Add a product of low rank to one projection of the last layer."""
    layer: Any = model.get_decoder().layers[-1]
    weight = next(value for name, value in layer.named_parameters() if "proj" in name and value.dim() == 2)
    weight.data += 0.05 * torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def cut(model: PreTrainedModel) -> None:
    """Drop the last layer."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    decoder.layers = nn.ModuleList(list(decoder.layers)[:-1])
    config.num_hidden_layers -= 1


def cast(model: PreTrainedModel) -> None:
    """To half precision and back, which rounds."""
    model.to(torch.bfloat16).float()


def grow(model: PreTrainedModel) -> None:
    """Further ids: the others stay."""
    model.resize_token_embeddings(140, mean_resizing=False)


def saved(family: str, folder: Path) -> tuple[PreTrainedModel, str]:
    """A target in a folder with what drafts for it, and the name of that drafter."""
    model = tiny.build_model(tiny.ModelSpec(family, seed=3, layers=3, calm=True))
    if family != "gemma4":
        own.write_checkpoint(model, folder, own.head_tensors(model))
        return model, "mtp"
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    assistants.build_assistant(model).save_pretrained(f"{folder}-assistant")
    return model, "assistant"


@pytest.mark.every(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "is_used"),
    [(merge, False), (cut, False), (cast, True), (grow, True)],
    ids=["merge", "cut", "cast", "grow"],
)
def test_a_target_that_was_modified_after_loading(
    family: str,
    change: Callable[[PreTrainedModel], None],
    is_used: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if family == "gemma4" and change in (cut, grow):
        pytest.skip("its layers share keys, and an assistant has its own ids")
    model, name = saved(family, tmp_path / "model")
    change(model)
    registry.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mmspec"):
        drafter = resolve_drafter(name, find_adapter(model))
    lines = [record.message for record in caplog.records]
    assert isinstance(drafter, OwnDrafter) is is_used, lines
    assert is_used or (len(lines) == 1 and drafter.name == "hybrid" and len(lines[0]) <= 300)
    if change is merge:
        folder = f"{tmp_path}/model" + ("-assistant" if name == "assistant" else "")
        named = folder if name == "assistant" else f"{name}:{folder}"
        assert isinstance(resolve_drafter(named, find_adapter(model)), OwnDrafter)


class EightBits(nn.Module):
    """A linear layer that stores eight bits, as of a quantisation package."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = layer.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (layer.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, inputs: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale.to(inputs.dtype))


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
def test_a_quantised_target_keeps_a_bfloat16_head(tmp_path: Path) -> None:
    """Its weights are not compared with the files, and the head is as in these: not quantised."""
    model, _ = saved("glm_ocr", tmp_path)
    half = {name: value.bfloat16() for name, value in own.head_tensors(model).items()}
    own.write_checkpoint(model.bfloat16(), tmp_path, half)
    for layer in model.get_decoder().layers:
        for name, part in list(layer.mlp.named_children()):
            if isinstance(part, nn.Linear):
                setattr(layer.mlp, name, EightBits(part))
    model.config.quantization_config = {"quant_method": "eight bits"}
    drafter = resolve_drafter("auto", find_adapter(model))
    assert isinstance(drafter, MTPDrafter)
    with patch_model(model, drafter, tree_size=4):
        model.generate(**tiny.build_inputs(model, 5, 2), **{**GREEDY, "max_new_tokens": 8})
        stats = mmspec.stats(model)
    assert stats.num_draft_tokens > 0 and not stats.fallback_reason
    weights = dict(drafter.head.named_parameters())
    assert weights and {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert not any(isinstance(part, EightBits) for part in drafter.head.modules())


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
def test_embeddings_of_its_own_are_refused(tmp_path: Path) -> None:
    """A copy of the target's is not."""
    model, _ = saved("glm_ocr", tmp_path)
    name, tensors = f"{own.head_prefix(model)}embed_tokens.weight", own.head_tensors(model)
    weight: Tensor = model.get_input_embeddings().weight.detach()
    own.write_checkpoint(model, tmp_path, tensors | {name: weight.clone()})
    read_own_head(find_adapter(model))
    for other in (weight * 1.5, weight[:, :-1].contiguous()):
        own.write_checkpoint(model, tmp_path, tensors | {name: other})
        with pytest.raises(OwnHeadError, match="embeddings of its own"):
            read_own_head(find_adapter(model))


@pytest.mark.skipif("qwen3_5" not in zoo.ROWS, reason="this transformers has no Qwen3.5")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/nowhere/" + "x" * 300, "not there any more"),
        ("owner/" + "x" * 300, "not in the local cache"),
        ("some-owner/some-model", "not in the local cache"),
    ],
)
def test_a_checkpoint_that_cannot_be_reached(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the model's own and, a hub id, as that of another model."""
    model = tiny.build_model(tiny.ModelSpec("qwen3_5", seed=3, layers=3))
    model.config._name_or_path = name
    for drafter in ("mtp", "mtp:some-owner/some-base"):
        registry.warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mmspec"):
            assert resolve_drafter(drafter, find_adapter(model)).name == "hybrid"
        lines = [record.message for record in caplog.records]
        assert len(lines) == 1 and len(lines[0]) <= 300 and "hybrid" in lines[0]
        assert (reason if drafter == "mtp" else "not in the local cache") in lines[0]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("qwen3_5", "gemma4")])
def test_env_says_what_was_found(family: str, tmp_path: Path) -> None:
    """The drafter that comes with a model, or why it is not used; an assistant reads no image positions."""
    model, name = saved(family, tmp_path / "model")
    adapter = find_adapter(model)
    found = dict(describe_drafter("auto", adapter, None))
    assert found["drafter"] == name and name not in found
    assert ("tensors" if name == "mtp" else "4 layers") in found["draft head"]
    assert ("image positions" in found) is (name == "mtp")
    if name == "mtp":
        tensors = {key: value for key, value in own.head_tensors(model).items() if "mlp" not in key}
        own.write_checkpoint(model, tmp_path / "model", tensors)
    else:
        shutil.rmtree(tmp_path / "model-assistant")
    found = dict(describe_drafter("auto", adapter, None))
    assert found["drafter"] == "arbitrated" and "draft head" not in found
    assert found[name].startswith("not used: ") and str(tmp_path) not in found[name] and len(found[name]) <= 300
    assert ("lacks 3 of 15 tensors" if name == "mtp" else "no folder model-assistant beside") in found[name]
    assert not {"mtp", "assistant"} & set(dict(describe_drafter("hybrid", adapter, None)))
