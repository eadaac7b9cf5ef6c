"""A `DsparkHead` in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from torch import Tensor, nn

from mmspec.cpu.draft_types import CorrectionWeights, DsparkWeights, HeadWeights
from mmspec.cpu.layers import LayerWeights
from mmspec.drafters.heads.base.c_draft import own_lm_head, shared_weights, split_projections
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dspark.head import BigramHead, DsparkHead, DsparkLayer

DSPARK_CLASSES = (nn.ModuleList, DsparkLayer, BigramHead)
"""Classes of modules in a `DsparkHead`, besides those of every head."""


def dspark_weights(
    head: DsparkHead, state: DraftState, block_size: int, mask_token_id: int | None
) -> HeadWeights | None:
    """Weights of a head for `find_c_draft`; None without a `BigramHead`: then the tree is no tree of levels.

    Windows and causal blocks are not implemented there either.

    Args:
        head: the head.
        state: of the call.
        block_size: positions that predict.
        mask_token_id: as in `DsparkDrafter`.
    """
    bigram_head, confidence_head = head.bigram_head, head.confidence_head
    if bigram_head is None or head.config.sliding_windows or head.config.causal_layers:
        return None
    ends = shared_weights(state)
    vocab_proj = bigram_head.vocab_proj.weight
    if head.lm_head is not None:
        ends |= own_lm_head(head.lm_head.weight)
    elif state.draft_ids is not None:
        vocab_proj = vocab_proj[state.draft_ids]
    mask_embedding: Tensor = head.mask_embedding
    if mask_token_id is not None:
        mask_embedding = ends["embeddings"][mask_token_id]
    first_position = int(not head.config.sample_from_anchor)
    dspark = DsparkWeights(
        mixture=head.mixture,
        mask_embedding=mask_embedding,
        confidence=None if confidence_head is None else confidence_head.weight,
        confidence_bias=None if confidence_head is None else confidence_head.bias,
        block_positions=block_size + first_position,
        first_position=first_position,
    )
    return HeadWeights(
        head.fc.weight,
        None,
        [_layer_weights(layer) for layer in head.layers if isinstance(layer, DsparkLayer)],
        hidden_norm=head.hidden_norm.weight,
        final_norm=head.norm.weight,
        correction=_correction_weights(bigram_head, vocab_proj),
        dspark=dspark,
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
    )


def _correction_weights(bigram_head: BigramHead, vocab_proj: Tensor) -> CorrectionWeights:
    norm, proj, table = bigram_head.token_norm, bigram_head.token_proj, bigram_head.table
    return CorrectionWeights(
        feature_norm=None,
        feature_proj=None,
        token_norm=None if norm is None else norm.weight,
        token_proj=None if proj is None else proj.weight,
        token_table=None if table is None else table.weight,
        vocab_proj=vocab_proj,
    )
