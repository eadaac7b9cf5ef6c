"""Counts of n-grams and draft trees from them in compiled code (ngrams.h); the estimates are described in
`mmspec.drafters.ngram.output_ngrams`, whose numbers these are.

Independent of models and drafters.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.native import FewRowsKernel, load_kernel
from mmspec.engine.tree import BUCKETS, DraftTree

NUM_LIKELY = 16
"""Tokens of a head that are drafted though no n-gram names them. This and the following as in ngrams.h."""
MAX_NODE_CANDIDATES = 50
MAX_TABLE_CONTEXT, MAX_TABLE_SUCCESSORS = 8, 64
NO_TOKEN = -2
"""In a context, in front of the tokens where there are too few."""
MIN_CONTEXT_PLACES = 1 << 10
SUCCESSORS_PER_CONTEXT = 1
"""Room for successors, per place for a context."""


@dataclass(frozen=True)
class HeadDistributions:
    """Distributions of the next k positions of B rows over V' tokens, ready for a product with those of n-grams.

    All on the CPU and contiguous.

    Attributes:
        powers: [B, k, V'] float32, powers of the probabilities.
        weights: [B, k, V'] float32, these times powers of the tokens' frequencies.
        totals: [B, k] float64, sums of `weights`.
        floors: [B, k] float64, smallest power of a token that an n-gram names.
        ids: [V'] int64, the tokens.
        index: [V] int32, the place of each token of the target in `ids`, or -1.
    """

    powers: Tensor
    weights: Tensor
    totals: Tensor
    floors: Tensor
    ids: Tensor
    index: Tensor


@dataclass(frozen=True)
class HeadTokens:
    """The tokens that heads predict.

    Attributes:
        ids, index: as in `HeadDistributions`.
        priors: [V'] float32, factors of the powers of the probabilities.
        frequencies: [V'] float32, powers of the tokens' frequencies.
    """

    ids: Tensor
    index: Tensor
    priors: Tensor
    frequencies: Tensor

    def weigh(self, logits: Tensor, power: float) -> HeadDistributions:
        """The distributions of logits [B, k, V'] float32, probabilities raised to `power`; compiled if possible."""
        logits = logits.cpu().contiguous()
        kernel = load_kernel()
        if kernel is None:
            return self._weigh_in_torch(logits, power)
        batch, slots, count = logits.shape
        powers, weights = torch.empty(2, batch, slots, count, dtype=torch.float32, device="cpu")
        totals, floors = torch.empty(2, batch, slots, dtype=torch.float64, device="cpu")
        inputs = (logits.data_ptr(), self.priors.data_ptr(), self.frequencies.data_ptr())
        outputs = (powers.data_ptr(), weights.data_ptr(), totals.data_ptr(), floors.data_ptr())
        _functions_of(kernel).weigh(*inputs, batch * slots, count, power, *outputs)
        return HeadDistributions(powers, weights, totals, floors, self.ids, self.index)

    def _weigh_in_torch(self, logits: Tensor, power: float) -> HeadDistributions:
        powers = (logits.log_softmax(-1) * power).exp() * self.priors
        powers = powers.nan_to_num(posinf=0.0)
        weights = powers * self.frequencies
        floors = powers.amin(-1).double()
        return HeadDistributions(powers, weights, weights.double().sum(-1), floors, self.ids, self.index)


@dataclass(frozen=True)
class NgramRule:
    """Constants of the estimates and of the search.

    Attributes:
        ngram_power: exponent of the n-grams' distribution in a product.
        num_classes: into which probabilities are divided for calibration; 1 is a further class.
        min_candidate: smallest probability of a candidate.
        min_node: smallest probability of a node.
        max_siblings: largest sum of the probabilities of siblings.
        min_unseen: shorter contexts are not consulted for less than this probability.
    """

    ngram_power: float
    num_classes: int
    min_candidate: float
    min_node: float
    max_siblings: float
    min_unseen: float


@dataclass(frozen=True)
class NgramRequest:
    """Which trees to grow.

    Attributes:
        contexts: the last tokens of each row.
        active: rows that are drafted for.
        max_nodes: size of a tree, the root included.
        heads: distributions of the first positions, or None.
        calibrated: [(1 + k) * (num_classes + 1)] probability of each class: without heads, then position by position.
        token_flags: [V] uint8 on the CPU, bit 0: never drafted, bit 1: ends a row.
    """

    contexts: Sequence[tuple[int, ...]]
    active: Sequence[bool]
    max_nodes: int
    heads: HeadDistributions | None
    calibrated: Sequence[float]
    token_flags: Tensor


class _Context(ctypes.Structure):
    """`ngram_context` of ngrams.h."""

    _fields_ = [
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("total", "distinct", "first", "unused")),
    ]


class _Successor(ctypes.Structure):
    """`ngram_successor` of ngrams.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("token", "count", "next")]


class _Table(ctypes.Structure):
    """`ngram_table` of ngrams.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("context_places", "successor_places", "num_contexts", "num_successors"),
                *("max_context", "max_successors"),
            )
        ),
        *((name, ctypes.c_void_p) for name in ("contexts", "successors")),
    ]


class _NgramDraft(ctypes.Structure):
    """`ngram_draft` of ngrams.h."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "max_nodes", "slots", "num_ids", "vocab_size", "num_classes")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("contexts", "active", "flags", "powers", "weights", "totals", "floors", "ids", "index"),
                "calibrated",
            )
        ),
        *(
            (name, ctypes.c_double)
            for name in ("ngram_power", "min_candidate", "min_node", "max_siblings", "min_unseen")
        ),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "scores", "mask", "candidates", "num_candidates")),
    ]


class NativeNgrams:
    """How often tokens followed the up to `max_context` tokens before them. Shared by threads; bounded memory."""

    def __init__(self, kernel: FewRowsKernel, max_context: int, max_successors: int, max_contexts: int) -> None:
        """
        Args:
            kernel: the compiled kernel.
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
        self._functions = _functions_of(kernel)
        self._kernel = kernel
        self._sizes = max_context, max_successors, max_contexts
        self._lock = threading.Lock()
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
        place, end = len(context), len(history)
        with self._lock:
            while (place := self._functions.add(ctypes.byref(self._table), history, place, end)) < end:
                self._make_room()

    def probs(self, context: tuple[int, ...], min_unseen: float) -> tuple[dict[int, float], float]:
        """The estimated probabilities of the tokens after a context, and of all others together."""
        max_context, max_successors, _ = self._sizes
        limit = max_context * max_successors
        tokens, probs, rest = (ctypes.c_int64 * limit)(), (ctypes.c_double * limit)(), ctypes.c_double()
        with self._lock:
            found = self._functions.probs(
                ctypes.byref(self._table), self._padded((context,)), min_unseen, tokens, probs, ctypes.byref(rest)
            )
        return dict(zip(tokens[:found], probs[:found], strict=True)), rest.value

    def draft(self, request: NgramRequest, rule: NgramRule) -> tuple[DraftTree, NodeCandidates]:
        """The trees of all rows, and the candidates that were found at each of their nodes."""
        batch, size, heads = len(request.contexts), min(request.max_nodes, BUCKETS[-1]), request.heads
        ids = torch.zeros(2, batch, size, dtype=torch.long, device="cpu")
        tokens, parents = ids
        parents[:, 0] = -1
        scores = torch.zeros(batch, size, dtype=torch.float32, device="cpu")
        scores[:, 0] = 1
        node_mask = scores > 0
        found = NodeCandidates(batch, size)
        draft = _NgramDraft(
            batch=batch,
            max_nodes=size,
            vocab_size=len(request.token_flags),
            flags=request.token_flags.data_ptr(),
            **{name: getattr(rule, name) for name in NgramRule.__dataclass_fields__},
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            scores=scores.data_ptr(),
            mask=node_mask.data_ptr(),
            candidates=ctypes.addressof(found.candidates),
            num_candidates=ctypes.addressof(found.counts),
        )
        num_tables = 1 + (0 if heads is None else heads.powers.shape[1])
        if len(request.calibrated) < num_tables * (rule.num_classes + 1):
            raise ValueError(f"needed are {num_tables} tables of calibrated probabilities.")
        if heads is not None:
            draft.slots, draft.num_ids = heads.powers.shape[1:]
            for name in HeadDistributions.__dataclass_fields__:
                setattr(draft, name, getattr(heads, name).data_ptr())
            draft.vocab_size = min(draft.vocab_size, len(heads.index))
        contexts = self._padded(request.contexts)
        active = (ctypes.c_uint8 * batch)(*request.active)
        calibrated = (ctypes.c_double * len(request.calibrated))(*request.calibrated)
        draft.contexts, draft.active = ctypes.addressof(contexts), ctypes.addressof(active)
        draft.calibrated = ctypes.addressof(calibrated)
        with self._lock:
            draft.table = ctypes.addressof(self._table)
            largest = self._functions.draft(ctypes.byref(draft))
        return DraftTree(tokens, parents, node_mask, scores).trim(max(1, largest)), found

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

    def _copy(self, table: _Table, places: int, divisor: int) -> _Table:
        memory = self._contexts, self._successors  # where `table` points to
        new = self._new_table(places)
        self._functions.copy(ctypes.byref(table), ctypes.byref(new), divisor)
        del memory
        return new

    def _new_table(self, places: int) -> _Table:
        """An empty table, whose memory replaces that of the current one."""
        max_context, max_successors, _ = self._sizes
        self._contexts = (_Context * places)()
        self._successors = (_Successor * (SUCCESSORS_PER_CONTEXT * places))()
        return _Table(
            context_places=places,
            successor_places=len(self._successors),
            max_context=max_context,
            max_successors=max_successors,
            contexts=ctypes.addressof(self._contexts),
            successors=ctypes.addressof(self._successors),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeNgrams:
        copied = NativeNgrams(self._kernel, *self._sizes)
        with self._lock:
            copied._table = copied._copy(self._table, self._table.context_places, 1)
        memo[id(self)] = copied
        return copied


class NodeCandidates:
    """The candidates that were found at the nodes of trees.

    Attributes:
        num_nodes: N.
        candidates: [B, N, MAX_NODE_CANDIDATES, 2] int32, token and class.
        counts: [B, N] int32, candidates of each node.
    """

    def __init__(self, batch: int, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.candidates = (ctypes.c_int32 * (batch * num_nodes * MAX_NODE_CANDIDATES * 2))()
        self.counts = (ctypes.c_int32 * (batch * num_nodes))()

    def at(self, row: int, node: int) -> Iterator[tuple[int, int]]:
        """(token, class) of each candidate at a node."""
        number = row * self.num_nodes + node
        first = 2 * MAX_NODE_CANDIDATES * number
        found = self.candidates[first : first + 2 * self.counts[number]]
        return zip(found[::2], found[1::2], strict=True)


class _NgramFunctions:
    """The functions of ngrams.h."""

    def __init__(self, kernel: FewRowsKernel) -> None:
        library, pointer, size = kernel.library, ctypes.c_void_p, ctypes.c_int64
        self.weigh = library.few_rows_ngrams_weigh
        self.weigh.argtypes = [pointer, pointer, pointer, size, size, ctypes.c_float, *[pointer] * 4]
        self.weigh.restype = None
        self.add = library.few_rows_ngrams_add
        self.add.argtypes, self.add.restype = [pointer, pointer, size, size], size
        self.copy = library.few_rows_ngrams_copy
        self.copy.argtypes, self.copy.restype = [pointer, pointer, size], None
        self.probs = library.few_rows_ngrams_probs
        self.probs.argtypes = [pointer, pointer, ctypes.c_double, pointer, pointer, pointer]
        self.probs.restype = size
        self.draft = library.few_rows_ngrams_draft
        self.draft.argtypes, self.draft.restype = [pointer], size


@cache
def _functions_of(kernel: FewRowsKernel) -> _NgramFunctions:
    return _NgramFunctions(kernel)


__all__ = [
    "MAX_NODE_CANDIDATES",
    "NO_TOKEN",
    "NUM_LIKELY",
    "HeadDistributions",
    "HeadTokens",
    "NativeNgrams",
    "NgramRequest",
    "NgramRule",
    "NodeCandidates",
]
