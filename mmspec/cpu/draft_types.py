"""Draft heads as C reads them: weights, what a call has read, and the struct of draft_types.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.cpu.angles import RotaryFn
from mmspec.cpu.layers import DecoderShape, DecoderStruct, LayerWeights
from mmspec.cpu.structs import fields_of
from mmspec.cpu.weights import WeightStruct


@dataclass(frozen=True)
class BlockWeights:
    """Weights of FLASH's block of k positions: feature i is x + (down @ silu(up @ norm(x)))[i].

    Attributes:
        norm: [D].
        up: [F, D].
        down: [k D, F].
    """

    norm: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class CorrectionWeights:
    """Weights of the correction of a position's logits by the tokens before it: vocab_proj @ r.

    r is silu(feature_proj @ feature_norm(feature) + token_proj @ token_norm(token)) in FLASH; without the feature, or
    the token's row of a table, in DSpark; silu(token_proj @ [feature ; state]) in Domino, the state that of a GRU
    without biases over the tokens of the path.

    Attributes:
        vocab_proj: [V, R].
        feature_norm: [D] or None.
        feature_proj: [R, D] or None.
        token_norm: [D] or None.
        token_proj: [R, D], [R, D + S] or None.
        token_table: [num_rows, R] or None.
        gru_in: [3 S, D] of the reset gate, the update gate and the candidate, or None.
        gru_state: [3 S, S] or None.
        first_corrected: positions before this one are not corrected.
    """

    vocab_proj: Tensor
    feature_norm: Tensor | None = None
    feature_proj: Tensor | None = None
    token_norm: Tensor | None = None
    token_proj: Tensor | None = None
    token_table: Tensor | None = None
    gru_in: Tensor | None = None
    gru_state: Tensor | None = None
    first_corrected: int = 0


@dataclass(frozen=True)
class DsparkWeights:
    """What a DSpark head, or one that extends DFlash, has besides its layers and the correction.

    Attributes:
        mixture: [S] weights with which the target's states are added; None: they are concatenated.
        mask_embedding: [D] input of the positions behind the first; None for the embedding of `mask_token`.
        mask_token: id of that token.
        confidence: [1, D + R] or None.
        confidence_bias: [1] or None.
        block_positions: k, positions of a block.
        first_position: 1 if the first position, of the last token, predicts nothing; else 0.
    """

    mixture: Tensor | None
    mask_embedding: Tensor | None
    mask_token: int
    confidence: Tensor | None
    confidence_bias: Tensor | None
    block_positions: int
    first_position: int


@dataclass(frozen=True)
class AssistantWeights:
    """What an assistant has besides: its layers have no keys of their own.

    Attributes:
        layer_types: type of each layer; it reads keys and values of the target's last layer of that type.
        carry: [E, D] from a normalised output to the hidden state that the next token reads.
        centroids: [C, D]: only ids of the `num_best` likeliest ones have logits; None: all ids have.
        clusters: [C, V / C] int64 ids of each centroid, or None.
        num_best: at most C.
    """

    layer_types: Sequence[str]
    carry: Tensor
    centroids: Tensor | None
    clusters: Tensor | None
    num_best: int


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head, contiguous on the CPU, all of the type of the embeddings.

    Attributes:
        fuse: [D, 2 E], from [embedding ; hidden state] to the input of the layer; with `hidden_norm` from S hidden
            states of the target to one: [D, S D], or [D, D] with a mixture.
        fuse_bias: [D] or None.
        layers: the decoder layers; more than one for DSpark and assistants only.
        embeddings: [num_embeddings, E]; E is D but for assistants.
        lm_head: [V, D], of the draft vocabulary.
        lm_head_bias: [V] or None.
        hidden_norm: [D] of EAGLE-3, DSpark and MTP, else None.
        embedding_norm: [D] of MTP, whose `hidden_norm` is of the input state, else None.
        final_norm: [D] before the LM head, or None.
        adds_normed_state: whether an EAGLE-3 layer adds to the normalised state (`norm_before_residual`).
        block: of FLASH, else None.
        correction: of a head that predicts a block of positions; None for others, and for one of which only the block
            is computed here.
        dspark: of DSpark, else None.
        assistant: of an assistant, else None.
        logit_scale: factor of what the LM head returns.
        logit_softcap: c of c * tanh(logits / c) behind it; 0 for none.
        embed_scale: factor of the embeddings; None for the target's.
        shape: sizes and traits, if the layers are of the target's kind; None for those of our own heads.
        rotaries: rotary angles of each layer; empty: those of the head are of all.
        window: most positions of a text; None for any.
    """

    fuse: Tensor
    fuse_bias: Tensor | None
    layers: Sequence[LayerWeights]
    embeddings: Tensor
    lm_head: Tensor
    lm_head_bias: Tensor | None
    hidden_norm: Tensor | None = None
    embedding_norm: Tensor | None = None
    final_norm: Tensor | None = None
    adds_normed_state: bool = False
    block: BlockWeights | None = None
    correction: CorrectionWeights | None = None
    dspark: DsparkWeights | None = None
    assistant: AssistantWeights | None = None
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    embed_scale: float | None = None
    shape: DecoderShape | None = None
    rotaries: Sequence[RotaryFn] = ()
    window: int | None = None


@dataclass(frozen=True)
class HeadContext:
    """What the head has read so far, of the rows that are computed.

    Attributes:
        lengths: positions in the cache of each row.
        positions: rotary position of each row's next token; of an assistant that of all its nodes.
        caches: [2, R, num_kv_heads, capacity, head_dim] keys and values of each layer.
        last_hidden: [B, D] output of the layer at each row's last position, of an assistant its input, of DSpark the
            fused state, which it does not read.
        anchors: [B] int64 last token of each row; None but for DSpark.
        cache_rows: which of the R rows of the caches each of the B rows is; None: R is B, and they are the same.
        padding: [B, P] bool, False at positions of the caches that are masked; None if none is.
    """

    lengths: Sequence[int]
    positions: Sequence[int]
    caches: Sequence[Tensor | None]
    last_hidden: Tensor
    anchors: Tensor | None = None
    cache_rows: Sequence[int] | None = None
    padding: Tensor | None = None


@dataclass(frozen=True)
class TreeRequest:
    """Which trees to grow.

    Attributes:
        num_levels: levels below the root; of a head that predicts k positions at most k.
        top_k: W, nodes per level that are expanded, and children of each.
        max_nodes: size of a tree, the root included.
        logit_bias: [V] float32, added to the logits.
        log_noise: [B, num_levels, V] float32, subtracted from the logits divided by the temperature; None for none.
        temperature: of the sampling.
        draft_ids: [V] int64 target ids of the draft vocabulary; None if it is the target's.
        level_penalty: subtracted from the log probability per level.
        candidates: [B, num_levels, C] int64 tokens of the draft vocabulary, of a tree over scores of pairs; else None.
        pair_scores: [B, num_levels, C, C] float32, in each row of a level the scores behind a candidate of that before.
    """

    num_levels: int
    top_k: int
    max_nodes: int
    logit_bias: Tensor
    log_noise: Tensor | None
    temperature: float
    draft_ids: Tensor | None
    level_penalty: float
    candidates: Tensor | None = None
    pair_scores: Tensor | None = None


class DraftStruct(ctypes.Structure):
    """`draft` of draft_types.h."""

    _fields_ = fields_of("draft", decoder=DecoderStruct, weights=WeightStruct)
