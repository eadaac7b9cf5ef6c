"""LLaVA 1.5, ViP-LLaVA, PaliGemma 1 and 2: one square grid of visual tokens per image."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.attention import AttentionCapture, capture_attention
from mmspec.vision.grids.layout import VisualLayout


class LlavaLayout(VisualLayout):
    """`LlavaForConditionalGeneration`. Each image is a run of placeholders; images may be adjacent."""

    model_types: tuple[str, ...] = ("llava",)
    vision_args: tuple[str, ...] = ("image_sizes",)

    def attention_capture(self) -> AttentionCapture | None:
        """Of the layer whose output the projector reads."""
        config = self.model.config
        has_class_token = config.vision_feature_select_strategy == "default"
        return capture_attention(self.model.model.vision_tower, config.vision_feature_layer, has_class_token)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Square grids of the vision tower's patches; empty if a run of placeholders is no multiple of a square."""
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        grids: list[VisualGrid] = []
        for row, start, length in self.placeholder_runs(input_ids, self.model.config.image_token_id):
            tokens_per_image = side * side if length % (side * side) == 0 else length
            edge = isqrt(tokens_per_image)
            if edge * edge != tokens_per_image:
                return ()
            for offset in range(0, length, tokens_per_image):
                grids.append(VisualGrid(row, start + offset, edge, edge, media_index=len(grids)))
        return tuple(grids)


class VipLlavaLayout(LlavaLayout):
    """`VipLlavaForConditionalGeneration`. The class token is always dropped."""

    model_types: tuple[str, ...] = ("vipllava",)
    vision_args: tuple[str, ...] = ()

    def attention_capture(self) -> AttentionCapture | None:
        """Of the first of the layers that the projector reads, the deepest one in the published models."""
        layers = self.model.config.vision_feature_layers  # the name in 5.18, an alias later
        layer = layers if isinstance(layers, int) else layers[0]
        return capture_attention(self.model.model.vision_tower, layer, has_class_token=True)


class PaliGemmaLayout(LlavaLayout):
    """`PaliGemmaForConditionalGeneration`. Images may be adjacent."""

    model_types: tuple[str, ...] = ("paligemma",)
    vision_args: tuple[str, ...] = ()

    def attention_capture(self) -> None:
        """None: the capture is for towers that LLaVA selects a layer of."""
