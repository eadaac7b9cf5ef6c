"""Idefics 3 and SmolVLM: each tile behind its position, as text, then the downscaled whole image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout
from mmspec.vision.grids.tiles import tile_grids, tokens_per_side


class Idefics3Layout(VisualLayout):
    """`Idefics3ForConditionalGeneration`.

    The processor lays an image out as `<fake><row_1_col_1>` and its tile, and so on, a line break after each row of
    tiles, and `<fake><global-img>`, the whole image and `<fake>` at the end. The model's config has none of these ids,
    and some tokenizers split the tags. But a whole image is the last of each row of the batch.
    """

    model_types: tuple[str, ...] = ("idefics3",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """A grid per tile and whole image; a frame of a video is an image. Empty if the layout is another."""
        config = self.model.config
        size = tokens_per_side(config.vision_config, config.scale_factor)
        rows: dict[int, list[int]] = {}
        for row, start, length in self.placeholder_runs(input_ids, config.image_token_id):
            if length != size[0] * size[1]:
                return ()
            rows.setdefault(row, []).append(start)
        ids = input_ids.tolist()
        tags = {row: _tags(ids[row], starts, size[0] * size[1]) for row, starts in rows.items()}
        whole_image = {row_tags[-1] for row_tags in tags.values()}
        if len(whole_image) != 1 or None in whole_image:
            return ()
        grids: list[VisualGrid] = []
        media_index = 0
        for row, starts in rows.items():
            image: list[int] = []
            for start, tag in zip(starts, tags[row], strict=True):
                image.append(start)
                if tag in whole_image:
                    grids += tile_grids(row, image, size, media_index)
                    media_index, image = media_index + 1, []
        return tuple(grids)


class SmolVLMLayout(Idefics3Layout):
    """`SmolVLMForConditionalGeneration`. A video is a sequence of whole images with time stamps in between."""

    model_types: tuple[str, ...] = ("smolvlm",)


def _tags(ids: list[int], starts: Sequence[int], length: int) -> list[tuple[int, ...] | None]:
    """Ids between `<fake>`, which also ends the row's last image, and each run of placeholders; None without it.

    Args:
        ids: a row of the prompt.
        starts: first index of each run of placeholders.
        length: number of placeholders of each run.
    """
    fake = ids[starts[-1] + length : starts[-1] + length + 1]
    tags: list[tuple[int, ...] | None] = []
    previous_end = 0
    for start in starts:
        before = ids[previous_end:start]
        index = max((index for index, token in enumerate(before) if [token] == fake), default=None)
        tags.append(None if index is None else tuple(before[index + 1 :]))
        previous_end = start + length
    return tags
