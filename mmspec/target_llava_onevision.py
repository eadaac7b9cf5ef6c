"""LLaVA-OneVision: pictures as in LLaVA-NeXT (several pictures: base grids only), clips as pooled frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import Segment
from mmspec.target_llava_next import LlavaNext


class LlavaOnevision(LlavaNext):
    """`LlavaOnevisionForConditionalGeneration`."""

    model_type = "llava_onevision"
    vision_args = ("image_sizes", "image_sizes_videos", "batch_num_images")

    def segments(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[Segment, ...]:
        """Base and tile grids of pictures, one grid per frame and a newline token for clips."""
        found = self.pictures(input_ids, vision)
        if found is None:
            return ()
        config = self.model.config
        first = 1 + max((segment.source for segment in found), default=-1)
        base = config.vision_config.image_size // config.vision_config.patch_size
        pooled = -(-base // 2)
        for clip, (row, start, length) in enumerate(self.runs(input_ids, config.video_token_id)):
            frames, rest = divmod(length - 1, pooled * pooled)
            if rest:
                return ()
            source = first + clip
            for time in range(frames):
                place = start + time * pooled * pooled
                found.append(Segment(row, place, pooled, pooled, source, role="frame", time=time))
            found.append(Segment(row, start + length - 1, 1, 1, source, role="newline", time=frames - 1))
        return tuple(found)
