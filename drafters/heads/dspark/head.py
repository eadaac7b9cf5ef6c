"""The network of DSpark (arXiv 2607.05147), and of DFlash, which it extends.

Decoder layers over a block of k positions: the last emitted token, then k - 1 mask embeddings. Queries see the whole
block and the context; the context's keys and values are projections of hidden states of several of the target's layers,
so that neither text nor image is embedded for it. A `BigramHead` biases each position by the token before it, and a
confidence head estimates whether a position is accepted. The module knows nothing of trees or targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import AttentionFn, DraftHead, RMSNorm
from mmspec.drafters.heads.eagle.head import DecoderLayer
from mmspec.interfaces import SharedEmbeddings


@dataclass(frozen=True)
class DsparkConfig(HeadConfig):
    """Shape of a `DsparkHead`.

    Attributes:
        num_hidden_layers: decoder layers, one to four.
        markov_rank: rank of the bias by the token before (`BigramHead`); 0: none.
        layer_mixture: whether the hidden states are added with learned weights before `fc`, not concatenated.
        confidence_head: whether the head estimates the acceptance of each position.
        sample_from_anchor: whether the first position of a block predicts a token too; if not, a block has one position
            more than `block_size` (DFlash).
        sliding_windows: positions that each layer sees, its own included; 0 for all; empty for no windows (DFlash).
        causal_layers: whether the positions of a block see no later ones, in each layer (DFlash); empty: no.
    """

    num_hidden_layers: int = 1
    markov_rank: int = 0
    layer_mixture: bool = False
    confidence_head: bool = False
    sample_from_anchor: bool = True
    sliding_windows: tuple[int, ...] = ()
    causal_layers: tuple[bool, ...] = ()

    @property
    def block_positions(self) -> int:
        """Positions of a block, its anchor included."""
        return self.block_size + (not self.sample_from_anchor)


class DsparkLayer(DecoderLayer):
    """A Qwen3 decoder layer: queries and keys are normalised per head."""

    is_qwen3 = True
    input_norm: RMSNorm


class BigramHead(nn.Module):
    """`MarkovHead` without the position's feature: the bias depends on the token before alone (DSpark, "vanilla").

    The R numbers of a token come from its embedding, which needs no table of the vocabulary. Those of published heads
    are a table, for which engines ask; `to_table` computes it.
    """

    def __init__(self, config: DsparkConfig, vocab_size: int, has_table: bool = False) -> None:
        """
        Args:
            config: with `markov_rank`.
            vocab_size: V', rows of the bias.
            has_table: [V, R] numbers of their own for all tokens, instead of a projection of the embeddings.
        """
        super().__init__()
        self.token_norm = None if has_table else RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.token_proj = None if has_table else nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.table = nn.Embedding(config.vocab_size, config.markov_rank) if has_table else None
        self.vocab_proj = nn.Linear(config.markov_rank, vocab_size, bias=False)
        nn.init.zeros_(self.vocab_proj.weight)

    def embed(self, ids: Tensor, shared_embeddings: SharedEmbeddings) -> Tensor:
        """[..., R] of target ids [...]."""
        if self.table is not None:
            table: Tensor = self.table(ids)
            return table
        return self.project(shared_embeddings.embed(ids))

    def project(self, inputs_embeds: Tensor) -> Tensor:
        """[..., R] of embeddings [..., D], without a table."""
        assert self.token_norm is not None and self.token_proj is not None
        return functional.silu(self.token_proj(self.token_norm(inputs_embeds)))

    def to_table(self, shared_embeddings: SharedEmbeddings, vocab_size: int) -> Tensor:
        """[V, R] the numbers of all tokens."""
        device = self.vocab_proj.weight.device
        return self.embed(torch.arange(vocab_size, device=device), shared_embeddings)


class DsparkHead(DraftHead):
    """`fc` over the target's hidden states, the layers, and the heads for bigrams and confidence.

    `fuse` gives the features of the context; the forward is `forward_block`.

    Attributes:
        layer_class: of its layers.
    """

    config: DsparkConfig
    layer_class: ClassVar[Callable[[Any], DsparkLayer]] = DsparkLayer
    stored_names: ClassVar[Mapping[str, str]] = {
        "bigram_head.table": "markov_head.markov_w1",
        "bigram_head.vocab_proj": "markov_head.markov_w2",
        "confidence_head": "confidence_head.proj",
    }

    def __init__(self, config: DsparkConfig, has_table: bool = False) -> None:
        """
        Args:
            config: with `hidden_state_layers`; `draft_vocab_size` for an LM head of its own.
            has_table: see `BigramHead`.

        Raises:
            ValueError: no hidden states, or a confidence head without a bigram head.
        """
        super().__init__(config)
        if not config.hidden_state_layers:
            raise ValueError("a DSpark head needs hidden_state_layers, the hidden states that it reads; got none.")
        if config.confidence_head and not config.markov_rank:
            raise ValueError("confidence_head needs a markov_rank of at least 1; got 0.")
        hidden, num_states = config.hidden_size, len(config.hidden_state_layers)
        self.mixture = nn.Parameter(torch.full((num_states,), 1 / num_states)) if config.layer_mixture else None
        self.fc = nn.Linear(hidden if config.layer_mixture else num_states * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        build: Callable[[Any], DsparkLayer] = type(self).layer_class
        self.layers = nn.ModuleList(build(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(0.02 * torch.randn(hidden))
        own_size = config.draft_vocab_size
        self.lm_head = nn.Linear(hidden, own_size, bias=False) if own_size else None
        rank = config.markov_rank
        self.bigram_head = BigramHead(config, own_size or config.vocab_size, has_table) if rank else None
        self.confidence_head = nn.Linear(hidden + rank, 1) if config.confidence_head else None

    def hidden_state_indices(self, num_layers: int) -> tuple[int, ...]:
        return self.config.hidden_state_layers

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] features of the context from hidden states [..., S * D]; embeddings are not read."""
        if self.mixture is not None:
            parts = hidden_states.unflatten(-1, (len(self.mixture), -1))
            hidden_states = (parts * self.mixture.to(parts.dtype)[:, None]).sum(-2)
        features: Tensor = self.hidden_norm(self.fc(hidden_states))
        return features

    def context_keys_values(self, features: Tensor, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, H', n, d] of the context in every layer, from `fuse`'s features [B, n, D]."""
        layers = (layer for layer in self.layers if isinstance(layer, DsparkLayer))
        return [layer.context_keys_values(features, cos, sin) for layer in layers]

    def block_inputs(self, anchor_embeds: Tensor, block_size: int) -> Tensor:
        """[..., k, D] inputs of blocks that begin with tokens of embeddings [..., D]."""
        masks = self.mask_embedding.to(anchor_embeds.dtype).expand(*anchor_embeds.shape[:-1], block_size - 1, -1)
        return torch.cat((anchor_embeds[..., None, :], masks), dim=-2)

    def forward_block(self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: Sequence[AttentionFn]) -> Tensor:
        """[B, n, D] features of the positions of one or more blocks, after the norm, from `block_inputs`.

        Args:
            inputs: [B, n, D].
            cos: [B or 1, 1, n, d].
            sin: as `cos`.
            attend: attention of each layer, over the context and the block.
        """
        for layer, attention in zip(self.layers, attend, strict=True):
            inputs = layer(inputs, cos, sin, attention)
        features: Tensor = self.norm(inputs)
        return features

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """See `DraftHead`; None with an LM head of its own."""
        return None if self.lm_head is not None else super().draft_lm_head(shared_embeddings, draft_ids)

    def output_scaling(self, shared_embeddings: SharedEmbeddings) -> SharedEmbeddings:
        """With the factor and the cap of this head's logits: the target's, or none with an LM head of its own."""
        own = replace(shared_embeddings, logit_scale=1.0, logit_softcap=None)
        return shared_embeddings if self.lm_head is None else own

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """See `DraftHead`; without the bias of the `BigramHead`."""
        scaling = self.output_scaling(shared_embeddings)
        if self.lm_head is None:
            return super().logits(hidden_states, scaling, draft_lm_head)
        return scaling.scale_logits(self.lm_head(hidden_states))

    def confidence(self, features: Tensor, token_features: Tensor) -> Tensor:
        """[...] logit of the acceptance of a position, from its feature [..., D] and the token before it [..., R]."""
        assert self.confidence_head is not None
        logit: Tensor = self.confidence_head(torch.cat((features, token_features), dim=-1))[..., 0]
        return logit
