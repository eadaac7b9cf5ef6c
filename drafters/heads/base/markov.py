"""Correction of a position's logits by the token before it, shared by the drafters that predict several positions.

Independent predictions of neighbouring positions fit together badly. A bigram model of low rank, added to the logits,
makes a block semi-autoregressive without a further forward of the head or of the LM head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import StatelessExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import HeadConfig, RMSNorm
from mmspec.interfaces import SharedEmbeddings


class MarkovHead(nn.Module):
    """Low-rank correction of a position's logits by the token before it.

    A bigram model of rank R (`markov_rank`) that also depends on the position's feature. The LM head, the largest
    product by far, is not applied again. The correction is zero at initialisation.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feature_proj = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.token_proj = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.vocab_proj = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        nn.init.zeros_(self.vocab_proj.weight)

    def project_features(self, features: Tensor) -> Tensor:
        """[..., D] features -> [..., R]."""
        projected: Tensor = self.feature_proj(self.norm(features))
        return projected

    def mix(self, features: Tensor, inputs_embeds: Tensor) -> Tensor:
        """[..., R] projected features and [..., D] embeddings of the tokens before them -> [..., R]."""
        return functional.silu(features + self.token_proj(self.token_norm(inputs_embeds)))

    def forward(self, features: Tensor, inputs_embeds: Tensor) -> Tensor:
        """[..., D] features and [..., D] embeddings of the tokens before them -> [..., V] added to the logits."""
        logits: Tensor = self.vocab_proj(self.mix(self.project_features(features), inputs_embeds))
        return logits


class BigramHead(nn.Module):
    """`MarkovHead` without the position's feature: the bias depends on the token before alone (DSpark, "vanilla").

    The R numbers of a token come from its embedding, which needs no table of the vocabulary. Those of published heads
    are a table, for which engines ask; `to_table` computes it.
    """

    def __init__(self, config: HeadConfig, vocab_size: int, has_table: bool = False) -> None:
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


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """[..., V] -> [..., size]: an LM head may have more or fewer rows than the config's vocabulary has ids."""
    return functional.pad(logits, (0, size - logits.shape[-1]))  # a negative width crops


class MarkovExpander(StatelessExpander):
    """A `LevelExpander` that applies the LM head once for the whole block, and the `MarkovHead` at each level."""

    def __init__(self, drafter: BlockDrafter, markov_head: MarkovHead, state: DraftState) -> None:
        features = drafter.block_features(state)
        self.state = state
        self.markov_head = markov_head
        self.root_hidden = features[:, :1]
        self.base_logits = drafter.logits(state, features)
        self.features = markov_head.project_features(features)
        ids = state.draft_ids
        self.draft_vocab_proj = None if ids is None else markov_head.vocab_proj.weight[ids]

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, R], which `logits` projects."""
        return self.markov_head.mix(self.features[:, level, None], inputs_embeds)

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        base_logits = self.base_logits[:, level, None]
        if not level:
            return base_logits
        if self.draft_vocab_proj is None:
            correction: Tensor = fit_vocabulary(self.markov_head.vocab_proj(hidden_states), base_logits.shape[-1])
        else:
            correction = functional.linear(hidden_states, self.draft_vocab_proj)
        return base_logits + correction.float()
