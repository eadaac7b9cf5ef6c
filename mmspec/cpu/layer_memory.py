"""What the layers of a decoder have of earlier positions: keys and values, or the states of those with a convolution in
place of attention (mixers.h), with what a forward logs of its nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.cpu.addresses import new_floats
from mmspec.cpu.decoder_types import DecoderInputs, LayerState, NodeLog
from mmspec.cpu.layers import DecoderShape, LayerStruct
from mmspec.cpu.weights import FLOAT_TYPES, is_plain

if TYPE_CHECKING:
    from mmspec.cpu.c_kernel import CKernel


def mixer_sizes(layers: Iterable[LayerStruct]) -> dict[str, int]:
    """`mixer_width` and `mixer_size` of a decoder with these layers."""
    mixers = [one for one in layers if one.conv]
    widths = [one.q.rows + one.z.rows + one.write.rows + one.decay.rows for one in mixers]
    return {"mixer_width": max(widths, default=0), "mixer_size": max((one.o.cols for one in mixers), default=0)}


def set_caches(
    structs: ctypes.Array[LayerStruct],
    caches: Sequence[Tensor | None],
    shape: DecoderShape,
    batch: int,
    rows: Sequence[int] | None,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    owners: Sequence[int] = (),
) -> bool:
    """Set the addresses of the keys and values of all layers; False if they are not as described.

    Args:
        structs: of the layers.
        caches: [2, R, num_kv_heads, `kv_len` or more, head_dim] of each layer, of type `dtype`; see `DecoderContext`.
        shape: sizes.
        batch: B, rows that are computed.
        rows: which of the R rows each of them is; None: R is B, and they are the same.
        kv_len: positions.
        dtype: of the caches.
        owners: cache that each layer reads; () for its own.
    """
    num_rows = batch
    if rows is not None:
        num_rows = next((cache.shape[1] for cache in caches if cache is not None), max(rows, default=-1) + 1)
        if len(rows) != batch or len(set(rows)) < batch or not set(rows) <= set(range(num_rows)):
            return False
    for index, struct in enumerate(structs):
        owner = owners[index] if owners else index
        if struct.conv:
            continue
        cache = caches[owner] if owner < len(caches) else None
        if cache is None:
            return False
        capacity, sizes = cache.shape[3], shape.sizes_of(struct.number)
        expected = 2, num_rows, sizes[0], capacity, sizes[1]
        if cache.shape != expected or capacity < kv_len or not is_plain(cache, dtype):
            return False
        struct.capacity = capacity
        struct.keys = cache.data_ptr()
        struct.values = struct.keys + cache.nbytes // 2
    return True


def log_nodes(
    kernel: CKernel, layer: LayerStruct, state: LayerState | None, inputs: DecoderInputs, dtype: torch.dtype
) -> NodeLog | None:
    """Let the next forward read this state of a layer, and log its nodes; None if the state is not as described."""
    rows, nodes = inputs.cache_rows, inputs.tokens.shape[1]
    batch = 0 if state is None else len(state.conv)
    if state is None or (batch != len(inputs.tokens) if rows is None else max(rows, default=-1) >= batch):
        return None
    shape = batch, layer.channels, layer.conv_size
    if state.conv.shape != shape or not is_plain(state.conv, dtype):
        return None
    window = torch.empty(*shape[:2], layer.conv_size + nodes, dtype=dtype, device="cpu")
    if rows is not None:  # of the others nothing else is logged
        window[:, :, : layer.conv_size] = state.conv
    layer.conv_state, layer.conv_window = state.conv.data_ptr(), window.data_ptr()
    if not layer.z.data:
        return NodeLog(window, None, _no_states)
    key_size, value_size = layer.key_size, layer.value_size
    sizes = batch, layer.num_value_heads, *((value_size, key_size) if layer.skip else (key_size, value_size))
    old = state.recurrent
    if old is None or old.shape != sizes or not is_plain(old):
        return None
    mixed, rates = new_floats(batch * nodes, layer.channels), new_floats(batch * nodes, 2, layer.num_value_heads)
    new = torch.empty_like(old)
    layer.state, layer.next_state = old.data_ptr(), new.data_ptr()
    layer.mixed, layer.rates, layer.state_type = mixed.data_ptr(), rates.data_ptr(), FLOAT_TYPES[dtype]
    known = LayerStruct.from_buffer_copy(layer)  # the next forward changes the other

    def advance(counts: Tensor, path: Tensor, memory: tuple[Tensor, ...] = (old, mixed, rates)) -> Tensor:
        found = torch.empty_like(memory[0])
        kernel.advance(ctypes.addressof(known), nodes, path, counts, found)
        return found

    return NodeLog(window, new, advance)


def _no_states(counts: Tensor, path: Tensor) -> Tensor:
    raise RuntimeError("a convolution has no recurrent state")
