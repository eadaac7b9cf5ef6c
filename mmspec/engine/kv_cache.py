"""The one layout of keys and values: a sequence length per row, new positions behind each row's own, read as a prefix.

    row 0   [ committed ............ ][ nodes ]
    row 1   [ committed .. ][ nodes ]
            0                                    kv_len        C

`RaggedKVCache` holds the keys and values of a stack of layers; the target and the heads of drafters use it. The prefix
that a forward reads is as long as the longest row needs. A recorded function must have few shapes and no number of the
host in it: `RecordedKVCache` is the same cache there, with the lengths as a tensor and a prefix rounded up to a bucket.
After verification the accepted nodes are gathered to the front of the new positions. Independent of transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mmspec.engine.host_copy import from_host

MIN_BUCKET = 256
"""Smallest number of positions that a recorded function reads."""
RESERVED_TOKENS = 256
"""New tokens for which a call's first bucket has room: rarely a second recording, at little cost per round."""
AT_ONCE_BYTES = 1 << 20
"""Keys and values of a layer that are allocated once, for the whole length of a call; larger ones grow by a quarter."""

LayerParts = tuple[Tensor, ...]
"""Keys and values of a layer: one tensor [2, B, H, C, D], or two tensors [1, B, H, C, D] where the shapes differ."""


def length_bucket(length: int) -> int:
    """Smallest of 256 * {1, 1.5, 2, 3, 4, 6, 8, 12, ...} that is at least `length`."""
    bucket = MIN_BUCKET
    while bucket < length:
        half = bucket + bucket // 2
        if length <= half:
            return half
        bucket *= 2
    return bucket


class RaggedKVCache:
    """Growing key and value buffers, one tensor [2, B, H, C, D] per layer (C allocated positions).

    Layers may differ in shape. A layer whose keys and values differ in shape (multi-head latent attention) has two
    tensors [1, B, H, C, D].

    Use: `begin_forward(n)` once per forward, `write` once per layer, then `keep_path` (after a prefill: `advance`).

    Attributes:
        seq_lens: committed positions of each row, on the host.
        max_length: number of positions that is never exceeded.
        num_new: positions per row that the current forward writes.
        kv_len: key length of the current forward, `max(seq_lens) + num_new`.
        layers: the tensors of each layer; () of one that stores nothing.
        groups: the tensors in which `pack` has put all layers; none before, and after one has outgrown its tensor.
    """

    def __init__(self, batch: int, max_length: int, values_start_as_keys: bool = False) -> None:
        """
        Args:
            batch: B.
            max_length: largest number of positions of a row, tree nodes included. Allocation stops there.
            values_start_as_keys: the values returned have at least the dtype of the first keys, as those of
                `DynamicLayer` had in older versions of transformers.
        """
        self._seq_lens = [0] * batch
        self._device_lengths: dict[torch.device, Tensor] = {}  # copies of `seq_lens`
        self.max_length = max_length
        self._values_start_as_keys = values_start_as_keys
        self.num_new = 0
        self.kv_len = 0
        self.layers: list[LayerParts] = []
        self._dtypes: list[tuple[torch.dtype, torch.dtype]] = []  # (keys, values) of each layer
        self._write_indices: dict[torch.device, Tensor] = {}
        self.groups: list[Tensor] = []
        self._common: list[Tensor | None] = []  # of `common_buffers`, as long as they are those of `layers`
        self._common_capacity = 0

    @classmethod
    def over(cls, group: Tensor, seq_lens: Sequence[int]) -> RaggedKVCache:
        """A packed cache on a tensor [layers, 2, B, H, C, D] that holds `seq_lens` positions of each row."""
        cache = cls(len(seq_lens), max_length=group.shape[4])
        cache.groups = [group]
        cache.layers = [(layer,) for layer in group.unbind()]
        cache._dtypes = [(group.dtype, group.dtype)] * len(group)
        cache.seq_lens = list(seq_lens)
        return cache

    @property
    def seq_lens(self) -> list[int]:
        """Committed positions of each row. Assign a new list to change them."""
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, seq_lens: list[int]) -> None:
        self._seq_lens = seq_lens
        self._device_lengths.clear()

    def lengths_on(self, device: torch.device) -> Tensor:
        """[B] int64, `seq_lens` on `device`. Copied from the host only after `seq_lens` was assigned."""
        if device not in self._device_lengths:
            self._device_lengths[device] = from_host(self._seq_lens, device)
        return self._device_lengths[device]

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length, so that new positions can be written as a slice."""
        return len(set(self.seq_lens)) == 1

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for layer in self.layers for part in layer)

    def begin_forward(self, nodes: int) -> None:
        """Prepare for a forward that writes `nodes` positions per row."""
        self.num_new = nodes
        self.kv_len = max(self.seq_lens) + nodes
        self._write_indices.clear()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, num_new, D] behind the length of each row.

        Returns:
            Views [B, H, kv_len, D] of all keys and values (H and D may differ). Positions behind a row's own are finite
            but undefined: mask them. Keys and values of different dtypes (autocast) are returned in the dtypes of
            `DynamicLayer`.
        """
        parts = self._allocate(layer, keys, values)
        for buffer, new in ((parts[0][0], keys), (parts[-1][-1], values)):
            if self.is_uniform:
                start = self.seq_lens[0]
                buffer[:, :, start : start + self.num_new] = new
            else:
                index = self._write_index(new.device)[:, None, :, None].expand(new.shape)
                buffer.scatter_(2, index, new.to(buffer.dtype))
        return self.read(layer, self.kv_len)

    def common_buffers(self) -> list[Tensor | None] | None:
        """The tensors [2, B, H, C, D] of all layers, with room for this forward's positions, to be written directly.

        The same list until tensors are replaced. None if keys and values of a layer are in two; in it, for layers that
        have none.
        """
        if self._common and self.kv_len <= self._common_capacity:
            return self._common
        for index, parts in enumerate(self.layers):
            if len(parts) > 1:
                return None
            if parts and parts[0].shape[3] < self.kv_len:
                keys, values = parts[0][:, :, :, :0]
                self._allocate(index, keys, values)
        self._common = [parts[0] if parts else None for parts in self.layers]
        self._common_capacity = min((parts[0].shape[3] for parts in self.layers if parts), default=0)
        return self._common

    def advance(self, nodes: int) -> None:
        """Commit the first `nodes` positions of the last forward (prefill)."""
        self.seq_lens = [length + nodes for length in self.seq_lens]

    def append(self, counts: Sequence[int], device_counts: Tensor) -> None:
        """Commit the first `counts[b]` positions of row b; `device_counts` [B] int64 are the same numbers."""
        self._seq_lens = [length + count for length, count in zip(self._seq_lens, counts, strict=True)]
        for device, lengths in self._device_lengths.items():
            self._device_lengths[device] = lengths + device_counts.to(device)

    def keep_path(self, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        """Commit the accepted nodes of the last forward, in order, and drop the others.

        Args:
            path: [B, N] int64 accepted nodes, defined up to `counts`.
            counts: [B] int64.
            accepted_nodes: the same nodes on the host.
        """
        if self.groups:  # a recorded forward may follow, which reads all nodes
            commit_nodes(self.groups, self.lengths_on(path.device), path, counts)
        elif any(node != step for row in accepted_nodes for step, node in enumerate(row)):
            path = path[:, : max(len(row) for row in accepted_nodes)]
            commit_nodes(self._buffers(), self.lengths_on(path.device), path, counts)
        self.append([len(row) for row in accepted_nodes], counts)

    def crop(self, lengths: Sequence[int]) -> None:
        """Cut row b to at most `lengths[b]` positions."""
        cropped = [min(old, new) for old, new in zip(self.seq_lens, lengths, strict=True)]
        if cropped != self.seq_lens:
            self.seq_lens = cropped

    def zero_tail(self) -> None:
        """Set all positions behind the rows' lengths to zero."""
        for buffer in self._buffers():
            index = torch.arange(buffer.shape[3], device=buffer.device)
            behind = index >= self.lengths_on(buffer.device)[:, None]
            buffer.masked_fill_(behind[None, :, None, :, None], 0)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, H, length, D] of the keys and values of one layer."""
        parts = self.layers[layer]
        keys_dtype, values_dtype = self._dtypes[layer]
        return parts[0][0, :, :, :length].to(keys_dtype), parts[-1][-1, :, :, :length].to(values_dtype)

    @property
    def written_layers(self) -> list[int]:
        """Layers that have keys and values; recurrent layers have none."""
        return [index for index, parts in enumerate(self.layers) if parts]

    def pack(self, capacity: int) -> bool:
        """Move all layers to fixed addresses, with room for `capacity` positions: one tensor for all of one shape.

        Returns:
            Whether they moved, so that recordings of the former addresses are void.
        """
        if self.groups and all(tensor.shape[4] >= capacity for tensor in self.groups):
            return False
        with torch.inference_mode(False), torch.no_grad():  # they outlive the call
            self.groups, places = _pack(self.layers, capacity)
            for parts, views in zip(self.layers, places, strict=True):
                for old, new in zip(parts, views, strict=True):
                    new[:, :, :, : old.shape[3]] = old[:, :, :, :capacity]
        self.layers, self._common = places, []
        return bool(places)

    def reset(self) -> None:
        """Empty the cache for another call. Nothing of the last one remains: nan would reach outputs (0 * nan)."""
        self.seq_lens = [0] * len(self.seq_lens)
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self._buffers():
                tensor.zero_()

    def _buffers(self) -> Iterator[Tensor]:
        """The tensors of all layers, [2, B, H, C, D] or [1, B, H, C, D]."""
        for parts in self.layers:
            yield from parts

    def _write_index(self, device: torch.device) -> Tensor:
        """[B, num_new] int64 positions that this forward writes, cached per device (layers may be on several)."""
        if device not in self._write_indices:
            step = torch.arange(self.num_new, device=device)
            self._write_indices[device] = self.lengths_on(device)[:, None] + step
        return self._write_indices[device]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `layer`, with room for `max_length`, or above `AT_ONCE_BYTES` grown by a quarter at a time.

        New positions are zero, because a masked position contributes 0 * value, and 0 * nan is nan.
        """
        while len(self.layers) <= layer:
            self.layers.append(())
            self._dtypes.append((keys.dtype, keys.dtype if self._values_start_as_keys else values.dtype))
        parts = self.layers[layer]
        dtype = self._promote_dtype(layer, keys.dtype, values.dtype)
        is_large_enough = bool(parts) and parts[0].shape[3] >= self.kv_len
        if is_large_enough and parts[0].dtype == dtype:
            return parts
        a_position = dtype.itemsize * sum(one.shape[0] * one.shape[1] * one.shape[3] for one in (keys, values))
        ahead = max(self.kv_len + self.kv_len // 4 + 16, AT_ONCE_BYTES // max(1, a_position))
        capacity = max(self.kv_len, min(self.max_length, ahead))
        if is_large_enough:
            capacity = parts[0].shape[3]
        groups = ((2, keys),) if keys.shape == values.shape else ((1, keys), (1, values))
        grown = tuple(new.new_zeros(n, *new.shape[:2], capacity, new.shape[3], dtype=dtype) for n, new in groups)
        for old, new in zip(parts, grown, strict=bool(parts)):
            new[:, :, :, : old.shape[3]] = old
        self.layers[layer], self.groups, self._common = grown, [], []
        return grown

    def _promote_dtype(self, layer: int, keys: torch.dtype, values: torch.dtype) -> torch.dtype:
        """Dtype of the buffer of `layer` that holds old and new keys and values, promoted as by `torch.cat`."""
        old = self._dtypes[layer]
        if old != (keys, values):
            self._dtypes[layer] = torch.promote_types(old[0], keys), torch.promote_types(old[1], values)
        return torch.promote_types(*self._dtypes[layer])


class RecordedKVCache(RaggedKVCache):
    """A `RaggedKVCache` inside a recorded function: lengths are a tensor, and a prefix of `bucket` positions is read.

    Nothing but the positions behind `lengths` is written. On the host every row ends `num_new` positions before the end
    of the bucket; assigning `seq_lens` (a draft whose nodes all begin at one position) makes that the truth.
    """

    def __init__(self, layers: Sequence[LayerParts], lengths: Tensor, bucket: int) -> None:
        """
        Args:
            layers: of a packed cache.
            lengths: [B] int64 committed positions, all new ones included at most `bucket`.
            bucket: positions that are read.
        """
        super().__init__(len(lengths), bucket)
        self._lengths: Tensor | None = lengths
        self._bucket = bucket
        self.layers = list(layers)
        self._dtypes = [(parts[0].dtype, parts[-1].dtype) if parts else (torch.float32,) * 2 for parts in layers]
        self._seq_lens = [bucket] * len(lengths)

    @property
    def seq_lens(self) -> list[int]:
        """Positions on the host: an upper bound until they are assigned."""
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, seq_lens: list[int]) -> None:
        self._seq_lens, self._lengths = seq_lens, None
        self._device_lengths.clear()

    @property
    def is_uniform(self) -> bool:
        """Whether new positions are written as one slice."""
        return self._lengths is None and len(set(self._seq_lens)) == 1

    def lengths_on(self, device: torch.device) -> Tensor:
        """[B] int64 committed positions."""
        return super().lengths_on(device) if self._lengths is None else self._lengths.to(device)

    def begin_forward(self, nodes: int) -> None:
        if self._lengths is not None:
            self._seq_lens = [self._bucket - nodes] * len(self._seq_lens)
        super().begin_forward(nodes)


def commit_nodes(tensors: Iterable[Tensor], lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """Move the accepted nodes to the front of each row's new positions. May be recorded; the lengths stay.

    Whatever is not accepted becomes a copy of node 0, which is finite where the row is; a recorded forward reads behind
    the longest row too, and 0 * nan is nan.

    Args:
        tensors: [..., B, H, C, D] of a cache, on any devices, changed in place.
        lengths: [B] int64 committed positions.
        path: [B, A] int64 accepted nodes, defined up to `counts`.
        counts: [B] int64.
    """
    step = torch.arange(path.shape[1], device=path.device)
    both = torch.stack([lengths[:, None] + torch.where(step < counts[:, None], path, 0), lengths[:, None] + step])
    on_device: dict[torch.device, Tensor] = {}  # computed once, not per layer
    for tensor in tensors:
        if tensor.device not in on_device:
            on_device[tensor.device] = both.to(tensor.device)[:, :, None, :, None]
        shape = (*tensor.shape[:-2], path.shape[1], tensor.shape[-1])
        source, destination = (index.expand(shape) for index in on_device[tensor.device])
        tensor.scatter_(-2, destination, tensor.gather(-2, source))


def _pack(layers: Sequence[LayerParts], capacity: int) -> tuple[list[Tensor], list[LayerParts]]:
    """Zeros for all layers, one tensor [n, 2 or 1, B, H, C, D] for all of one shape, and the views of each layer."""
    members: dict[object, list[tuple[int, int]]] = defaultdict(list)  # (layer, part) of one shape
    for layer, parts in enumerate(layers):
        for part, tensor in enumerate(parts):
            members[tensor.shape[:3], tensor.shape[4], tensor.dtype, tensor.device].append((layer, part))
    groups, views = list[Tensor](), dict[tuple[int, int], Tensor]()
    for places in members.values():
        example = layers[places[0][0]][places[0][1]]
        shape = (len(places), *example.shape[:3], capacity, example.shape[4])
        groups.append(torch.zeros(shape, dtype=example.dtype, device=example.device))
        views |= zip(places, groups[-1].unbind(), strict=True)
    return groups, [tuple(views[layer, part] for part in range(len(parts))) for layer, parts in enumerate(layers)]
