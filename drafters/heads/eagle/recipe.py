"""EAGLE and MSD: registered, trained, read as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, Recipe, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.interfaces import TargetInfo


@register
class Eagle(HeadMethod):
    """EAGLE-1/2 and MSD, which differ in their visual mode."""

    name = "eagle"
    recipes = (
        Recipe("msd", "visual tokens enter as their projected embeddings alone (MSD)", "decoupled"),
        Recipe("eagle", "visual tokens are fused with the target's hidden states like text (EAGLE-2)", "coupled"),
        Recipe("eagle-text-only", "no visual tokens: only text tokens, with the target's hidden states", "text_only"),
        Recipe("eagle-placeholder", "visual tokens are placeholder embeddings, as in EAGLE for text", "placeholder"),
    )

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.eagle.drafter import EagleDrafter
        from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
        from mmspec.drafters.training.losses import eagle_loss

        return HeadClasses(EagleConfig, EagleHead, EagleDrafter, eagle_loss)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return int("fc.weight" in weights)

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        from mmspec.drafters.heads.eagle.checkpoint import load_eagle

        return load_eagle(values, weights, target, name)

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        if drafter.visual_mode == "decoupled":
            return (
                "MSD feeds a visual token as its projected embedding alone, without a hidden state; no engine does. "
                "Train --drafter eagle3."
            )
        return super().export_refusal(drafter, target, format_name)
