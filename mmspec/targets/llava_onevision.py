"""LLaVA-OneVision: pictures as in LLaVA-NeXT (several pictures: base grids only), clips as pooled frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from mmspec.interfaces import VisualGrid
from mmspec.targets.llava_next import LlavaNextAdapter, clip_spans, frame_grids


class LlavaOnevisionAdapter(LlavaNextAdapter):
    """`LlavaOnevisionForConditionalGeneration`."""

    model_type = "llava_onevision"
    vision_args = ("image_sizes", "image_sizes_videos", "batch_num_images", "pixel_values_videos")

    packing_config_keys = ("vision_aspect_ratio",)

    def tiles_per_image(self, sizes: Any, vision: Mapping[str, Any]) -> list[int]:
        """One for each of several pictures in a row."""
        tiles, numbers = super().tiles_per_image(sizes, vision), vision.get("batch_num_images")
        if numbers is None:
            return tiles
        alone = [int(number) == 1 for number in numbers for _ in range(int(number))]
        return [count if one else 1 for count, one in zip(tiles, alone, strict=False)]

    def token_saliency(self, shares: Tensor, vision: Mapping[str, Any]) -> Tensor | None:
        """By transformers' own packing and pooling; not of pictures and clips in one call."""
        pixels = vision.get("pixel_values_videos")
        if pixels is None:
            return super().token_saliency(shares, vision)
        if vision.get("image_sizes") is not None:
            return None
        pooled = self.model.model.apply_pooling(shares[..., None]).reshape(len(pixels), -1)
        return functional.pad(pooled, (0, 1)).flatten()  # the newline token behind a clip shows nothing

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of pictures, one grid per frame and a newline token for clips."""
        found, config = self.image_grids(input_ids, vision), self.model.config
        base = config.vision_config.image_size // config.vision_config.patch_size
        side = -(-base // 2)
        pixels, runs = vision.get("pixel_values_videos"), self.placeholder_runs(input_ids, config.video_token_id)
        shown = clip_spans(runs, pixels, side * side, end=1)
        if found is None or shown is None:
            return ()
        first = 1 + max((segment.media_index for segment in found), default=-1)
        for source, (row, start, frames) in enumerate(shown, first):
            found += frame_grids(row, start, frames, side, source)
            found.append(VisualGrid(row, start + frames * side * side, 1, 1, source, role="newline", frame=frames - 1))
        return tuple(found)
