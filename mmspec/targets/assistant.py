"""Gemma 4's assistants: small models that draft over the target's own keys and values, and have none of their own.

An assistant reads the embedding of a token and the hidden state before it; its layers attend to the keys and values of
the target's last layer of each type that stores its own. It is published beside its target, `<target>-assistant`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor, nn

from mmspec.cpu.layers import LayerWeights
from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache
from mmspec.files import snapshot_id
from mmspec.interfaces import AssistantParts, OwnHeadError
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_layers import eps_of, is_norm, layer_weights
from mmspec.targets.draft_model import check_complete, config_of
from mmspec.targets.hf import HFTarget
from mmspec.targets.own_checkpoint import check_unchanged, checkpoint_folder
from mmspec.weight_files import TensorFiles

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""`config.model_type` of assistants."""
TARGET_TYPES = ("gemma4", "gemma4_unified", "gemma4_text", "gemma4_unified_text")
"""`config.model_type` of their targets."""
ASSISTANT_SUFFIX = "-assistant"
"""Of an assistant's name, behind that of its target."""


@dataclass(frozen=True)
class TargetKeysReader:
    """Implements `mmspec.interfaces.TargetKeys` for one call.

    Attributes:
        buffer: the target's keys and values.
        layers: {type: index of a layer in it}.
        window: of the sliding layers.
        padding: [B, P] bool, False at left pads; None if there are none.
    """

    buffer: RaggedKVCache
    layers: Mapping[str, int]
    window: int | None
    padding: Tensor | None

    @classmethod
    def of(cls, target: HFTarget) -> TargetKeysReader:
        """After the prefill."""
        layers = stored_layer_by_type(target.adapter.text_config)
        return cls(target.buffer, layers, target.adapter.sliding_window, target.call_tensors.padding)

    @property
    def lengths(self) -> list[int]:
        return self.buffer.seq_lens

    def read(self, layer_type: str) -> tuple[Tensor, Tensor, Tensor]:
        longest = max(self.lengths)
        keys, values = self.buffer.read(self.layers[layer_type], longest)
        lengths = self.buffer.lengths_on(keys.device)[:, None]
        index = torch.arange(longest, device=keys.device)
        visible = index < lengths
        if layer_type == "sliding_attention" and self.window is not None:
            visible = visible & (index >= lengths - self.window)
        if self.padding is not None:
            visible = visible & nn.functional.pad(self.padding, (0, longest), value=True)[:, :longest]
        return keys, values, visible[:, None, None]

    def buffers(self, layer_types: Sequence[str]) -> list[Tensor | None] | None:
        caches = self.buffer.common_buffers()
        return None if caches is None else [caches[self.layers[kind]] for kind in layer_types]

    def fixed_tensors(self) -> dict[str, Tensor] | None:
        if not self.buffer.groups:
            return None
        places = {kind: self.buffer.layers[index] for kind, index in self.layers.items()}
        return {f"{kind} {number}": part for kind, parts in places.items() for number, part in enumerate(parts)}

    def call_tensors(self, capacity: int) -> dict[str, Tensor]:
        keys = self.buffer.groups[0]
        seen = torch.ones(len(self.lengths), capacity, dtype=torch.bool, device=keys.device)
        if self.padding is not None:
            seen[:, : self.padding.shape[1]] = self.padding
        return {"target_padding": seen}

    def over(self, named: Mapping[str, Tensor], lengths: Tensor, bucket: int) -> TargetKeysReader:
        parts = [tuple(named[name] for name in named if name.rpartition(" ")[0] == kind) for kind in self.layers]
        buffer = RecordedKVCache(parts, lengths, bucket)
        layers = {kind: index for index, kind in enumerate(self.layers)}
        return TargetKeysReader(buffer, layers, self.window, named["target_padding"])


class AssistantBody(nn.Module):
    """The layers of an assistant, each over the target's keys and values."""

    def __init__(self, text_model: Any) -> None:
        super().__init__()
        self.layers = text_model.layers
        self.norm = text_model.norm
        self.layer_types: tuple[str, ...] = tuple(text_model.config.layer_types)
        self._rotary = text_model.rotary_emb.forward  # not a part of this module: a cast would round its frequencies

    @property
    def eps(self) -> set[float]:
        """Of its norms."""
        return {float(eps_of(one)) for one in self.modules() if is_norm(one)}

    def angles(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [P, d], of positions [P] in layers of a type."""
        cos, sin = self._rotary(torch.empty(0, dtype=dtype, device=positions.device), positions[None], kind)
        return cos[0], sin[0]

    def c_weights(self) -> list[LayerWeights] | None:
        """Weights of the layers as C reads them; None if one has other parts than queries and a gated feed-forward."""
        found = list(map(layer_weights, self.layers))
        layers = [
            one for one in found if one is not None and one.k is None and one.conv is None and one.gate is not None
        ]
        is_known = len(layers) == len(found) and all(one.router is one.per_layer_gate is None for one in layers)
        return layers if is_known else None

    def forward(self, inputs: Tensor, position_ids: Tensor, cache: dict[str, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """[B, n, d] outputs after the last norm, of n nodes that do not see each other.

        Args:
            inputs: [B, n, d].
            position_ids: [B, 1], one for all nodes.
            cache: {layer type: what `TargetKeys.read` returns}.
        """
        rotary = {kind: self._rotary(inputs, position_ids, kind) for kind in cache}
        states = inputs
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            keys, values, visible = cache[kind]
            states = layer(
                states,
                shared_kv_states={kind: (keys, values)},
                position_embeddings=rotary[kind],
                attention_mask=visible.expand(-1, -1, inputs.shape[1], -1),
            )
        outputs: Tensor = self.norm(states)
        return outputs


def stored_layer_by_type(config: Any) -> dict[str, int]:
    """{layer type: index of the last layer of a target that stores keys and values of its own}."""
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: index for index, kind in enumerate(config.layer_types[:count])}


def is_assistant_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an assistant."""
    return config_of(folder).get("model_type") in ASSISTANT_TYPES


def find_assistant(adapter: ModelAdapter) -> AssistantParts:
    """The assistant of a target: in the folder beside its own, or in the cache of the hub; nothing is fetched.

    Raises:
        OwnHeadError: there is none, or it is another target's.
    """
    if adapter.model_type not in TARGET_TYPES:
        raise OwnHeadError(f"no assistants of {adapter.model_type} are known; known are those of Gemma 4")
    name = str(getattr(adapter.model.config, "_name_or_path", "") or "").rstrip("/\\")
    if not name:
        raise OwnHeadError("the model was not loaded from a checkpoint, whose name would tell its assistant's")
    folder = name + ASSISTANT_SUFFIX
    if not os.path.isdir(folder):
        if os.path.isdir(name) and snapshot_id(name) is None:
            raise OwnHeadError(
                f"there is no folder {os.path.basename(folder)[-80:]} beside the target's; drafter=FOLDER names another"
            )
        hub_id = (snapshot_id(name) or name) + ASSISTANT_SUFFIX
        try:
            folder = snapshot_download(hub_id, local_files_only=True)
        except Exception as error:  # the hub's exception types change between versions
            raise OwnHeadError(f"{hub_id[-80:]} is not in the local cache; fetch it with `hf download`") from error
    try:
        _check_target(adapter)
        return load_assistant(folder, adapter)
    except (OSError, ValueError) as error:
        if isinstance(error, OwnHeadError):
            raise
        raise OwnHeadError(" ".join(str(error).split())[:200], is_expected=True) from error


def _check_target(adapter: ModelAdapter) -> None:
    """See `check_unchanged`; a target whose own files are not here is not judged."""
    try:
        files = TensorFiles(checkpoint_folder(adapter.model.config))
    except (OSError, ValueError):
        return
    check_unchanged(adapter, files)


def load_assistant(folder: str | os.PathLike[str], adapter: ModelAdapter) -> AssistantParts:
    """The assistant in a folder, in the target's precision and on its device.

    Raises:
        OwnHeadError: it is another target's.
        ValueError: the weights are not complete.
        OSError: a file is missing or damaged.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = "Gemma4UnifiedAssistantForCausalLM" if "unified" in config.model_type else "Gemma4AssistantForCausalLM"
    model, report = getattr(transformers, kind).from_pretrained(
        folder, dtype=adapter.model.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    check_complete(folder, report)
    return assistant_parts(model.to(adapter.model.device).eval().requires_grad_(False), adapter)


def is_assistant(model: Any) -> bool:
    """Whether an object is the model of an assistant."""
    return getattr(getattr(model, "config", None), "model_type", None) in ASSISTANT_TYPES


def assistant_parts(model: Any, adapter: ModelAdapter) -> AssistantParts:
    """The parts of an assistant, compared with the target.

    Raises:
        OwnHeadError: it is another target's.
    """
    text, own = adapter.text_config, model.config.get_text_config()
    if adapter.model_type not in TARGET_TYPES:
        raise OwnHeadError(f"assistants draft for Gemma 4; got {adapter.model_type}", is_expected=True)
    stored = stored_layer_by_type(text)
    facts = {
        "hidden size": (model.config.backbone_hidden_size, text.hidden_size),
        "vocabulary": (own.vocab_size, text.vocab_size),
    }
    for index, kind in enumerate(own.layer_types):
        target_dim = text.per_layer_config[stored[kind]].head_dim if kind in stored else None
        facts[f"head size of {kind}"] = (own.per_layer_config[index].head_dim, target_dim)
    wrong = [f"{name} {mine} (the target: {other})" for name, (mine, other) in facts.items() if mine != other]
    if wrong:
        raise OwnHeadError(f"it is another target's assistant: {', '.join(wrong)[:150]}", is_expected=True)
    embedder = model.masked_embedding
    if embedder is not None:
        _check_ordering(embedder.token_ordering, embedder.num_centroids)
    model.model.config._attn_implementation = "sdpa"  # takes a mask per node
    return AssistantParts(
        description=f"assistant of {len(own.layer_types)} layers",
        pre_projection=model.pre_projection,
        body=AssistantBody(model.model),
        post_projection=model.post_projection,
        lm_head=model.lm_head,
        centroids=None if embedder is None else embedder.centroids,
        token_ordering=None if embedder is None else embedder.token_ordering.long().view(embedder.num_centroids, -1),
        top_centroids=0 if embedder is None else min(embedder.centroid_intermediate_top_k, embedder.num_centroids),
        suppressed_ids=tuple(getattr(model.generation_config, "suppress_tokens", None) or ()),
        hidden_size=int(own.hidden_size),
        vocab_size=int(own.vocab_size),
        num_layers=adapter.num_layers,
    )


def _check_ordering(ordering: Tensor, num_centroids: int) -> None:
    """Refuse ids of centroids that are none.

    Raises:
        OwnHeadError: they do not divide into centroids, or are no ids of the vocabulary.
    """
    size = len(ordering)
    if size % num_centroids or int(ordering.min()) < 0 or int(ordering.max()) >= size:
        raise OwnHeadError(
            f"token_ordering must be ids below {size} in {num_centroids} groups of one size; got others",
            is_expected=True,
        )
