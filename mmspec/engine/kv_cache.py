"""`RaggedKVCache`: keys and values of a stack of layers, preallocated, with a length per row.

Row b's new nodes are written at its own offset; keeping a path gathers the kept nodes in place. There are no holes, no
re-alignment between rows and no concatenation per step. Knows nothing of transformers; drafters use it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RaggedKVCache:
    """Growing key and value buffers, one `[2, B, H, C, D]` tensor per layer (C positions allocated).

    Use: `open(n)` once per forward, then `write` once per layer, then `keep` (or `advance` after a prefill).

    Attributes:
        lengths: positions committed in each row, on the host.
        nodes: positions being written per row since `open`.
        end: extent that attention looks at during this forward, `max(lengths) + nodes`.
    """

    def __init__(self, batch: int, max_length: int) -> None:
        """
        Args:
            batch: B. limit: positions that will ever be needed, trees included; allocation stops there.
        """
        self.seq_lens = [0] * batch
        self.max_length = max_length
        self.num_new = 0
        self.kv_len = 0
        self._layers: list[Tensor | None] = []
        self._types: list[tuple[torch.dtype, torch.dtype]] = []  # of keys and of values, per layer
        self._write_indices: dict[torch.device, Tensor] = {}

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length, so that a plain slice serves them."""
        return len(set(self.seq_lens)) == 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self._layers if layer is not None)

    def begin_forward(self, nodes: int) -> None:
        """Announce that the coming forward writes `nodes` positions per row."""
        self.num_new = nodes
        self.kv_len = max(self.seq_lens) + nodes
        self._write_indices.clear()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, H, nodes, D] keys and values behind each row's length; return views [B, H, end, D] of all.

        What lies behind a row's own nodes in the views is finite but meaningless: mask it. Keys and values of different
        types (autocast) come back in the types that `DynamicLayer` would hold them in.
        """
        buffer = self._allocate(layer, keys, values)
        if self.is_uniform:
            start = self.seq_lens[0]
            buffer[0, :, :, start : start + self.num_new] = keys
            buffer[1, :, :, start : start + self.num_new] = values
        else:
            place = self._write_index(keys.device)[:, None, :, None].expand(keys.shape)
            buffer[0].scatter_(2, place, keys.to(buffer.dtype))
            buffer[1].scatter_(2, place, values.to(buffer.dtype))
        return self.read(layer, self.kv_len)

    def advance(self, nodes: int) -> None:
        """Commit all of the first `nodes` positions written: what a prefill does."""
        self.seq_lens = [length + nodes for length in self.seq_lens]

    def keep_path(self, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        """Keep the walked nodes of the last forward, in order, and forget the rest.

        Args:
            path: [B, N] int64 nodes walked, meaningful up to counts [B] int64. walked: the same on the host.
        """
        if any(node != step for row in accepted_nodes for step, node in enumerate(row)):
            longest = max(len(row) for row in accepted_nodes)
            for buffer in self._layers:
                assert buffer is not None
                self._gather(buffer, path[:, :longest].to(buffer.device), counts.to(buffer.device))
        self.seq_lens = [length + len(row) for length, row in zip(self.seq_lens, accepted_nodes, strict=True)]

    def crop(self, lengths: Sequence[int]) -> None:
        """Cut every row to at most `lengths[b]` positions."""
        self.seq_lens = [min(old, new) for old, new in zip(self.seq_lens, lengths, strict=True)]

    def zero_tail(self) -> None:
        """Zero everything behind the rows' lengths."""
        for buffer in self._layers:
            assert buffer is not None
            place = torch.arange(buffer.shape[3], device=buffer.device)
            beyond = place >= torch.tensor(self.seq_lens, device=buffer.device)[:, None]
            buffer.masked_fill_(beyond[None, :, None, :, None], 0)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, H, length, D] of the first `length` positions of one layer."""
        buffer = self._layers[layer]
        assert buffer is not None
        of_keys, of_values = self._types[layer]
        return buffer[0, :, :, :length].to(of_keys), buffer[1, :, :, :length].to(of_values)

    def __len__(self) -> int:
        return len(self._layers)

    def _gather(self, buffer: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move the nodes of `path` [B, A] to the front of the last written ones. Steps past `counts` stay put."""
        batch, longest = path.shape
        step = torch.arange(longest, device=buffer.device)
        lengths = torch.tensor(self.seq_lens, device=buffer.device)[:, None]
        source = lengths + torch.where(step < counts[:, None], path, step)
        shape = (2, batch, buffer.shape[2], longest, buffer.shape[4])
        moved = buffer.gather(3, source[None, :, None, :, None].expand(shape))
        buffer.scatter_(3, (lengths + step)[None, :, None, :, None].expand(shape), moved)

    def _write_index(self, device: torch.device) -> Tensor:
        """[B, nodes] positions being written, per device (layers may live on several)."""
        if device not in self._write_indices:
            lengths = torch.tensor(self.seq_lens, device=device)
            self._write_indices[device] = lengths[:, None] + torch.arange(self.num_new, device=device)
        return self._write_indices[device]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """The buffer of `layer`, grown by a quarter at a time up to the limit. Zeros, because 0 * nan is nan."""
        while len(self._layers) <= layer:
            self._layers.append(None)
            self._types.append((keys.dtype, keys.dtype))  # values start as an empty tensor of the type of keys
        buffer, dtype = self._layers[layer], self._widened(layer, keys.dtype, values.dtype)
        enough = buffer is not None and buffer.shape[3] >= self.kv_len
        if buffer is not None and enough and buffer.dtype == dtype:
            return buffer
        room = max(self.kv_len, min(self.max_length, self.kv_len + self.kv_len // 4 + 16))
        if buffer is not None and enough:
            room = buffer.shape[3]
        batch, heads, _, size = keys.shape
        grown = keys.new_zeros(2, batch, heads, room, size, dtype=dtype)
        if buffer is not None:
            grown[:, :, :, : buffer.shape[3]] = buffer
        self._layers[layer] = grown
        return grown

    def _widened(self, layer: int, keys: torch.dtype, values: torch.dtype) -> torch.dtype:
        """Type of the buffer of `layer`, wide enough for what is there and what comes, as `torch.cat` promotes it."""
        old = self._types[layer]
        if old != (keys, values):
            self._types[layer] = torch.promote_types(old[0], keys), torch.promote_types(old[1], values)
        return torch.promote_types(*self._types[layer])
