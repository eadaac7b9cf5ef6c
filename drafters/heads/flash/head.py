"""FLASH (arXiv 2505.12728), a drafter of k tokens from one forward. It is not FlashAttention and does not use it.

One attention layer over the context, then a feed-forward whose output is k features, one per position; the positions
are predicted independently. Differences from the paper: the features are added to the attention output behind a norm,
and attention is standard causal attention. A `MarkovHead`, which the paper does not have, can make a position's logits
depend on the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.draft_types import BlockWeights, CorrectionWeights, HeadWeights
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.markov import MarkovExpander, MarkovHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import eagle_weights
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleConfig, EagleHead
from mmspec.drafters.training.batch import PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache


@dataclass(frozen=True)
class FlashConfig(EagleConfig):
    """Shape of a `FlashHead`.

    Attributes:
        block_ffn_size: intermediate size of the block's feed-forward.
        markov_rank: rank of the correction by the token before (`MarkovHead`); 0: none.
    """

    block_ffn_size: int = 0
    markov_rank: int = 0


class FlashHead(EagleHead):
    """`fc`, attention, a feed-forward from one output to k features, and the `MarkovHead` if `markov_rank` is not 0."""

    config: FlashConfig

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        if config.block_ffn_size < 1:
            raise ValueError(f"a FLASH head needs block_ffn_size of at least 1; got {config.block_ffn_size}.")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.block_ffn_size, bias=False)
        self.block_proj = nn.Linear(config.block_ffn_size, config.block_size * config.hidden_size, bias=False)
        self.markov_head = MarkovHead(config, config.markov_rank) if config.markov_rank else None

    def block_features(self, outputs: Tensor) -> Tensor:
        """[..., D] outputs -> [..., k, D] features of the next k positions."""
        features = self.block_proj(functional.silu(self.up_proj(self.norm(outputs))))
        return outputs[..., None, :] + features.unflatten(-1, (self.config.block_size, -1))


class FlashDrafter(BlockDrafter):
    """Drafts with a `FlashHead`."""

    head: FlashHead
    c_classes = (FlashHead, DecoderLayer, MarkovHead)
    records_drafts = True

    def block_features(self, state: DraftState) -> Tensor:
        return self.head.block_features(state.last_hidden)

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        markov_head = self.head.markov_head
        return None if markov_head is None else MarkovExpander(self, markov_head, state)

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """See `HeadDrafter`. Without a `MarkovHead` positions are independent, and the tree is no tree of levels."""
        head, markov, layer = self.head, self.head.markov_head, eagle_weights(self.head, state)
        if markov is None or layer is None:
            return None
        vocab_proj = markov.vocab_proj.weight
        block = BlockWeights(norm=head.norm.weight, up=head.up_proj.weight, down=head.block_proj.weight)
        correction = CorrectionWeights(
            feature_norm=markov.norm.weight,
            feature_proj=markov.feature_proj.weight,
            token_norm=markov.token_norm.weight,
            token_proj=markov.token_proj.weight,
            vocab_proj=vocab_proj if state.draft_ids is None else vocab_proj[state.draft_ids],
            first_corrected=1,
        )
        return replace(layer, block=block, correction=correction)


def flash_loss(given: LossInputs) -> LossAndMetrics:
    """Feature i predicts the hidden state i positions further on (FLASH, section 3.3).

    The `MarkovHead` is trained with the target's token before each position.
    """
    head, data = given.draft_model.head, given.aligned()
    packed = PackedQueries(data)
    loss = given.accumulator(data)
    features = head.block_features(RolloutCache(head, packed).forward(data.inputs))
    for slot in range(head.config.block_size):
        mask, logit_bias = packed.loss_mask_at(slot), None
        outputs = features[:, :, slot][mask]
        if slot and head.markov_head is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))[mask]
            logit_bias = head.markov_head(outputs, embeds.to(outputs.dtype), given.draft_model.draft_ids)
        loss.add(slot, outputs, packed.labels(slot, mask), logit_bias, mask=mask)
    return loss.result()
