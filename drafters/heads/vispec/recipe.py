"""ViSpec: registered and read as published; it is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.interfaces import TargetInfo


@register
class Vispec(HeadMethod):
    """ViSpec."""

    name = "vispec"

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.vispec.head import VispecConfig, VispecDrafter, VispecHead

        return HeadClasses(VispecConfig, VispecHead, VispecDrafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 2 * ("imadpt.q" in weights or "img_adaptor.query" in weights)

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        from mmspec.drafters.heads.vispec.head import load_vispec

        return load_vispec(values, weights, target, name)
