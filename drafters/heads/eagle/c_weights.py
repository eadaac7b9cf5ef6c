"""An `EagleHead` in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from mmspec.cpu.draft_types import HeadWeights
from mmspec.cpu.layers import LayerWeights
from mmspec.drafters.heads.base.c_draft import shared_weights, split_projections
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleHead


def eagle_weights(head: EagleHead, state: DraftState) -> HeadWeights | None:
    """Weights of a head that computes as `EagleHead` does: `fc` and one layer, then the target's LM head."""
    if head.config.qk_norm or head.config.final_norm:
        return None
    return HeadWeights(head.fc.weight, head.fc.bias, [layer_weights(head.layer)], **shared_weights(state))


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    """Views of the weights of a layer."""
    sizes = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
    return LayerWeights(
        input_norm=None if layer.input_norm is None else layer.input_norm.weight,
        q_norm=None,
        k_norm=None,
        o=layer.o_proj.weight,
        o_bias=None,
        post_norm=layer.post_norm.weight if layer.has_mlp else None,
        **split_projections(layer, sizes, layer.has_mlp),
    )
