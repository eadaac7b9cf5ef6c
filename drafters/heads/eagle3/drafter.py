"""Drafts with an `Eagle3Head`, by EAGLE-2's trees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.c_draft import own_lm_head, shared_weights
from mmspec.drafters.heads.base.expand import AutoregressiveExpander
from mmspec.drafters.heads.base.reader import CosSin
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head, Eagle3Layer, LayeredAttention
from mmspec.engine.gather import gather_rows


class Eagle3Expander(AutoregressiveExpander):
    """Levels of nodes: a window counts from each level's position."""

    def attention(self, level: int, mask: Tensor) -> CachedAttention:
        config = self.drafter.head.config
        if not isinstance(config, Eagle3Config) or not config.is_layered:
            return super().attention(level, mask)
        num_nodes, num_context = self.self_mask.shape[1], self.context_mask.shape[-1]
        device = mask.device
        context = self.lengths[:, None] + (level - 1) - torch.arange(num_context, device=device)
        nodes = torch.arange(level - 1, -1, -1, device=device).repeat_interleave(num_nodes)
        distances = torch.cat((context, nodes.expand(len(context), -1)), dim=1)[:, None]
        cache = self.state.kv_cache
        return LayeredAttention(cache, mask, windows=config.sliding_windows, distances=distances)


class Eagle3Drafter(EagleDrafter):
    """Drafts with an `Eagle3Head`, level by level."""

    head: Eagle3Head
    c_classes = (Eagle3Head, Eagle3Layer, nn.ModuleList)

    def expander(self, state: DraftState, top_k: int) -> Eagle3Expander:
        return Eagle3Expander(self, state, top_k)

    def run_rows(
        self, state: DraftState, inputs: Tensor, rotary: CosSin, attend: CachedAttention, query_index: Tensor | None
    ) -> Tensor:
        """See `HeadReader`; layers above the first need all outputs of those below."""
        if not self.head.config.is_layered:
            return super().run_rows(state, inputs, rotary, attend, query_index)
        attend = committed_attention(self.head.config, attend, inputs.shape[1], inputs.device)
        outputs: Tensor = self.head(inputs, *rotary, attend)
        return outputs if query_index is None else gather_rows(outputs, query_index)

    @property
    def label(self) -> str:
        """The name in `Stats.drafter`, with the visual mode, in which trainers and engines differ."""
        return f"{self.name} ({self.visual_mode})"

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """See `HeadDrafter`; nor of a head that reads one hidden state only, which its `fuse` does not project."""
        head, config = self.head, self.head.config
        others = (config.qk_norm, config.norm_before_fc, config.fc_norm, config.norm_output, config.target_hidden_size)
        if any(others) or config.is_layered or head.fc.in_features == config.hidden_size:
            return None
        ends = shared_weights(state) | own_lm_head(head.lm_head.weight)
        return HeadWeights(
            head.fc.weight,
            None,
            [head.layer.c_weights()],
            hidden_norm=head.layer.hidden_norm.weight,
            final_norm=head.norm.weight,
            adds_normed_state=config.norm_before_residual,
            **ends,
        )


def committed_attention(config: Eagle3Config, attend: CachedAttention, n: int, device: torch.device) -> CachedAttention:
    """Attention of n positions behind the committed ones of each row, in every layer to all before them."""
    kv_cache = attend.kv_cache
    queries = kv_cache.lengths_on(device)[:, None] + torch.arange(n, device=device)
    distances = queries[..., None] - torch.arange(kv_cache.kv_len, device=device)
    return LayeredAttention(kv_cache, (distances >= 0)[:, None], windows=config.sliding_windows, distances=distances)
