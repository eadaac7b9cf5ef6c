"""Heads in the checkpoint of a target (MTP): registered, tuned, written as published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.drafters.heads.registry import ExportInputs, HeadClasses, HeadMethod, Recipe, TrainSizes, register

if TYPE_CHECKING:
    from mmspec.drafters.checkpoints.format import HeadMetadata
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.heads.base.head import DraftHead
    from mmspec.interfaces import TargetInfo

TUNING_RATE = 1e-4
"""Of weights that are trained already."""
HELP = "tunes the head in the target's own checkpoint (Qwen3.5, GLM-OCR, EXAONE 4.5); its layout stays"


@register
class Mtp(HeadMethod):
    """The head that a target's checkpoint brings along."""

    name = "mtp"
    recipes = (Recipe("mtp", HELP, "coupled", learning_rate=TUNING_RATE),)
    served = "vLLM, under the names of the target's checkpoint; needs --target, whose embeddings are copied"
    is_of_target = True

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.base.config import HeadConfig
        from mmspec.drafters.mtp.drafter import MTPDrafter
        from mmspec.drafters.mtp.head import MTPHead, mtp_loss

        return HeadClasses(HeadConfig, MTPHead, MTPDrafter, mtp_loss)

    def head_of_target(self, target: TargetInfo, sizes: TrainSizes) -> DraftHead:
        from mmspec.drafters.mtp.head import MTPHead

        self.check_sizes(sizes)
        if target.read_own_head is None:
            raise ValueError("it is read from the target's checkpoint; load the target.")
        return MTPHead(target.read_own_head()).trainable_copy()

    def load_for_target(self, folder: Path, metadata: HeadMetadata, target: TargetInfo, name: str) -> HeadDrafter:
        from mmspec.drafters.mtp.checkpoint import load_tuned

        return load_tuned(folder, metadata, target, name)

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        if format_name != "vllm":
            return "only vLLM's layout of a head of the target's own checkpoint is written; use --format vllm."
        family = next(iter(drafter.head.visual_modes), drafter.visual_mode)
        if drafter.visual_mode != family and drafter.trained_visual_mode != "mixed":
            return (
                f"vLLM feeds such heads {family!r} at image positions; this one was trained {drafter.visual_mode!r}: "
                f"train with --set visual_mode={family} or mixed."
            )
        return None

    def export(self, folder: Path, given: ExportInputs) -> None:
        from mmspec.drafters.mtp.checkpoint import export_own_head

        export_own_head(folder, given.drafter, given.embeddings())
