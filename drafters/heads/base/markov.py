"""Correction of a position's logits by the token before it, shared by the drafters that predict several positions.

Independent predictions of neighbouring positions fit together badly. A bigram model of low rank, added to the logits,
makes a block semi-autoregressive without a further forward of the head or of the LM head.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.state import DraftState


class MarkovHead(nn.Module):
    """Low-rank correction of a position's logits by the token before it.

    A bigram model of rank R that also depends on the position's feature. The LM head, the largest
    product by far, is not applied again. The correction is zero at initialisation.
    """

    def __init__(self, config: HeadConfig, rank: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feature_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.token_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.vocab_proj = nn.Linear(rank, config.vocab_size, bias=False)
        nn.init.zeros_(self.vocab_proj.weight)

    def project_features(self, features: Tensor) -> Tensor:
        """[..., D] features -> [..., R]."""
        projected: Tensor = self.feature_proj(self.norm(features))
        return projected

    def mix(self, features: Tensor, inputs_embeds: Tensor) -> Tensor:
        """[..., R] projected features and [..., D] embeddings of the tokens before them -> [..., R]."""
        return functional.silu(features + self.token_proj(self.token_norm(inputs_embeds)))

    def forward(self, features: Tensor, inputs_embeds: Tensor, ids: Tensor | None = None) -> Tensor:
        """[..., D] features and [..., D] embeddings of the tokens before them -> [..., V'] added to the logits of `ids`
        [V'], of all V if None."""
        return project_vocabulary(self.vocab_proj, self.mix(self.project_features(features), inputs_embeds), ids)


def project_vocabulary(vocab_proj: nn.Linear, features: Tensor, ids: Tensor | None) -> Tensor:
    """[..., R] -> [..., V'] by the rows of `ids`, all if None."""
    return functional.linear(features, vocab_proj.weight if ids is None else vocab_proj.weight[ids])


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """[..., V] -> [..., size]: an LM head may have more or fewer rows than the config's vocabulary has ids."""
    return functional.pad(logits, (0, size - logits.shape[-1]))  # a negative width crops


class CorrectionExpander(LevelExpander):
    """A `LevelExpander` that applies the LM head once for the whole block, and corrects each node by those before it.

    Attributes:
        features: [B, k, D] of the block.
    """

    def __init__(
        self, drafter: BlockDrafter, state: DraftState, vocab_proj: Tensor, ids: Tensor | None, first_corrected: int = 0
    ) -> None:
        """
        Args:
            drafter: of the block.
            state: of the call.
            vocab_proj: [V, R] what `mix` is projected by.
            ids: [V'] of its rows, for a draft vocabulary; None for all.
            first_corrected: the first level whose logits are corrected.
        """
        self.state, self.first_corrected = state, first_corrected
        self.features, logits = drafter.block(state)
        self.base_logits = logits + state.logit_bias
        self.rows = vocab_proj if ids is None else vocab_proj[ids]

    def mix(self, level: int, hidden_states: Tensor) -> Tensor:
        """[B, W, R] of the hidden states of nodes; by default they are it."""
        return hidden_states

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        base_logits = self.base_logits[:, level, None]
        if level < self.first_corrected:
            return base_logits.expand(-1, hidden_states.shape[1], -1)
        correction = functional.linear(self.mix(level, hidden_states), self.rows)
        return base_logits + fit_vocabulary(correction, base_logits.shape[-1]).float()


class MarkovExpander(CorrectionExpander):
    """Corrects by a `MarkovHead`, but for the first position."""

    def __init__(self, drafter: BlockDrafter, markov_head: MarkovHead, state: DraftState) -> None:
        super().__init__(drafter, state, markov_head.vocab_proj.weight, state.draft_ids, first_corrected=1)
        self.markov_head = markov_head
        self.root_hidden = self.features[:, :1]
        self.projected = markov_head.project_features(self.features)

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, R]."""
        return self.markov_head.mix(self.projected[:, level, None], inputs_embeds)
