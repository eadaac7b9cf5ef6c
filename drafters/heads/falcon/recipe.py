"""Falcon: registered and trained."""

from __future__ import annotations

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, Recipe, register


@register
class Falcon(HeadMethod):
    """Falcon."""

    name = "falcon"
    recipes = (Recipe("falcon", "2 tokens per forward, several forwards (Falcon)", "decoupled", 2),)

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.eagle.head import EagleConfig
        from mmspec.drafters.heads.falcon.head import FalconDrafter, FalconHead, falcon_loss

        return HeadClasses(EagleConfig, FalconHead, FalconDrafter, falcon_loss)
