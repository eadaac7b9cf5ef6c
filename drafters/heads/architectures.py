"""Architectures of trained drafters: the head, the drafter and the training loss of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkHead
from mmspec.drafters.heads.dspark.loss import dspark_loss
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleHead, HeadConfig
from mmspec.drafters.heads.eagle.loss import eagle_loss
from mmspec.drafters.heads.eagle3.head import Eagle3Head
from mmspec.drafters.heads.falcon.drafter import FalconDrafter, FalconHead
from mmspec.drafters.heads.falcon.loss import falcon_loss
from mmspec.drafters.heads.flash.drafter import FlashDrafter, FlashHead
from mmspec.drafters.heads.flash.loss import flash_loss
from mmspec.drafters.heads.instant.drafter import InstantDrafter
from mmspec.drafters.heads.instant.head import InstantHead
from mmspec.drafters.heads.instant.loss import instant_loss
from mmspec.drafters.heads.parallel.drafter import ParallelDrafter, ParallelHead
from mmspec.drafters.heads.parallel.loss import parallel_loss


@dataclass(frozen=True)
class DraftArchitecture:
    """An architecture of trained drafters.

    Attributes:
        head: constructor of the head.
        drafter: constructor of the drafter, with the arguments of `HeadDrafter`.
        compute_loss: (loss, metrics) of a batch, see `mmspec.drafters.training.losses.eagle_loss`.
    """

    head: Callable[[HeadConfig], EagleHead]
    drafter: Callable[..., HeadDrafter]
    compute_loss: Callable[..., tuple[Tensor, dict[str, Any]]]


ARCHITECTURES: dict[str, DraftArchitecture] = {
    "eagle": DraftArchitecture(EagleHead, EagleDrafter, eagle_loss),
    "eagle3": DraftArchitecture(Eagle3Head, EagleDrafter, eagle_loss),
    "flash": DraftArchitecture(FlashHead, FlashDrafter, flash_loss),
    "parallel": DraftArchitecture(ParallelHead, ParallelDrafter, parallel_loss),
    "dspark": DraftArchitecture(DsparkHead, DsparkDrafter, dspark_loss),
    "instant": DraftArchitecture(InstantHead, InstantDrafter, instant_loss),
    "falcon": DraftArchitecture(FalconHead, FalconDrafter, falcon_loss),
}
"""By the name that a head's config records. "flash" is FLASH (arXiv 2505.12728), not FlashAttention."""
