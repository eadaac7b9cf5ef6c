"""FLASH (arXiv 2505.12728): k tokens from one pass, each by its own share of a wide feed-forward.

One attention over what the drafter reads, then a feed-forward whose output is k features. They are drawn up without
knowing of each other: the price of a single pass. Here the features are added to what the attention gave, behind a
norm, and attention is the ordinary kind; the paper's is neither. Knows neither the decode loop nor transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.blocks import Table, best
from mmspec.drafters.eagle import EagleDrafter, State
from mmspec.drafters.head import EagleHead, HeadConfig, Norm
from mmspec.tree import DraftTree


class FlashHead(EagleHead):
    """`fc`, attention, and a feed-forward from one row to k features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.inner < 1:
            raise ValueError(f"a FLASH head has a width (inner) of at least 1; got {config.inner}.")
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.widen = nn.Linear(config.hidden_size, config.inner, bias=False)
        self.spread = nn.Linear(config.inner, config.block * config.hidden_size, bias=False)

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

    def table(self, state: State, budget: int, slots: int) -> Table:
        """Candidates for a tree of `budget` nodes, made once."""
        key = (slots, budget, state.shut.shape[0], state.shut.device)
        if key not in self.tables:
            self.tables[key] = Table.of(slots, budget - 1, key[2], key[3])
        return self.tables[key]

    def _tree(self, state: State, budget: int, depth: int) -> DraftTree:
        """The likeliest nodes of the product of the k distributions."""
        slots = min(self.size, budget - 1)
        chances = self._chances(state, self.features(state)[:, :slots], self._noise(state, slots))
        table = self.table(state, budget, slots)
        tokens, totals, _ = table.offers(chances[:, None], chances.new_zeros(chances.shape[0], 1))
        return best(state.ids, tokens[:, 0], totals[:, 0], table.parent.expand(totals[:, 0].shape), nodes=budget)


class FlashDrafter(BlockDrafter):
    """Drafts with a `FlashHead`."""

    head: FlashHead

    def features(self, state: State) -> Tensor:
        """From the last row that was read."""
        return self.head.block(state.last)


__all__ = ["BlockDrafter", "FlashDrafter", "FlashHead"]
