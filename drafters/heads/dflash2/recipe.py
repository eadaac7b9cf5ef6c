"""DFlash 2: registered, trained, read and written as published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark, read_numbers
from mmspec.drafters.heads.registry import ExportInputs, HeadClasses, Recipe, TrainSizes, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.config import HeadConfig
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.interfaces import TargetInfo

DFLASH2_HELP = """\
as dspark, the positions mixed with the one before; of the likeliest tokens of each those are drafted that fit the token
before (DFlash 2)"""

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("output_multiplier", "final_logit_softcapping")
CODEBOOK = "candidate_selector.predecessor_codebook"


@register
class Dflash2(Dspark):
    """DFlash 2."""

    name = "dflash2"
    title = "DFlash 2"
    recipes = (
        Recipe(
            "dflash2",
            DFLASH2_HELP,
            "coupled",
            5,
            {"intermediate_size": 1.0, "selector_rank": 0.125},
            {"sample_from_anchor": False},
        ),
    )
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, SCALES)
    served = "vLLM; needs --target"

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.dflash2.head import Dflash2Config, Dflash2Drafter, Dflash2Head, dflash2_loss

        return HeadClasses(Dflash2Config, Dflash2Head, Dflash2Drafter, dflash2_loss)

    def train_config(self, shape: HeadConfig, recipe: Recipe, sizes: TrainSizes) -> HeadConfig:
        """As of DSpark, with groups of a size that divides the hidden size."""
        from mmspec.drafters.heads.dflash2.head import Dflash2Config

        group = math.gcd(shape.hidden_size, Dflash2Config.conv_group_size)
        sized = replace(recipe, settings={**recipe.settings, "conv_group_size": group})
        return super().train_config(shape, sized, sizes)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 4 * (CODEBOOK in weights or "layers.0.attention_conv.base_kernel" in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Dspark`; sizes that a config does not name are those of the tensors."""
        cap = settings.get(SCALES[1]) or None
        found = read_numbers({**settings, SCALES[1]: cap}, SCALES, self.title, float, is_optional=True)
        found |= read_numbers(settings, SIZES, self.title, is_optional=True)
        if (book := weights.get(CODEBOOK)) is not None and book.dim() == 2:
            found.setdefault("selector_rank", book.shape[1])
        return found

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        if format_name != "vllm":
            return f"--format {format_name} has no layout of DFlash 2 heads with a mask embedding; use --format vllm."
        if drafter.draft_ids is not None:
            return "--set draft_vocab of a dflash2 head limits what mmspec drafts; the layout has no counterpart."
        return super().export_refusal(drafter, target, format_name)

    def export(self, folder: Path, given: ExportInputs) -> None:
        from mmspec.drafters.heads.dflash2.export import export_dflash2

        export_dflash2(folder, given)
