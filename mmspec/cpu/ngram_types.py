"""What ngrams.h reads and writes: distributions of heads, constants, requests, candidates, structs, functions.

Independent of models and drafters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import CKernel, load_kernel

NUM_LIKELY = 16
"""Tokens of a head that are drafted though no n-gram names them. This and the following as in ngrams.h."""
MAX_NODE_CANDIDATES = 50
MAX_TABLE_CONTEXT, MAX_TABLE_SUCCESSORS = 8, 64
NO_TOKEN = -2
"""In a context, in front of the tokens where there are too few."""


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
        ngram_functions(kernel).weigh(*inputs, batch * slots, count, power, *outputs)
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


class ContextStruct(ctypes.Structure):
    """`ngram_context` of ngrams.h."""

    _fields_ = [
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("total", "distinct", "first", "unused")),
    ]


class SuccessorStruct(ctypes.Structure):
    """`ngram_successor` of ngrams.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("token", "count", "next")]


class TableStruct(ctypes.Structure):
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


class NgramDraftStruct(ctypes.Structure):
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


class NgramFunctions:
    """The functions of ngrams.h."""

    def __init__(self, kernel: CKernel) -> None:
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
def ngram_functions(kernel: CKernel) -> NgramFunctions:
    return NgramFunctions(kernel)
