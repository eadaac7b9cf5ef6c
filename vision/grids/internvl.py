"""InternVL: square tiles without separators, then the downscaled whole image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout
from mmspec.vision.grids.tiles import tile_grids, tokens_per_side


class InternVLLayout(VisualLayout):
    """`InternVLForConditionalGeneration`. Each image is a run of placeholders, and so is each frame of a video."""

    model_types: tuple[str, ...] = ("internvl",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """A grid per tile; the last one of an image is the whole image. Empty if a run is no multiple of a tile."""
        config = self.model.config
        size = tokens_per_side(config.vision_config, 1 / config.downsample_ratio)
        tile = size[0] * size[1]
        grids: list[VisualGrid] = []
        for media_index, (row, start, length) in enumerate(self.placeholder_runs(input_ids, config.image_token_id)):
            if not tile or length % tile:
                return ()
            grids += tile_grids(row, list(range(start, start + length, tile)), size, media_index)
        return tuple(grids)
