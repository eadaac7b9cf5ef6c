"""Reuse of prompts: what a call has computed of its prompt and answer serves the next call that begins alike.

`patch(model, reuse_prefix=True)` keeps the keys and values of finished calls. A later call with the same first tokens
and the same picture (another question about it, the next turn of a chat) loads them and computes the rest of its prompt
only; the picture is not encoded again. A prefix ends before a picture or behind all of them, never inside one.
States of recurrent layers have no positions: prompts of such a model are kept whole, with the states behind them, and
serve prompts that go on where they end (the next turn of a chat).

Nothing stale is used: token ids are compared one by one, pictures by SHA-256, and everything is dropped when a module,
an adapter or one bit of a weight has changed. Whether a model reads its prompt causally at all is not taken from a
list: the first reuse computes both ways and compares the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.engine.guard import ModuleGuard
from mmspec.engine.kv_cache import RaggedKVCache

MAX_PREFIX_BYTES = 1 << 30
"""Largest memory of all that is kept for one model; what was used longest ago goes first."""
MIN_LENGTH = 16
"""Shorter prefixes are computed anew: loading them would cost as much."""
KeysAndValues = dict[int, tuple[Tensor, Tensor]]
States = dict[Hashable, Tensor]
"""{place: state of a recurrent layer}, of one row [...] or of all [B, ...]."""


@dataclass(frozen=True)
class PromptRows:
    """The prompts of one call, as far as a prefix depends on them.

    Attributes:
        tokens: [B, L, K] int64 on the CPU: the input ids, and the types of the tokens where the call has some.
        padding: padding tokens at the left of each row.
        is_media: [B, L] bool, placeholders of pictures and clips.
        digests: SHA-256 of each row's pictures and clips; b"" of a row without.
        scope: only calls of the same scope share anything.
    """

    tokens: Tensor
    padding: list[int]
    is_media: Tensor
    digests: list[bytes]
    scope: str = ""


@dataclass(frozen=True)
class Prefix:
    """The first positions of all rows of a call, computed before.

    Attributes:
        length: columns of the prompt, padding included.
        layers: {layer: keys and values [B, H, length, D]}; undefined at padding, which is masked.
        hidden_states: {index: [B, length, D]}.
        needs_media: whether the pictures lie behind the prefix, and must be encoded.
        recurrent: states behind the prefix.
    """

    length: int
    layers: KeysAndValues
    hidden_states: dict[int, Tensor]
    needs_media: bool
    recurrent: States = field(default_factory=dict)

    def load(self, kv_cache: RaggedKVCache) -> None:
        """Write the keys and values into an empty cache."""
        kv_cache.begin_forward(self.length)
        for layer, (keys, values) in self.layers.items():
            kv_cache.write(layer, keys, values)
        kv_cache.advance(self.length)

    def repeated(self, count: int) -> Prefix:
        """Each row `count` times, as transformers repeats prompts for `num_return_sequences`."""
        if count == 1:
            return self
        layers = {
            layer: (keys.repeat_interleave(count, 0), values.repeat_interleave(count, 0))
            for layer, (keys, values) in self.layers.items()
        }
        hidden = {index: state.repeat_interleave(count, 0) for index, state in self.hidden_states.items()}
        recurrent = {place: state.repeat_interleave(count, 0) for place, state in self.recurrent.items()}
        return Prefix(self.length, layers, hidden, self.needs_media, recurrent)


@dataclass(frozen=True)
class StoredRow:
    """What is kept of one row of a finished call.

    Attributes:
        tokens: [n, K] int64 on the CPU, prompt and answer without padding; the prompt alone where there are states.
        is_media: [n] bool.
        digest: of its pictures.
        scope: see `PromptRows`.
        layers: {layer: keys and values [H, n, D]}.
        hidden_states: {index: [m, D]} of the prompt's m <= n positions.
        recurrent: states behind the last token.
    """

    tokens: Tensor
    is_media: Tensor
    digest: bytes
    scope: str
    layers: KeysAndValues
    hidden_states: dict[int, Tensor]
    recurrent: States = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        pairs = [part for pair in self.layers.values() for part in pair]
        others = [*self.hidden_states.values(), *self.recurrent.values(), self.tokens]
        return sum(part.nbytes for part in [*pairs, *others])

    def usable_length(self, tokens: Tensor, is_media: Tensor, digest: bytes, indices: Sequence[int]) -> int:
        """`common_length`; with states all or nothing, and never all of the other row."""
        length = self.common_length(tokens, is_media, digest, indices)
        return length if not self.recurrent or length == len(self.tokens) < len(tokens) else 0

    def common_length(self, tokens: Tensor, is_media: Tensor, digest: bytes, indices: Sequence[int]) -> int:
        """Leading positions that a row shares, with hidden states of `indices`; never inside a picture."""
        if tokens.shape[1] != self.tokens.shape[1] or not all(index in self.hidden_states for index in indices):
            return 0
        length = min([len(tokens), len(self.tokens), *(len(self.hidden_states[index]) for index in indices)])
        different = (tokens[:length] != self.tokens[:length]).any(1).nonzero()
        length = int(different[0]) if len(different) else length
        places = is_media.nonzero()
        if not len(places) or length <= int(places[0]):
            return length
        covers_all = length > int(places[-1]) and not bool(self.is_media[length:].any())
        return length if digest == self.digest and covers_all else int(places[0])

    def is_contained_in(self, other: StoredRow) -> bool:
        """Whether another row serves every call that this one does."""
        if self.scope != other.scope or self.digest not in (b"", other.digest) or len(self.tokens) > len(other.tokens):
            return False
        if self.recurrent and len(self.tokens) < len(other.tokens):  # the states behind it are in no other row
            return False
        has_states = all(index in other.hidden_states for index in self.hidden_states)
        return has_states and self.common_length(other.tokens, other.is_media, other.digest, ()) == len(self.tokens)


@dataclass
class PrefixStore:
    """The rows that are kept for one model. Thread-safe.

    Attributes:
        max_bytes: largest memory.
        verdicts: {`Prefix.needs_media`: whether a forward behind a prefix gives the logits of the whole forward}.
        rows: from the longest unused one to the last used one.
    """

    max_bytes: int = MAX_PREFIX_BYTES
    verdicts: dict[bool, bool] = field(default_factory=dict)
    rows: list[StoredRow] = field(default_factory=list)
    _guard: ModuleGuard | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, model: nn.Module) -> ModuleGuard:
        """Drop everything if the model is not what it was; returns its present state. Reads all weights."""
        guard = ModuleGuard(list(model.modules()), [*model.parameters(), *model.buffers()], reads_bits=True)
        with self._lock:
            if self._guard is None or guard != self._guard:
                self.rows.clear()
                self.verdicts.clear()
                self._guard = guard
            return self._guard

    def find(self, rows: PromptRows, hidden_state_indices: Sequence[int] = ()) -> Prefix | None:
        """The longest prefix that all rows of a call have in store, or None."""
        with self._lock:
            best = [self._best(rows, row, hidden_state_indices) for row in range(len(rows.tokens))]
            if not best or any(stored is None for stored, _ in best):
                return None
            found = [stored for stored, _ in best if stored is not None]
            self.rows = [row for row in self.rows if all(row is not one for one in found)]
            self.rows += {id(one): one for one in found}.values()
        ends = [pad + length for pad, (_, length) in zip(rows.padding, best, strict=True)]
        end = min(*ends, rows.tokens.shape[1] - 1)
        columns = rows.is_media.any(0).nonzero()
        needs_media = bool(len(columns)) and end <= int(columns[-1])
        if needs_media:
            end = min(end, int(columns[0]))
        if end - max(rows.padding) < MIN_LENGTH or any(
            row.recurrent and pad + len(row.tokens) != end for pad, row in zip(rows.padding, found, strict=True)
        ):
            return None
        layers = {
            layer: _stack([(row.layers[layer][0] for row in found), (row.layers[layer][1] for row in found)], rows, end)
            for layer in found[0].layers
        }
        states = {
            index: _padded([row.hidden_states[index] for row in found], rows.padding, end)
            for index in hidden_state_indices
        }
        recurrent = {place: torch.stack([row.recurrent[place] for row in found]) for place in found[0].recurrent}
        return Prefix(end, layers, states, needs_media, recurrent)

    def add(
        self,
        rows: PromptRows,
        sequences: Tensor,
        kv_cache: RaggedKVCache,
        states: Mapping[int, Tensor],
        repeats: int = 1,
        recurrent: Mapping[Hashable, Tensor] | None = None,
    ) -> None:
        """Keep the rows of a finished call.

        Args:
            rows: its prompts.
            sequences: [B * repeats, L + n] int64, prompts and answers.
            kv_cache: with the committed positions of each row.
            states: {index: [B * repeats, L, D]} hidden states of the prompts.
            repeats: rows of the call for each prompt; the first is kept.
            recurrent: {place: [B * repeats, ...]} states behind the prompts; None if there are none.
        """
        sequences = sequences.detach().cpu()
        for prompt, start in enumerate(rows.padding):
            row = prompt * repeats
            end = rows.tokens.shape[1] if recurrent else min(kv_cache.seq_lens[row], sequences.shape[1])
            layers: KeysAndValues = {}
            for layer in kv_cache.written_layers:
                keys, values = kv_cache.read(layer, end)
                layers[layer] = keys[row, :, start:].clone(), values[row, :, start:].clone()
            is_media = torch.zeros(end - start, dtype=torch.bool)
            is_media[: rows.is_media.shape[1] - start] = rows.is_media[prompt, start:]
            hidden = {index: state[row, start:].clone() for index, state in states.items()}
            tokens = torch.zeros(end - start, rows.tokens.shape[2], dtype=torch.long)  # what is generated is of type 0
            tokens[: rows.tokens.shape[1] - start] = rows.tokens[prompt, start:]
            tokens[:, 0] = sequences[row, start:end]
            kept = {place: state[row].clone() for place, state in (recurrent or {}).items()}
            self._insert(StoredRow(tokens, is_media, rows.digests[prompt], rows.scope, layers, hidden, kept))

    def forget(self, scope: str) -> None:
        """Drop what calls of scopes that begin so have left."""
        with self._lock:
            self.rows = [row for row in self.rows if not row.scope.startswith(scope)]

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self.rows.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(row.nbytes for row in self.rows)

    def _best(self, rows: PromptRows, row: int, indices: Sequence[int]) -> tuple[StoredRow | None, int]:
        """The stored row that shares most with a row of a call. Those of its pictures are looked at first: others share
        the text before the first placeholder at most, and rows are many where jobs run for long."""
        start, digest = rows.padding[row], rows.digests[row]
        tokens, is_media = rows.tokens[row, start:], rows.is_media[row, start:]
        text_length = int(is_media.long().argmax()) if bool(is_media.any()) else len(tokens)
        best: tuple[StoredRow | None, int] = (None, 0)
        for is_same in (True, False):
            for stored in reversed(self.rows):
                if stored.scope != rows.scope or (stored.digest == digest) != is_same:
                    continue
                if not is_same and max(best[1], MIN_LENGTH - 1) >= text_length:
                    return best
                length = stored.usable_length(tokens, is_media, digest, indices)
                best = (stored, length) if length > best[1] else best
        return best

    def _insert(self, new: StoredRow) -> None:
        """Keep a row, without those that it contains and those that there is no room for."""
        if new.nbytes > self.max_bytes:
            return
        with self._lock:
            self.rows = [old for old in self.rows if not old.is_contained_in(new)]
            self.rows.append(new)
            total = sum(row.nbytes for row in self.rows)
            while total > self.max_bytes:
                total -= self.rows.pop(0).nbytes


def _stack(pairs: Sequence[Any], rows: PromptRows, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, end, D] of rows [H, n, D]."""
    keys, values = (
        _padded([part.transpose(0, 1) for part in parts], rows.padding, end).transpose(1, 2) for parts in pairs
    )
    return keys, values


def _padded(parts: Sequence[Tensor], padding: Sequence[int], end: int) -> Tensor:
    """[B, end, ...] of rows [n, ...], each behind its padding, which is zero."""
    first = parts[0]
    stacked = first.new_zeros(len(parts), end, *first.shape[1:])
    for row, (part, start) in enumerate(zip(parts, padding, strict=True)):
        stacked[row, start:end] = part[: end - start]
    return stacked
