"""Checkpoints of tiny targets with a draft head (MTP) beside the model, and the head computed the slow way.

The files are written by hand under the names of the published checkpoints; `SlowHead` reads them and follows the
formulas row by row over whole sequences, without a cache and without the drafter's code.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import assistants
import pytest
import tiny_models as tiny
import torch
import zoo
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.drafters.mtp.assistant import AssistantDrafter
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.engine.tree import DraftTree
from mmspec.targets.assistant import assistant_parts
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILIES = tuple(name for name in ("qwen3_5", "qwen3_5_moe", "glm_ocr", "exaone4_5") if name in zoo.ROWS)
MTP_NAMES = {"fc": "fc", "e": "pre_fc_norm_embedding", "h": "pre_fc_norm_hidden", "o": "norm", "block": "layers.0."}
GLM_NAMES = {"fc": "eh_proj", "e": "enorm", "h": "hnorm", "o": "shared_head.norm", "block": ""}
ONE_PLUS = ("qwen3_5", "qwen3_5_moe")
"""Families whose norms multiply by 1 + w."""


def head_prefix(model: PreTrainedModel) -> str:
    """Of the names of the head's tensors."""
    if model.config.model_type == "glm_ocr":
        return f"model.language_model.layers.{model.config.get_text_config().num_hidden_layers}."
    return "mtp."


def names_of(model: PreTrainedModel) -> Mapping[str, str]:
    """Part of the head -> its name behind the prefix."""
    return GLM_NAMES if model.config.model_type == "glm_ocr" else MTP_NAMES


def new_layer(model: PreTrainedModel) -> nn.Module:
    """A decoder layer as the head's, with random weights."""
    config = copy.deepcopy(model.config.get_text_config())
    layers: Any = model.get_decoder().layers
    config._attn_implementation = "sdpa"
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        own = config.layer_types[0]
        config.layer_types = ["full_attention" if own in ("linear_attention", "conv") else own]
    layer: nn.Module = type(layers[0])(config, 0)
    return layer


def head_tensors(model: PreTrainedModel, seed: int = 0, echo: float = 0.0) -> dict[str, Tensor]:
    """Random tensors of a head, by their published names.

    Args:
        model: the target.
        seed: of the numbers.
        echo: how strongly the head predicts what followed the token before, which a repeating target rewards.
    """
    generator = torch.Generator().manual_seed(seed)
    size, prefix, names = model.config.get_text_config().hidden_size, head_prefix(model), names_of(model)
    layer = new_layer(model)

    def normal(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    fc = normal(size, 2 * size, scale=0.1)
    fc[:, size:] += echo * torch.eye(size)
    base = 0.0 if model.config.model_type in ONE_PLUS else 1.0
    tensors = {f"{names['fc']}.weight": fc}
    tensors |= {f"{names[part]}.weight": base + normal(size, scale=0.1) for part in ("e", "h", "o")}
    for name, value in layer.state_dict().items():
        is_norm = value.dim() == 1
        tensors[names["block"] + name] = (base if is_norm else 0.0) + normal(*value.shape, scale=0.1)
    return {prefix + name: value.contiguous() for name, value in tensors.items()}


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with one tensor for each projection of each expert, and halves of fused projections."""
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base, _, part = name.removesuffix(".weight").rpartition(".")
        halves = {"gate_proj": 0, "up_proj": 1} if part == "gate_up_proj" else {part: 0}
        if ".experts." in name:
            for expert, weight in enumerate(value):
                chunks = weight.chunk(len(halves))
                split |= {f"{base}.{expert}.{half}.weight": chunks[i].clone() for half, i in halves.items()}
        elif part == "gate_up_proj":
            split |= {f"{base}.{half}.weight": value.chunk(2)[i].clone() for half, i in halves.items()}
        else:
            split[name] = value
    return split


def write_checkpoint(
    model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor], indexed: bool = True
) -> PreTrainedModel:
    """Save a target with a head beside it, as published, and let the model name the folder as its origin."""
    model.save_pretrained(folder)
    save_file(dict(tensors), folder / "head.safetensors", metadata={"format": "pt"})
    if indexed:
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", "pt") as own:
            weight_map = dict.fromkeys(own.keys(), "model.safetensors")
        weight_map |= dict.fromkeys(tensors, "head.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config._name_or_path = str(folder)
    return model


def new_drafter(model: PreTrainedModel, folder: Path, echo: float = 2.0, **options: Any) -> OwnDrafter:
    """What comes with a target and drafts for it: a head that is written into its checkpoint, or an assistant.

    `centroids`, an option of assistants, is False where the ids are given.
    """
    adapter, family = find_adapter(model), model.config.model_type
    if family.startswith("gemma4"):
        centroids = options.pop("centroids", "draft_ids" not in options)
        assistant = assistants.build_assistant(model, centroids=centroids).to(model.dtype)
        return AssistantDrafter(assistant_parts(assistant, adapter), **options)
    write_checkpoint(model, folder, head_tensors(model, echo=echo))
    return MTPDrafter(read_own_head(adapter), **options)


def needs_family(family: str) -> None:
    """Skip where this transformers does not have what drafts for the family."""
    if family not in (*FAMILIES, *assistants.FAMILIES):
        pytest.skip("an older transformers")


def trees_of(model: PreTrainedModel, drafter: Any, given: tiny.Inputs, num_tokens: int = 20) -> list[DraftTree]:
    """The trees of a call, whose text is the target's."""
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    plain, trees = model.generate(**given, **options), list[DraftTree]()
    with pytest.MonkeyPatch.context() as patch:
        draft_tree = drafter.draft_tree
        patch.setattr(drafter, "draft_tree", lambda *args: trees.append(draft_tree(*args)) or trees[-1])
        mmspec.patch(model, drafter, tree_size=6)
        try:
            assert torch.equal(model.generate(**given, **options), plain)
            assert not mmspec.stats(model).fallback_reason
        finally:
            mmspec.unpatch(model)
    return trees


def build_drafter(spec: tiny.ModelSpec, seed: int) -> MTPDrafter:
    """The drafter of a target whose checkpoint has a random head, which often echoes."""
    model = tiny.build_model(spec)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, Path(folder), head_tensors(model, seed, echo=2.0 * (seed % 2)))
        ids = {"draft_ids": torch.arange(5, spec.vocab, 2)} if seed % 3 == 2 else {}
        return MTPDrafter(read_own_head(find_adapter(model)), max_depth=3, top_k=1 + seed % 3, **ids)


class SlowHead:
    """The formulas of the head over whole sequences of one row, from its tensors."""

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        names, prefix = names_of(model), head_prefix(model)
        own = {name.removeprefix(prefix): value for name, value in tensors.items()}
        self.model = model
        self.plus = 1.0 if model.config.model_type in ONE_PLUS else 0.0
        self.weights = {part: own.pop(f"{names[part]}.weight") for part in ("fc", "e", "h", "o")}
        self.layer = new_layer(model).eval()
        self.layer.load_state_dict({name.removeprefix(names["block"]): value for name, value in own.items()})
        self.eps = model.config.get_text_config().rms_norm_eps
        types = getattr(model.config.get_text_config(), "layer_types", None) or [""]
        self.window = model.config.get_text_config().sliding_window if types[0] == "sliding_attention" else None

    def norm(self, part: str, states: Tensor) -> Tensor:
        """RMSNorm, written out."""
        scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled * (self.plus + self.weights[part])

    def states(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """[n, D] z of rows with embeddings [n, D] of the next tokens, states [n, D], positions [n] or [3, n]."""
        joined = torch.cat((self.norm("e", embeds), self.norm("h", hidden)), dim=-1)
        inputs = (joined @ self.weights["fc"].T)[None]
        rotary: Callable[..., Any] = self.model.get_decoder().rotary_emb
        ids = position_ids[:, None] if position_ids.dim() == 2 else position_ids[None]
        if position_ids.dim() == 1 and "mrope_section" in str(self.model.config.get_text_config().rope_parameters):
            ids = ids.expand(3, 1, -1)
        n = len(embeds)
        row, column = torch.arange(n)[:, None], torch.arange(n)
        mask = column <= row
        if self.window is not None:
            mask &= column > row - self.window
        outputs = self.layer(inputs, position_embeddings=rotary(inputs, ids), attention_mask=mask[None, None])
        return (outputs[0] if isinstance(outputs, tuple) else outputs)[0]

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of z."""
        return self.model.get_output_embeddings()(self.norm("o", states))

    def chain(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, tokens: list[int]) -> Tensor:
        """[1 + t, V] logits behind the last row and behind each of t draft tokens."""
        embed = self.model.get_input_embeddings()
        found = []
        for token in (*tokens, None):
            states = self.states(embeds, hidden, position_ids)
            found.append(self.logits(states[-1]))
            if token is None:
                break
            embeds = torch.cat((embeds, embed(torch.tensor([token]))))
            hidden = torch.cat((hidden, self.norm("o", states[-1])[None]))
            position_ids = torch.cat((position_ids, position_ids[..., -1:] + 1), dim=-1)
        return torch.stack(found)
