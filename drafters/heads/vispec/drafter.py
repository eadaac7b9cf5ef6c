"""ViSpec (arXiv 2509.15235): each image is compressed to a few learned tokens and one vector added to all later text.

The head is EAGLE's with two more modules. Text keeps its position ids; of an image's positions only the last
few remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.base.visual_inputs import DraftInputs
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.vispec.head import VispecHead


@dataclass
class VispecState(DraftState):
    """State of one call.

    Attributes:
        image_vectors: [B, D] vector of each row's last image (zeros: none), added to the text after it.
    """

    kept: ClassVar[tuple[str, ...]] = ("last_hidden", "image_vectors")
    image_vectors: Tensor | None = None


class VispecDrafter(EagleDrafter):
    """Drafts with a `VispecHead`."""

    head: VispecHead
    state_class = VispecState

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
        assert isinstance(state, VispecState) and state.image_vectors is not None
        return self._fuse_mixed(inputs_embeds, hidden_states, state.image_vectors[:, None].expand(hidden_states.shape))

    def _fuse_mixed(self, inputs_embeds: Tensor, hidden_states: Tensor, image_vectors: Tensor) -> Tensor:
        mixed = self.head.img_fc(torch.cat((hidden_states, image_vectors), dim=-1))
        return self.head.fuse(inputs_embeds, mixed)

    def prompt_inputs(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """Compressed tokens replace the last positions of each image; its vector is mixed into the text after it."""
        next_embeds, visual_mask = inputs.next_embeds, inputs.visual_mask.tolist()
        batch, _, hidden = next_embeds.shape
        keep = ~inputs.visual_mask
        layer_inputs, image_vectors = next_embeds.clone(), torch.zeros_like(next_embeds)
        assert isinstance(state, VispecState)
        state.image_vectors = next_embeds.new_zeros(batch, hidden)
        for row in range(batch):
            for start, end in _true_runs(visual_mask[row]):
                compressed = self.head.imadpt(next_embeds[row, start:end])
                num_kept = min(len(compressed) - 1, end - start)
                if num_kept:
                    layer_inputs[row, end - num_kept : end] = compressed[:num_kept]
                    keep[row, end - num_kept : end] = True
                image_vectors[row, end:] = compressed[-1]
                state.image_vectors[row] = compressed[-1]
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
