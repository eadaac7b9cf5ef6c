"""`VisualLayout`: where the visual tokens of a model's prompts stand, and which of them its vision tower attends to.

Read by compressors and drafters only. Subclasses, one file per family, are listed in `mmspec.vision.grids.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid


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
