"""The kinds of trained drafters: for each its head, what drafts with it, and what it is taught by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.drafters.block.falcon import FalconDrafter, FalconHead
from mmspec.drafters.block.flash import FlashDrafter, FlashHead
from mmspec.drafters.block.parallel import ParallelDrafter, ParallelHead
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.drafters.training.block_losses import falcon_loss, flash_loss, parallel_loss
from mmspec.drafters.training.losses import eagle_loss


@dataclass(frozen=True)
class DraftArchitecture:
    """A kind of trained drafter.

    Attributes:
        head: makes a head of a shape. drafter: makes what drafts with it (`EagleDrafter`'s arguments).
        losses: see `training_losses.losses`.
    """

    head: Callable[[HeadConfig], EagleHead]
    drafter: Callable[..., EagleDrafter]
    compute_loss: Callable[..., tuple[Tensor, dict[str, Any]]]


ARCHITECTURES: dict[str, DraftArchitecture] = {
    "eagle": DraftArchitecture(EagleHead, EagleDrafter, eagle_loss),
    "flash": DraftArchitecture(FlashHead, FlashDrafter, flash_loss),
    "parallel": DraftArchitecture(ParallelHead, ParallelDrafter, parallel_loss),
    "falcon": DraftArchitecture(FalconHead, FalconDrafter, falcon_loss),
}

__all__ = ["ARCHITECTURES", "DraftArchitecture"]
