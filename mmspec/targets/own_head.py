"""The draft head in the target's own checkpoint (MTP): found by its tensors, built from the target's own classes.

transformers leaves these tensors in the files. They are read where the target was loaded from, a folder or the snapshot
of its revision in the cache, from safetensors alone, each after its shape has been compared. Embedding, LM head and
rotary embedding are the live target's; norms and the decoder layer are new objects of its classes.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.layers import LayerWeights
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import HeadCache, HeadFiles, OwnHead, OwnHeadError
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_layers import layer_weights
from mmspec.targets.own_checkpoint import NUM_COMPARED, check_unchanged, checkpoint_folder, differs
from mmspec.targets.own_head_layouts import LAYOUTS, HeadLayout
from mmspec.weight_files import TensorFiles

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale in official FP8 checkpoints."""
SCALE_SUFFIX = "_scale_inv"
FURTHER_LAYER = re.compile(r"layers\.[1-9]\d*\.")
"""Of heads with several layers, of which the first is repeated, as vLLM does."""
MAX_MESSAGE = 200


class TargetBlock(nn.Module):
    """A decoder layer of the target's class as `OwnHead.block`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache) -> Tensor:
        outputs = self.layer(inputs, position_embeddings=(cos, sin), attention_mask=mask, **{CACHE_ARGUMENT: cache})
        result: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return result

    def c_weights(self) -> LayerWeights | None:
        return layer_weights(self.layer)


def read_own_head(adapter: ModelAdapter, folder: str | os.PathLike[str] | None = None) -> OwnHead:
    """The head in the checkpoint of a target, or another one for it.

    Args:
        adapter: of the target.
        folder: with the tensors of a head under the same names; None for the target's checkpoint.

    Raises:
        OwnHeadError: there is none, or it cannot be used; one line says why.
    """
    layout = LAYOUTS.get(adapter.model_type)
    if layout is None:
        raise OwnHeadError(f"no draft head of {adapter.model_type} is known; known are {', '.join(LAYOUTS)}")
    for flag in layout.refused:
        if getattr(adapter.text_config, flag, False) or getattr(adapter.model.config, flag, False):
            raise OwnHeadError(f"a head with {flag}=true is not read", is_expected=True)
    is_own = folder is None
    try:
        files = TensorFiles(checkpoint_folder(adapter.model.config) if folder is None else folder)
        with torch.no_grad():
            reader = _Reader(adapter, layout, files)
            if is_own:
                check_unchanged(adapter, files, reader.prefix)
            return reader.head()
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, OwnHeadError):
            raise
        raise OwnHeadError(" ".join(str(error).split())[:MAX_MESSAGE], is_expected=True) from error


def is_exported_head(folder: str | os.PathLike[str], adapter: ModelAdapter) -> bool:
    """Whether a folder holds a head for this target as a serving engine reads it: beside copies of its embeddings."""
    layout = LAYOUTS.get(adapter.model_type)
    try:
        names = TensorFiles(folder).names
    except (OSError, ValueError):  # whoever loads the folder reports it
        return False
    prefixes = () if layout is None else tuple(one.format(layers=adapter.num_layers) for one in layout.prefixes)
    for prefix in prefixes:
        copies = {name.format(prefix=prefix) for name in layout.served} if layout is not None else set()
        own = names - copies
        if own < names and own and all(name.startswith(prefix) for name in own):
            return True
    return False


class _Reader:
    """Builds one head. Its parts have no memory until the shapes of all of its tensors have been compared."""

    def __init__(self, adapter: ModelAdapter, layout: HeadLayout, files: TensorFiles) -> None:
        self.adapter = adapter
        self.layout = layout
        self.files = files
        self.config = _block_config(adapter, layout)
        self.prefix = self._find_prefix()

    def _find_prefix(self) -> str:
        prefixes = [prefix.format(layers=self.adapter.num_layers) for prefix in self.layout.prefixes]
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self.files.names):
                return prefix
        raise OwnHeadError(
            f"the checkpoint has no tensors {prefixes[0]}*: saving or fine-tuning has dropped its head, and "
            "drafter='mtp:BASE', the folder or hub id of the base model, takes that one's",
            is_expected=True,
        )

    def head(self) -> OwnHead:
        """The head with its weights."""
        layout, adapter, size = self.layout, self.adapter, int(self.config.hidden_size)
        with torch.device("meta"):  # an initialisation would advance the user's random generator
            layer = type(_first_layer(adapter))(self.config, 0)
            norms = {part: self._new_norm(size) for part in layout.names if part != "fc"}
            parts = nn.ModuleDict({"fc": nn.Linear(2 * size, size, bias=False), **norms, "block": TargetBlock(layer)})
        names = {f"{part}.weight": [self.prefix + name] for part, name in layout.names.items()}
        block_prefix = self.prefix + layout.block
        for name, value in layer.state_dict().items():
            names[f"block.layer.{name}"] = self._sources(block_prefix + name, value)
        self._check(parts.state_dict(), names)
        self._check_embeddings()
        weights = {part: self._read(sources, parts.state_dict()[part]) for part, sources in names.items()}
        parts.load_state_dict(weights, assign=True)
        if any(value.is_meta for value in (*parts.parameters(), *parts.buffers())):
            raise OwnHeadError("its decoder layer has buffers that no checkpoint holds", is_expected=True)
        parts.eval().requires_grad_(False)
        return OwnHead(
            visual_modes=layout.visual_modes,
            zeroes_first=layout.zeroes_first,
            description=f"{self.prefix}* of the checkpoint, {len(names)} tensors",
            **dict(parts.items()),
            lm_head=self._own_lm_head(size),
            rotary_embedding=_rotary_embedding(adapter),
            mrope_section=_mrope_section(self.config),
            window=self.config.sliding_window if self._is_sliding() else None,
            hidden_size=size,
            vocab_size=adapter.vocab_size,
            num_layers=adapter.num_layers,
            files=self._files(names),
        )

    def _files(self, names: Mapping[str, list[str]]) -> HeadFiles:
        """How the head is stored, under the names that it was found by."""
        config = self.adapter.model.config.to_dict()
        config.pop("quantization_config", None)
        for section in (config, config.get("text_config")):  # engines look in either
            if section is not None:
                section[self.layout.depth_key] = 1
        return HeadFiles(
            tensors={part: tuple(sources) for part, sources in names.items()},
            copies={name.format(prefix=self.prefix): what for name, what in self.layout.served.items()},
            config=config,
        )

    def _new_norm(self, size: int) -> nn.Module:
        norm: nn.Module = type(self.adapter.text_model.norm)(size, eps=self.config.rms_norm_eps)
        return norm

    def _is_sliding(self) -> bool:
        types = getattr(self.config, "layer_types", None) or [""]
        return bool(types[0] == "sliding_attention")

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _sources(self, name: str, value: Tensor) -> list[str]:
        """The tensors of the files that make up one of the block: itself, its halves, or those of its experts."""
        names = self.files.names
        if name in names:
            return [name]
        stem = name.removesuffix(".weight")
        if stem.endswith(".gate_up_proj") and ".experts." not in stem:
            base = stem.removesuffix("gate_up_proj")
            return [f"{base}gate_proj.weight", f"{base}up_proj.weight"]
        if ".experts." not in stem:
            return [name]
        base, part = stem.rsplit(".", 1)
        halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        return [f"{base}.{expert}.{half}.weight" for expert in range(value.shape[0]) for half in halves]

    def _check(self, wanted: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> None:
        """Compare names and shapes of all tensors, before any is read."""
        needed = {name for sources in names.values() for name in sources}
        if missing := sorted(needed - self.files.names):
            raise OwnHeadError(
                f"the head of the checkpoint lacks {len(missing)} of {len(needed)} tensors, such as {missing[0][:80]}",
                is_expected=True,
            )
        ignored = {self.prefix + name for name in (self.layout.lm_head, *self.layout.copies) if name}
        scales = {name + SCALE_SUFFIX for name in needed}
        further = {n for n in self.files.names if n.startswith(self.prefix)} - needed - ignored - scales
        unknown = sorted(name for name in further if not FURTHER_LAYER.match(name.removeprefix(self.prefix)))
        if unknown:
            raise OwnHeadError(f"the head has a part that is not known: {unknown[0][:80]}", is_expected=True)
        for part, sources in names.items():
            expected = _source_shape(tuple(wanted[part].shape), len(sources))
            for name in sources:
                self._check_shape(name, expected)

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if (found := self.files.shape(name)) != expected:
            raise OwnHeadError(
                f"{name[:80]} must have the shape {list(expected)}, as the target's layers; got {list(found)}",
                is_expected=True,
            )
        if name + SCALE_SUFFIX in self.files.names:
            blocks = (*expected[:-2], *(-(-size // FP8_BLOCK) for size in expected[-2:]))
            if (scale := self.files.shape(name + SCALE_SUFFIX)) != blocks:
                raise OwnHeadError(
                    f"{name[:80]}{SCALE_SUFFIX} must have the shape {list(blocks)}, a scale for each block of "
                    f"{FP8_BLOCK} x {FP8_BLOCK}; got {list(scale)}",
                    is_expected=True,
                )

    def _check_embeddings(self) -> None:
        """Refuse embeddings of its own, in place of a copy of the target's."""
        live = self.adapter.shared_embeddings.embed_tokens.weight
        assert isinstance(live, Tensor)
        for name in (self.prefix + one for one in self.layout.copies):
            if name not in self.files.names:
                continue
            stored, step = self.files.read(name), max(1, len(live) // NUM_COMPARED)
            if stored.shape[1:] != live.shape[1:] or differs(
                live[: len(stored) : step, 0], stored[: len(live) : step, 0]
            ):
                raise OwnHeadError(f"a head with embeddings of its own, {name[:80]}, is not read", is_expected=True)

    def _read(self, sources: list[str], wanted: Tensor) -> Tensor:
        """The tensor that its sources make up."""
        tensors = [self._read_one(name) for name in sources]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors).reshape(wanted.shape)

    def _read_one(self, name: str) -> Tensor:
        """A tensor, FP8 blocks with their scales as bfloat16.

        Raises:
            OwnHeadError: numbers that are stored in another way.
        """
        tensor = self.files.read(name)
        scale_name = name + SCALE_SUFFIX
        if scale_name in self.files.names:
            scale = self.files.read(scale_name).float()
            for dim in (-2, -1):
                scale = scale.repeat_interleave(FP8_BLOCK, dim).narrow(dim, 0, tensor.shape[dim])
            tensor = (tensor.float() * scale).bfloat16()
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise OwnHeadError(f"{name[:80]} holds {tensor.dtype} numbers without scales", is_expected=True)
        if not bool(torch.isfinite(tensor).all()):
            raise OwnHeadError(f"{name[:80]} holds values that are not finite", is_expected=True)
        return tensor

    def _own_lm_head(self, size: int) -> Tensor | None:
        """[V, D] LM head of the head's own; None where it is the target's."""
        name = self.prefix + self.layout.lm_head
        if not self.layout.lm_head or name not in self.files.names:
            return None
        self._check_shape(name, (self.adapter.vocab_size, size))
        own = self._read_one(name)
        target = getattr(self.adapter.model.get_output_embeddings(), "weight", None)
        if target is not None and target.shape == own.shape and torch.equal(own, target.to(own.device, own.dtype)):
            return None
        return own


def _source_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shape of each of `count` tensors that make up one, [E, 2 I, H] of experts or [2 I, H]."""
    if count == 1:
        return shape
    rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
    return (rows // count, shape[-1])


def _first_layer(adapter: ModelAdapter) -> nn.Module:
    layer: nn.Module = adapter.text_model.layers[0]
    return layer


def _block_config(adapter: ModelAdapter, layout: HeadLayout) -> Any:
    """The text config of a model with the block as its only layer."""
    config = copy.deepcopy(adapter.text_config)
    config.num_hidden_layers = 1
    if (types := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [layout.layer_type or types[0]]
    config._attn_implementation = "sdpa"  # takes the mask of a tree
    return config


def _mrope_section(config: Any) -> tuple[int, ...]:
    rope = getattr(config, "rope_parameters", None) or {}
    return tuple(rope.get("mrope_section") or ())


def _rotary_embedding(adapter: ModelAdapter) -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """The live target's, of position ids [B, n] or [3, B, n]."""
    module = adapter.text_model.rotary_emb
    axes = 3 if _mrope_section(adapter.text_config) else 0

    def rotate(position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if axes and position_ids.dim() == 2:
            position_ids = position_ids.expand(axes, *position_ids.shape)
        cos, sin = module(torch.empty(0, dtype=dtype, device=position_ids.device), position_ids)
        return cos, sin

    return rotate
