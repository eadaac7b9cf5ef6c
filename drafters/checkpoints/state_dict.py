"""Names of a head's tensors on disk: those of the EAGLE code, which published heads share, one tensor per projection.

The modules in memory fuse the query, key and value projections and the gate and up projections. Other modules have the
name that they have in memory, or that of `DraftHead.stored_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from mmspec.drafters.heads.base.head import DraftHead

FUSED_PROJECTIONS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused module of a decoder layer -> the projections on disk."""
STORED_MODULES = {
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "post_norm": "post_attention_layernorm",
}
"""Other modules of a decoder layer -> module on disk."""
Head = TypeVar("Head", bound=DraftHead)


def stored_parts(head: DraftHead) -> dict[str, tuple[tuple[str, int], ...]]:
    """Name in the state dict -> (name on disk, rows) of the tensors that it consists of.

    The one layer of EAGLE heads, `layer` in memory, is `layers.0` on disk.
    """
    config = head.config
    num_q, num_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"qkv_proj": (num_q, num_kv, num_kv), "gate_up_proj": (config.intermediate_size,) * 2}
    parts: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, value in head.state_dict().items():
        path, _, suffix = name.rpartition(".")
        layer, _, module = path.rpartition(".")
        layer = "layers.0" if layer == "layer" else layer
        if not layer.startswith("layers."):
            parts[name] = ((_rename(name, head.stored_names), value.shape[0] if value.dim() else 1),)
        elif module in FUSED_PROJECTIONS:
            projections = zip(FUSED_PROJECTIONS[module], sizes[module], strict=True)
            parts[name] = tuple((f"{layer}.{stored}.{suffix}", rows) for stored, rows in projections)
        else:
            parts[name] = ((f"{layer}.{STORED_MODULES.get(module, module)}.{suffix}", value.shape[0]),)
    return parts


def _rename(name: str, names: Mapping[str, str]) -> str:
    """`name` with the module prefix replaced that is listed in `names`, if any."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def to_stored(head: DraftHead) -> dict[str, Tensor]:
    """The weights of a head under their names on disk."""
    if (own := head.stored_tensors()) is not None:
        return own
    state_dict, weights = head.state_dict(), dict[str, Tensor]()
    for name, parts in stored_parts(head).items():
        value = state_dict[name].detach()
        pieces = value.split([rows for _, rows in parts]) if len(parts) > 1 else (value,)
        weights |= {stored: piece.contiguous() for (stored, _), piece in zip(parts, pieces, strict=True)}
    return weights


def read_head(
    build: Callable[[], Head],
    weights: Mapping[str, Tensor],
    what: str = "a draft head",
    not_stored: Collection[str] = (),
) -> Head:
    """A head in float32 with the tensors on disk.

    Args:
        build: constructs the head.
        weights: tensors under their names on disk.
        what: the kind of head, for messages.
        not_stored: names in the state dict that are not on disk; they stay on the meta device.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or not finite; the message names them.
    """
    with torch.device("meta"):  # an initialisation would advance the user's random generator
        head = build()
    own = head.state_dict()
    parts = {name: stored for name, stored in stored_parts(head).items() if name not in not_stored}
    shapes = {
        stored: own[name].shape if len(found) == 1 else torch.Size((rows, *own[name].shape[1:]))
        for name, found in parts.items()
        for stored, rows in found
    }
    _check_tensors(weights, shapes, what)
    state_dict = {
        name: torch.cat([weights[stored] for stored, _ in found]) if len(found) > 1 else weights[found[0][0]]
        for name, found in parts.items()
    }
    values = {name: value.float() for name, value in state_dict.items()}
    head.load_state_dict(values, strict=not not_stored, assign=True)
    return head


def _check_tensors(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], what: str) -> None:
    """Compare tensors with the expected names and shapes.

    Args:
        weights: the tensors.
        shapes: expected name -> shape.
        what: the kind of head, for the message.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or not finite; the message names them.
    """
    missing, unexpected = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing[:4])}.")
    if unexpected:
        raise ValueError(f"{what} has unexpected tensors {', '.join(unexpected[:4])}.")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for this config; got {list(weights[name].shape)}.")
        check_numbers(name, weights[name])


def check_numbers(name: str, weight: Tensor) -> None:
    """Refuse a weight that is not plain numbers: quantised ones mean nothing without their scales.

    Raises:
        ValueError: they are integers, of one byte each, or not finite.
    """
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"{name} holds {weight.dtype} values: a quantised head is not read; use the original weights.")
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} holds values that are not finite.")


def drop_unused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors without those that a head does not use: rotary buffers and its copy of the embeddings."""
    return {key: value for key, value in weights.items() if "rotary" not in key and key != "embed_tokens.weight"}
