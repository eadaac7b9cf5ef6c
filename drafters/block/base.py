"""`BlockDrafter`: the common part of drafters whose head predicts a block of k tokens per forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.block.block_tree import PathTable, select_nodes
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead
from mmspec.drafters.eagle.state import EagleState
from mmspec.engine.tree import DraftTree


class BlockDrafter(EagleDrafter, ABC):
    """Drafts the next k tokens from one forward; subclasses define where the k features come from.

    Attributes:
        block_size: k, tokens per forward.
        path_tables: cached by (block size, tree size, vocabulary size, device).
    """

    def __init__(
        self, head: EagleHead, visual_mode: str = "decoupled", *, block_size: int | None = None, **options: Any
    ) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: a key of `VISUAL_MODES`.
            block_size: tokens per draft; None for the head's.
            **options: further arguments of `EagleDrafter`, except `max_depth`.

        Raises:
            ValueError: the head was trained for fewer tokens.
        """
        limit = head.config.block_size
        block_size = limit if block_size is None else block_size
        if not 1 <= block_size <= limit:
            raise ValueError(f"block_size must be 1 to {limit}, for which this head was trained; got {block_size}.")
        super().__init__(head, visual_mode, **options | {"max_depth": 1})
        self.block_size = block_size
        self.max_lookahead = block_size
        self.path_tables: dict[tuple[int, int, int, torch.device], PathTable] = {}

    @abstractmethod
    def block_features(self, state: EagleState) -> Tensor:
        """[B, k, D] features of the next k positions."""

    @property
    def is_sequential(self) -> bool:
        """Whether a position's logits depend on the token before it, so that the tree is expanded level by level."""
        return False

    def path_table(self, state: EagleState, max_nodes: int, block_size: int) -> PathTable:
        """Candidate paths for a tree of `max_nodes` nodes, the root included."""
        key = (block_size, max_nodes, state.logit_bias.shape[0], state.logit_bias.device)
        if key not in self.path_tables:
            self.path_tables[key] = PathTable.build(block_size, max_nodes - 1, key[2], key[3])
        return self.path_tables[key]

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Sequential positions level by level; of independent ones the most likely nodes of their product."""
        block_size = min(self.block_size, max_nodes - 1)
        if self.is_sequential:
            return super()._draft_tree(state, max_nodes, block_size)
        logits = self.logits(state, self.block_features(state)[:, :block_size])
        log_probs = self.log_probs(state, logits, self.log_noise(state, block_size))
        table = self.path_table(state, max_nodes, block_size)
        root_scores = log_probs.new_zeros(log_probs.shape[0], 1)
        tokens, scores, _ = table.score_paths(log_probs[:, None], root_scores)
        tokens, scores = tokens[:, 0], scores[:, 0]
        return select_nodes(state.draft_ids, tokens, scores, table.parents.expand(scores.shape), num_nodes=max_nodes)


__all__ = ["BlockDrafter"]
