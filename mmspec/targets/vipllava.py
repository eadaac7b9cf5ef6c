"""ViP-LLaVA: grids as in LLaVA 1.5; the projector reads several layers of the vision tower."""

from __future__ import annotations

from mmspec.targets.llava import LlavaAdapter
from mmspec.targets.vision_attention import AttentionCapture, capture_attention


class VipLlavaAdapter(LlavaAdapter):
    """`VipLlavaForConditionalGeneration`. The class token is always dropped."""

    model_types: tuple[str, ...] = ("vipllava",)
    vision_args: tuple[str, ...] = ()

    def attention_capture(self) -> AttentionCapture | None:
        """Of the first of the layers that the projector reads, the deepest one in the published models."""
        layers = self.model.config.vision_feature_layers  # the name in 5.18, an alias later
        layer = layers if isinstance(layers, int) else layers[0]
        return capture_attention(self.model.model.vision_tower, layer, has_class_token=True)
