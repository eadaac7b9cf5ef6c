"""Stopping criteria and captioner that end `generate` when a run is cancelled."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList

from mmspec.app.io.images import Media
from mmspec.app.modeling.captioner import Caption, Captioner
from mmspec.app.ui.worker import CancelSignal
from mmspec.interfaces import Compressor


def build_stopping_criteria(cancel_signal: CancelSignal) -> StoppingCriteriaList:
    """`stopping_criteria` for `generate`: every row ends when the run is cancelled, or when its lease expires.

    The signal moves the deadline of transformers' own criterion, which mmspec evaluates on the host. A criterion of our
    own would be user code, for which the loop builds and compares tensors at every token.
    """
    criterion = MaxTimeCriteria(math.inf, initial_timestamp=0.0)
    cancel_signal.on_deadline(functools.partial(setattr, criterion, "max_time"))
    return StoppingCriteriaList([criterion])


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

    @property
    def drafter_name(self) -> str:
        return str(getattr(self.drafter, "name", self.drafter))

    def generation_kwargs(self) -> dict[str, Any]:
        mmspec_options = {"drafter": self.drafter, "compressor": self.compressor}
        return super().generation_kwargs() | {"stopping_criteria": self._criteria, "mmspec": mmspec_options}

    @cached_property
    def _criteria(self) -> StoppingCriteriaList:
        return build_stopping_criteria(self.cancel_signal)

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
