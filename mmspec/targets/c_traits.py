"""Reads the traits of a model's decoder from its modules, for the C decoder.

A decoder is a stack of layers of norms, attention, or what has a state in its place, and a gated feed-forward, or
experts. Its modules are found by the names of their parts (`mmspec.targets.c_layers`) and distinguished by what they
compute for random numbers: how a norm uses its weight, which activation it is. What is found is a hypothesis, which
`mmspec.targets.c_check` tests against the model's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.angles import RotaryFn
from mmspec.cpu.decoder_types import DecoderEnds
from mmspec.cpu.layers import DecoderShape, LayerWeights
from mmspec.interfaces import SharedEmbeddings
from mmspec.targets.base import RECURRENT_LAYER_TYPES, ModelAdapter
from mmspec.targets.c_layers import (
    activations_of,
    eps_of,
    head_norms,
    inner_size,
    is_bare_norm,
    is_norm,
    is_parallel,
    is_plain_linear,
    layer_weights,
    mixer_of,
    parts_of,
    recurrent_sizes,
)
from mmspec.targets.c_probes import activation_of, common_norm_traits, embed_scale_of, routing_traits
from mmspec.targets.forward import takes_one_mask

ATTENTION_TYPES = frozenset(("full_attention", "sliding_attention"))
LAYER_TYPES = ATTENTION_TYPES | RECURRENT_LAYER_TYPES
UNSCALED = "rotary_emb_unscaled"
"""Part of a text model with the angles of layers whose `rope_types` are "unscaled"."""
PER_LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Parts of a text model whose layers have inputs of their own: embeddings, a projection, its norm."""


@dataclass(frozen=True)
class DecoderParts:
    """A model's decoder as the compiled one takes it.

    Attributes:
        shape: sizes, constants and traits.
        layers: weights of the layers.
        ends: what is around them.
        rotaries: rotary angles of each layer; None for those without positions.
        shared: the model's embeddings, with what it applies to the products of its LM head.
    """

    shape: DecoderShape
    layers: list[LayerWeights]
    ends: DecoderEnds
    rotaries: list[RotaryFn | None]
    shared: SharedEmbeddings


@dataclass(frozen=True)
class Rotary:
    """Rotary angles by a text model's own module. On all axes a text position is the same number.

    Attributes:
        module: of the text model.
        dtype: type in which the model computes them.
        layer_type: argument of modules that have angles for each type of layers; None for others.
        shift: added to positions.
    """

    module: nn.Module
    dtype: torch.dtype
    layer_type: str | None
    shift: int = 0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        example = torch.empty(0, dtype=self.dtype, device="cpu")
        has_axes = "mrope_section" in str(getattr(getattr(self.module, "config", None), "rope_parameters", ""))
        num_axes = len(getattr(self.module, "mrope_section", None) or range(3))
        positions = positions + self.shift
        position_ids = positions.expand(num_axes, 1, -1) if has_axes else positions[None]
        arguments = () if self.layer_type is None else (self.layer_type,)
        with torch.no_grad():
            angles = self.module(example, position_ids, *arguments)
        cos, sin = (part.float().reshape(-1, len(positions), part.shape[-1])[0] for part in angles)
        return cos.contiguous(), sin.contiguous()


def read_parts(adapter: ModelAdapter, shape: DecoderShape | None = None) -> Iterator[DecoderParts]:
    """What a model's decoder may be, likeliest first; nothing if it is none that the C decoder knows.

    Args:
        adapter: of the model.
        shape: of a former result for the same modules, which is not found out again.
    """
    text_model = adapter.text_model
    layers, parts = list(getattr(text_model, "layers", ())), parts_of(text_model)
    if not layers or set(parts) - {*PER_LAYER_INPUTS, UNSCALED, "rotary_emb"} != {"embed_tokens", "layers", "norm"}:
        return
    num_layers = {adapter.num_layers, text_model.config.num_hidden_layers}
    if not adapter.layer_types <= LAYER_TYPES or num_layers != {len(layers)}:
        return
    embeddings, lm_head = adapter.model.get_input_embeddings(), adapter.model.get_output_embeddings()
    scale, shared = embed_scale_of(embeddings), adapter.shared_embeddings
    weights = [found for layer in layers if (found := layer_weights(layer)) is not None]
    per_layer = _per_layer_inputs(text_model, parts)
    if scale is None or not is_plain_linear(lm_head) or len(weights) < len(layers) or per_layer is None:
        return
    types = _layer_types(adapter, len(layers))
    rotary = parts.get("rotary_emb")  # none of models without positions
    takes_type = rotary is not None and "layer_type" in inspect.signature(type(rotary).forward).parameters
    is_unscaled = [kind == "unscaled" for kind in getattr(text_model, "rope_types", types)]
    rotaries = [
        Rotary(parts[UNSCALED] if plain else rotary, embeddings.weight.dtype, one if takes_type else None)
        if rotary is not None and one in ATTENTION_TYPES
        else None
        for one, plain in zip(types, is_unscaled, strict=True)
    ]
    ends = DecoderEnds(embeddings.weight, parts["norm"].weight, lm_head.weight, lm_head.bias, **per_layer[0])
    if shape is None:
        shapes = _shapes(adapter, layers, weights, scale * shared.embed_scale, types, rotaries)
        shapes = [replace(one, per_layer_scales=per_layer[1]) for one in shapes]
    else:
        shapes = [shape]
    for one in shapes:
        own: list[RotaryFn | None] = [
            angles if one.sizes_of(index)[2] else None for index, angles in enumerate(rotaries)
        ]
        yield DecoderParts(one, weights, ends, own, shared)


def _per_layer_inputs(
    text_model: Any, parts: dict[str, Any]
) -> tuple[dict[str, Any], tuple[float, float, float]] | None:
    """What `DecoderEnds` and `DecoderShape.per_layer_scales` say of the inputs that each layer has besides."""
    if not set(parts) & {*PER_LAYER_INPUTS}:
        return {}, (1.0, 1.0, 1.0)
    table, linear, norm = (parts[name] for name in PER_LAYER_INPUTS)
    if (scale := embed_scale_of(table)) is None or not is_plain_linear(linear) or linear.bias is not None:
        return None
    scales = scale, float(text_model.per_layer_model_projection_scale), float(text_model.per_layer_input_scale)
    weights = {"per_layer_embeddings": table.weight, "per_layer_in": linear.weight, "per_layer_norm": norm.weight}
    return weights, scales


def _shapes(
    adapter: ModelAdapter,
    layers: Sequence[Any],
    weights: Sequence[LayerWeights],
    embed_scale: float,
    types: Sequence[str],
    rotaries: Sequence[Rotary | None],
) -> list[DecoderShape]:
    """Sizes and traits that all layers share, with each way to rotate that there may be; empty if they share none."""
    config, mlps = adapter.text_config, [parts_of(layer)["mlp"] for layer in layers]
    mixers = [mixer_of(layer) for layer in layers]
    pairs = list(zip(mixers, weights, strict=True))
    attentions = [one for one, kind in zip(mixers, types, strict=True) if kind in ATTENTION_TYPES]
    deltas = [one for one, layer in pairs if layer.z is not None]
    gated_norms = [parts_of(one)["norm"] for one in deltas]
    all_norms = [part for layer in layers for part in layer.modules() if is_norm(part) or is_bare_norm(part)]
    all_norms.append(parts_of(adapter.text_model)["norm"])
    norms = [one for one in all_norms if is_norm(one) and not any(one is other for other in gated_norms)]
    owners = _owners(weights, types)
    common: dict[str, set[Any]] = {
        "eps": {eps_of(norm) for norm in all_norms},
        "scaling": {float(one.scaling) for one in attentions},
        "attention_softcap": {float(getattr(one, "attn_logit_softcapping", None) or 0.0) for one in attentions},
        "delta_heads": set(map(recurrent_sizes, deltas)) or {(0,) * 4},
        "residual_scale": {float(getattr(layer, "residual_multiplier", 1.0)) for layer in layers},
        "is_parallel": {is_parallel(layer) for layer in layers},
        "gates_heads": {layer.head_gate is not None for layer in weights if layer.conv is None},
        "head_norms": {head_norms(one, layer) for one, layer in pairs if layer.conv is None},
        "normalises_values": {"v_norm" in parts_of(one) for one, layer in pairs if layer.k is not None},
    }
    convolutions = {one.z is not None for one in weights if one.conv is not None}
    norm, routing = common_norm_traits(norms), routing_traits(mlps)
    activation = activation_of({id(part): part for mlp in mlps for part in activations_of(mlp)}.values())
    are_in_order = all(mixer.layer_idx == index for index, mixer in enumerate(mixers))
    if norm is None or activation is None or routing is None or owners is None:
        return []
    if not are_in_order or len(convolutions) > 1 or any(len(values) != 1 for values in common.values()):
        return []
    constants = {name: values.pop() for name, values in common.items()}
    found = _head_sizes(config.num_attention_heads, mixers, weights, owners, rotaries)
    if found is None or (routing and (constants["residual_scale"] != 1 or constants["is_parallel"])):
        return []
    sizes, gates = found
    used = [size for size, one in zip(sizes, weights, strict=True) if one.conv is None]
    rotary = next((one for one in rotaries if one is not None), None)
    window = None if takes_one_mask(adapter) else adapter.sliding_window
    windows = tuple(window if window and one == "sliding_attention" else 0 for one in types)
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=max(inner_size(mlp) for mlp in mlps),
        num_heads=config.num_attention_heads,
        num_kv_heads=max(size[0] for size in used),
        head_dim=max(size[1] for size in used),
        activation=activation,
        norm_offset=norm[0],
        rounds_twice=norm[1],
        is_centred=norm[2],
        embed_scale=embed_scale,
        is_eager=adapter.attention == "eager",
        rotary_size=max(size[2] for size in used),
        windows=windows if any(windows) else (),
        head_sizes=tuple(sizes) if len(set(used)) > 1 or rotary is None else (),
        owners=tuple(owners) if owners != list(range(len(owners))) else (),
        gates_attention=gates,
        shared_size=max(0 if one.shared_gate is None else one.shared_gate.shape[0] for one in weights),
        **constants,
        **routing,
    )
    if rotary is None:
        return [shape]
    angles = rotary(torch.arange(8, device="cpu"))[0]
    is_of_halves = torch.equal(*angles.chunk(2, -1))
    candidates = [shape, replace(shape, is_interleaved=True)] if is_of_halves else [replace(shape, is_interleaved=True)]
    return candidates + [_without_positions(one, types) for one in candidates if {*ATTENTION_TYPES} <= {*types}]


def _without_positions(shape: DecoderShape, types: Sequence[str]) -> DecoderShape:
    """The same with rotation in layers with a window alone."""
    sizes = [shape.sizes_of(index) for index in range(len(types))]
    rotated = (
        (*size[:2], size[2] if one == "sliding_attention" else 0) for size, one in zip(sizes, types, strict=True)
    )
    return replace(shape, head_sizes=tuple(rotated))


def _owners(weights: Sequence[LayerWeights], types: Sequence[str]) -> list[int] | None:
    """Layer whose keys and values each layer reads: its own, or the last one's of its type; None if there is none."""
    found, last = [], dict[str, int]()
    for index, (layer, kind) in enumerate(zip(weights, types, strict=True)):
        if layer.k is not None or layer.conv is not None:
            last[kind] = index
        if kind not in last:
            return None
        found.append(last[kind])
    return found


def _head_sizes(
    heads: int,
    mixers: Sequence[Any],
    weights: Sequence[LayerWeights],
    owners: Sequence[int],
    rotaries: Sequence[Rotary | None],
) -> tuple[list[tuple[int, int, int]], bool] | None:
    """`DecoderShape.head_sizes`, and whether queries have gates; None if they do not fit."""
    sizes, gates, positions = list[tuple[int, int, int]](), set[bool](), torch.arange(8, device="cpu")
    rotated = {one: one(positions)[0].shape[1] for one in set(rotaries) if one is not None}
    for index, (mixer, layer) in enumerate(zip(mixers, weights, strict=True)):
        rotary, keys = rotaries[index], weights[owners[index]].k
        if layer.conv is not None:
            sizes.append((1, 2, 0))
            continue
        if keys is None or layer.q.shape[0] % heads:
            return None
        size, width = int(mixer.head_dim), layer.q.shape[0] // heads
        kv_heads, is_whole = divmod(keys.shape[0], size)
        turned = 0 if rotary is None else rotated[rotary]
        fits = not is_whole and kv_heads and heads % kv_heads == 0 and width in (size, 2 * size)
        if not fits or turned % 2 or turned > size:
            return None
        sizes.append((kv_heads, size, turned))
        gates.add(width > size)
    return (sizes, gates.pop()) if len(gates) == 1 else None


def _layer_types(adapter: ModelAdapter, num_layers: int) -> list[str]:
    """Attention type of each layer."""
    types = getattr(adapter.text_model.config, "layer_types", None)
    return list(types) if types is not None else [min(adapter.layer_types)] * num_layers
