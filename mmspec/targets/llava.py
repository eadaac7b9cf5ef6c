"""LLaVA 1.5: one square grid of visual tokens per picture."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec.interfaces import Segment
from mmspec.targets.hf import Family
from mmspec.targets.vision_attention import Listening, listening


class Llava(Family):
    """`LlavaForConditionalGeneration`. Each picture is a run of placeholders; pictures may follow each other."""

    model_type = "llava"
    vision_args = ("image_sizes",)

    def listening(self) -> Listening | None:
        """Hears the layer that the projector is given."""
        config = self.model.config
        first = config.vision_feature_select_strategy == "default"
        return listening(self.model.model.vision_tower, config.vision_feature_layer, first)

    def segments(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[Segment, ...]:
        """Square grids of the vision tower's patches; none if its size does not divide the placeholders."""
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        found: list[Segment] = []
        for row, start, length in self.runs(input_ids, self.model.config.image_token_id):
            per_picture = side * side if length % (side * side) == 0 else length
            if isqrt(per_picture) ** 2 != per_picture:
                return ()
            edge = isqrt(per_picture)
            for offset in range(0, length, per_picture):
                found.append(Segment(row, start + offset, edge, edge, source=len(found)))
        return tuple(found)
