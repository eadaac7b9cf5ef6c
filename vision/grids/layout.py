"""`VisualLayout`: where the visual tokens of a model's prompts stand, and which of them its vision tower attends to.

Read by compressors and drafters only. Subclasses, one file per family, are listed in `mmspec.vision.grids.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.attention import AttentionCapture


class VisualLayout:
    """The layout of one model; this class knows no grids. Without per-call state.

    Attributes:
        model_types: values of `config.model_type` that the class serves; this one serves all others.
        vision_args: arguments of `generate` that describe visual inputs; transformers does not pass them to the
            decoding loop.
        model: the transformers model.
    """

    model_types: tuple[str, ...] = ()
    vision_args: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        self.model = model

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """The grids that the visual tokens of a prompt form; empty if they cannot be derived.

        Args:
            input_ids: [B, L].
            vision: {name: value} of the `vision_args` that were passed to `generate`.
        """
        return ()

    @property
    def has_grids(self) -> bool:
        """Whether the grids of this family's visual tokens can be derived."""
        return type(self).grids is not VisualLayout.grids

    def attention_capture(self) -> AttentionCapture | None:
        """A capture of the vision tower's attention; None where it cannot be assigned to visual tokens."""
        return None

    def token_saliency(self, shares: Tensor, vision: Mapping[str, Any]) -> Tensor | None:
        """[M] saliency of the visual tokens of all rows, in prompt order; None if the numbers do not match.

        Args:
            shares: [P, N] attention shares of the N patches of each of P images or tiles, as the tower encodes them.
            vision: see `grids`.
        """
        return shares.flatten()

    def visual_saliency(
        self, capture: AttentionCapture | None, visual_mask: Tensor, vision: Mapping[str, Any]
    ) -> Tensor | None:
        """[B, L] float32, saliency of each visual token, 0 elsewhere; None if it cannot be computed.

        Args:
            capture: the capture that was active while the images were encoded, or None.
            visual_mask: [B, L] bool.
            vision: see `grids`.
        """
        shares = None if capture is None else capture.scores()
        saliency = None if shares is None else self.token_saliency(shares, vision)
        if saliency is None or len(saliency) != int(visual_mask.sum()):  # synchronises, once per prompt
            return None
        saliency = saliency.to(visual_mask.device)
        return saliency.new_zeros(visual_mask.shape).masked_scatter_(visual_mask, saliency)

    def placeholder_runs(self, input_ids: Tensor, token: int) -> list[tuple[int, int, int]]:
        """(row, start, length) of each contiguous run of a placeholder token, in prompt order."""
        runs: list[tuple[int, int, int]] = []
        for row, ids in enumerate(input_ids.tolist()):
            start = None
            for index, value in enumerate([*ids, None]):
                if value == token and start is None:
                    start = index
                elif value != token and start is not None:
                    runs.append((row, start, index - start))
                    start = None
        return runs
