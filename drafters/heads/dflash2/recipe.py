"""DFlash 2: registered and read as published; it is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark
from mmspec.drafters.heads.registry import HeadClasses, register

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("output_multiplier", "final_logit_softcapping")
CODEBOOK = "candidate_selector.predecessor_codebook"


@register
class Dflash2(Dspark):
    """DFlash 2."""

    name = "dflash2"
    title = "DFlash 2"
    recipes = ()
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, SCALES)
    served = ""

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.dflash2.head import Dflash2Config, Dflash2Drafter, Dflash2Head

        return HeadClasses(Dflash2Config, Dflash2Head, Dflash2Drafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 4 * (CODEBOOK in weights or "layers.0.attention_conv.base_kernel" in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Dspark`; sizes that a config does not name are those of the tensors."""
        found: dict[str, Any] = {key: float(settings[key]) for key in SCALES if settings.get(key) is not None}
        found |= {key: settings[key] for key in SIZES if settings.get(key) is not None}
        if wrong := next((key for key in SIZES if type(found.get(key, 1)) is not int or found.get(key, 1) < 1), None):
            raise ValueError(f"{wrong} must be an integer of at least 1; got {found[wrong]!r:.40}.")
        if (book := weights.get(CODEBOOK)) is not None and book.dim() == 2:
            found.setdefault("selector_rank", book.shape[1])
        return found
