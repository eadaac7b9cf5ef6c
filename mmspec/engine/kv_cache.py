"""`RaggedKVCache`: preallocated keys and values of a stack of layers, with a sequence length per row.

The new positions of row b are written behind its own length. After verification the accepted nodes are gathered to the
front of the new positions. There are no gaps, no alignment between rows and no `torch.cat` per step. Independent of
transformers; drafters use it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RaggedKVCache:
    """Growing key and value buffers, one tensor [2, B, H, C, D] per layer (C allocated positions).

    Use: `begin_forward(n)` once per forward, `write` once per layer, then `keep_path` (after a prefill: `advance`).

    Attributes:
        seq_lens: committed positions of each row, on the host.
        max_length: number of positions that is never exceeded.
        num_new: positions per row that the current forward writes.
        kv_len: key length of the current forward, `max(seq_lens) + num_new`.
    """

    def __init__(self, batch: int, max_length: int) -> None:
        """
        Args:
            batch: B.
            max_length: largest number of positions of a row, tree nodes included. Allocation stops there.
        """
        self.seq_lens = [0] * batch
        self.max_length = max_length
        self.num_new = 0
        self.kv_len = 0
        self._layers: list[Tensor | None] = []
        self._dtypes: list[tuple[torch.dtype, torch.dtype]] = []  # (keys, values) of each layer
        self._write_indices: dict[torch.device, Tensor] = {}

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length, so that new positions can be written as a slice."""
        return len(set(self.seq_lens)) == 1

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(layer.nbytes for layer in self._allocated())

    def begin_forward(self, nodes: int) -> None:
        """Prepare for a forward that writes `nodes` positions per row."""
        self.num_new = nodes
        self.kv_len = max(self.seq_lens) + nodes
        self._write_indices.clear()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, num_new, D] behind the length of each row.

        Returns:
            Views [B, H, kv_len, D] of all keys and values. Positions behind a row's own are finite but undefined: mask
            them. Keys and values of different dtypes (autocast) are returned in the dtypes of `DynamicLayer`.
        """
        buffer = self._allocate(layer, keys, values)
        if self.is_uniform:
            start = self.seq_lens[0]
            buffer[0, :, :, start : start + self.num_new] = keys
            buffer[1, :, :, start : start + self.num_new] = values
        else:
            index = self._write_index(keys.device)[:, None, :, None].expand(keys.shape)
            buffer[0].scatter_(2, index, keys.to(buffer.dtype))
            buffer[1].scatter_(2, index, values.to(buffer.dtype))
        return self.read(layer, self.kv_len)

    def advance(self, nodes: int) -> None:
        """Commit the first `nodes` positions of the last forward (prefill)."""
        self.seq_lens = [length + nodes for length in self.seq_lens]

    def keep_path(self, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        """Commit the accepted nodes of the last forward, in order, and drop the others.

        Args:
            path: [B, N] int64 accepted nodes, defined up to `counts`.
            counts: [B] int64.
            accepted_nodes: the same nodes on the host.
        """
        if any(node != step for row in accepted_nodes for step, node in enumerate(row)):
            longest = max(len(row) for row in accepted_nodes)
            for buffer in self._allocated():
                self._gather(buffer, path[:, :longest].to(buffer.device), counts.to(buffer.device))
        self.seq_lens = [length + len(row) for length, row in zip(self.seq_lens, accepted_nodes, strict=True)]

    def crop(self, lengths: Sequence[int]) -> None:
        """Cut row b to at most `lengths[b]` positions."""
        self.seq_lens = [min(old, new) for old, new in zip(self.seq_lens, lengths, strict=True)]

    def zero_tail(self) -> None:
        """Set all positions behind the rows' lengths to zero."""
        for buffer in self._allocated():
            index = torch.arange(buffer.shape[3], device=buffer.device)
            behind = index >= torch.tensor(self.seq_lens, device=buffer.device)[:, None]
            buffer.masked_fill_(behind[None, :, None, :, None], 0)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, H, length, D] of the keys and values of one layer."""
        buffer = self._layers[layer]
        assert buffer is not None
        keys_dtype, values_dtype = self._dtypes[layer]
        return buffer[0, :, :, :length].to(keys_dtype), buffer[1, :, :, :length].to(values_dtype)

    def has_layer(self, layer: int) -> bool:
        """Whether keys and values of this layer have been written; recurrent layers have none."""
        return layer < len(self._layers) and self._layers[layer] is not None

    def __len__(self) -> int:
        return len(self._layers)

    def _allocated(self) -> list[Tensor]:
        return [buffer for buffer in self._layers if buffer is not None]

    def _gather(self, buffer: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move the nodes of `path` [B, A] to the front of the new positions; steps from `counts` on do not move."""
        batch, longest = path.shape
        step = torch.arange(longest, device=buffer.device)
        lengths = torch.tensor(self.seq_lens, device=buffer.device)[:, None]
        source = lengths + torch.where(step < counts[:, None], path, step)
        shape = (2, batch, buffer.shape[2], longest, buffer.shape[4])
        moved = buffer.gather(3, source[None, :, None, :, None].expand(shape))
        buffer.scatter_(3, (lengths + step)[None, :, None, :, None].expand(shape), moved)

    def _write_index(self, device: torch.device) -> Tensor:
        """[B, num_new] int64 positions that this forward writes, cached per device (layers may be on several)."""
        if device not in self._write_indices:
            lengths = torch.tensor(self.seq_lens, device=device)
            self._write_indices[device] = lengths[:, None] + torch.arange(self.num_new, device=device)
        return self._write_indices[device]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """The buffer of `layer`, grown by a quarter at a time up to `max_length`.

        New positions are zero, because a masked position contributes 0 * value, and 0 * nan is nan.
        """
        while len(self._layers) <= layer:
            self._layers.append(None)
            self._dtypes.append((keys.dtype, keys.dtype))  # `DynamicLayer` starts its values with the dtype of the keys
        buffer = self._layers[layer]
        dtype = self._promote_dtype(layer, keys.dtype, values.dtype)
        is_large_enough = buffer is not None and buffer.shape[3] >= self.kv_len
        if buffer is not None and is_large_enough and buffer.dtype == dtype:
            return buffer
        capacity = max(self.kv_len, min(self.max_length, self.kv_len + self.kv_len // 4 + 16))
        if buffer is not None and is_large_enough:
            capacity = buffer.shape[3]
        batch, heads, _, head_dim = keys.shape
        grown = keys.new_zeros(2, batch, heads, capacity, head_dim, dtype=dtype)
        if buffer is not None:
            grown[:, :, :, : buffer.shape[3]] = buffer
        self._layers[layer] = grown
        return grown

    def _promote_dtype(self, layer: int, keys: torch.dtype, values: torch.dtype) -> torch.dtype:
        """Dtype of the buffer of `layer` that holds old and new keys and values, promoted as by `torch.cat`."""
        old = self._dtypes[layer]
        if old != (keys, values):
            self._dtypes[layer] = torch.promote_types(old[0], keys), torch.promote_types(old[1], values)
        return torch.promote_types(*self._dtypes[layer])
