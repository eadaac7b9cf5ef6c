"""ViSpec (arXiv 2509.15235): each image is compressed to a few learned tokens and one vector added to all later text.

The head is EAGLE's with two more modules. Text keeps its position ids; of an image's positions only the last
few remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.checkpoints.state_dict import read_head
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.base.visual_inputs import DraftInputs
from mmspec.drafters.heads.eagle.checkpoint import read_eagle
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.interfaces import TargetInfo


@dataclass(frozen=True)
class VispecConfig(EagleConfig):
    """Shape of a `VispecHead`.

    Attributes:
        num_queries: Q, learned queries of the visual adaptor.
    """

    num_queries: int = 2


class VisualAdaptor(nn.Module):
    """Cross-attention of Q learned queries over an image's projected embeddings, without positions or norm."""

    def __init__(self, config: VispecConfig) -> None:
        super().__init__()
        num_heads, size = config.num_attention_heads, config.head_dim
        self.q = nn.Parameter(torch.randn(config.num_queries, num_heads, size) * size**-0.5)
        self.k_proj = nn.Linear(config.hidden_size, num_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, num_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_heads * size, config.hidden_size, bias=False)

    def forward(self, image_embeds: Tensor) -> Tensor:
        """[M, D] -> [Q, D]."""
        num_heads, size = self.q.shape[1:]
        keys, values = (
            proj(image_embeds).view(-1, num_heads, size).transpose(0, 1) for proj in (self.k_proj, self.v_proj)
        )
        queries = self.q.transpose(0, 1)
        outputs = functional.scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
        projected: Tensor = self.o_proj(outputs.transpose(0, 1).flatten(1))
        return projected


class VispecHead(EagleHead):
    """EAGLE's head with the visual adaptor, and a layer that mixes an image's vector into the hidden state."""

    config: VispecConfig
    compresses_visual_tokens = True

    def __init__(self, config: VispecConfig) -> None:
        super().__init__(config)
        self.imadpt = VisualAdaptor(config)
        self.img_fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)


class VispecDrafter(EagleDrafter):
    """Drafts with a `VispecHead`. `DraftState.carry` is [B, D], the vector of each row's last image (zeros: none)."""

    head: VispecHead

    def __init__(self, head: VispecHead, *, num_layers: int, name: str = "vispec", **options: Any) -> None:
        """
        Args:
            head: the draft head.
            num_layers: decoder layers of the target.
            name: of the drafter.
            **options: further arguments of `HeadDrafter`; `max_depth` is 4 by default.
        """
        super().__init__(head, "coupled", num_layers=num_layers, name=name, **{"max_depth": 4, **options})

    def fuse(self, state: DraftState, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Inputs of text, mixed with the vector of the last image before it."""
        assert state.carry is not None
        return self._fuse_mixed(inputs_embeds, hidden_states, state.carry[:, None].expand(hidden_states.shape))

    def _fuse_mixed(self, inputs_embeds: Tensor, hidden_states: Tensor, image_vectors: Tensor) -> Tensor:
        mixed = self.head.img_fc(torch.cat((hidden_states, image_vectors), dim=-1))
        return self.head.fuse(inputs_embeds, mixed)

    def prompt_inputs(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """Compressed tokens replace the last positions of each image; its vector is mixed into the text after it."""
        next_embeds, visual_mask = inputs.next_embeds, inputs.visual_mask.tolist()
        batch, _, hidden = next_embeds.shape
        keep = ~inputs.visual_mask
        layer_inputs, image_vectors = next_embeds.clone(), torch.zeros_like(next_embeds)
        state.carry = next_embeds.new_zeros(batch, hidden)
        for row in range(batch):
            for start, end in _true_runs(visual_mask[row]):
                compressed = self.head.imadpt(next_embeds[row, start:end])
                num_kept = min(len(compressed) - 1, end - start)
                if num_kept:
                    layer_inputs[row, end - num_kept : end] = compressed[:num_kept]
                    keep[row, end - num_kept : end] = True
                image_vectors[row, end:] = compressed[-1]
                state.carry[row] = compressed[-1]
        mixed = self._fuse_mixed(next_embeds, inputs.hidden_states, image_vectors)
        return torch.where(inputs.visual_mask[..., None], layer_inputs, mixed), keep


def _true_runs(flags: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of every run of True."""
    runs, start = [], None
    for index, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            runs.append((start, index))
            start = None
    return runs


PARTS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
AUTOMODEL_NAMES = {
    "img_adaptor.query": "imadpt.q",
    **{f"img_adaptor.{part}": f"imadpt.{part}" for part in ("o_proj.weight", *PARTS)},
}
"""Name in NeMo Automodel's layout -> in that of the authors."""


def load_vispec(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str
) -> VispecDrafter:
    """The drafter of a head in the layout of its authors; arguments and errors as `HeadMethod.load_published`."""
    weights = {AUTOMODEL_NAMES.get(name, name): value for name, value in weights.items()}
    shape, weights, vocab_limit = read_eagle(values, weights, target)
    queries = weights["imadpt.q"]
    if queries.dim() != 3 or queries.shape[1:] != (shape.num_attention_heads, shape.head_dim):
        raise ValueError(
            f"imadpt.q must be [queries, {shape.num_attention_heads}, {shape.head_dim}]; got {list(queries.shape)}."
        )
    config = VispecConfig.of(shape, num_queries=queries.shape[0])
    head = read_head(lambda: VispecHead(config), weights)
    return VispecDrafter(head, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)
