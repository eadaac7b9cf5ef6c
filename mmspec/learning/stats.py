"""What online learning has done so far, and the speed of a patched model over its calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.metrics.stats import Stats

MAX_CURVE_POINTS = 128
"""Points of a curve; when it is full, neighbours are merged, so its memory stays bounded."""


@dataclass(frozen=True)
class CurvePoint:
    """The mean speed of some consecutive calls.

    Attributes:
        first_call: number of the first of them, from 1.
        last_call: number of the last of them.
        tokens: output tokens, the first of each row excluded.
        forwards: forwards of the target, once per active row, prefill excluded.
        decode_s: seconds from the first token to the last.
    """

    first_call: int
    last_call: int
    tokens: int
    forwards: int
    decode_s: float

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward and row; 1 without any forward."""
        return self.tokens / self.forwards if self.forwards else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding; 0 without any."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    def merge(self, later: CurvePoint) -> CurvePoint:
        """The point of these calls and the ones after them."""
        return CurvePoint(
            self.first_call,
            later.last_call,
            self.tokens + later.tokens,
            self.forwards + later.forwards,
            self.decode_s + later.decode_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return asdict(self) | {"tokens_per_forward": self.tokens_per_forward, "tokens_per_s": self.tokens_per_s}


class SpeedCurve:
    """Speed over the calls of a patched model, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[CurvePoint] = []
        self._calls_per_point = 1
        self._num_calls = 0

    def add(self, call: Stats) -> None:
        """One more call that the loop decoded; others are not counted."""
        if call.fallback_calls:
            return
        self._num_calls += 1
        point = CurvePoint(
            self._num_calls, self._num_calls, call.tokens - call.first_tokens, call.row_rounds, call.decode_s
        )
        last = self._points[-1] if self._points else None
        if last is not None and last.last_call - last.first_call + 1 < self._calls_per_point:
            self._points[-1] = last.merge(point)
            return
        if len(self._points) == MAX_CURVE_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [first.merge(second) for first, second in pairs]
            self._calls_per_point *= 2
        self._points.append(point)

    def points(self) -> list[CurvePoint]:
        """The points so far, in order."""
        return list(self._points)


@dataclass(frozen=True)
class LearningStats:
    """State of online learning on one patched model (`mmspec.stats(model).learning`).

    Attributes:
        enabled: whether the drafter is learning.
        disabled_reason: why learning stopped by itself, or None.
        drafter: name of what learns, "" if nothing does.
        num_examples: positions in the reservoir.
        reservoir_bytes: host memory of the reservoir.
        num_fitted: positions in the fit in closed form.
        num_steps: optimiser steps.
        num_updates: how often new weights were swapped in.
        learn_s: seconds spent on learning, storing examples and weights included.
        call_s: seconds of the calls during which it learned; `learn_s / call_s` is its share of the time.
        share: largest share of the time that it may take now.
        resumed: whether it continued from weights in the cache folder.
        folder: where the weights are stored; None if they are not.
        curve: speed over all calls since `patch`, with or without learning.
    """

    enabled: bool = False
    disabled_reason: str | None = None
    drafter: str = ""
    num_examples: int = 0
    reservoir_bytes: int = 0
    num_fitted: int = 0
    num_steps: int = 0
    num_updates: int = 0
    learn_s: float = 0.0
    call_s: float = 0.0
    share: float = 0.0
    resumed: bool = False
    folder: str | None = None
    curve: list[CurvePoint] = field(default_factory=list)

    def __str__(self) -> str:
        if self.disabled_reason is not None:
            return f"learning ended: {self.disabled_reason}"
        share = self.learn_s / self.call_s if self.call_s else 0.0
        return f"learned {self.num_updates} updates from {self.num_examples} positions in {share:.1%} of the time"

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return asdict(self) | {"curve": [point.as_dict() for point in self.curve]}
