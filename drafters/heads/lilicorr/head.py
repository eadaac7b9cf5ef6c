"""The network of LiLiCorr (arXiv 2608.20530): a DFlash head with a small transformer over its candidates.

Each of the likeliest tokens of each position of a block is embedded, with its log probability and its rank. All of them
attend to each other (`CandidateLattice`). Of each come two vectors of length 1: one meets the candidates of the next
position, one those of the position before; their products score the pairs. In front of the first stands the target's
last position. Its own code walks one path through these scores; here they grow a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dflash2.head import ConvConfig, Dflash2Layer, TwoTaps
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkHead, DsparkLayer
from mmspec.drafters.heads.dspark.loss import BlockBatch
from mmspec.drafters.training.batch import shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs
from mmspec.interfaces import SharedEmbeddings

NUM_NUMBERS = 5
"""Of a candidate: log probability, probability, log probability below the best, rank from 0 to 1, whether the best."""


@dataclass(frozen=True)
class LilicorrConfig(ConvConfig):
    """Shape of a `LilicorrHead`; `conv_kernel_size` 0 for layers of DFlash.

    Attributes:
        candidate_topk: C, candidates of each position.
        lattice_size: E, size of the vectors of candidates.
        lattice_layers: layers over the candidates.
        lattice_heads: of their attention.
        mlp_ratio: size of their MLP as a multiple of E.
        factor_dim: F, size of the vectors whose products score a pair.
        vector_eps: smallest length that they are divided by.
        logit_scale: factor of the products.
    """

    conv_kernel_size: int = 0
    conv_group_size: int = 1
    candidate_topk: int = 8
    lattice_size: int = 256
    lattice_layers: int = 2
    lattice_heads: int = 4
    mlp_ratio: float = 2.0
    factor_dim: int = 64
    vector_eps: float = 1e-6
    logit_scale: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lattice_size % self.lattice_heads:
            raise ValueError(
                f"lilicorr_hidden_size must be a multiple of lilicorr_num_heads; got {self.lattice_size} and "
                f"{self.lattice_heads}."
            )


class FeedForward(nn.Module):
    """Two linear layers with biases."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        outputs: Tensor = self.down_proj(functional.silu(self.up_proj(inputs)))
        return outputs


class LatticeAttention(nn.Module):
    """Attention of all candidates to all; the parameters are those of `nn.MultiheadAttention`."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * size, size) * size**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, inputs: Tensor, bias: Tensor) -> Tensor:
        """[B, S, E] of [B, S, E], with a bias [H, S, S] of the scores."""
        projected = functional.linear(inputs, self.in_proj_weight, self.in_proj_bias)
        queries, keys, values = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, bias.to(inputs.dtype))
        outputs: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return outputs


class LatticeLayer(nn.Module):
    """A layer over the candidates."""

    def __init__(self, config: LilicorrConfig) -> None:
        super().__init__()
        size = config.lattice_size
        self.attn_norm, self.mlp_norm = RMSNorm(size, config.rms_norm_eps), RMSNorm(size, config.rms_norm_eps)
        self.attn = LatticeAttention(size, config.lattice_heads)
        self.mlp = FeedForward(size, int(size * config.mlp_ratio), size)

    def forward(self, inputs: Tensor, bias: Tensor) -> Tensor:
        """[B, S, E] of [B, S, E]; the bias as in `LatticeAttention`."""
        inputs = inputs + self.attn(self.attn_norm(inputs), bias)
        outputs: Tensor = inputs + self.mlp(self.mlp_norm(inputs))
        return outputs


class CandidateLattice(nn.Module):
    """Vectors of the candidates of a block, whose products score pairs of neighbours."""

    def __init__(self, config: LilicorrConfig) -> None:
        super().__init__()
        hidden, size, slots = config.hidden_size, config.lattice_size, config.block_size
        self.eps, self.offset = config.vector_eps, slots
        self.token_proj = nn.Identity() if size == hidden else nn.Linear(hidden, size)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, size), nn.Linear(hidden, size)
        self.feature_norm = nn.LayerNorm(NUM_NUMBERS)
        self.feature_mlp = FeedForward(NUM_NUMBERS, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidate_topk, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.lattice_layers))
        self.output_norm, self.anchor_norm = RMSNorm(size, config.rms_norm_eps), RMSNorm(size, config.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head = nn.Linear(size, config.factor_dim), nn.Linear(size, config.factor_dim)
        self.anchor_out_head = nn.Linear(size, config.factor_dim)

    def forward(
        self, embeds: Tensor, log_probs: Tensor, features: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors of length 1 in front of the first position, behind each candidate, and in front of each.

        Args:
            embeds: [B, k, C, D] embeddings of the candidates, the likeliest of each position first.
            log_probs: [B, k, C] float32 of them.
            features: [B, k, D] of the positions.
            context: [B, D] feature of the target's last position.

        Returns:
            [B, F], [B, k, C, F], [B, k, C, F].
        """
        k, num_candidates = log_probs.shape[1:]
        ranks = torch.arange(num_candidates, device=log_probs.device)
        rank = (ranks / max(1, num_candidates - 1)).expand_as(log_probs)
        best = log_probs.amax(-1, keepdim=True)
        numbers = torch.stack((log_probs, log_probs.exp(), log_probs - best, rank, (ranks == 0).expand_as(rank)), -1)
        states = self.token_proj(embeds) + self.pass_hidden_proj(features)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(numbers.to(states.dtype)))
        states = states + self.slot_embedding[0, :, :k] + self.rank_embedding[0, :, :, :num_candidates]
        slots = torch.arange(k, device=log_probs.device).repeat_interleave(num_candidates)
        distance = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distance + self.offset] + (distance == 0) * self.same_slot_bias[:, None, None]
        states = states.flatten(1, 2)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states).unflatten(1, (k, num_candidates))
        anchor = self.anchor_norm(self.context_proj(context))
        beside = anchor[:, None, None].expand_as(states)
        inner = functional.silu(self.factor_input_proj(torch.cat((states, beside, states * beside), dim=-1)))
        heads = (self.anchor_out_head, anchor), (self.out_head, inner), (self.in_head, inner)
        first, behind, before = (functional.normalize(head(inputs), dim=-1, eps=self.eps) for head, inputs in heads)
        return first, behind, before


def _layer(config: LilicorrConfig) -> DsparkLayer:
    return Dflash2Layer(config) if config.conv_kernel_size else DsparkLayer(config)


class LilicorrHead(DsparkHead):
    """DFlash's network, with or without the convolutions of DFlash 2, and the lattice."""

    config: LilicorrConfig
    layer_class = _layer
    stored_names: ClassVar[Mapping[str, str]] = {**DsparkHead.stored_names, "lattice": "lilicorr"}

    def __init__(self, config: LilicorrConfig, has_table: bool = False) -> None:
        super().__init__(config, has_table)
        self.lattice = CandidateLattice(config)

    def output_scaling(self, shared_embeddings: SharedEmbeddings) -> SharedEmbeddings:
        """See `DsparkHead`; the products of the LM head, without what the target applies to them."""
        return replace(shared_embeddings, logit_scale=1.0, logit_softcap=None)


class LilicorrDrafter(DsparkDrafter):
    """Drafts a block as `DsparkDrafter` does; a tree over the scores of pairs."""

    head: LilicorrHead
    c_classes = (
        *(LilicorrHead, nn.ModuleList, DsparkLayer, Dflash2Layer, TwoTaps, CandidateLattice, LatticeLayer),
        *(LatticeAttention, FeedForward, nn.LayerNorm, nn.Identity),
    )
    records_drafts = True

    def expander(self, state: DraftState, top_k: int) -> PairExpander:
        """See `BlockDrafter`; tokens that are no candidates have no probability."""
        config, (features, logits) = self.head.config, self.block(state)
        total = logits.logsumexp(-1, keepdim=True)  # also of ids that must not be drafted, as in training
        best, candidates = (logits + state.logit_bias).topk(min(config.candidate_topk, logits.shape[-1]))
        ids = state.target_ids(candidates)
        log_probs = logits.gather(-1, candidates) - total
        parts: Any = self.head.lattice(self.embed_ids(state, ids), log_probs, features, state.last_hidden)
        first, behind, before = (part.float() for part in parts)
        first = first[:, None, None].expand(-1, 1, ids.shape[-1], -1)
        scores = torch.cat((first, behind[:, :-1]), dim=1) @ before.transpose(-1, -2)
        allowed = torch.zeros_like(best).masked_fill(best.isneginf(), -torch.inf)
        return PairExpander(state, candidates, config.logit_scale * scores + allowed[:, :, None])


def lilicorr_loss(given: LossInputs) -> LossAndMetrics:
    """That of DFlash, and of the scores of candidates behind the text's own token.

    As Model-Optimizer trains it without its margin and its penalty, and with the target's distribution for the label.
    Behind a token that is no candidate all scores are 0, from which nothing is learned. Results as those of
    `dspark_loss`, without a loss on the hidden states.
    """
    head, blocks = given.draft_model.head, BlockBatch.sample(given)
    config, packed, data = head.config, blocks.packed, blocks.packed.data
    draft_ids = given.draft_model.draft_ids
    features, context = blocks.features.flatten(0, 1), packed.gather(data.inputs).flatten(0, 1)  # [n, k, D], [n, D]
    with torch.no_grad():
        rows = None if draft_ids is None else head.draft_lm_head(given.shared_embeddings, draft_ids)
        logits = head.logits(features, given.shared_embeddings, rows)[..., : config.vocab_size].float()
        log_probs, candidates = logits.log_softmax(-1).topk(min(config.candidate_topk, logits.shape[-1]))
        ids = candidates if draft_ids is None else draft_ids[candidates]
        embeds = given.shared_embeddings.embed(ids).to(features.dtype)
    parts: Any = head.lattice(embeds, log_probs, features, context)
    first, behind, before = (part.float() for part in parts)
    loss = given.accumulator(data, has_own_lm_head=True)
    for slot, mask, outputs, labels in blocks.slots():
        vectors = first
        if slot:
            tokens = packed.gather(shift(data.next_ids, slot)).flatten()
            vectors = ((ids[:, slot - 1] == tokens[:, None]).float()[:, None] @ behind[:, slot - 1])[:, 0]
        scores = config.logit_scale * (before[:, slot] @ vectors[..., None])[..., 0]
        chosen = candidates[:, slot][mask.flatten()], scores[mask.flatten()]

        def choose(logits: Tensor, chosen: tuple[Tensor, Tensor] = chosen) -> tuple[Tensor, Tensor]:
            return chosen

        loss.add(slot, outputs, labels, mask=mask, choose=choose)
    return loss.result()
