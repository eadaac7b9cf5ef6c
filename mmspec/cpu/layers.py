"""Decoder layers as C reads them: shapes, weights where they lie, and the structs of decoder_types.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.structs import fields_of
from mmspec.cpu.weights import (
    BFLOAT16_PAIRS,
    FLOAT_TYPES,
    QuantisedWeight,
    Weight,
    WeightStruct,
    is_plain,
    weight_struct,
)

GATE_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""{name: its number in decoder_types.h}"""


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
        eager_attention: in half precision scores and normalised weights of attention are rounded.
        rotary_size: first numbers of a head that are rotated; 0 for all.
        interleaved: neighbours are rotated with each other, not halves.
        windows: positions that each layer's nodes see, their own included, 0 for all; () if all layers see all.
        num_experts: of the feed-forward of layers that have a router; 0 if none has one.
        expert_size: `intermediate_size` of an expert.
        experts_per_token: that a router chooses, at most `num_experts`.
        normalises_shares: the shares of a token's experts add to 1.
        rounds_shares: in half precision they are rounded.
        adds_in_type: in half precision what experts return is added in their order and rounded after each.
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
    eager_attention: bool = False
    rotary_size: int = 0
    interleaved: bool = False
    windows: tuple[int, ...] = ()
    num_experts: int = 0
    expert_size: int = 0
    experts_per_token: int = 0
    normalises_shares: bool = True
    rounds_shares: bool = True
    adds_in_type: bool = False

    @property
    def rotated(self) -> int:
        """Numbers of a head that are rotated."""
        return self.rotary_size or self.head_dim


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a decoder layer, contiguous on the CPU, of the decoder's type; norms and biases are vectors.

    Matrices are [out, in]. The names are those of `decoder_layer` in decoder_types.h. Of q, k and v all
    are quantised or none is, and so with gate and up. `attention_out_norm` and `mlp_out_norm` normalise what the parts
    of the layer add to the residual. With a `router` [num_experts, D] the matrices of experts lie behind each other:
    `gate` has gate and up of each, [num_experts * 2 * expert_size, D], `down` is [num_experts * D, expert_size].
    """

    input_norm: Tensor | None
    q: Weight
    k: Weight
    v: Weight
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    post_norm: Tensor | None
    gate: Weight | None
    up: Weight | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    router: Tensor | None = None


LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Attributes of `LayerWeights` that are matrices, which may be copied or quantised."""


class LayerStruct(ctypes.Structure):
    """`decoder_layer` of decoder_types.h."""

    _fields_ = fields_of("decoder_layer", weights=WeightStruct)


class DecoderStruct(ctypes.Structure):
    """`decoder` of decoder_types.h."""

    _fields_ = fields_of("decoder", weights=WeightStruct)


class VectorStruct(ctypes.Structure):
    """`vector` of decoder_types.h."""

    _fields_ = fields_of("vector")


def decoder_struct(shape: DecoderShape, addresses: WeightAddresses, **fields: Any) -> DecoderStruct:
    """The struct with what a shape and the type of its weights say of it, and other fields."""
    number = FLOAT_TYPES[addresses.dtype]
    return DecoderStruct(
        type=number,
        attention_type=BFLOAT16_PAIRS if addresses.in_pairs else number,
        hidden_size=shape.hidden_size,
        intermediate_size=max(shape.intermediate_size, shape.experts_per_token * shape.expert_size),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary_size=shape.rotated,
        is_interleaved=shape.interleaved,
        activation=GATE_ACTIVATIONS[shape.activation],
        rounds_twice=shape.rounds_twice,
        is_eager=shape.eager_attention,
        eps=shape.eps,
        scaling=shape.scaling,
        embed_scale=shape.embed_scale,
        attention_softcap=shape.attention_softcap,
        num_experts=shape.num_experts,
        expert_size=shape.expert_size,
        experts_per_token=shape.experts_per_token,
        normalises_shares=shape.normalises_shares,
        rounds_shares=shape.rounds_shares,
        adds_in_type=shape.adds_in_type,
        **fields,
    )


class WeightAddresses:
    """Addresses of weights, whose memory lives as long as this.

    Vectors that the kernel cannot read where they lie, since they have another type or need an offset, have copies that
    it makes at the start of each forward (`vectors`).

    Attributes:
        dtype: of all weights but quantised ones.
        in_pairs: they are bfloat16, and multiplied in pairs.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, norm_offset: float = 0.0, multiplies_pairs: bool = False
    ) -> None:
        """
        Args:
            dtype: of all weights but quantised ones.
            norm_offset: added to vectors whose name ends with "norm".
            multiplies_pairs: of the kernel.
        """
        self.dtype = dtype
        self.in_pairs = multiplies_pairs and dtype is torch.bfloat16
        self._norm_offset = norm_offset
        self._storages: list[torch.UntypedStorage] = []  # which live as long as C may read them
        self._copies: list[tuple[Tensor, Tensor, float]] = []

    def add(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        """Address of a vector, or of a table of float32; None for None.

        Raises:
            ValueError: it is not contiguous, of the type and of this shape on the CPU.
        """
        if tensor is None:
            return None
        self._check(name, tensor, shape)
        self._storages.append(tensor.untyped_storage())
        offset = self._norm_offset if name.partition(" ")[0].endswith("norm") else 0.0
        if self.dtype is torch.float32 and not offset:
            return tensor.data_ptr()
        copy = new_floats(*shape)
        self._copies.append((tensor, copy, offset))
        return copy.data_ptr()

    def vectors(self) -> ctypes.Array[VectorStruct]:
        """What `decoder.vectors` points to; must outlive its use."""
        rows = [
            VectorStruct(one.data_ptr(), copy.data_ptr(), one.numel(), offset) for one, copy, offset in self._copies
        ]
        return (VectorStruct * len(rows))(*rows)

    def add_matrix(self, name: str, weight: Weight | None, shape: tuple[int, ...]) -> WeightStruct:
        """The struct of a matrix; an empty one for None.

        Raises:
            ValueError: it is neither contiguous, of the type and of this shape on the CPU, nor a quantised weight of
                this shape.
        """
        if weight is None:
            return WeightStruct()
        if isinstance(weight, QuantisedWeight):
            if weight.shape != shape:
                raise ValueError(f"{name} must have shape {list(shape)}; got a quantised weight {list(weight.shape)}")
            self._storages += weight.data.untyped_storage(), weight.scales.untyped_storage()
        else:
            self._check(name, weight, shape)
            self._storages.append(weight.untyped_storage())
        return weight_struct(weight, self.in_pairs)

    def set(
        self, struct: ctypes.Structure, name: str, weight: Weight | None, shape: tuple[int, ...], label: str
    ) -> None:
        """Set a field of a struct to a weight, whose name in messages is `label`.

        Raises:
            ValueError: see `add` and `add_matrix`.
        """
        is_matrix = any(field[:2] == (name, WeightStruct) for field in struct._fields_)
        add = self.add_matrix if is_matrix else self.add
        setattr(struct, name, add(label, weight, shape))  # type: ignore[arg-type]

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if not is_plain(tensor, self.dtype) or tensor.shape != shape:
            kind = str(self.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} must be contiguous {kind} of shape {list(shape)} on the CPU; got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def set_layer(
    struct: LayerStruct, weights: LayerWeights, shape: DecoderShape, addresses: WeightAddresses, where: str
) -> None:
    """Set the addresses of a layer's weights; `where` completes their names in messages.

    Raises:
        ValueError: see `WeightAddresses.set`; or some of q, k and v are quantised, or one of gate and up, or experts.
    """
    kinds = {name: isinstance(weight, QuantisedWeight) for name, weight in vars(weights).items()}
    for together in (("q", "k", "v"), ("gate", "up")):
        if weights.router is None and len({kinds[name] for name in together}) > 1:
            raise ValueError(f"{', '.join(together)} {where} must be quantised together; quantise all of them or none")
    if weights.router is not None and (kinds["gate"] or kinds["down"] or weights.up is not None):
        raise ValueError(f"experts {where} must be of a float type, with gate and up in one matrix")
    for name, tensor in vars(weights).items():
        addresses.set(struct, name, tensor, _shape_of(name, shape, weights.router is not None), f"{name} {where}")


def set_caches(
    structs: ctypes.Array[LayerStruct],
    caches: Sequence[Tensor],
    shape: DecoderShape,
    batch: int,
    rows: Sequence[int] | None,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Set the addresses of the keys and values of all layers; False if they are not as described.

    Args:
        structs: of the layers.
        caches: [2, R, num_kv_heads, `kv_len` or more, head_dim] of each layer, of type `dtype`.
        shape: sizes.
        batch: B, rows that are computed.
        rows: which of the R rows each of them is; None: R is B, and they are the same.
        kv_len: positions.
        dtype: of the caches.
    """
    num_rows = batch
    if rows is not None:
        num_rows = caches[0].shape[1] if caches else 0
        if len(rows) != batch or len(set(rows)) < batch or not set(rows) <= set(range(num_rows)):
            return False
    if len(caches) != len(structs):
        return False
    for struct, cache in zip(structs, caches, strict=True):
        capacity = cache.shape[3]
        expected = 2, num_rows, shape.num_kv_heads, capacity, shape.head_dim
        if cache.shape != expected or capacity < kv_len or not is_plain(cache, dtype):
            return False
        struct.capacity = capacity
        struct.keys = cache.data_ptr()
        struct.values = struct.keys + cache.nbytes // 2
    return True


def new_floats(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, not initialised."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _shape_of(name: str, shape: DecoderShape, has_experts: bool) -> tuple[int, ...]:
    """Shape of a weight of `LayerWeights`."""
    hidden, width, size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.head_dim
    columns = shape.attention_input_size or hidden
    count, inner = (shape.num_experts, shape.expert_size) if has_experts else (1, shape.intermediate_size)
    sizes = {
        **dict.fromkeys(("q",), (width, columns)),
        **dict.fromkeys(("k", "v"), (shape.num_kv_heads * size, columns)),
        "o": (hidden, width),
        **dict.fromkeys(("gate", "up"), (2 * count * inner if has_experts else inner, hidden)),
        "down": (count * hidden, inner),
        "router": (count, hidden),
        **dict.fromkeys(("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm"), (hidden,)),
        **dict.fromkeys(("q_norm", "k_norm"), (size,)),
    }
    return sizes[name] if name in sizes else sizes[name.removesuffix("_bias")][:1]
