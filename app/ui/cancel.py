"""Ways to end `generate` itself when a run is halted, not only what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from mmspec.app.io.images import Shown
from mmspec.app.modeling.captioner import Caption, Captioner
from mmspec.app.ui.worker import Halt
from mmspec.interfaces import Compressor


class HaltCriterion(StoppingCriteria):
    """Ends every row when the run is halted."""

    def __init__(self, halt: Halt) -> None:
        self.halt = halt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """[B] bool, the same for all rows."""
        return torch.full((input_ids.shape[0],), self.halt.asked, dtype=torch.bool, device=input_ids.device)


def criteria(halt: Halt) -> StoppingCriteriaList:
    """What `generate` takes as `stopping_criteria`."""
    return StoppingCriteriaList([HaltCriterion(halt)])


class StoppedError(BaseException):
    """The run was halted. No `Exception`, since a job answers those by trying each picture alone."""


@dataclass
class HaltingCaptioner(Captioner):
    """A captioner whose `generate` ends when the run is halted, with a drafter and a compressor of its own."""

    halt: Halt = field(default_factory=Halt)
    drafter: Any = "none"
    compressor: Compressor | None = None

    def options(self) -> dict[str, Any]:
        """See `Captioner`."""
        speed = {"drafter": self.drafter, "compressor": self.compressor}
        return super().options() | {"stopping_criteria": criteria(self.halt), "mmspec": speed}

    def caption(
        self, shown: Sequence[Shown], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        """See `Captioner`.

        Raises:
            StoppedError: the run was halted, and the captions at hand are cut.
        """
        if self.halt.asked:
            raise StoppedError
        made = super().caption(shown, prompts, seed, compare)
        if self.halt.asked:
            raise StoppedError
        return made


__all__ = ["HaltingCaptioner", "StoppedError", "criteria"]
