"""`StaticKVCache`: keys and values at fixed addresses and in few shapes, so that a round can be recorded and replayed.

One tensor holds all layers. The nodes of a tree are written to a fixed slice in front of the committed positions, and
the committed positions that a round reads are a prefix, rounded up to a bucket:

    position  0 ......... T - N ... T ................. T + bucket ..... T + C
                unused    [ nodes ][ committed, then zeros ]    unused

So a round of N nodes reads and writes `data[..., T - N : T + bucket, :]` however long the rows are. Keys are stored
with their rotary position applied, hence their order does not matter. Independent of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.engine.host_copy import pin
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import BUCKETS

MAX_NODES = BUCKETS[-1]
"""T: positions in front of the committed ones, for the nodes of a tree."""
MIN_BUCKET = 256
"""Smallest number of committed positions that a round reads."""
RESERVED_TOKENS = 256
"""New tokens for which a call's first bucket has room: rarely a second recording, at little cost per round."""


class StaticLayoutError(ValueError):
    """A layer's keys or values do not fit the common tensor."""


def length_bucket(length: int) -> int:
    """Smallest of 256 * {1, 1.5, 2, 3, 4, 6, 8, 12, ...} that is at least `length`."""
    bucket = MIN_BUCKET
    while bucket < length:
        half = bucket + bucket // 2
        if length <= half:
            return half
        bucket *= 2
    return bucket


class StaticKVCache(RaggedKVCache):
    """Keys and values of all layers in one tensor [L, 2, B, H, T + C, D], allocated once.

    Use: as `RaggedKVCache` for the prompt. For trees: `begin_tree` and `write_nodes`, then `keep_path`. May serve
    several calls, one after another: `reset` in between.

    Attributes:
        num_layers: L.
        capacity: C, largest number of committed positions.
        data: the tensor; None before the first write.
        lengths: [B] int64, committed positions of each row, at a fixed address; None before the first write.
    """

    def __init__(self, batch: int, capacity: int, num_layers: int) -> None:
        """
        Args:
            batch: B.
            capacity: C.
            num_layers: L, layers that store keys and values.
        """
        super().__init__(batch, capacity)
        self.capacity = capacity
        self.num_layers = num_layers
        self.data: Tensor | None = None
        self.lengths: Tensor | None = None
        self._num_nodes = 0  # of the last tree

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return 0 if self.data is None else self.data.nbytes

    @property
    def layers(self) -> list[Tensor]:
        """2 * L views [B, H, T + C, D] of `data`: keys and values of each layer in turn.

        A recorded function gets these and not `data`: a compiler copies a tensor that is written more than once.
        """
        assert self.data is not None
        return list(self.data.flatten(0, 1).unbind())

    def bucket(self, min_length: int = 0) -> int:
        """Committed positions that the next round reads: the longest row's, or `min_length` if more, rounded up."""
        return min(length_bucket(max(min_length, *self.seq_lens)), self.capacity)

    def reset(self) -> None:
        """Empty the cache for another call. Nothing of the last one remains: nan would reach outputs (0 * nan)."""
        self.seq_lens = [0] * len(self.seq_lens)
        if self.data is not None:
            self.data.zero_()

    def begin_tree(self, num_nodes: int) -> None:
        """Prepare for a forward over N nodes per row, at most T."""
        assert num_nodes <= MAX_NODES
        self._num_nodes = num_nodes

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, n, D] of the prompt; see `RaggedKVCache.write`.

        Raises:
            StaticLayoutError: the layers differ in shape or dtype, or the prompt is longer than the capacity.
        """
        data = self._checked_data(layer, keys, values)
        if self.kv_len > self.capacity or not self.is_uniform:
            raise StaticLayoutError(f"a prompt of {self.kv_len} positions for a capacity of {self.capacity}")
        start = MAX_NODES + self.seq_lens[0]
        data[layer, 0, :, :, start : start + self.num_new] = keys
        data[layer, 1, :, :, start : start + self.num_new] = values
        return self.read(layer, self.kv_len)

    def lengths_on(self, device: torch.device) -> Tensor:
        """[B] int64, `seq_lens` at a fixed address. Copied from the host only after `seq_lens` was assigned."""
        assert self.lengths is not None, "lengths are allocated by the first write"
        if not self._device_lengths:  # they were assigned
            host = pin(torch.tensor(self.seq_lens, device="cpu"), self.lengths.device)
            self._device_lengths[self.lengths.device] = self.lengths.copy_(host, non_blocking=True)
        return self.lengths.to(device)

    def keep_path(self, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        """See `RaggedKVCache.keep_path`. Shapes depend on N only, and nothing is read on the host."""
        assert self.data is not None
        device = self.data.device
        lengths = self.lengths_on(device)
        commit_path(self.data, lengths, path.to(device), counts.to(device), self._num_nodes)
        lengths.add_(counts.to(device))
        self._seq_lens = [length + len(row) for length, row in zip(self.seq_lens, accepted_nodes, strict=True)]

    def zero_tail(self) -> None:
        """Set the nodes of the last tree, and all positions behind the rows' lengths, to zero."""
        if self.data is not None:
            index = torch.arange(-MAX_NODES, self.capacity, device=self.data.device)
            unused = (index < 0) | (index >= self.lengths_on(self.data.device)[:, None])
            self.data.masked_fill_(unused[None, None, :, None, :, None], 0)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, H, length, D] of the committed keys and values of one layer."""
        assert self.data is not None
        keys, values = self.data[layer, :, :, :, MAX_NODES : MAX_NODES + length].unbind()
        return keys, values

    def has_layer(self, layer: int) -> bool:
        """Whether keys and values of this layer have been written."""
        return self.data is not None and layer < self.num_layers

    def __len__(self) -> int:
        return self.num_layers

    def _checked_data(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """`data`, allocated by the first write. Zeros, because a masked position contributes 0 * value."""
        if self.data is None:
            batch, heads, _, size = keys.shape
            shape = (self.num_layers, 2, batch, heads, MAX_NODES + self.capacity, size)
            with torch.inference_mode(False):  # it outlives the call
                self.data = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
                self.lengths = torch.zeros(batch, dtype=torch.long, device=keys.device)
        expected = self.data.shape[2], self.data.shape[3], self.data.shape[5], self.data.dtype
        for part in (keys, values):
            if (part.shape[0], part.shape[1], part.shape[3], part.dtype) != expected or layer >= self.num_layers:
                raise StaticLayoutError(
                    f"layer {layer} of {self.num_layers} has keys {list(keys.shape)} and values {list(values.shape)} "
                    f"of {part.dtype}; the first layer has [batch, heads, size] {list(expected[:3])} of {expected[3]}"
                )
        return self.data


def write_nodes(buffer: Tensor, nodes: Tensor, bucket: int) -> Tensor:
    """Store the keys, or the values, of a tree's nodes in one layer.

    Args:
        buffer: [B, H, T + C, D] of `StaticKVCache.layers`, changed in place.
        nodes: [B, H, N, D].
        bucket: committed positions to read.

    Returns:
        View [B, H, N + bucket, D], the nodes first. Mask positions from a row's length on: finite but undefined.
    """
    start = MAX_NODES - nodes.shape[2]
    buffer[:, :, start:MAX_NODES] = nodes
    return buffer[:, :, start : MAX_NODES + bucket]


def commit_path(data: Tensor, lengths: Tensor, path: Tensor, counts: Tensor, num_nodes: int) -> None:
    """Copy the accepted nodes of all layers behind each row's committed positions. One gather, one scatter.

    All of `path` is copied, so that the shapes do not depend on what was accepted. Steps from `counts` on are copies of
    node 0, which is finite where the row is; they lie behind the row's new length and are overwritten later. So C must
    exceed the largest length by A.

    Args:
        data: [L, 2, B, H, T + C, D], changed in place.
        lengths: [B] int64 committed positions.
        path: [B, A] int64 accepted nodes, defined up to `counts`.
        counts: [B] int64.
        num_nodes: N of the tree.
    """
    layers, _, batch, heads, _, width = data.shape
    steps = path.shape[1]
    step = torch.arange(steps, device=data.device)
    source = MAX_NODES - num_nodes + torch.where(step < counts[:, None], path, 0)
    destination = MAX_NODES + lengths[:, None] + step
    shape = (layers, 2, batch, heads, steps, width)
    moved = data.gather(4, source[None, None, :, None, :, None].expand(shape))
    data.scatter_(4, destination[None, None, :, None, :, None].expand(shape), moved)


__all__ = [
    "MAX_NODES",
    "RESERVED_TOKENS",
    "StaticKVCache",
    "StaticLayoutError",
    "commit_path",
    "length_bucket",
    "write_nodes",
]
