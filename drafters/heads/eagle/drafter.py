"""EAGLE-2 (arXiv 2406.16858) for vision-language models: the head drafts a dynamic tree, one forward
for each level but the first, whose hidden state reading the emitted tokens has given.

With `visual_mode="decoupled"` this is MSD (arXiv 2505.14260). Reading order: `HeadDrafter` (`base/drafter.py`) for a
call from `begin` to `observe`, `expand_levels` (`base/expand.py`) for the tree, `EagleHead` (`head.py`) for the
network. In C: `CDraft` (`base/c_draft.py`), `CHead` (`mmspec/cpu/draft.py`), `draft_tree` (`draft_workers.h`).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from mmspec.cpu.draft_types import HeadWeights
from mmspec.cpu.layers import LayerWeights
from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft, shared_weights, split_projections
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.expand import AutoregressiveExpander, expand_levels
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleHead
from mmspec.engine.tree import DraftTree


class EagleDrafter(HeadDrafter):
    """Drafts with an `EagleHead`, level by level."""

    records_drafts = True
    expander_class: ClassVar[type[AutoregressiveExpander]] = AutoregressiveExpander

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """Expand the `top_k` most likely nodes of each of `num_levels` levels, then re-rank (EAGLE-2, section 4)."""
        top_k = self.top_k_of(state)
        if state.c_draft is not None:
            tree = state.c_draft.tree(state, top_k, max_nodes, num_levels)
            if tree is not None:
                return tree
        expander = self.expander_class(self, state, top_k)
        return expand_levels(state, expander, top_k, max_nodes=max_nodes, num_levels=num_levels)

    def c_draft(self, state: DraftState) -> CDraft | None:
        head = self.head
        if type(self) is not EagleDrafter or type(head) is not EagleHead:
            return None
        return find_c_draft(self, state, partial(eagle_weights, head, state), (DecoderLayer,))


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
