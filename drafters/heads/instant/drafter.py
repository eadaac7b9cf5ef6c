"""Instant heads as a drafter: a tree from the target's last hidden state and the token that it has just picked.

The head has no context of its own, so nothing is read from the prompt but its last hidden state, and nothing of earlier
rounds is stored. Drafting costs one product with the LM head over k positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mmspec.drafters.heads.base.attention import select_last
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.markov import MarkovExpander
from mmspec.drafters.heads.base.reader import MAX_HEAD_TREE_SIZE
from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.drafters.heads.instant.head import InstantHead
from mmspec.engine.gather import gather_rows
from mmspec.engine.tree import DraftTree, root_only
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import DrafterRequirements, Prompt


@dataclass
class InstantState(DraftState):
    """State of one call.

    Attributes:
        root_embeds: [B, D] embedding of the root; None before the first draft.
    """

    kept: ClassVar[tuple[str, ...]] = ("last_hidden", "root_embeds")
    root_embeds: Tensor | None = None


class InstantDrafter(BlockDrafter):
    """Drafts with an `InstantHead`. `DraftState.last_hidden` is the target's hidden state before the root.

    Attributes:
        is_ready: whether the head was trained; without, it would draft the root again.
    """

    head: InstantHead
    state_class = InstantState

    def __init__(self, head: InstantHead, visual_mode: str = "text_only", **options: Any) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: recorded in its config; the head reads no visual tokens.
            **options: further arguments of `BlockDrafter`.
        """
        super().__init__(head, visual_mode, **options)
        self.is_ready = bool(head.block_proj.weight.any())

    def set_hidden_state_indices(self, indices: tuple[int, ...], num_layers: int) -> None:
        """See `HeadDrafter`; the input embeddings of the prompt are not needed."""
        super().set_hidden_state_indices(indices, num_layers)
        self.requirements = DrafterRequirements(hidden_state_indices=indices, max_tree_size=MAX_HEAD_TREE_SIZE)

    @InferenceMode()
    def propose(self, state: DraftState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """See `HeadDrafter`; the root alone before anything was learned."""
        if not self.is_ready:
            return root_only(len(active), state.last_hidden.device)
        return super().propose(state, max_nodes, active)

    @property
    def compresses_visual_tokens(self) -> bool:
        """True: the head reads none, so a compressor would have no effect."""
        return True

    def _prefill(self, state: DraftState, prompt: Prompt, first_ids: Tensor) -> None:
        """Take the hidden state of the last position of each row."""
        hidden_states = self.select_hidden_states(prompt.hidden_states)
        mask = prompt.attention_mask[:, -hidden_states.shape[1] :]
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        state.last_hidden = gather_rows(hidden_states, last[:, None])[:, 0]
        assert isinstance(state, InstantState)
        state.root_embeds = state.shared_embeddings.embed(first_ids).to(state.last_hidden.dtype)

    def read_pending(self, state: DraftState) -> None:
        """Take the last token that was emitted in each row, and the hidden state before it."""
        if not state.pending:
            return
        pending, state.pending = Pending.concatenate(state.pending), []
        assert isinstance(state, InstantState) and state.root_embeds is not None
        embeds = state.shared_embeddings.embed(pending.tokens).to(state.root_embeds.dtype)
        state.last_hidden = select_last(pending.hidden_states, pending.counts, state.last_hidden)
        state.root_embeds = select_last(embeds, pending.counts, state.root_embeds)

    def block_features(self, state: DraftState) -> Tensor:
        assert isinstance(state, InstantState) and state.root_embeds is not None
        return self.head.block_features(state.root_embeds, state.last_hidden)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        super().publish(weights)
        self.is_ready = True

    def expander(self, state: DraftState) -> LevelExpander | None:
        markov_head = self.head.markov_head
        return None if markov_head is None else MarkovExpander(self, markov_head, state)
