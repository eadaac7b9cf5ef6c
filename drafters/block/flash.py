"""FLASH (arXiv 2505.12728): k tokens from one pass, each by its own share of a wide feed-forward.

One attention over what the drafter reads, then a feed-forward whose output is k features. They are drawn up without
knowing of each other: the price of a single pass. Here the features are added to what the attention gave, behind a
norm, and attention is the ordinary kind; the paper's is neither. A `Chain`, which the paper has not, may let a word
weigh on what is said of the place behind it. Knows neither the decode loop nor transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.block.block_tree import Table, best
from mmspec.drafters.eagle.drafter import Descent, EagleDrafter, State
from mmspec.drafters.eagle.head import EagleHead, HeadConfig, Norm
from mmspec.engine.tree import DraftTree


class Chain(nn.Module):
    """What a word does to the scores of the next place, by a few numbers made of the place's feature and the word.

    As a bigram model of low rank would, but knowing what the pass says of the place. The output head is not asked
    again: its product is by far the dearest of a place. It begins as nothing.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.word_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.see = nn.Linear(config.hidden_size, config.chain, bias=False)
        self.hear = nn.Linear(config.hidden_size, config.chain, bias=False)
        self.say = nn.Linear(config.chain, config.vocab_size, bias=False)
        nn.init.zeros_(self.say.weight)

    def seen(self, feature: Tensor) -> Tensor:
        """[..., D] features -> [..., C]."""
        seen: Tensor = self.see(self.norm(feature))
        return seen

    def heard(self, seen: Tensor, embedded: Tensor) -> Tensor:
        """[..., C] of a place and the [..., D] embedding of the word before it -> [..., C]."""
        return functional.silu(seen + self.hear(self.word_norm(embedded)))

    def forward(self, feature: Tensor, embedded: Tensor) -> Tensor:
        """[..., V] to be added to the scores of a place."""
        added: Tensor = self.say(self.heard(self.seen(feature), embedded))
        return added


class FlashHead(EagleHead):
    """`fc`, attention, a feed-forward from one row to k features, and the chain if it has a width."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.inner < 1:
            raise ValueError(f"a FLASH head has a width (inner) of at least 1; got {config.inner}.")
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.widen = nn.Linear(config.hidden_size, config.inner, bias=False)
        self.spread = nn.Linear(config.inner, config.block * config.hidden_size, bias=False)
        self.chain = Chain(config) if config.chain else None

    def block(self, out: Tensor) -> Tensor:
        """[..., D] what the pass gave at a row -> [..., k, D] features of the k coming positions."""
        said = self.spread(functional.silu(self.widen(self.norm(out))))
        return out[..., None, :] + said.unflatten(-1, (self.config.block, -1))


class BlockDrafter(EagleDrafter, ABC):
    """Drafts the coming k tokens from one pass. What differs is where the k features come from."""

    def __init__(self, head: EagleHead, rule: str = "decoupled", *, block: int | None = None, **more: Any) -> None:
        """
        Args:
            block: tokens of a draft, at most those of the head.

        Raises:
            ValueError: the head was trained for fewer.
        """
        block = head.config.block if block is None else block
        if not 1 <= block <= head.config.block:
            raise ValueError(f"block must be 1 to {head.config.block}, for which this head was trained; got {block}.")
        super().__init__(head, rule, **more | {"depth": 1})
        self.size = self.reach = block
        self.tables: dict[tuple[int, int, int, torch.device], Table] = {}

    @abstractmethod
    def features(self, state: State) -> Tensor:
        """[B, k, D] for the coming positions."""

    @property
    def chained(self) -> bool:
        """Whether a place hangs on the word before it, so that a tree is gone down level by level."""
        return False

    def table(self, state: State, budget: int, slots: int) -> Table:
        """Candidates for a tree of `budget` nodes, made once."""
        key = (slots, budget, state.shut.shape[0], state.shut.device)
        if key not in self.tables:
            self.tables[key] = Table.of(slots, budget - 1, key[2], key[3])
        return self.tables[key]

    def _tree(self, state: State, budget: int, depth: int) -> DraftTree:
        """Chained places level by level; of independent ones the likeliest nodes of their product."""
        slots = min(self.size, budget - 1)
        if self.chained:
            return super()._tree(state, budget, slots)
        scores = self.scores(state, self.features(state)[:, :slots])
        chances = self._likely(state, scores, self._noise(state, slots))
        table = self.table(state, budget, slots)
        tokens, totals, _ = table.offers(chances[:, None], chances.new_zeros(chances.shape[0], 1))
        return best(state.ids, tokens[:, 0], totals[:, 0], table.parent.expand(totals[:, 0].shape), nodes=budget)


class FlashDrafter(BlockDrafter):
    """Drafts with a `FlashHead`."""

    head: FlashHead

    def features(self, state: State) -> Tensor:
        """From the last row that was read."""
        return self.head.block(state.last)

    @property
    def chained(self) -> bool:
        """See `BlockDrafter`."""
        return self.head.chain is not None

    def _descent(self, state: State, width: int) -> Descent:
        assert self.head.chain is not None
        return Chained(self, self.head.chain, state)


class Passless:
    """A `Descent` without passes has nothing to remember of the way it went."""

    def follow(self, source: Tensor) -> None:
        """See `Descent`."""

    def close(self) -> None:
        """See `Descent`."""


class Chained(Passless):
    """Goes down a tree, and asks the output head once for all levels."""

    def __init__(self, drafter: FlashDrafter, chain: Chain, state: State) -> None:
        features = drafter.features(state)
        self.chain, self.ids, self.start = chain, state.ids, features[:, :1]
        self.plain, self.seen = drafter.scores(state, features), chain.seen(features)
        self.say = None if self.ids is None else chain.say.weight[self.ids]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `Descent`; [B, W, C]."""
        return self.chain.heard(self.seen[:, level, None], embedded)

    def scores(self, level: int, out: Tensor) -> Tensor:
        """See `Descent`."""
        plain = self.plain[:, level, None]
        if not level:
            return plain
        return plain + (self.chain.say(out) if self.say is None else functional.linear(out, self.say)).float()


__all__ = ["BlockDrafter", "Chain", "FlashDrafter", "FlashHead", "Passless"]
