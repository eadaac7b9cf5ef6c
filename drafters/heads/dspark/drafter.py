"""Drafts with a `DsparkHead` (DSpark, arXiv 2607.05147; DFlash is the same without its two small heads)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.draft_types import CorrectionWeights, DsparkWeights, HeadWeights
from mmspec.drafters.heads.base.attention import CachedAttention, select_last
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.c_draft import own_lm_head, shared_weights
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.markov import CorrectionExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dspark.head import BigramHead, DsparkConfig, DsparkHead, DsparkLayer


class DsparkDrafter(BlockDrafter):
    """Drafts a block from one forward over its positions; the context only adds keys and values.

    `last_hidden` is the feature of the last position of the context, `carry` the last emitted tokens.

    Attributes:
        mask_token_id: whose embedding mask positions have (published heads); None for `DsparkHead.mask_embedding`.
        embedding_scale: factor of the embeddings at the block's positions as they are stored (published heads, also
            where the target scales its own); None for embeddings as the target's layers receive them.
    """

    head: DsparkHead
    c_classes: ClassVar[tuple[type, ...] | None] = (DsparkHead, nn.ModuleList, DsparkLayer, BigramHead)
    records_drafts = True

    def __init__(self, head: DsparkHead, visual_mode: str = "coupled", **options: Any) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: which positions are context: all ("coupled") or text alone ("text_only"); the others of
                `VISUAL_MODES` replace features of visual positions.
            **options: further arguments of `BlockDrafter`.
        """
        super().__init__(head, visual_mode, **options)
        self.mask_token_id: int | None = None
        self.embedding_scale: float | None = None

    @property
    def compressor_hidden_size(self) -> int | None:
        """It reads several hidden states, which no trained compressor fits."""
        return None

    def read_prompt(self, state: DraftState) -> None:
        """See `HeadDrafter`; also keeps the last token of each row."""
        state.carry = state.first_ids if state.carry is None else state.carry
        super().read_prompt(state)

    def follow_tokens(self, state: DraftState, tokens: Tensor, counts: Sequence[int] | Tensor) -> None:
        state.carry = select_last(tokens[..., None], counts, anchors_of(state)[:, None])[:, 0]

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        """See `HeadDrafter`: keys and values of the features, without a forward."""
        state.kv_cache.begin_forward(inputs.shape[1])
        cos, sin = self.rotary_embedding(state, position_ids)
        for index, (keys, values) in enumerate(self.head.context_keys_values(inputs, cos, sin)):
            state.kv_cache.write(index, keys, values)
        state.last_hidden = select_last(inputs, counts, state.last_hidden)

    extend_prompt = extend_rows

    def block_features(self, state: DraftState) -> Tensor:
        """See `BlockDrafter`. The block's keys and values are dropped afterwards."""
        kv_cache, device = state.kv_cache, state.last_hidden.device
        k = self.block_size + (not self.head.config.sample_from_anchor)
        anchors = self.embed_ids(state, anchors_of(state))
        inputs = self.head.block_inputs(anchors, k)
        if self.mask_token_id is not None:
            mask_ids = torch.full((len(anchors), k - 1), self.mask_token_id, device=device)
            inputs = torch.cat((inputs[:, :1], self.embed_ids(state, mask_ids)), dim=1)
        cos, sin = self.rotary_embedding(state, state.first_positions() + torch.arange(k, device=device))
        # All blocks stand behind the longest row, or the bucket of a recorded draft; the gaps are no keys.
        seq_lens = kv_cache.seq_lens
        has_gaps = state.position_offset is not None or not kv_cache.is_uniform
        masks = block_masks(self.head.config, kv_cache.lengths_on(device), max(seq_lens), k, has_gaps)
        kv_cache.seq_lens = [max(seq_lens)] * len(seq_lens)
        kv_cache.begin_forward(k)
        attend = [CachedAttention(kv_cache, mask, layer=layer) for layer, mask in enumerate(masks)]
        features = self.head.forward_block(inputs, cos, sin, attend)[:, -self.block_size :]
        kv_cache.seq_lens = seq_lens
        return features

    def embed_ids(self, state: DraftState, ids: Tensor) -> Tensor:
        """[..., D] embeddings of target ids [...], as the head's positions read them."""
        shared = state.shared_embeddings
        weight = getattr(shared.embed_tokens, "weight", None)
        if self.embedding_scale is None or not isinstance(weight, Tensor) or not weight.is_floating_point():
            embeds = shared.embed(ids)
        else:
            embeds = functional.embedding(ids, weight) * self.embedding_scale
        return embeds.to(state.last_hidden.dtype)

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        bigram_head = self.head.bigram_head
        return None if bigram_head is None else BigramExpander(self, bigram_head, state)

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """See `HeadDrafter`; None with windows or causal blocks."""
        head, mask_token_id = self.head, self.mask_token_id
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
            block_positions=self.block_size + first_position,
            first_position=first_position,
        )
        return HeadWeights(
            head.fc.weight,
            None,
            [layer.c_weights() for layer in head.layers if isinstance(layer, DsparkLayer)],
            hidden_norm=head.hidden_norm.weight,
            final_norm=head.norm.weight,
            correction=self.correction_weights(self.corrected_ids(state)),
            dspark=dspark,
            embed_scale=self.embedding_scale,
            **ends,
        )

    def correction_weights(self, ids: Tensor | None) -> CorrectionWeights | None:
        """What corrects logits by the tokens before, for these ids or all; None if nothing of this kind does."""
        bigram_head = self.head.bigram_head
        if bigram_head is None:
            return None
        norm, proj, table = bigram_head.token_norm, bigram_head.token_proj, bigram_head.table
        rows = bigram_head.vocab_proj.weight
        return CorrectionWeights(
            token_norm=None if norm is None else norm.weight,
            token_proj=None if proj is None else proj.weight,
            token_table=None if table is None else table.weight,
            vocab_proj=rows if ids is None else rows[ids],
        )

    def corrected_ids(self, state: DraftState) -> Tensor | None:
        """[V'] ids of which a correction has rows; None for all: an LM head of its own has draft ids only."""
        return None if self.head.lm_head is not None else state.draft_ids


def anchors_of(state: DraftState) -> Tensor:
    """[B] int64, the last emitted token of each row, with which its next block begins."""
    assert state.carry is not None
    return state.carry


def block_masks(config: DsparkConfig, lengths: Tensor, longest: int, k: int, has_gaps: bool) -> list[Tensor | None]:
    """Which keys the positions of a block see in each layer: the context in front of it, then the block.

    Args:
        config: with `sliding_windows` and `causal_layers`.
        lengths: [B] int64 of the context of each row.
        longest: columns of the context.
        k: positions of the block.
        has_gaps: whether a row may have fewer than `longest` positions.

    Returns:
        For each layer [B or 1, 1, k or 1, longest + k] bool; None for all keys.
    """
    is_context = functional.pad(torch.arange(longest, device=lengths.device) < lengths[:, None], (0, k), value=True)
    is_key = is_context[:, None, None] if has_gaps else None
    if not config.sliding_windows and not config.causal_layers:
        return [is_key] * config.num_hidden_layers
    slots = torch.arange(k, device=lengths.device)
    queries = (lengths[:, None] + slots)[:, None, :, None]  # [B, 1, k, 1] positions
    context = torch.arange(longest, device=lengths.device).expand(len(lengths), longest)
    keys = torch.cat((context, lengths[:, None] + slots), dim=1)[:, None, None]  # [B, 1, 1, longest + k]
    masks: list[Tensor | None] = []
    for layer in range(config.num_hidden_layers):
        window = config.sliding_windows[layer] if config.sliding_windows else 0
        is_causal = bool(config.causal_layers) and config.causal_layers[layer]
        mask = is_key
        if is_causal:
            mask = (keys <= queries) if mask is None else mask & (keys <= queries)
        if window:
            near = (queries - keys).abs() < window
            mask = near if mask is None else mask & near
        masks.append(mask)
    return masks


class BigramExpander(CorrectionExpander):
    """Corrects by a `BigramHead`. The hidden states of nodes are the R numbers of their tokens."""

    def __init__(self, drafter: DsparkDrafter, bigram_head: BigramHead, state: DraftState) -> None:
        super().__init__(drafter, state, bigram_head.vocab_proj.weight, drafter.corrected_ids(state))
        self.head, self.bigram_head = drafter.head, bigram_head
        root_hidden = bigram_head.embed(anchors_of(state), state.shared_embeddings)[:, None]
        self.root_hidden = root_hidden.to(self.features.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, R]."""
        return self.bigram_head.embed(self.state.target_ids(tokens), self.state.shared_embeddings)

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; the embeddings are those of `embed`."""
        return inputs_embeds

    def calibrate(self, level: int, hidden_states: Tensor, log_probs: Tensor) -> Tensor:
        """See `LevelExpander`: where the confidence is below the best probability, all are scaled down to it.

        Then fewer nodes are scored of a block that is not trusted, and more of another.
        """
        if self.head.confidence_head is None:
            return log_probs
        features = self.features[:, level, None].expand(-1, hidden_states.shape[1], -1)
        confidence = functional.logsigmoid(self.head.confidence(features, hidden_states).float())[..., None]
        return log_probs + (confidence - log_probs[..., :1]).clamp(max=0)
