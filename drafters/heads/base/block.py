"""`BlockDrafter`: the common part of drafters whose head predicts a block of k tokens per forward."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from mmspec.drafters.heads.base.block_tree import path_table
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.rerank import select_nodes
from mmspec.engine.tree import DraftTree


class BlockDrafter(HeadDrafter):
    """Drafts the next k tokens from one forward.

    Hooks, besides those of `HeadDrafter`:
        block_features: features of the k positions, where they are not computed in C. Abstract.
        expander: of the positions, if one depends on the token before it. Default: None, it does not.

    Attributes:
        block_size: k, tokens per forward.
    """

    def __init__(
        self, head: DraftHead, visual_mode: str = "decoupled", *, block_size: int | None = None, **options: Any
    ) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: a key of `VISUAL_MODES`.
            block_size: tokens per draft; None for the head's.
            **options: further arguments of `HeadDrafter`, except `max_depth`.

        Raises:
            ValueError: the head was trained for fewer tokens.
        """
        limit = head.config.block_size
        block_size = limit if block_size is None else block_size
        if not 1 <= block_size <= limit:
            raise ValueError(f"block_size must be 1 to {limit}, for which this head was trained; got {block_size}.")
        super().__init__(head, visual_mode, **options | {"max_depth": 1})
        self.block_size = self.tokens_per_level = self.max_depth = block_size

    @abstractmethod
    def block_features(self, state: DraftState) -> Tensor:
        """[B, k, D] features of the next k positions."""

    def block(self, state: DraftState) -> tuple[Tensor, Tensor]:
        """[B, k, D] features of the next k positions, and their [B, k, V'] float32 logits, of all ids."""
        found = None if state.c_draft is None else state.c_draft.block(state)
        if found is not None:
            return found
        features = self.block_features(state)
        return features, self.head.logits(features, state.shared_embeddings, state.draft_lm_head).float()

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        return None

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """Level by level if positions are sequential, else the likeliest nodes of the product of their distributions.

        Args:
            state: of the call.
            max_nodes: size of the tree, the root included.
            num_levels: not used: the block size is the depth.
        """
        block_size = min(self.block_size, max_nodes - 1)
        tree = self.level_tree(state, max_nodes, block_size)
        if tree is not None:
            return tree
        logits = self.block(state)[1][:, :block_size] + state.logit_bias
        log_probs = state.log_probs(logits, state.log_noise(block_size))
        table = path_table(block_size, max_nodes - 1, len(state.logit_bias), state.logit_bias.device)
        root_log_probs = log_probs.new_zeros(log_probs.shape[0], 1)
        tokens, path_log_probs, _ = table.score_paths(log_probs[:, None], root_log_probs)
        tokens, path_log_probs = tokens[:, 0], path_log_probs[:, 0]
        parents = table.parents.expand(path_log_probs.shape)
        return select_nodes(state.draft_ids, tokens, path_log_probs, parents, max_nodes=max_nodes)
