"""ViSpec (arXiv 2509.15235): every picture shrinks to a few learned tokens and one vector that colours all later text.

The head is EAGLE's with two more parts. Text rows keep their positions; of a picture's rows only the last few stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.eagle.drafter import EagleDrafter, EagleState
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.drafters.eagle.visual_inputs import DraftInputs


class VisualAdaptor(nn.Module):
    """Learned queries over a picture's projected embeddings: [M, D] in, [Q, D] out. No positions, no norm."""

    def __init__(self, config: HeadConfig, num_queries: int) -> None:
        super().__init__()
        heads, size = config.num_attention_heads, config.head_dim
        self.q = nn.Parameter(torch.randn(num_queries, heads, size) * size**-0.5)
        self.k_proj = nn.Linear(config.hidden_size, heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def forward(self, picture: Tensor) -> Tensor:
        """[M, D] -> [Q, D]."""
        heads, size = self.q.shape[1:]
        keys, values = (part(picture).view(-1, heads, size).transpose(0, 1) for part in (self.k_proj, self.v_proj))
        seen = functional.scaled_dot_product_attention(self.q.transpose(0, 1)[None], keys[None], values[None])[0]
        out: Tensor = self.o_proj(seen.transpose(0, 1).flatten(1))
        return out


class VispecHead(EagleHead):
    """EAGLE's head with the adaptor, and a layer that mixes the picture's vector into the state."""

    compresses_visual_tokens = True
    """No compressor goes with it (`mmspec.config`)."""

    def __init__(self, config: HeadConfig, num_queries: int) -> None:
        super().__init__(config)
        self.imadpt = VisualAdaptor(config, num_queries)
        self.img_fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)


class VispecDrafter(EagleDrafter):
    """Drafts with a `VispecHead`. A row's current picture vector is in `State.more`."""

    head: VispecHead

    def __init__(self, head: VispecHead, *, num_layers: int, name: str = "vispec", **more: Any) -> None:
        super().__init__(head, "coupled", num_layers=num_layers, name=name, **{"depth": 4, **more})

    def fuse(self, state: EagleState, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Text rows see the last picture before them."""
        assert state.extra is not None
        return self._mixed(inputs_embeds, hidden_states, state.extra[:, None].expand(hidden_states.shape))

    def _mixed(self, embeddings: Tensor, states: Tensor, picture: Tensor) -> Tensor:
        return self.head.fuse(embeddings, self.head.img_fc(torch.cat((states, picture), dim=-1)))

    def prompt_inputs(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """Picture by picture: the few tokens go to the picture's last places, its vector to the text behind it."""
        following, visual = inputs.next_embeds, inputs.visual_mask.tolist()
        batch, _, hidden = following.shape
        keep = ~inputs.visual_mask
        rows, pictures = following.clone(), torch.zeros_like(following)
        state.extra = following.new_zeros(batch, hidden)
        for row in range(batch):
            for start, end in _runs(visual[row]):
                shrunk = self.head.imadpt(following[row, start:end])
                few = min(len(shrunk) - 1, end - start)
                if few:
                    rows[row, end - few : end] = shrunk[:few]
                    keep[row, end - few : end] = True
                pictures[row, end:] = shrunk[-1]
                state.extra[row] = shrunk[-1]
        mixed = self._mixed(following, inputs.hidden_states, pictures)
        return torch.where(inputs.visual_mask[..., None], rows, mixed), keep


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of every unbroken run of True."""
    found, start = [], None
    for place, on in enumerate([*flags, False]):
        if on and start is None:
            start = place
        elif not on and start is not None:
            found.append((start, place))
            start = None
    return found


def build_vispec_head(config: HeadConfig, weights: Mapping[str, Tensor]) -> tuple[VispecHead, dict[str, Tensor]]:
    """A head of the right shape, and the weights of EAGLE's part of it."""
    queries = weights["imadpt.q"]
    if queries.dim() != 3 or queries.shape[1:] != (config.num_attention_heads, config.head_dim):
        raise ValueError(
            f"imadpt.q must be [queries, {config.num_attention_heads}, {config.head_dim}]; got {list(queries.shape)}."
        )
    plain = {name: value for name, value in weights.items() if not name.startswith(("imadpt.", "img_fc."))}
    with torch.device("meta"):
        return VispecHead(config, queries.shape[0]), plain


__all__ = ["Adaptor", "VispecDrafter", "VispecHead", "build_vispec_head"]
