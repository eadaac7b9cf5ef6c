"""Token Recycling: the likeliest successors that the target saw after each token, last time that token was scored.

The table is shared by all rows and calls, and can be saved. Rejected nodes teach it as well as accepted ones.
Knows nothing of trees or of what a guess is worth.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, Key, Candidate, PromptText
from mmspec.interfaces import VerifyResult

TOP_K = 8
"""Successors kept for each token."""
MAX_STABLE = 3
"""Up to how many updates in a row that left the first successor the same are told apart."""

_KEYS: tuple[tuple[Key, ...], ...] = tuple(
    tuple(("table", rank, steady) for rank in range(TOP_K)) for steady in range(MAX_STABLE + 1)
)

Entry = tuple[int, tuple[int, ...]]
"""(how many updates in a row left the first successor the same, up to `STEADY`; the successors)"""


def _priors() -> dict[Key, float]:
    """Pessimistic, so that a target that cannot be guessed is left alone: 0.1, more if steady, less down the ranks."""
    return {
        key: max(0.02, 0.1 * (1 + steady) if rank == 0 else 0.1 * 0.7**rank)
        for steady, keys in enumerate(_KEYS)
        for rank, key in enumerate(keys)
    }


class SuccessorTable:
    """Guesses the successors that the table holds. A cursor is a token.

    Entries are replaced, never changed, so reading needs no lock; writers take it. The table belongs to one target:
    a call with another vocabulary starts it anew.
    """

    top_k = TOP_K
    priors: Mapping[Key, float] = _priors()

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._entries: dict[int, Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of tokens with known successors."""
        return len(self._entries)

    def successors(self, token: int) -> tuple[int, ...]:
        """What the table holds for a token, likeliest first."""
        return self._entries.get(token, (0, ()))[1]

    def start(self, prompt_text: PromptText) -> list[int]:
        """Let the prompt's text teach the table. The state is the last token of each row."""
        with self._lock:
            self._set_vocab_size(prompt_text.vocab_size)
            for row in prompt_text.rows:
                for token, successor in pairwise(row):
                    if token != BARRIER and successor != BARRIER:
                        self._promote(token, successor)
        return [row[-1] if row else BARRIER for row in prompt_text.rows]

    def _set_vocab_size(self, vocab_size: int) -> None:
        if not vocab_size or self.vocab_size is None:
            self.vocab_size = vocab_size or self.vocab_size
        elif self.vocab_size != vocab_size:  # the target was given more or fewer tokens
            self._entries, self.vocab_size = {}, vocab_size

    def cursor(self, state: list[int], row: int) -> int | None:
        """The row's last token."""
        return self.enter(state[row])

    def expand(self, cursor: int) -> Iterable[Candidate]:
        """Its successors."""
        entry = self._entries.get(cursor)
        if entry is None:
            return ()
        return zip(entry[1], _KEYS[entry[0]], entry[1], strict=False)

    def enter(self, token: int) -> int | None:
        """The token, if it has successors."""
        return token if token in self._entries else None

    def update(self, state: list[int], result: VerifyResult) -> None:
        """Store the successors of every scored node; the walked nodes come last, so their word stands."""
        with self._lock:
            if result.top_ids is None:
                self._update_emitted(state, result)
            else:
                self._update_scored(state, result, result.top_ids)
        for row, emitted in enumerate(result.emitted_ids):
            if emitted:
                state[row] = emitted[-1]

    def _update_scored(
        self, state: list[int], result: VerifyResult, top_ids: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        live = [row for row, emitted in enumerate(result.emitted_ids) if emitted]
        if result.scored_ids is not None and result.tree.num_nodes > 1:
            for row in live:
                walked = set(result.accepted_nodes[row])
                for node, (token, ids) in enumerate(zip(result.scored_ids[row], top_ids[row], strict=True)):
                    if node not in walked:
                        self._store(token, ids)  # places without a node are -1, which it refuses
        for row in live:
            # The token of a walked node is the one picked at the node before it.
            for token, node in zip((state[row], *result.emitted_ids[row]), result.accepted_nodes[row], strict=False):
                self._store(token, top_ids[row][node])

    def _update_emitted(self, state: list[int], result: VerifyResult) -> None:
        for last, emitted in zip(state, result.emitted_ids, strict=True):
            for token, successor in zip((last, *emitted), emitted, strict=False):
                self._promote(token, successor)

    def _store(self, token: int, ids: Sequence[int]) -> None:
        limit = self.vocab_size or float("inf")
        if not ids or not 0 <= token < limit:
            return
        if min(ids) < 0 or max(ids) >= limit:
            ids = [i for i in ids if 0 <= i < limit]
            if not ids:
                return
        self._entries[token] = (self._stable_updates(token, ids[0]), tuple(ids[:TOP_K]))

    def _promote(self, token: int, successor: int) -> None:
        """Make `successor` the first of `token`'s."""
        others = [i for i in self.successors(token) if i != successor]
        self._store(token, (successor, *others))

    def _stable_updates(self, token: int, first: int) -> int:
        old = self._entries.get(token)
        return min(old[0] + 1, MAX_STABLE) if old is not None and old[1][0] == first else 0

    def reset(self) -> None:
        """Forget all successors, not whose they were."""
        with self._lock:
            self._entries.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a safetensors file."""
        with self._lock:
            entries = sorted(self._entries.items())
        table = [ids + (-1,) * (TOP_K - len(ids)) for _, (_, ids) in entries]
        tensors = {
            "tokens": torch.tensor([token for token, _ in entries], dtype=torch.int32),
            "steady": torch.tensor([steady for _, (steady, _) in entries], dtype=torch.int8),
            "successors": torch.tensor(table, dtype=torch.int32).view(-1, TOP_K),
        }
        save_file(tensors, path, metadata={"vocab_size": str(self.vocab_size or 0)})

    def load(self, path: str | os.PathLike[str]) -> SuccessorTable:
        """Replace the table by a saved one; returns this guesser."""
        vocab_size, entries = _read_table(path)
        with self._lock:
            if self.vocab_size is not None and self.vocab_size != vocab_size:
                raise ValueError(
                    f"a table serves one vocabulary: {os.fspath(path)} holds ids of {vocab_size} tokens, this drafter "
                    f"has served a target of {self.vocab_size}; load it into a new drafter"
                )
            self.vocab_size, self._entries = vocab_size or None, entries
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SuccessorTable:
        copy = SuccessorTable(self.vocab_size)
        with self._lock:
            copy._entries = dict(self._entries)
        memo[id(self)] = copy
        return copy


def _read_table(path: str | os.PathLike[str]) -> tuple[int, dict[int, Entry]]:
    """(V, the entries) of a saved table, checked."""
    with safe_open(path, framework="pt") as file:
        missing = {"tokens", "steady", "successors"} - set(file.keys())
        if missing:
            raise ValueError(f"{os.fspath(path)} is not a saved table: it lacks {sorted(missing)}")
        vocab_size = int((file.metadata() or {}).get("vocab_size", 0))
        columns = [file.get_tensor(name).tolist() for name in ("tokens", "steady", "successors")]
    entries: dict[int, Entry] = {}
    for token, steady, padded in zip(*columns, strict=True):
        ids = tuple(i for i in padded[:TOP_K] if i >= 0)
        if (vocab_size and max((token, *ids)) >= vocab_size) or token < 0 or not ids or not 0 <= steady <= MAX_STABLE:
            raise ValueError(f"{os.fspath(path)} is damaged: token {token} of {vocab_size} has successors {padded}")
        entries[token] = (steady, ids)
    return vocab_size, entries


def recycling(table: SuccessorTable | None = None) -> BestFirstDrafter:
    """The drafter that only recycles; `table` brings a table that was saved or is shared."""
    return BestFirstDrafter("recycling", [SuccessorTable() if table is None else table])


__all__ = ["TableGuesser", "recycling"]
