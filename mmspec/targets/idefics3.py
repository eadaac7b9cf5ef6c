"""Idefics 3 and SmolVLM: each tile behind a token of its position, then the downscaled whole image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.targets.base import ModelAdapter
from mmspec.targets.tiles import tile_grids, tokens_per_side


class Idefics3Adapter(ModelAdapter):
    """`Idefics3ForConditionalGeneration`.

    The processor lays an image out as `<fake><row_1_col_1>` and its tile, and so on, a line break after each row of
    tiles, and `<fake><global-img>`, the whole image and `<fake>` at the end. The model's config has none of these ids.
    But a row ends with a whole image, so that the token before its last run of placeholders is `<global-img>`.
    """

    model_types: tuple[str, ...] = ("idefics3",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """A grid per tile and whole image; a frame of a video is an image. Empty if the layout is another."""
        config = self.model.config
        size = tokens_per_side(config.vision_config, config.scale_factor)
        rows: dict[int, list[int]] = {}
        for row, start, length in self.placeholder_runs(input_ids, config.image_token_id):
            if length != size[0] * size[1] or not start:
                return ()
            rows.setdefault(row, []).append(start)
        ids = input_ids.tolist()
        if len({ids[row][starts[-1] - 1] for row, starts in rows.items()}) > 1:
            return ()
        grids: list[VisualGrid] = []
        media_index = 0
        for row, starts in rows.items():
            global_marker, image = ids[row][starts[-1] - 1], list[int]()
            for start in starts:
                image.append(start)
                if ids[row][start - 1] == global_marker:
                    grids += tile_grids(row, image, size, media_index, base=-1)
                    media_index, image = media_index + 1, []
        return tuple(grids)


class SmolVLMAdapter(Idefics3Adapter):
    """`SmolVLMForConditionalGeneration`. A video is a sequence of whole images with time stamps in between."""

    model_types: tuple[str, ...] = ("smolvlm",)
