"""LLaVA-NeXT-Video: pictures as in LLaVA-NeXT, clips as one pooled grid per frame with nothing in between."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor
from torch.nn import functional

from mmspec.interfaces import VisualGrid
from mmspec.targets.llava_next import LlavaNextAdapter, clip_spans, frame_grids


class LlavaNextVideoAdapter(LlavaNextAdapter):
    """`LlavaNextVideoForConditionalGeneration`. All clips of a call have the same number of frames."""

    model_type = "llava_next_video"
    vision_args = ("image_sizes", "pixel_values_videos")

    def token_saliency(self, shares: Tensor, vision: Mapping[str, Any]) -> Tensor | None:
        """Of pictures as in LLaVA-NeXT; of clips the mean of the patches a token was pooled from; not of both."""
        if vision.get("pixel_values_videos") is None:
            return super().token_saliency(shares, vision)
        if vision.get("image_sizes") is not None:
            return None
        edge = isqrt(shares.shape[1])
        stride = self.model.config.spatial_pool_stride
        return functional.avg_pool2d(shares.view(-1, 1, edge, edge), stride, stride).flatten()

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of pictures, then a grid per frame of the clips; none if the numbers do not fit."""
        found, config = self.image_grids(input_ids, vision), self.model.config
        base = config.vision_config.image_size // config.vision_config.patch_size
        side = base // config.spatial_pool_stride  # pooling leaves out what does not fill a block
        pixels, runs = vision.get("pixel_values_videos"), self.placeholder_runs(input_ids, config.video_token_id)
        shown = clip_spans(runs, pixels, side * side)
        if found is None or shown is None:
            return ()
        first = 1 + max((segment.media_index for segment in found), default=-1)
        for source, (row, start, frames) in enumerate(shown, first):
            found += frame_grids(row, start, frames, side, source)
        return tuple(found)
