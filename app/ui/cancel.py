"""Stopping criterion and captioner that end `generate` when a run is cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from mmspec.app.io.images import Media
from mmspec.app.modeling.captioner import Caption, Captioner
from mmspec.app.ui.worker import CancelSignal
from mmspec.interfaces import Compressor


class CancelCriterion(StoppingCriteria):
    """Ends every row when the run is cancelled."""

    def __init__(self, cancel_signal: CancelSignal) -> None:
        self.cancel_signal = cancel_signal

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Bool tensor [B], equal for all rows."""
        return torch.full(
            (input_ids.shape[0],), self.cancel_signal.should_stop, dtype=torch.bool, device=input_ids.device
        )


def build_stopping_criteria(cancel_signal: CancelSignal) -> StoppingCriteriaList:
    """`stopping_criteria` for `generate`."""
    return StoppingCriteriaList([CancelCriterion(cancel_signal)])


class RunCancelledError(BaseException):
    """The run was cancelled. Not an `Exception`: a caption job handles those by retrying each picture alone."""


@dataclass
class CancellableCaptioner(Captioner):
    """A captioner whose `generate` ends when the run is cancelled.

    Attributes:
        cancel_signal: of the run.
        drafter: passed to each call.
        compressor: passed to each call.
    """

    cancel_signal: CancelSignal = field(default_factory=CancelSignal)
    drafter: Any = "none"
    compressor: Compressor | None = None

    def generation_kwargs(self) -> dict[str, Any]:
        """See `Captioner`."""
        mmspec_options = {"drafter": self.drafter, "compressor": self.compressor}
        criteria = build_stopping_criteria(self.cancel_signal)
        return super().generation_kwargs() | {"stopping_criteria": criteria, "mmspec": mmspec_options}

    def caption(
        self, media: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        """See `Captioner`.

        Raises:
            RunCancelledError: the run was cancelled, so the captions may be cut short.
        """
        if self.cancel_signal.should_stop:
            raise RunCancelledError
        captions = super().caption(media, prompts, seed, compare)
        if self.cancel_signal.should_stop:
            raise RunCancelledError
        return captions


__all__ = ["CancellableCaptioner", "RunCancelledError", "build_stopping_criteria"]
