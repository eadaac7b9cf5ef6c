"""Reuse of prompts: what a call has computed of its prompt and answer serves the next call that begins alike.

`patch(model, reuse_prefix=True)` keeps the keys and values of finished calls. A later call with the same first columns
and the same pictures (another question about them, the next turn of a chat) loads them and computes the rest of its
prompt only; the pictures are not encoded again. A prefix ends behind all pictures of the prompt.
States of recurrent layers have no positions: prompts of such a model are kept whole, with the states behind them, and
serve prompts that go on where they end (the next turn of a chat).

Nothing stale is used: columns (id, mask, types) are compared one by one, pictures and everything else that a prefill
is given by SHA-256, and everything is dropped when a module, an attribute or one bit of a weight has changed. Whether a
model reads its prompt causally at all is not taken from a list: the first reuse computes both ways and compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.revision import Revision
from mmspec.forks import new_lock
from mmspec.live import all_modules, reread

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
        tokens: [B, L, K] int64 on the CPU: input id, mask, and the types of the tokens where the call has some.
        is_media: [B, L] bool, placeholders of pictures and clips.
        digests: SHA-256 of what else the prefill of each row is given; b"" for nothing.
        next_token: [B, K] what a column holds whose token is generated, but for the id.
        scope: only calls of the same scope share anything.
    """

    tokens: Tensor
    is_media: Tensor
    digests: list[bytes]
    next_token: Tensor
    scope: str = ""


@dataclass(frozen=True)
class Prefix:
    """The first columns of all rows of a call, computed before.

    Attributes:
        length: columns of the prompt, padding included.
        layers: {layer: keys and values [B, H, length, D]}.
        hidden_states: {index: [B, length, D]}.
        recurrent: states behind the prefix.
    """

    length: int
    layers: KeysAndValues
    hidden_states: dict[int, Tensor]
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
        return Prefix(self.length, layers, hidden, recurrent)


@dataclass(frozen=True)
class StoredRow:
    """What is kept of one row of a finished call.

    Attributes:
        tokens: [n, K] int64 on the CPU, prompt and answer; the prompt alone where there are states.
        is_media: [n] bool.
        digest: of its pictures.
        scope: see `PromptRows`.
        layers: {layer: keys and values [H, n, D]}.
        hidden_states: {index: [m, D]} of the prompt's m <= n columns.
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

    def usable_length(self, tokens: Tensor, is_media: Tensor, indices: Sequence[int]) -> int:
        """Leading columns that serve a row of the same pictures, with hidden states of `indices`: all pictures or none
        of it; with states all or nothing, and never all of the other row."""
        if tokens.shape[1] != self.tokens.shape[1] or not all(index in self.hidden_states for index in indices):
            return 0
        length = min([len(tokens), len(self.tokens), *(len(self.hidden_states[index]) for index in indices)])
        different = (tokens[:length] != self.tokens[:length]).any(1) | (is_media[:length] != self.is_media[:length])
        length = int(different.long().argmax()) if bool(different.any()) else length
        if bool(is_media[length:].any()) or bool(self.is_media[length:].any()):
            return 0
        return length if not self.recurrent or length == len(self.tokens) < len(tokens) else 0

    def is_contained_in(self, other: StoredRow) -> bool:
        """Whether another row serves every call that this one does."""
        if (self.scope, self.digest) != (other.scope, other.digest) or len(self.tokens) > len(other.tokens):
            return False
        if self.recurrent and len(self.tokens) < len(other.tokens):  # the states behind it are in no other row
            return False
        if not all(index in other.hidden_states for index in self.hidden_states):
            return False
        length = len(self.tokens)
        same = self.tokens.shape[1] == other.tokens.shape[1] and torch.equal(self.tokens, other.tokens[:length])
        return same and torch.equal(self.is_media, other.is_media[:length])


@dataclass
class PrefixStore:
    """The rows that are kept for one model. Thread-safe.

    Attributes:
        max_bytes: largest memory.
        verdicts: {whether the prompt has pictures: whether a forward behind a prefix gives the whole forward's logits}.
        rows: from the longest unused one to the last used one.
    """

    max_bytes: int = MAX_PREFIX_BYTES
    verdicts: dict[bool, bool] = field(default_factory=dict)
    rows: list[StoredRow] = field(default_factory=list)
    _revision: Revision | None = None
    _lock: threading.Lock = field(default_factory=new_lock)

    def check(self, model: nn.Module, code: Callable[[Sequence[nn.Module]], Any]) -> Revision:
        """Drop everything if the model is not what it was; returns its present state. Reads all weights.

        Args:
            model: the whole model.
            code: see `Revision`.
        """
        revision = _revision_of(model, code)
        with self._lock:
            if self._revision is None or revision != self._revision:
                self.rows.clear()
                self.verdicts.clear()
                self._revision = revision
            return self._revision

    def find(self, rows: PromptRows, hidden_state_indices: Sequence[int] = ()) -> Prefix | None:
        """The longest prefix that all rows of a call have in store, or None."""
        with self._lock:
            best = [self._best(rows, row, hidden_state_indices) for row in range(len(rows.tokens))]
            found = [stored for stored, _ in best if stored is not None]
            if not found or len(found) < len(best):
                return None
            self.rows = [row for row in self.rows if all(row is not one for one in found)]
            self.rows += {id(one): one for one in found}.values()
        end = min(*(length for _, length in best), rows.tokens.shape[1] - 1)
        ends_early = bool(rows.is_media[:, end:].any()) or any(
            row.recurrent and len(row.tokens) != end for row in found
        )
        if end < MIN_LENGTH or ends_early:
            return None
        layers = {
            layer: (_stack(keys, end, 1), _stack(values, end, 1))
            for layer in found[0].layers
            for keys, values in [zip(*(row.layers[layer] for row in found), strict=True)]
        }
        states = {index: _stack([row.hidden_states[index] for row in found], end, 0) for index in hidden_state_indices}
        recurrent = {place: torch.stack([row.recurrent[place] for row in found]) for place in found[0].recurrent}
        return Prefix(end, layers, states, recurrent)

    def add(
        self,
        rows: PromptRows,
        sequences: Tensor,
        kv_cache: RaggedKVCache,
        states: Mapping[int, Tensor],
        repeats: int = 1,
        recurrent: Mapping[Hashable, Tensor] | None = None,
        revision: Revision | None = None,
    ) -> None:
        """Keep the rows of a finished call, unless a call since has found the model changed.

        Args:
            rows: its prompts.
            sequences: [B * repeats, L + n] int64, prompts and answers.
            kv_cache: with the committed positions of each row.
            states: {index: [B * repeats, L, D]} hidden states of the prompts.
            repeats: rows of the call for each prompt; the first is kept.
            recurrent: {place: [B * repeats, ...]} states behind the prompts; None if there are none.
            revision: result of `check` for the call.
        """
        sequences = sequences.detach().cpu()
        length = rows.tokens.shape[1]
        for prompt, digest in enumerate(rows.digests):
            row = prompt * repeats
            end = length if recurrent else min(kv_cache.seq_lens[row], sequences.shape[1])
            layers: KeysAndValues = {}
            for layer in kv_cache.written_layers:
                keys, values = kv_cache.read(layer, end)
                layers[layer] = keys[row].clone(), values[row].clone()
            tokens = torch.cat([rows.tokens[prompt], rows.next_token[prompt].expand(end - length, -1)])
            tokens[length:, 0] = sequences[row, length:end]
            is_media = torch.cat([rows.is_media[prompt], torch.zeros(end - length, dtype=torch.bool)])
            hidden = {index: state[row].clone() for index, state in states.items()}
            kept = {place: state[row].clone() for place, state in (recurrent or {}).items()}
            self._insert(StoredRow(tokens, is_media, digest, rows.scope, layers, hidden, kept), revision)

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
        """The stored row that shares most with a row of a call, of those of its pictures."""
        best: tuple[StoredRow | None, int] = (None, 0)
        for stored in reversed(self.rows):
            if stored.scope == rows.scope and stored.digest == rows.digests[row]:
                length = stored.usable_length(rows.tokens[row], rows.is_media[row], indices)
                best = (stored, length) if length > best[1] else best
        return best

    def judge(self, has_media: bool, verdict: bool, revision: Revision) -> None:
        """Keep a verdict, unless a call since this revision has found the model changed."""
        with self._lock:
            if revision is self._revision:
                self.verdicts[has_media] = verdict

    def _insert(self, new: StoredRow, revision: Revision | None) -> None:
        """Keep a row, without those that it contains and those that there is no room for."""
        if new.nbytes > self.max_bytes:
            return
        with self._lock:
            if revision is not self._revision:
                return
            self.rows = [old for old in self.rows if not old.is_contained_in(new)]
            self.rows.append(new)
            total = sum(row.nbytes for row in self.rows)
            while total > self.max_bytes:
                total -= self.rows.pop(0).nbytes


@reread
def _revision_of(model: nn.Module, code: Callable[[Sequence[nn.Module]], Any]) -> Revision:
    return Revision(all_modules([model]), code, reads_bits=True, reads_data=True)


def _stack(parts: Sequence[Tensor], end: int, dim: int) -> Tensor:
    """The first `end` columns, along dimension `dim` of a row, of all rows."""
    return torch.stack([part.narrow(dim, 0, end) for part in parts])
