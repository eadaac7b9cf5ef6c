"""The network of DFlash 2 (NeMo Automodel, vLLM): a DFlash head with two further parts, and drafts with it.

Before and after the attention and the MLP of each layer, a position of the block is mixed with the one before it
(`TwoTaps`). A selector then scores pairs of neighbouring tokens among the likeliest of each position
(`CandidateSelector`). Engines walk one path through these scores; here they grow a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.layers import LayerWeights
from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.heads.base.head import AttentionFn
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter, anchors_of
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead, DsparkLayer
from mmspec.drafters.heads.dspark.loss import BlockBatch
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs
from mmspec.interfaces import SharedEmbeddings


@dataclass(frozen=True)
class ConvConfig(DsparkConfig):
    """Shape of a head whose layers are `Dflash2Layer`.

    Attributes:
        conv_kernel_size: taps of the convolutions: a position of the block and those before it.
        conv_group_size: numbers that share what is added to a tap.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size must divide hidden_size {self.hidden_size}; got {self.conv_group_size}.")


@dataclass(frozen=True)
class Dflash2Config(ConvConfig):
    """Shape of a `Dflash2Head`.

    Attributes:
        selector_rank: R, size of the vectors whose products score a pair of tokens.
        selector_top_k: C, candidates of each position.
        output_multiplier: factor of the products of the LM head.
        final_logit_softcapping: c of `c * tanh(logits / c)`; 0 for none.
    """

    selector_rank: int = 256
    selector_top_k: int = 16
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0


class TwoTaps(nn.Module):
    """Mixes each position of a block with those before it in the block, by weights that depend on the position."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.num_taps, self.num_groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.block_positions = config.block_positions
        self.base_kernel = nn.Parameter(torch.zeros(2, self.num_taps, config.hidden_size))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * self.num_groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, n, D] the sublayer of the mixed inputs, mixed again; n positions are one block or several whole ones."""
        changes = self.kernel_projection(inputs).unflatten(-1, (2, self.num_taps, self.num_groups))
        outputs = sublayer(self._mix(inputs, changes[..., 0, :, :], self.base_kernel[0]))
        return self._mix(outputs, changes[..., 1, :, :], self.base_kernel[1])

    def _mix(self, inputs: Tensor, changes: Tensor, kernel: Tensor) -> Tensor:
        """[B, n, D] of [B, n, D], changes of the taps [B, n, K, G] and the taps [K, D]."""
        batch, n, hidden = inputs.shape
        k = self.block_positions if n % self.block_positions == 0 else n
        blocks = inputs.view(batch, -1, k, self.num_groups, hidden // self.num_groups)
        kernel = kernel.to(inputs.dtype).unflatten(-1, blocks.shape[-2:])
        taps = kernel + changes.unflatten(1, blocks.shape[1:3])[..., None]
        mixed = taps[..., 0, :, :] * blocks
        for tap in range(1, min(self.num_taps, k)):
            before = functional.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            mixed = mixed + taps[..., tap, :, :] * before
        return mixed.view(batch, n, hidden)


class Dflash2Layer(DsparkLayer):
    """A layer of DFlash with `TwoTaps` around its attention and its MLP."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = TwoTaps(config), TwoTaps(config)

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        normed = self.input_norm(inputs)
        inputs = inputs + self.attention_conv.around(normed, lambda mixed: self.attention(mixed, cos, sin, attend))
        return inputs + self.mlp_conv.around(self.post_norm(inputs), self.mlp)

    def c_weights(self) -> LayerWeights:
        return replace(
            super().c_weights(),
            attention_changes=self.attention_conv.kernel_projection.weight,
            attention_taps=self.attention_conv.base_kernel,
            mlp_changes=self.mlp_conv.kernel_projection.weight,
            mlp_taps=self.mlp_conv.base_kernel,
        )


class CandidateSelector(nn.Module):
    """Scores of pairs: a low-rank product of the vectors of two tokens, weighted by the feature of the position."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__()
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.top_k = config.selector_top_k

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best logits of [..., V], and their indices, each [..., C]."""
        values, indices = logits.topk(min(self.top_k, logits.shape[-1]))
        return values, indices

    def rows(self, ids: Tensor) -> Tensor:
        """[..., R] rows of `predecessor_codebook` of target ids [...]."""
        return functional.embedding(ids, self.predecessor_codebook)

    def forward(self, gates: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """[..., P, C] scores to add to the candidates' logits behind each of P tokens.

        Args:
            gates: [..., R] `hidden_projection` of the position's feature.
            predecessors: [..., P, R] rows of `predecessor_codebook` of the tokens before it.
            candidates: [..., C] int64 target ids.
        """
        successors = functional.embedding(candidates, self.successor_codebook)
        return (gates[..., None, :] * predecessors) @ successors.transpose(-1, -2)


class Dflash2Head(DsparkHead):
    """DFlash's network with convolutions and a selector."""

    config: Dflash2Config
    layer_class: ClassVar[Callable[[Dflash2Config], DsparkLayer]] = Dflash2Layer
    stored_names: ClassVar[Mapping[str, str]] = {**DsparkHead.stored_names, "selector": "candidate_selector"}

    def __init__(self, config: Dflash2Config, has_table: bool = False) -> None:
        super().__init__(config, has_table)
        self.selector = CandidateSelector(config)

    def output_scaling(self, shared_embeddings: SharedEmbeddings) -> SharedEmbeddings:
        """See `DsparkHead`; the factor and the cap of its own config, not the target's."""
        cap = self.config.final_logit_softcapping or None
        return replace(shared_embeddings, logit_scale=self.config.output_multiplier, logit_softcap=cap)


class Dflash2Drafter(DsparkDrafter):
    """Drafts a block as `DsparkDrafter` does; a tree over the scores of pairs."""

    head: Dflash2Head
    c_classes = (Dflash2Head, nn.ModuleList, Dflash2Layer, TwoTaps, CandidateSelector)
    records_drafts = True

    def expander(self, state: DraftState, top_k: int) -> PairExpander:
        """See `BlockDrafter`; tokens that are no candidates have no probability, as in the head's own code."""
        selector, (features, logits) = self.head.selector, self.block(state)
        scores, candidates = selector.candidates(logits + state.logit_bias)
        ids = state.target_ids(candidates)
        first = selector.rows(anchors_of(state))[:, None, None].expand(-1, 1, ids.shape[-1], -1)
        before = torch.cat((first, selector.rows(ids[:, :-1])), dim=1)  # [B, k, C, R]
        pairs = selector(selector.hidden_projection(features), before.to(features.dtype), ids)
        return PairExpander(state, candidates, scores[:, :, None] + pairs.float())


def dflash2_loss(given: LossInputs) -> LossAndMetrics:
    """That of DFlash, and of the scores of candidates behind the target's own token, as NeMo Automodel trains it.

    With the target's distribution for the label: every position over the whole vocabulary, and over its candidates
    alone where the target's likeliest token is among them; both have the same weight. Results as those of
    `dspark_loss`, without a loss on the hidden states.
    """
    head, blocks = given.draft_model.head, BlockBatch.sample(given)
    selector, vocab_size, data = head.selector, head.config.vocab_size, blocks.packed.data
    draft_ids = given.draft_model.draft_ids
    loss = given.accumulator(data, has_own_lm_head=True)
    for slot, mask, outputs, labels in blocks.slots():
        gates, tokens = selector.hidden_projection(outputs), blocks.at(data.next_ids, slot, mask)
        before = selector.rows(tokens[:, None])

        def choose(logits: Tensor, gates: Tensor = gates, before: Tensor = before) -> tuple[Tensor, Tensor]:
            scores, candidates = selector.candidates(logits[:, :vocab_size])
            ids = candidates if draft_ids is None else draft_ids[candidates]
            return candidates, scores + selector(gates, before, ids)[:, 0].float()

        loss.add(slot, outputs, labels, mask=mask, choose=choose)
    return loss.result()
