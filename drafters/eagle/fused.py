"""The draft of a head as a part of a recorded round (`mmspec.interfaces.round`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspec.drafters.eagle.captured import CapturedDraft, StaticDraft
from mmspec.drafters.eagle.state import DraftState, Pending
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.round import DraftPart

if TYPE_CHECKING:
    from mmspec.drafters.eagle.base import HeadDrafter


def build_draft_part(drafter: HeadDrafter, state: DraftState, max_nodes: int, num_levels: int) -> DraftPart | None:
    """The part of the coming round; None if its draft must be drafted alone.

    Args:
        drafter: whose code runs.
        state: of the call, after its prompt.
        max_nodes: size of the tree, the root included.
        num_levels: as in `HeadDrafter.draft_tree`.
    """
    width = drafter.max_depth + 1
    if sum(part.tokens.shape[1] for part in state.pending) > width:  # more tokens than a round emits
        drafter.sync(state)
    backend = state.backend
    if not isinstance(backend, CapturedDraft):
        return None
    bucket = backend.bucket(state, width)
    if bucket is None:
        return None
    if state.pending:
        pending = Pending.concatenate(state.pending)
        state.pending = [pending]
    else:
        pending = _nothing(state)
    num_missing = width - pending.tokens.shape[1]
    inputs = {"tokens": pending.tokens, "hidden_states": pending.hidden_states, "last_hidden": state.last_hidden}
    if num_missing:
        inputs["tokens"] = nn.functional.pad(pending.tokens, (0, num_missing))
        inputs["hidden_states"] = nn.functional.pad(pending.hidden_states, (0, 0, 0, num_missing))
    if state.extra is not None:
        inputs["extra"] = state.extra
    named = backend.tensors.named
    others = ("lengths", "counts") if state.noise is None else ("lengths", "counts", "noise")
    draft = StaticDraft(drafter, state.shared_embeddings, (*named, *inputs, *others), bucket)

    def function(
        fixed: Sequence[Tensor], changing: Sequence[Tensor], numbers: Tensor, noise: Tensor | None
    ) -> tuple[DraftTree, Sequence[Tensor]]:
        tensors = *fixed, *changing, *numbers.unbind(1), *(() if noise is None else (noise,))
        return draft.extend_and_grow(max_nodes, num_levels, *tensors)

    return DraftPart(
        owner=backend.tensors,
        key=(drafter.top_k_on(state.last_hidden.device), max_nodes, num_levels, bucket, draft.names),
        state=list(named.values()),
        inputs=list(inputs.values()),
        numbers=[list(pair) for pair in zip(state.kv_cache.seq_lens, pending.counts, strict=True)],
        max_depth=drafter.max_depth,
        hidden_state_indices=drafter.hidden_state_indices,
        function=function,
        select_hidden_states=drafter.select_hidden_states,
    )


def follow_draft_part(state: DraftState, pending: Pending | None, kept: Sequence[Tensor]) -> None:
    """Update the state after a round with a part: what it has read, and the tokens `pending` that it emitted."""
    counts = state.pending[0].counts if state.pending else [0] * len(state.next_positions)
    state.last_hidden, *extra = kept
    state.extra = extra[0] if extra else None
    state.kv_cache.seq_lens = [n + count for n, count in zip(state.kv_cache.seq_lens, counts, strict=True)]
    state.next_positions = [n + count for n, count in zip(state.next_positions, counts, strict=True)]
    state.pending = [] if pending is None else [pending]


def _nothing(state: DraftState) -> Pending:
    """No tokens, as between the prompt and the first draft."""
    batch = len(state.last_hidden)
    tokens = torch.zeros(batch, 0, dtype=torch.long, device=state.last_hidden.device)
    return Pending(tokens, state.last_hidden.new_zeros(batch, 0, state.hidden_size), [0] * batch)


__all__ = ["build_draft_part", "follow_draft_part"]
