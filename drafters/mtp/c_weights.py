"""An `MTPHead` and an `AssistantHead` in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mmspec.cpu.angles import RotaryFn
from mmspec.cpu.draft_types import AssistantWeights, HeadWeights
from mmspec.drafters.heads.base.c_draft import own_lm_head, shared_weights
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


def assistant_weights(head: Any, state: DraftState) -> HeadWeights | None:
    """Weights of an `AssistantHead` whose layers compute as its target's do, where these run in C; else None."""
    shape, layers, keys, body = state.c_shape(), head.body.c_weights(), state.target_keys, head.body
    linears = [one for one in (head.fc, head.post_projection, head.lm_head, head.centroids) if one is not None]
    if shape is None or layers is None or keys is None or any(type(one) is not nn.Linear for one in linears):
        return None
    kinds, dtype = tuple(body.layer_types), state.last_hidden.dtype
    if (caches := keys.buffers(kinds)) is None or any(one.bias is not None for one in linears):
        return None
    angles: dict[str, RotaryFn] = {kind: partial(body.angles, kind, dtype=dtype) for kind in kinds}
    rotated = {kind: angle(state.first_positions()[:1, 0])[0].shape[-1] for kind, angle in angles.items()}
    sizes = [
        (one.shape[2], one.shape[4], rotated[kind]) for one, kind in zip(caches, kinds, strict=True) if one is not None
    ]
    heads = {layer.q.shape[0] // size[1] for layer, size in zip(layers, sizes, strict=True)}
    if len(heads) != 1 or body.eps != {shape.eps} or state.last_hidden.device.type != "cpu":
        return None
    window = 0 if keys.window is None else keys.window + 1  # it reads one position more than it sees: its own
    assistant = AssistantWeights(kinds, head.post_projection.weight, None, None, 0)
    if head.centroids is not None:
        clusters = head.token_ordering, head.top_centroids
        assistant = AssistantWeights(kinds, head.post_projection.weight, head.centroids.weight, *clusters)
    lm_head = head.lm_head.weight if state.draft_lm_head is None else state.draft_lm_head
    return HeadWeights(
        head.fc.weight,
        None,
        layers,
        final_norm=body.norm.weight,
        assistant=assistant,
        shape=replace(
            shape,
            hidden_size=head.fc.out_features,
            intermediate_size=max(layer.gate.shape[0] for layer in layers),
            num_heads=heads.pop(),
            num_kv_heads=max(size[0] for size in sizes),
            head_dim=max(size[1] for size in sizes),
            rotary_size=max(size[2] for size in sizes),
            head_sizes=tuple(sizes),
            windows=tuple(window * (kind == "sliding_attention") for kind in kinds),
            owners=(),
            num_experts=0,
            expert_size=0,
            experts_per_token=0,
            is_eager=False,
        ),
        rotaries=[angles[kind] for kind in kinds],
        **{**shared_weights(state), **own_lm_head(lm_head)},
    )
