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
from mmspec.drafters.training.block_losses import falcon_losses, flash_losses, parallel_losses
from mmspec.drafters.training.losses import losses


@dataclass(frozen=True)
class Kind:
    """A kind of trained drafter.

    Attributes:
        head: makes a head of a shape. drafter: makes what drafts with it (`EagleDrafter`'s arguments).
        losses: see `training_losses.losses`.
    """

    head: Callable[[HeadConfig], EagleHead]
    drafter: Callable[..., EagleDrafter]
    losses: Callable[..., tuple[Tensor, dict[str, Any]]]


KINDS: dict[str, Kind] = {
    "eagle": Kind(EagleHead, EagleDrafter, losses),
    "flash": Kind(FlashHead, FlashDrafter, flash_losses),
    "parallel": Kind(ParallelHead, ParallelDrafter, parallel_losses),
    "falcon": Kind(FalconHead, FalconDrafter, falcon_losses),
}

__all__ = ["KINDS", "Kind"]
