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

from mmspec.drafters.block.block_tree import PathTable, select_nodes
from mmspec.drafters.eagle.drafter import LevelExpander, EagleDrafter, EagleState
from mmspec.drafters.eagle.head import EagleHead, HeadConfig, RMSNorm
from mmspec.engine.tree import DraftTree


class MarkovHead(nn.Module):
    """What a word does to the scores of the next place, by a few numbers made of the place's feature and the word.

    As a bigram model of low rank would, but knowing what the pass says of the place. The output head is not asked
    again: its product is by far the dearest of a place. It begins as nothing.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feature_proj = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.token_proj = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.vocab_proj = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        nn.init.zeros_(self.vocab_proj.weight)

    def project_features(self, feature: Tensor) -> Tensor:
        """[..., D] features -> [..., C]."""
        seen: Tensor = self.feature_proj(self.norm(feature))
        return seen

    def mix(self, features: Tensor, embedded: Tensor) -> Tensor:
        """[..., C] of a place and the [..., D] embedding of the word before it -> [..., C]."""
        return functional.silu(features + self.token_proj(self.token_norm(embedded)))

    def forward(self, feature: Tensor, embedded: Tensor) -> Tensor:
        """[..., V] to be added to the scores of a place."""
        added: Tensor = self.vocab_proj(self.mix(self.project_features(feature), embedded))
        return added


class FlashHead(EagleHead):
    """`fc`, attention, a feed-forward from one row to k features, and the chain if it has a width."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.block_ffn_size < 1:
            raise ValueError(f"a FLASH head has a width (inner) of at least 1; got {config.block_ffn_size}.")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.block_ffn_size, bias=False)
        self.block_proj = nn.Linear(config.block_ffn_size, config.block_size * config.hidden_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def block_features(self, out: Tensor) -> Tensor:
        """[..., D] what the pass gave at a row -> [..., k, D] features of the k coming positions."""
        said = self.block_proj(functional.silu(self.up_proj(self.norm(out))))
        return out[..., None, :] + said.unflatten(-1, (self.config.block_size, -1))


class BlockDrafter(EagleDrafter, ABC):
    """Drafts the coming k tokens from one pass. What differs is where the k features come from."""

    def __init__(
        self, head: EagleHead, visual_mode: str = "decoupled", *, block_size: int | None = None, **more: Any
    ) -> None:
        """
        Args:
            block: tokens of a draft, at most those of the head.

        Raises:
            ValueError: the head was trained for fewer.
        """
        block_size = head.config.block_size if block_size is None else block_size
        if not 1 <= block_size <= head.config.block_size:
            raise ValueError(
                f"block must be 1 to {head.config.block_size}, for which this head was trained; got {block_size}."
            )
        super().__init__(head, visual_mode, **more | {"depth": 1})
        self.block_size = self.reach = block_size
        self.path_tables: dict[tuple[int, int, int, torch.device], PathTable] = {}

    @abstractmethod
    def block_features(self, state: EagleState) -> Tensor:
        """[B, k, D] for the coming positions."""

    @property
    def is_sequential(self) -> bool:
        """Whether a place hangs on the word before it, so that a tree is gone down level by level."""
        return False

    def path_table(self, state: EagleState, max_nodes: int, block_size: int) -> PathTable:
        """Candidates for a tree of `budget` nodes, made once."""
        key = (block_size, max_nodes, state.logit_bias.shape[0], state.logit_bias.device)
        if key not in self.path_tables:
            self.path_tables[key] = PathTable.build(block_size, max_nodes - 1, key[2], key[3])
        return self.path_tables[key]

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Chained places level by level; of independent ones the likeliest nodes of their product."""
        slots = min(self.block_size, max_nodes - 1)
        if self.is_sequential:
            return super()._draft_tree(state, max_nodes, slots)
        scores = self.logits(state, self.block_features(state)[:, :slots])
        chances = self._log_probs(state, scores, self._log_noise(state, slots))
        table = self.path_table(state, max_nodes, slots)
        tokens, totals, _ = table.score_paths(chances[:, None], chances.new_zeros(chances.shape[0], 1))
        return select_nodes(
            state.draft_ids, tokens[:, 0], totals[:, 0], table.parents.expand(totals[:, 0].shape), num_nodes=max_nodes
        )


class FlashDrafter(BlockDrafter):
    """Drafts with a `FlashHead`."""

    head: FlashHead

    def block_features(self, state: EagleState) -> Tensor:
        """From the last row that was read."""
        return self.head.block_features(state.last_hidden)

    @property
    def is_sequential(self) -> bool:
        """See `BlockDrafter`."""
        return self.head.markov_head is not None

    def _expander(self, state: EagleState, beam_width: int) -> LevelExpander:
        assert self.head.markov_head is not None
        return MarkovExpander(self, self.head.markov_head, state)


class StatelessExpander:
    """A `LevelExpander` without passes has nothing to remember of the way it went."""

    def reorder(self, parent_index: Tensor) -> None:
        """See `LevelExpander`."""

    def close(self) -> None:
        """See `LevelExpander`."""


class MarkovExpander(StatelessExpander):
    """Goes down a tree, and asks the output head once for all levels."""

    def __init__(self, drafter: FlashDrafter, chain: MarkovHead, state: EagleState) -> None:
        features = drafter.block_features(state)
        self.markov_head, self.draft_ids, self.start = chain, state.draft_ids, features[:, :1]
        self.base_logits, self.features = drafter.logits(state, features), chain.project_features(features)
        self.draft_vocab_proj = None if self.draft_ids is None else chain.vocab_proj.weight[self.draft_ids]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, C]."""
        return self.markov_head.mix(self.features[:, level, None], embedded)

    def logits(self, level: int, out: Tensor) -> Tensor:
        """See `LevelExpander`."""
        plain = self.base_logits[:, level, None]
        if not level:
            return plain
        return (
            plain
            + (
                self.markov_head.vocab_proj(out)
                if self.draft_vocab_proj is None
                else functional.linear(out, self.draft_vocab_proj)
            ).float()
        )


__all__ = ["BlockDrafter", "MarkovHead", "FlashDrafter", "FlashHead", "Passless"]
