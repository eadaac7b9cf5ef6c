"""`RaggedKVCache`: preallocated keys and values of a stack of layers, with a sequence length per row.

The new positions of row b are written behind its own length. After verification the accepted nodes are gathered to the
front of the new positions. There are no gaps, no alignment between rows and no `torch.cat` per step. Independent of
transformers; drafters use it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmspec.engine.host_copy import from_host


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
        self._layers: list[tuple[Tensor, ...]] = []  # () until the first write
        self._dtypes: list[tuple[torch.dtype, torch.dtype]] = []  # (keys, values) of each layer
        self._write_indices: dict[torch.device, Tensor] = {}

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
        return sum(part.nbytes for layer in self._layers for part in layer)

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

    def common_buffers(self) -> list[Tensor] | None:
        """The tensors [2, B, H, C, D] of all layers, with room for this forward's positions, to be written directly.

        None if keys and values of a layer are in two tensors, or a layer has none.
        """
        for index, parts in enumerate(self._layers):
            if len(parts) != 1:
                return None
            if parts[0].shape[3] < self.kv_len:
                keys, values = parts[0][:, :, :, :0]
                self._allocate(index, keys, values)
        return [buffer for (buffer,) in self._layers]

    def advance(self, nodes: int) -> None:
        """Commit the first `nodes` positions of the last forward (prefill)."""
        self.seq_lens = [length + nodes for length in self.seq_lens]

    def append(self, counts: Sequence[int], device_counts: Tensor) -> None:
        """Commit the first `counts[b]` positions of row b; `device_counts` [B] int64 are the same numbers."""
        self._seq_lens = [length + count for length, count in zip(self._seq_lens, counts, strict=True)]
        self._add_device_lengths(device_counts)

    def keep_path(self, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        """Commit the accepted nodes of the last forward, in order, and drop the others.

        Args:
            path: [B, N] int64 accepted nodes, defined up to `counts`.
            counts: [B] int64.
            accepted_nodes: the same nodes on the host.
        """
        if any(node != step for row in accepted_nodes for step, node in enumerate(row)):
            self._move_to_front(path[:, : max(len(row) for row in accepted_nodes)], counts)
        self._seq_lens = [length + len(row) for length, row in zip(self._seq_lens, accepted_nodes, strict=True)]
        self._add_device_lengths(counts)

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
        parts = self._layers[layer]
        keys_dtype, values_dtype = self._dtypes[layer]
        return parts[0][0, :, :, :length].to(keys_dtype), parts[-1][-1, :, :, :length].to(values_dtype)

    def has_layer(self, layer: int) -> bool:
        """Whether keys and values of this layer have been written; recurrent layers have none."""
        return layer < len(self._layers) and bool(self._layers[layer])

    def __len__(self) -> int:
        return len(self._layers)

    def _buffers(self) -> Iterator[Tensor]:
        """The tensors of all layers, [2, B, H, C, D] or [1, B, H, C, D]."""
        for parts in self._layers:
            yield from parts

    def _add_device_lengths(self, counts: Tensor) -> None:
        for device, lengths in self._device_lengths.items():
            self._device_lengths[device] = lengths + counts.to(device)

    def _move_to_front(self, path: Tensor, counts: Tensor) -> None:
        """Move the nodes of `path` [B, A] to the front of the new positions; steps from `counts` on do not move."""
        batch, longest = path.shape
        indices: dict[torch.device, tuple[Tensor, Tensor]] = {}  # computed once, not per layer
        for buffer in self._buffers():
            device = buffer.device
            if device not in indices:
                step = torch.arange(longest, device=device)
                lengths = self.lengths_on(device)[:, None]
                source = lengths + torch.where(step < counts.to(device)[:, None], path.to(device), step)
                indices[device] = source[None, :, None, :, None], (lengths + step)[None, :, None, :, None]
            source, destination = indices[device]
            shape = (buffer.shape[0], batch, buffer.shape[2], longest, buffer.shape[4])
            buffer.scatter_(3, destination.expand(shape), buffer.gather(3, source.expand(shape)))

    def _write_index(self, device: torch.device) -> Tensor:
        """[B, num_new] int64 positions that this forward writes, cached per device (layers may be on several)."""
        if device not in self._write_indices:
            step = torch.arange(self.num_new, device=device)
            self._write_indices[device] = self.lengths_on(device)[:, None] + step
        return self._write_indices[device]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `layer`, grown by a quarter at a time up to `max_length`.

        New positions are zero, because a masked position contributes 0 * value, and 0 * nan is nan.
        """
        while len(self._layers) <= layer:
            self._layers.append(())
            self._dtypes.append((keys.dtype, keys.dtype if self._values_start_as_keys else values.dtype))
        parts = self._layers[layer]
        dtype = self._promote_dtype(layer, keys.dtype, values.dtype)
        is_large_enough = bool(parts) and parts[0].shape[3] >= self.kv_len
        if is_large_enough and parts[0].dtype == dtype:
            return parts
        capacity = max(self.kv_len, min(self.max_length, self.kv_len + self.kv_len // 4 + 16))
        if is_large_enough:
            capacity = parts[0].shape[3]
        groups = ((2, keys),) if keys.shape == values.shape else ((1, keys), (1, values))
        grown = tuple(new.new_zeros(n, *new.shape[:2], capacity, new.shape[3], dtype=dtype) for n, new in groups)
        for old, new in zip(parts, grown, strict=bool(parts)):
            new[:, :, :, : old.shape[3]] = old
        self._layers[layer] = grown
        return grown

    def _promote_dtype(self, layer: int, keys: torch.dtype, values: torch.dtype) -> torch.dtype:
        """Dtype of the buffer of `layer` that holds old and new keys and values, promoted as by `torch.cat`."""
        old = self._dtypes[layer]
        if old != (keys, values):
            self._dtypes[layer] = torch.promote_types(old[0], keys), torch.promote_types(old[1], values)
        return torch.promote_types(*self._dtypes[layer])
