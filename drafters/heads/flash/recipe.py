"""FLASH: registered and trained."""

from __future__ import annotations

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, Recipe, register

FLASH_SCALES = {"intermediate_size": 0.0, "block_ffn_size": 1.0}
FLASH_HELP = "5 tokens per forward, by a wide feed-forward (FLASH), each corrected by the token before it"


@register
class Flash(HeadMethod):
    """FLASH (arXiv 2505.12728), not FlashAttention."""

    name = "flash"
    recipes = (
        Recipe("flash", FLASH_HELP, "decoupled", 5, {**FLASH_SCALES, "markov_rank": 0.25}),
        Recipe("flash-free", "the same without the correction, as in the paper", "decoupled", 5, FLASH_SCALES),
    )

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead, flash_loss

        return HeadClasses(FlashConfig, FlashHead, FlashDrafter, flash_loss)
