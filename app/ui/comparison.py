"""The same question twice: plain `generate`, then mmspec, on one picture that is looked at once.

The two never run at the same time, since on one machine that would falsify both. `Race.run` is for the worker's thread
(`running` does it); any other may look at its fields meanwhile. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmspec.app.bench.rounds import Round
from mmspec.app.io.images import Media
from mmspec.app.modeling.chat import Turn
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.streamer import TimingStreamer
from mmspec.app.ui.visible_tokens import VisibleTokens, find_visible_tokens
from mmspec.app.ui.worker import CancelSignal
from mmspec.metrics.stats import Stats

if TYPE_CHECKING:
    from mmspec.app.bench.recorder import RecordingDrafter
    from mmspec.app.ui.loaded_model import LoadedModel


@dataclass(frozen=True)
class Difference:
    """Where two answers part.

    Attributes:
        column: number of the token, from 0. plain, mmspec: the two ids.
        margin: how far the plain model's raw logit of its token was above the other's; nan if a stop came before it.
    """

    index: int
    plain: int
    mmspec: int
    margin: float


@dataclass
class ComparisonSide:
    """One of the two runs. `total_s` is 0 until it is over."""

    streamer: TimingStreamer = field(default_factory=TimingStreamer)
    total_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds so far, or in all once it is over; 0 before it begins."""
        return self.total_s or self.streamer.elapsed_s

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.streamer.token_times[0] if self.streamer.token_times else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.streamer.token_times[-1] - self.streamer.token_times[0] if self.streamer.token_times else 0.0


class ComparisonRun:
    """One question, asked twice."""

    def __init__(
        self,
        model_store: ModelStore,
        media: Media | Callable[[], Media],
        turns: Sequence[Turn],
        question: str,
        settings: RunSettings,
        cancel_signal: CancelSignal,
    ) -> None:
        """`shown`: the picture or clip, or what reads it when the race begins: nobody who waits holds its pixels."""
        self._media = media
        self.num_ahead = 0  # runs before this one in the line
        self.model_store, self.turns, self.question = model_store, tuple(turns), question
        self.settings, self.cancel_signal = settings, cancel_signal
        self.phase = "waiting"
        self.cancelled = False  # the run was stopped before its end
        self.plain, self.mmspec = ComparisonSide(), ComparisonSide()
        self.loaded_model: LoadedModel | None = None
        self.encode_s = 0.0
        self.prompt_tokens = 0
        self.stats = Stats()
        self.difference: Difference | None = None
        self.recorder: RecordingDrafter | None = None

    @property
    def media(self) -> Media:
        """The picture or clip; `look` reads it."""
        assert not callable(self._media)
        return self._media

    def load_media(self) -> None:
        """Read the picture or clip, if that is still to be done.

        Raises:
            UsageError: it cannot be used.
        """
        if callable(self._media):
            self._media = self._media()

    def run(self) -> ComparisonRun:
        """Do it all, in the worker's thread. A run that is halted ends early and leaves what there is.

        Raises:
            UsageError: the model, the drafter, the compressor or the length of the prompt does not do.
        """
        from mmspec.app.ui.run_comparison import run_comparison

        run_comparison(self)
        return self

    @property
    def rounds(self) -> list[Round]:
        """What every round of mmspec's run decided so far."""
        return self.recorder.rounds() if self.recorder is not None else []

    @property
    def visible_tokens(self) -> VisibleTokens | None:
        """What the drafter was shown of the picture; None before it was asked."""
        if self.recorder is None or not self.mmspec.total_s:
            return None
        return find_visible_tokens(self.recorder, self.stats.compression[0] if self.stats.compression else None)

    @property
    def identical(self) -> bool | None:
        """Whether both said the same; of a halted run, as far as both have come; None if one said nothing."""
        if not self.plain.streamer.token_ids or not self.mmspec.streamer.token_ids:
            return None
        return self.difference is None

    @property
    def speedup_decode(self) -> float | None:
        """How many times as many tokens per second, from the first token to the last; None if that cannot be said."""
        plain, ours = self.plain.streamer.tokens_per_s, self.tokens_per_s
        return ours / plain if plain and ours else None

    @property
    def speedup_e2e(self) -> float | None:
        """The same for the whole answer, looking at the picture counted on both sides; None if one was cut short."""
        if not self.mmspec.total_s or len(self.plain.streamer.token_ids) != len(self.mmspec.streamer.token_ids):
            return None
        return (self.encode_s + self.plain.total_s) / (self.encode_s + self.mmspec.total_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of mmspec's run, as `mmspec.stats` has it."""
        return self.mmspec.streamer.tokens_per_s if self.stats.fallback_calls else self.stats.tokens_per_s

    @property
    def round_cost(self) -> float | None:
        """R: seconds of a round in plain steps. Decode speed-up = tau / R."""
        speedup = self.speedup_decode
        return self.stats.tau / speedup if speedup else None


__all__ = ["ComparisonRun", "ComparisonSide", "Difference"]
