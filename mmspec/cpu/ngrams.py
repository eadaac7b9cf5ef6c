"""Counts of n-grams in C (ngrams.h); the estimates are described in
`mmspec.drafters.ngram.output_ngrams`, whose numbers these are.

Independent of models and drafters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.structs import fields_of
from mmspec.forks import new_lock

MAX_TABLE_CONTEXT, MAX_TABLE_SUCCESSORS = 8, 64
NO_TOKEN = -2
"""In a context, in front of the tokens where there are too few."""
MIN_CONTEXT_PLACES = 1 << 10
SUCCESSORS_PER_CONTEXT = 1
"""Room for successors, per place for a context."""


class ContextStruct(ctypes.Structure):
    """`ngram_context` of ngrams.h."""

    _fields_ = fields_of("ngram_context")


class SuccessorStruct(ctypes.Structure):
    """`ngram_successor` of ngrams.h."""

    _fields_ = fields_of("ngram_successor")


class TableStruct(ctypes.Structure):
    """`ngram_table` of ngrams.h."""

    _fields_ = fields_of("ngram_table")


class CNgrams:
    """How often tokens followed the up to `max_context` tokens before them. Shared by threads; bounded memory."""

    def __init__(self, kernel: CKernel, max_context: int, max_successors: int, max_contexts: int) -> None:
        """
        Args:
            kernel: the C kernel.
            max_context: tokens before the predicted one that are counted.
            max_successors: of a context; a further one replaces the rarest.
            max_contexts: distinct contexts in memory; beyond, all counts are halved.

        Raises:
            ValueError: a number is beyond what the kernel can count.
        """
        if not (0 < max_context <= MAX_TABLE_CONTEXT and 0 < max_successors <= MAX_TABLE_SUCCESSORS):
            raise ValueError(
                f"contexts have 1 to {MAX_TABLE_CONTEXT} tokens and 1 to {MAX_TABLE_SUCCESSORS} successors; got "
                f"{max_context} and {max_successors}."
            )
        self._kernel, self._library = kernel, kernel.library
        self._sizes = max_context, max_successors, max_contexts
        self._lock = new_lock()
        self._contexts: Any = None
        self._successors: Any = None
        self._table = self._new_table(min(MIN_CONTEXT_PLACES, 1 << (2 * max_contexts - 1).bit_length()))

    @property
    def num_contexts(self) -> int:
        """Distinct contexts in memory."""
        return int(self._table.num_contexts)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return ctypes.sizeof(self._contexts) + ctypes.sizeof(self._successors)

    def add(self, context: tuple[int, ...], tokens: Sequence[int]) -> None:
        """Count tokens that followed a context."""
        history = (ctypes.c_int64 * (len(context) + len(tokens)))(*context, *tokens)
        place, end, add = len(context), len(history), self._library.few_rows_ngrams_add
        with self._lock:
            while (place := add(ctypes.byref(self._table), history, place, end)) < end:
                self._make_room()

    def probs(self, context: tuple[int, ...], min_unseen: float) -> tuple[dict[int, float], float]:
        """The estimated probabilities of the tokens after a context, and of all others together."""
        max_context, max_successors, _ = self._sizes
        limit = max_context * max_successors
        tokens, probs, rest = (ctypes.c_int64 * limit)(), (ctypes.c_double * limit)(), ctypes.c_double()
        with self._lock:
            found = self._library.few_rows_ngrams_probs(
                ctypes.byref(self._table), self._padded((context,)), min_unseen, tokens, probs, ctypes.byref(rest)
            )
        return dict(zip(tokens[:found], probs[:found], strict=True)), rest.value

    @contextmanager
    def locked(self, context: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Addresses of the counts, which nobody changes meanwhile, and of a context in the form that C reads."""
        padded = self._padded((context,))
        with self._lock:
            yield ctypes.addressof(self._table), ctypes.addressof(padded)

    def _padded(self, contexts: Sequence[tuple[int, ...]]) -> Any:
        """[B, max_context] int64."""
        length = self._sizes[0]
        flat: list[int] = []
        for context in contexts:
            flat += (NO_TOKEN,) * (length - len(context)) + context[max(0, len(context) - length) :]
        return (ctypes.c_int64 * len(flat))(*flat)

    def _make_room(self) -> None:
        """A table of twice the size, or where that is too large one with half the counts."""
        places = int(self._table.context_places)
        if places < 2 * self._sizes[2]:
            self._table = self._copy(self._table, 2 * places, 1)
            return
        self._table = self._copy(self._table, places, 2)
        while 4 * self._table.num_contexts > places:
            self._table = self._copy(self._table, places, 2)

    def _copy(self, table: TableStruct, places: int, divisor: int) -> TableStruct:
        memory = self._contexts, self._successors  # where `table` points to
        new = self._new_table(places)
        self._library.few_rows_ngrams_copy(ctypes.byref(table), ctypes.byref(new), divisor)
        del memory
        return new

    def _new_table(self, places: int) -> TableStruct:
        """An empty table, whose memory replaces that of the current one."""
        max_context, max_successors, _ = self._sizes
        self._contexts = (ContextStruct * places)()
        self._successors = (SuccessorStruct * (SUCCESSORS_PER_CONTEXT * places))()
        return TableStruct(
            context_places=places,
            successor_places=len(self._successors),
            max_context=max_context,
            max_successors=max_successors,
            contexts=ctypes.addressof(self._contexts),
            successors=ctypes.addressof(self._successors),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CNgrams:
        copied = CNgrams(self._kernel, *self._sizes)
        with self._lock:
            copied._table = copied._copy(self._table, self._table.context_places, 1)
        memo[id(self)] = copied
        return copied
