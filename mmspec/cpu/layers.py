"""Decoder layers as C reads them: shapes, weights where they lie, and the structs of decoder_types.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.cpu.addresses import WeightAddresses
from mmspec.cpu.structs import fields_of
from mmspec.cpu.weights import BFLOAT16_PAIRS, FLOAT_TYPES, QuantisedWeight, Weight, WeightStruct

GATE_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu_squared": 2}
"""{name: its number in decoder_types.h}"""
HEAD_NORMS = {"each": 0, "all": 1, "rotated": 2}
"""{what `q_norm` and `k_norm` normalise: its number in decoder_types.h}"""
MOST_TAPS, MOST_KEYS, MOST_LAYER_INPUTS = 16, 256, 1024
"""Of a convolution, of a key of a delta rule, of the per-layer inputs: those of decoder_types.h."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes, constants and traits of a decoder.

    Attributes:
        hidden_size: D.
        intermediate_size: of the gated feed-forward.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; divides `num_heads`.
        head_dim: even.
        eps: of every RMSNorm.
        scaling: factor of the attention scores.
        attention_input_size: columns of q, k and v; 0 for `hidden_size`.
        activation: of the feed-forward, a key of `GATE_ACTIVATIONS`.
        norm_offset: added to the weights of norms: 1 in Gemma.
        rounds_twice: in half precision norms round before they multiply by the weight, and after.
        embed_scale: factor of the embeddings.
        attention_softcap: limit of the scores by tanh; 0 for none.
        is_eager: in half precision scores and normalised weights of attention are rounded.
        rotary_size: first numbers of a head that are rotated; 0 for all.
        is_interleaved: neighbours are rotated with each other, not halves.
        windows: positions that each layer's nodes see, their own included, 0 for all; () if all layers see all.
        num_experts: of the feed-forward of layers that have a router; 0 if none has one.
        expert_size: `intermediate_size` of an expert.
        experts_per_token: that a router chooses, at most `num_experts`.
        shared_size: `intermediate_size` of an expert that all tokens share; 0 for none.
        normalises_shares: the shares of a token's experts add to 1.
        rounds_shares: in half precision they are rounded.
        share_scale: factor of the shares.
        is_sigmoid: experts are chosen by the sigmoid of a router's logits, not by their softmax.
        rounds_routing: in half precision these logits are rounded.
        adds_in_type: in half precision what experts return is added in their order and rounded after each.
        head_sizes: (heads of keys and values, numbers of a head, of these rotated) of each layer; () if all are alike,
            else `num_kv_heads` and `head_dim` are the largest.
        owners: layer whose keys and values each layer reads; () if each has its own.
        head_norms: `q_norm` and `k_norm` are of each head, of all heads at once, or of each head after its rotation.
        gates_attention: q has behind each head the gate of its output.
        gates_heads: layers with attention have `head_gate`.
        normalises_values: values are divided by their root mean square.
        is_parallel: attention and feed-forward read the same input.
        is_centred: norms subtract the mean first (LayerNorm).
        residual_scale: factor of what layers add to the residual.
        delta_heads: (key heads, value heads, size of a key, of a value) of layers with a delta rule or a state space.
        per_layer_scales: factors of the embeddings of per-layer inputs, of their projection, and of the sum of both.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    attention_input_size: int = 0
    activation: str = "silu"
    norm_offset: float = 0.0
    rounds_twice: bool = True
    embed_scale: float = 1.0
    attention_softcap: float = 0.0
    is_eager: bool = False
    rotary_size: int = 0
    is_interleaved: bool = False
    windows: tuple[int, ...] = ()
    num_experts: int = 0
    expert_size: int = 0
    experts_per_token: int = 0
    shared_size: int = 0
    normalises_shares: bool = True
    rounds_shares: bool = True
    share_scale: float = 1.0
    is_sigmoid: bool = False
    rounds_routing: bool = True
    adds_in_type: bool = False
    head_sizes: tuple[tuple[int, int, int], ...] = ()
    owners: tuple[int, ...] = ()
    head_norms: str = "each"
    gates_attention: bool = False
    gates_heads: bool = False
    normalises_values: bool = False
    is_parallel: bool = False
    is_centred: bool = False
    residual_scale: float = 1.0
    delta_heads: tuple[int, int, int, int] = (0, 0, 0, 0)
    per_layer_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def rotated(self) -> int:
        """Numbers of a head that are rotated."""
        return self.rotary_size or self.head_dim

    def sizes_of(self, layer: int) -> tuple[int, int, int]:
        """Heads of keys and values of a layer, numbers of a head, and of these rotated."""
        return self.head_sizes[layer] if self.head_sizes else (self.num_kv_heads, self.head_dim, self.rotated)


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of a decoder layer, contiguous on the CPU, of the decoder's type; norms and biases are vectors.

    Matrices are [out, in]. The names are those of `decoder_layer` in decoder_types.h. Of q, k and v all
    are quantised or none is, and so with gate and up. `attention_out_norm` and `mlp_out_norm` normalise what the parts
    of the layer add to the residual. With a `router` [num_experts, D] the matrices of experts lie behind each other:
    `gate` has gate and up of each, [num_experts * 2 * expert_size, D], `down` is [num_experts * D, expert_size].
    `router_bias` is [num_experts], `shared_router` [1, D], `head_gate` [num_heads, D].

    Without k and v the keys and values are those of an earlier layer, without `up` there is no gate but an activation.
    With `conv` [C, K] there is a convolution in place of attention (mixers.h): q is [3 C, D], or [C, D] with a delta
    rule, which has `z`, `write` and `decay`; a state space (Mamba-2) has `skip` in place of `write`, and `mix_scale` of
    all heads.

    With taps [2, K, D] both parts stand between two mixtures of neighbours (dspark.h); `changes` are [2 K groups, D].
    """

    input_norm: Tensor | None = None
    q: Weight
    k: Weight | None = None
    v: Weight | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o: Weight
    o_bias: Tensor | None = None
    post_norm: Tensor | None = None
    gate: Weight | None = None
    up: Weight | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down: Weight | None = None
    down_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    shared_gate: Weight | None = None
    shared_up: Weight | None = None
    shared_down: Weight | None = None
    shared_router: Tensor | None = None
    per_layer_gate: Weight | None = None
    per_layer_out: Weight | None = None
    per_layer_norm: Tensor | None = None
    output_scale: Tensor | None = None
    conv: Tensor | None = None
    conv_bias: Tensor | None = None
    z: Weight | None = None
    write: Weight | None = None
    decay: Weight | None = None
    decay_log: Tensor | None = None
    decay_bias: Tensor | None = None
    mix_scale: Tensor | None = None
    skip: Tensor | None = None
    head_gate: Weight | None = None
    attention_changes: Tensor | None = None
    mlp_changes: Tensor | None = None
    attention_taps: Tensor | None = None
    mlp_taps: Tensor | None = None


LAYER_MATRICES = (
    *("q", "k", "v", "o", "gate", "up", "down"),
    *("per_layer_gate", "per_layer_out", "z", "write", "decay", "head_gate"),
    *("shared_gate", "shared_up", "shared_down"),
)
"""Attributes of `LayerWeights` that are matrices, which may be copied or quantised."""
QUANTISED_TOGETHER = ("q", "k", "v", "head_gate"), ("gate", "up"), ("q", "z", "write", "decay")
"""Of these all are or none."""


class LayerStruct(ctypes.Structure):
    """`decoder_layer` of decoder_types.h."""

    _fields_ = fields_of("decoder_layer", weights=WeightStruct)


class DecoderStruct(ctypes.Structure):
    """`decoder` of decoder_types.h."""

    _fields_ = fields_of("decoder", weights=WeightStruct)


def decoder_struct(shape: DecoderShape, addresses: WeightAddresses, **fields: Any) -> DecoderStruct:
    """The struct with what a shape and the type of its weights say of it, and other fields.

    What has one name in the shape and in C is the same number in both.
    """
    number, names = FLOAT_TYPES[addresses.dtype], {name for name, _ in DecoderStruct._fields_}
    found = {name: value for name, value in vars(shape).items() if name in names}
    found |= {
        "type": number,
        "attention_type": BFLOAT16_PAIRS if addresses.in_pairs else number,
        "intermediate_size": max(
            shape.intermediate_size, shape.experts_per_token * shape.expert_size, shape.shared_size
        ),
        "head_norms": HEAD_NORMS[shape.head_norms],
        "rotary_size": shape.rotated,
        "activation": GATE_ACTIVATIONS[shape.activation],
    }
    scales = zip(
        ("per_layer_embed_scale", "per_layer_in_scale", "per_layer_scale"), shape.per_layer_scales, strict=True
    )
    return DecoderStruct(**found, **dict(scales), **fields)


def set_layer(
    struct: LayerStruct,
    weights: LayerWeights,
    shape: DecoderShape,
    addresses: WeightAddresses,
    where: str,
    index: int = 0,
) -> None:
    """Set the addresses of a layer's weights, and its sizes; `where` completes their names in messages.

    Raises:
        ValueError: see `WeightAddresses.set`; or some of q, k and v are quantised, or one of gate and up, or experts.
    """
    kinds = {name: isinstance(weight, QuantisedWeight) for name, weight in vars(weights).items() if weight is not None}
    for together in QUANTISED_TOGETHER:
        if weights.router is None and len({kinds[name] for name in together if name in kinds}) > 1:
            names = ", ".join(name for name in together if name in kinds)
            raise ValueError(f"{names} {where} must be quantised together; quantise all of them or none")
    if weights.router is not None and (kinds["gate"] or kinds["down"] or weights.up is not None):
        raise ValueError(f"experts {where} must be of a float type, with gate and up in one matrix")
    if weights.router is not None and not 0 < shape.experts_per_token <= shape.num_experts:
        raise ValueError(f"experts {where} must be at least {shape.experts_per_token}; got {shape.num_experts}")
    if shape.gates_heads and weights.head_gate is None and weights.conv is None:
        raise ValueError(f"head_gate {where} must be there, since the shape gates heads")
    shapes = _shapes_of(weights, shape, index)
    for name, tensor in vars(weights).items():
        sizes = shapes[name] if name in shapes else shapes[name.removesuffix("_bias")][:1]
        addresses.set(struct, name, tensor, sizes, f"{name} {where}")
    struct.number, struct.window = index, shape.windows[index] if shape.windows else 0
    if shape.head_sizes:
        struct.num_kv_heads, struct.head_dim, struct.rotary_size = shape.head_sizes[index]
    if weights.attention_taps is not None:
        struct.num_taps = weights.attention_taps.shape[1]
    if weights.conv is not None:
        struct.channels, struct.conv_size = weights.conv.shape
        sizes = shape.delta_heads
        struct.num_key_heads, struct.num_value_heads, struct.key_size, struct.value_size = sizes
        if struct.conv_size > MOST_TAPS or struct.key_size > MOST_KEYS:
            raise ValueError(f"convolution {where} must have at most {MOST_TAPS} taps, and keys {MOST_KEYS} numbers")
        if weights.z is not None and (sizes[0] < 1 or sizes[1] % sizes[0]):
            raise ValueError(f"value heads {where} must be a multiple of the key heads; got {sizes[1]} and {sizes[0]}")


def _shapes_of(weights: LayerWeights, shape: DecoderShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a layer; of biases those of what they are added to."""
    hidden, per_layer = shape.hidden_size, 0 if weights.per_layer_gate is None else weights.per_layer_gate.shape[0]
    kv_heads, size, _ = shape.sizes_of(layer)
    width, columns = shape.num_heads * size, shape.attention_input_size or hidden
    count, inner = shape.num_experts, shape.expert_size
    if weights.router is None:
        count, inner = 1, shape.intermediate_size if weights.gate is None else weights.gate.shape[0]
        if inner > shape.intermediate_size:
            raise ValueError(f"the feed-forward must have at most {shape.intermediate_size} numbers; got {inner}")
    key_heads, heads, key_size, value_size = shape.delta_heads
    channels, taps = (0, 0) if weights.conv is None else weights.conv.shape
    scaled = value_size if weights.skip is None else heads * value_size
    mixed = {"conv": (channels, taps), "z": (heads * value_size, hidden), "mix_scale": (scaled,)}
    mixed |= dict.fromkeys(("write", "decay"), (heads, hidden))
    mixed |= dict.fromkeys(("decay_log", "decay_bias", "skip"), (heads,))
    query = (width * (2 if shape.gates_attention else 1), columns)
    if weights.z is not None:
        query, width = (2 * key_heads * key_size + heads * value_size, hidden), heads * value_size
        mixed["conv"] = (query[0], taps)
    elif weights.conv is not None:
        query, width = (3 * channels, hidden), channels
    neighbours = 0 if weights.attention_taps is None else weights.attention_taps.shape[1]
    changes = 0 if weights.attention_changes is None else len(weights.attention_changes)
    if changes and (changes % (2 * neighbours) or hidden % (changes // (2 * neighbours))):
        raise ValueError(f"groups of changes must divide {hidden} numbers of {neighbours} taps; got {changes} changes")
    return mixed | {
        "q": query,
        **dict.fromkeys(("k", "v"), (kv_heads * size, columns)),
        "head_gate": (shape.num_heads, columns),
        "o": (hidden, width),
        **dict.fromkeys(("gate", "up"), (inner if weights.router is None else 2 * count * inner, hidden)),
        "down": (count * hidden, inner),
        "router": (count, hidden),
        "router_bias": (count,),
        **dict.fromkeys(("shared_gate", "shared_up"), (shape.shared_size, hidden)),
        "shared_down": (hidden, shape.shared_size),
        "shared_router": (1, hidden),
        **dict.fromkeys(("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm", "per_layer_norm"), (hidden,)),
        "q_norm": (shape.num_heads * size if shape.head_norms == "all" else size,),
        "k_norm": (kv_heads * size if shape.head_norms == "all" else size,),
        "per_layer_gate": (per_layer, hidden),
        "per_layer_out": (hidden, per_layer),
        "output_scale": (1,),
        **dict.fromkeys(("attention_taps", "mlp_taps"), (2, neighbours, hidden)),
        **dict.fromkeys(("attention_changes", "mlp_changes"), (changes, hidden)),
    }
