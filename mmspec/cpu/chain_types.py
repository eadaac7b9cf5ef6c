"""Chains that a decoder drafts in one call: what is asked, what is returned, and the struct of chain_types.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from mmspec.cpu.layers import DecoderStruct
from mmspec.cpu.structs import fields_of

if TYPE_CHECKING:
    from mmspec.cpu.ngrams import CNgrams
    from mmspec.engine.tree import DraftTree


@dataclass(frozen=True)
class ChainGuesses:
    """What the decoder scores besides the token that it reads.

    Attributes:
        counts: of n-grams, whose likeliest successors are guessed.
        context: the last tokens of the only row, those not read yet included.
        costs: of a forward over 1, 2, ... nodes, relative to the first; as many as may be scored at once.
        min_unseen: contexts of fewer tokens are not consulted for less than this probability.
        trust: factor of the probabilities that the counts give.
    """

    counts: CNgrams
    context: tuple[int, ...]
    costs: Sequence[float]
    min_unseen: float
    trust: float = 1.0


@dataclass(frozen=True)
class ChainRequest:
    """Which chains to draft.

    Attributes:
        unread: ids of each row that are not in the cache; () for a row that is not drafted for.
        length: most tokens of a chain.
        top_k: likeliest ids after each token of a chain that become nodes of the tree.
        max_nodes: size of the tree, the root included.
        logit_bias: [V] float32, added to the logits.
        log_noise: [B, length, V], subtracted from the logits divided by the temperature; None for greedy decoding.
        temperature: of the sampling.
        level_penalty: subtracted from the log probability per level.
        min_prob: chains end where the mean of their probabilities falls below.
        stop_ids: ids that end a chain.
        guesses: None for none; with several rows there are none.
    """

    unread: Sequence[Sequence[int]]
    length: int
    top_k: int
    max_nodes: int
    logit_bias: Tensor
    log_noise: Tensor | None
    temperature: float
    level_penalty: float
    min_prob: float
    stop_ids: Sequence[int]
    guesses: ChainGuesses | None = None

    @property
    def most_unread(self) -> int:
        """Ids that some row has not read."""
        return max(map(len, self.unread))

    @property
    def most_nodes(self) -> int:
        """Nodes of a row in the largest forward."""
        return max(self.most_unread, 0 if self.guesses is None else len(self.guesses.costs))

    @property
    def num_positions(self) -> int:
        """Most positions that are written behind a row's committed ones."""
        return self.most_unread + self.length - 1 + self.most_nodes

    def rows(self, rows: Sequence[int]) -> ChainRequest:
        """The same for these rows only."""
        noise = None if self.log_noise is None else self.log_noise[list(rows)]
        guesses = self.guesses if len(rows) == 1 else None
        return replace(self, unread=[self.unread[row] for row in rows], log_noise=noise, guesses=guesses)


@dataclass(frozen=True)
class DraftedChains:
    """What was drafted.

    Attributes:
        tree: of all rows.
        num_tokens: of the longest chain.
        num_read: positions of each row that were read and are in the cache.
        chains: [B, length] ids of each chain, undefined behind its end.
        forward_s: {nodes: mean seconds of a forward over so many}.
        expected: guesses that were expected to be right.
        num_right: guesses that were.
    """

    tree: DraftTree
    num_tokens: int
    num_read: list[int]
    chains: Tensor
    forward_s: dict[int, float] = field(default_factory=dict)
    expected: float = 0.0
    num_right: int = 0


class ChainStruct(ctypes.Structure):
    """`chain` of chain_types.h."""

    _fields_ = fields_of("chain", decoder=DecoderStruct)
