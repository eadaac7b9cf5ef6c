"""Ways to end `generate` itself when a run is halted, not only what is shown of it."""

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
    """Ends every row when the run is halted."""

    def __init__(self, cancel_signal: CancelSignal) -> None:
        self.cancel_signal = cancel_signal

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """[B] bool, the same for all rows."""
        return torch.full(
            (input_ids.shape[0],), self.cancel_signal.should_stop, dtype=torch.bool, device=input_ids.device
        )


def build_stopping_criteria(cancel_signal: CancelSignal) -> StoppingCriteriaList:
    """What `generate` takes as `stopping_criteria`."""
    return StoppingCriteriaList([CancelCriterion(cancel_signal)])


class RunCancelledError(BaseException):
    """The run was halted. No `Exception`, since a job answers those by trying each picture alone."""


@dataclass
class CancellableCaptioner(Captioner):
    """A captioner whose `generate` ends when the run is halted, with a drafter and a compressor of its own."""

    cancel_signal: CancelSignal = field(default_factory=CancelSignal)
    drafter: Any = "none"
    compressor: Compressor | None = None

    def options(self) -> dict[str, Any]:
        """See `Captioner`."""
        speed = {"drafter": self.drafter, "compressor": self.compressor}
        return super().generation_kwargs() | {
            "stopping_criteria": build_stopping_criteria(self.cancel_signal),
            "mmspec": speed,
        }

    def caption(
        self, media: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        """See `Captioner`.

        Raises:
            StoppedError: the run was halted, and the captions at hand are cut.
        """
        if self.cancel_signal.should_stop:
            raise RunCancelledError
        made = super().caption(media, prompts, seed, compare)
        if self.cancel_signal.should_stop:
            raise RunCancelledError
        return made


__all__ = ["CancellableCaptioner", "RunCancelledError", "build_stopping_criteria"]
