"""An `MTPHead` in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.c_draft import shared_weights
from mmspec.drafters.heads.base.state import DraftState


def mtp_weights(head: Any, state: DraftState) -> HeadWeights | None:
    """Weights of an `MTPHead` whose block computes as the target's layers do, where these run in C; else None."""
    shape, layer = state.c_shape(), head.block.c_weights()
    if shape is None or layer is None or layer.router is not None or layer.k is None or layer.gate is None:
        return None
    ends = shared_weights(state)
    if head.lm_head is not None and state.draft_lm_head is None:
        ends |= {"lm_head": head.lm_head, "lm_head_bias": None}
    return HeadWeights(
        head.fc.weight,
        head.fc.bias,
        [layer],
        hidden_norm=head.hidden_norm.weight,
        embedding_norm=head.embedding_norm.weight,
        final_norm=head.output_norm.weight,
        shape=replace(shape, intermediate_size=layer.gate.shape[0], windows=(), head_sizes=(), owners=()),
        window=head.window,
        **ends,
    )
