"""Mistral 3 (Pixtral): images of any size, a text token after each line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout


class Mistral3Layout(VisualLayout):
    """`Mistral3ForConditionalGeneration`.

    [IMG_BREAK] follows each line of an image but the last, [IMG_END] the last. They are text tokens for the model.
    """

    model_types: tuple[str, ...] = ("mistral3",)
    vision_args: tuple[str, ...] = ("image_sizes",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One grid per image, with a gap after each line; empty if sizes are missing or do not match."""
        config = self.model.config
        patch = config.vision_config.patch_size * config.spatial_merge_size
        image_sizes = vision.get("image_sizes")
        if image_sizes is None:
            return ()
        lines = self.placeholder_runs(input_ids, config.image_token_id)
        grids: list[VisualGrid] = []
        first = 0
        for media_index, (height, width) in enumerate((int(h) // patch, int(w) // patch) for h, w in image_sizes):
            own = lines[first : first + height]
            if not own:
                return ()
            row, start, _ = own[0]
            if own != [(row, start + line * (width + 1), width) for line in range(height)]:
                return ()
            grids.append(VisualGrid(row, start, height, width, media_index, line_gap=1 if height > 1 else 0))
            first += height
        return tuple(grids) if first == len(lines) else ()
