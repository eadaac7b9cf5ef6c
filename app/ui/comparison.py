"""One question answered twice: by plain `generate`, then by mmspec, on one picture that is encoded once.

The two never run at the same time, which would distort both timings. `ComparisonRun.run` is called in the worker's
thread (`run_comparison` implements it); other threads may read its fields meanwhile. Independent of gradio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmspec.app.bench.rounds import Round
from mmspec.app.io.images import Media
from mmspec.app.modeling.chat import ChatTurn
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
    """The first difference of two answers.

    Attributes:
        index: of the token in the answer, from 0.
        plain: token id of plain `generate`.
        mmspec: token id of mmspec.
        margin: raw logit of `plain` minus that of `mmspec` in the plain model; nan if the run was cancelled before it
            was measured.
    """

    index: int
    plain: int
    mmspec: int
    margin: float


@dataclass
class ComparisonSide:
    """One of the two answers.

    Attributes:
        streamer: its tokens and their times.
        total_s: seconds of `generate`; 0 until it returns.
    """

    streamer: TimingStreamer = field(default_factory=TimingStreamer)
    total_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds so far, or `total_s` once it is known; 0 before the start."""
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
    """One question answered twice.

    Attributes:
        num_ahead: runs ahead of this one in the queue.
        phase: "waiting", "loading", "encoding", "plain", "mmspec" or "done".
        cancelled: the run ended early.
        plain: answer of plain `generate`.
        mmspec: answer of mmspec.
        loaded_model: set in phase "loading".
        encode_s: seconds of encoding the picture, once for both.
        prompt_tokens: length of the prompt, visual tokens included.
        stats: `mmspec.stats` of the mmspec call.
        difference: first difference of the answers; None if there is none.
        recorder: records the rounds of the mmspec call.
    """

    def __init__(
        self,
        model_store: ModelStore,
        media: Media | Callable[[], Media],
        turns: Sequence[ChatTurn],
        question: str,
        settings: RunSettings,
        cancel_signal: CancelSignal,
    ) -> None:
        """`media` may be a function that loads it when the run starts, so that queued runs hold no pixels."""
        self._media = media
        self.num_ahead = 0
        self.model_store = model_store
        self.turns = tuple(turns)
        self.question = question
        self.settings = settings
        self.cancel_signal = cancel_signal
        self.phase = "waiting"
        self.cancelled = False
        self.plain = ComparisonSide()
        self.mmspec = ComparisonSide()
        self.loaded_model: LoadedModel | None = None
        self.encode_s = 0.0
        self.prompt_tokens = 0
        self.stats = Stats()
        self.difference: Difference | None = None
        self.recorder: RecordingDrafter | None = None

    @property
    def media(self) -> Media:
        """The picture or clip, after `load_media`."""
        assert not callable(self._media)
        return self._media

    def load_media(self) -> None:
        """Load the picture or clip if it is not loaded yet.

        Raises:
            UsageError: it cannot be decoded.
        """
        if callable(self._media):
            self._media = self._media()

    def run(self) -> ComparisonRun:
        """Generate both answers, in the worker's thread. A cancelled run ends early with partial answers.

        Raises:
            UsageError: the model, drafter or compressor cannot be used, or the prompt is too long.
        """
        from mmspec.app.ui.run_comparison import run_comparison

        run_comparison(self)
        return self

    @property
    def rounds(self) -> list[Round]:
        """Rounds of the mmspec call so far."""
        return self.recorder.rounds() if self.recorder is not None else []

    @property
    def visible_tokens(self) -> VisibleTokens | None:
        """The visual tokens that the drafter read; None before the mmspec call ended."""
        if self.recorder is None or not self.mmspec.total_s:
            return None
        return find_visible_tokens(self.recorder, self.stats.compression[0] if self.stats.compression else None)

    @property
    def identical(self) -> bool | None:
        """Whether both answers are equal, up to the shorter one if cancelled; None if one is empty."""
        if not self.plain.streamer.token_ids or not self.mmspec.streamer.token_ids:
            return None
        return self.difference is None

    @property
    def speedup_decode(self) -> float | None:
        """Ratio of tokens per second, first token to last; None if one is not measured."""
        plain, ours = self.plain.streamer.tokens_per_s, self.tokens_per_s
        return ours / plain if plain and ours else None

    @property
    def speedup_e2e(self) -> float | None:
        """Ratio of total seconds, vision encoding counted on both sides; None if one answer was cut short."""
        if not self.mmspec.total_s or len(self.plain.streamer.token_ids) != len(self.mmspec.streamer.token_ids):
            return None
        return (self.encode_s + self.plain.total_s) / (self.encode_s + self.mmspec.total_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the mmspec call, from `mmspec.stats` unless it fell back to plain decoding."""
        return self.mmspec.streamer.tokens_per_s if self.stats.fallback_calls else self.stats.tokens_per_s

    @property
    def round_cost(self) -> float | None:
        """R: seconds of a round divided by seconds of a plain step. Decode speed-up = tau / R."""
        speedup = self.speedup_decode
        return self.stats.tau / speedup if speedup else None


__all__ = ["ComparisonRun", "ComparisonSide", "Difference"]
