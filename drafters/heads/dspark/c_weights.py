"""A `DsparkHead`, or one that extends it, in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspec.cpu.draft_types import DsparkWeights, HeadWeights
from mmspec.cpu.layers import LayerWeights
from mmspec.drafters.heads.base.c_draft import own_lm_head, shared_weights, split_projections
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dspark.head import DsparkLayer

if TYPE_CHECKING:
    from mmspec.drafters.heads.dspark.drafter import DsparkDrafter


def dspark_weights(drafter: DsparkDrafter, state: DraftState) -> HeadWeights | None:
    """Weights of a head for `find_c_draft`; None with windows or causal blocks, which are not implemented there.

    Args:
        drafter: with the head.
        state: of the call.
    """
    head, mask_token_id = drafter.head, drafter.mask_token_id
    if head.config.sliding_windows or head.config.causal_layers:
        return None
    ends, scaling = shared_weights(state), head.output_scaling(state.shared_embeddings)
    if not 0 <= (mask_token_id or 0) < len(ends["embeddings"]):  # embedding it ends the drafting
        return None
    if head.lm_head is not None:
        ends |= own_lm_head(head.lm_head.weight)
    ends |= {"logit_scale": scaling.logit_scale, "logit_softcap": scaling.logit_softcap or 0.0}
    first_position = int(not head.config.sample_from_anchor)
    confidence = head.confidence_head
    dspark = DsparkWeights(
        mixture=head.mixture,
        mask_embedding=head.mask_embedding if mask_token_id is None else None,
        mask_token=mask_token_id or 0,
        confidence=None if confidence is None else confidence.weight,
        confidence_bias=None if confidence is None else confidence.bias,
        block_positions=drafter.block_size + first_position,
        first_position=first_position,
    )
    return HeadWeights(
        head.fc.weight,
        None,
        [_layer_weights(layer) for layer in head.layers if isinstance(layer, DsparkLayer)],
        hidden_norm=head.hidden_norm.weight,
        final_norm=head.norm.weight,
        correction=drafter.correction_weights(drafter.corrected_ids(state)),
        dspark=dspark,
        embed_scale=drafter.embedding_scale,
        **ends,
    )


def _layer_weights(layer: DsparkLayer) -> LayerWeights:
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        q_norm=layer.q_norm.weight,
        k_norm=layer.k_norm.weight,
        o=layer.o_proj.weight,
        o_bias=layer.o_proj.bias,
        post_norm=layer.post_norm.weight,
        **split_projections(layer, layer.sizes),
        **layer.mixtures(),
    )
