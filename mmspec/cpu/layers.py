"""Decoder layers as compiled code reads them: shapes, weights where they lie, and the structs of decoder_types.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mmspec.cpu.native import is_plain


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and constants of a decoder.

    Attributes:
        hidden_size: D.
        intermediate_size: of the gated feed-forward.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; divides `num_heads`.
        head_dim: even.
        eps: of every RMSNorm.
        scaling: factor of the attention scores.
        attention_input_size: columns of q, k and v; 0 for `hidden_size`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    attention_input_size: int = 0


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a decoder layer, contiguous float32 on the CPU, [out, in] each; norms and biases are vectors.

    The order of the attributes is that of `decoder_layer` in decoder_types.h.
    """

    input_norm: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None


_SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *(
        "vocab_size",
        "num_embeddings",
        "batch",
        "nodes",
        "span",
        "max_keys",
        "max_position",
        "num_angles",
        "padding_length",
    ),
)
_POINTERS = (
    *("layers", "embeddings", "final_norm", "lm_head", "lm_head_bias", "cos", "sin", "tokens", "depths", "lengths"),
    *("position_base", "ancestors", "padding", "embedded", "normed", "logits", "scratch"),
)


class LayerStruct(ctypes.Structure):
    """`decoder_layer` of decoder_types.h."""

    _fields_ = [
        *((field.name, ctypes.c_void_p) for field in fields(LayerWeights)),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "hidden")),
        ("capacity", ctypes.c_int64),
    ]


class DecoderStruct(ctypes.Structure):
    """`decoder` of decoder_types.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
    ]


class WeightAddresses:
    """Addresses of weights, and whether they are still true."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._pointers: list[int] = []

    def add(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        """Address of a weight; None for None.

        Raises:
            ValueError: it is not contiguous float32 of this shape on the CPU.
        """
        if tensor is None:
            return None
        if not is_plain(tensor) or tensor.shape != shape:
            raise ValueError(
                f"{name} must be contiguous float32 of shape {list(shape)} on the CPU; got {list(tensor.shape)} of "
                f"{tensor.dtype} on {tensor.device}"
            )
        self._weights.append(tensor)
        self._pointers.append(tensor.data_ptr())
        return tensor.data_ptr()

    def are_valid(self) -> bool:
        """Whether every weight is where it was (`weight.data = ...` moves it)."""
        return self._pointers == [weight.data_ptr() for weight in self._weights]


def set_layer(
    struct: LayerStruct, weights: LayerWeights, shape: DecoderShape, addresses: WeightAddresses, where: str
) -> None:
    """Set the addresses of a layer's weights; `where` completes their names in messages.

    Raises:
        ValueError: see `WeightAddresses.add`.
    """
    for name, tensor in vars(weights).items():
        setattr(struct, name, addresses.add(f"{name} {where}", tensor, _shape_of(name, shape)))


def set_cache(struct: LayerStruct, cache: Tensor, shape: DecoderShape, batch: int, kv_len: int) -> bool:
    """Set the addresses of keys and values; False if the cache is not [2, batch, num_kv_heads, kv_len or more, d]."""
    capacity = cache.shape[3]
    expected = 2, batch, shape.num_kv_heads, capacity, shape.head_dim
    if cache.shape != expected or capacity < kv_len or not is_plain(cache):
        return False
    struct.capacity = capacity
    struct.keys = cache.data_ptr()
    struct.values = struct.keys + cache.nbytes // 2
    return True


def new_floats(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, not initialised."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _shape_of(name: str, shape: DecoderShape) -> tuple[int, ...]:
    """Shape of a weight of `LayerWeights`."""
    hidden, width, size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.head_dim
    columns = shape.attention_input_size or hidden
    sizes = {
        **dict.fromkeys(("q",), (width, columns)),
        **dict.fromkeys(("k", "v"), (shape.num_kv_heads * size, columns)),
        "o": (hidden, width),
        **dict.fromkeys(("gate", "up"), (shape.intermediate_size, hidden)),
        "down": (hidden, shape.intermediate_size),
        **dict.fromkeys(("input_norm", "post_norm"), (hidden,)),
        **dict.fromkeys(("q_norm", "k_norm"), (size,)),
    }
    return sizes[name] if name in sizes else sizes[name.removesuffix("_bias")][:1]


__all__ = [
    "DecoderShape",
    "DecoderStruct",
    "LayerStruct",
    "LayerWeights",
    "WeightAddresses",
    "new_floats",
    "set_cache",
    "set_layer",
]
