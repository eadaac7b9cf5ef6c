"""One question answered by plain `generate`, then by mmspec with one or several drafters, on one encoded picture.

No two run at the same time, which would distort their timings. `ComparisonRun.run` is called in the worker's thread
(`run_comparison` implements it); other threads may read its fields meanwhile. Independent of gradio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.io.images import Media
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.ui.credit import LOOP, NO_DRAFTS, Credit, split_speedup
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.rounds import Round
from mmspec.app.ui.streamer import TimingStreamer
from mmspec.app.ui.visible_tokens import VisibleTokens, find_visible_tokens
from mmspec.app.ui.worker import CancelSignal
from mmspec.metrics.stats import Stats

if TYPE_CHECKING:
    from mmspec.app.ui.loaded_model import LoadedModel
    from mmspec.app.ui.recorder import RoundRecorder
    from mmspec.interfaces import Drafter


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
class AnswerLane:
    """One answer of a comparison: that of plain `generate`, or that of mmspec with one drafter.

    Attributes:
        name: "plain" for the baseline, "mmspec", then "mmspec-2" and so on; "loop" for the loop without drafts.
        drafter: as chosen; None for plain `generate`.
        streamer: its tokens and their times.
        total_s: seconds of `generate`; 0 until it returns.
        stats: `mmspec.stats` of the call; empty for plain `generate`.
        used: the drafter of the call; None before it starts.
        recorder: records the rounds of the call; None before it starts.
        difference: first difference from the plain answer; None if there is none.
    """

    name: str
    drafter: str | None = None
    streamer: TimingStreamer = field(default_factory=TimingStreamer)
    total_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    used: Drafter | None = None
    recorder: RoundRecorder | None = None
    difference: Difference | None = None

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

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first; from `mmspec.stats` where mmspec decoded."""
        is_speculative = self.drafter is not None and not self.stats.fallback_calls
        return self.stats.tokens_per_s if is_speculative else self.streamer.tokens_per_s

    @property
    def rounds(self) -> list[Round]:
        """Rounds of the call so far; none for plain `generate`."""
        return self.recorder.rounds() if self.recorder is not None else []

    @property
    def resolved_drafter(self) -> str | None:
        """Name of the drafter in use, such as "flash" for "auto"; None for plain `generate`."""
        return self.used.name if self.used is not None else self.drafter


class ComparisonRun:
    """One question and its answers.

    Attributes:
        num_ahead: runs ahead of this one in the queue.
        phase: "waiting", "loading", "encoding", "answering" or "done".
        lane: the lane that is answering; None in the other phases.
        cancelled: the run ended early.
        plain: answer of the baseline: plain `generate`, or mmspec without drafts.
        loop: start of the answer by mmspec without drafts, measured where that is not the baseline.
        lanes: answers of mmspec, one per drafter.
        loaded_model: set in phase "loading".
        encode_s: seconds of encoding the picture, once for both.
        is_media_reused: the picture was encoded in an earlier turn.
        prompt_tokens: length of the prompt, visual tokens included.
        visitor: who asks; what was computed of the earlier turns is kept under this name. Empty: nothing is kept.
    """

    def __init__(
        self,
        model_store: ModelStore,
        media: Media | Callable[[], Media],
        turns: Sequence[ChatTurn],
        question: str,
        settings: RunSettings,
        cancel_signal: CancelSignal,
        file: str | Path = "",
        visitor: str = "",
    ) -> None:
        """`media` may be a function that loads it when the run starts, so that queued runs hold no pixels.

        `file` is that of the media, for code that repeats the run.
        """
        self._media = media
        self.num_ahead = 0
        self.model_store = model_store
        self.turns = tuple(turns)
        self.question = question
        self.settings = settings
        self.cancel_signal = cancel_signal
        self.file = Path(file) if str(file) else None
        self.file_name = Path(file).name
        self.visitor = visitor
        self.phase = "waiting"
        self.cancelled = False
        self.lane: AnswerLane | None = None
        self.plain = AnswerLane("plain", NO_DRAFTS if settings.baseline == LOOP else None)
        self.loop = AnswerLane("loop", NO_DRAFTS)
        drafters = (settings.drafter, *settings.more_drafters)
        self.lanes = tuple(
            AnswerLane("mmspec" if number == 1 else f"mmspec-{number}", drafter)
            for number, drafter in enumerate(drafters, 1)
        )
        self.loaded_model: LoadedModel | None = None
        self.encode_s = 0.0
        self.is_media_reused = False
        self.prompt_tokens = 0

    @property
    def media(self) -> Media:
        """The picture or clip, after `load_media`."""
        assert not callable(self._media)
        return self._media

    @property
    def is_media_loaded(self) -> bool:
        """Whether `media` can be read."""
        return not callable(self._media)

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

        try:
            run_comparison(self)
        finally:
            if self.cancel_signal.should_stop:  # perhaps the page was closed, and what is kept of it freed before
                self.model_store.forget(self.visitor)
        return self

    @property
    def mmspec(self) -> AnswerLane:
        """The lane of the first drafter."""
        return self.lanes[0]

    @property
    def visible_tokens(self) -> VisibleTokens | None:
        """The visual tokens that the first drafter read; None before its call ended."""
        lane = self.mmspec
        if lane.used is None or lane.recorder is None or not lane.total_s:
            return None
        compression = lane.stats.compression[0] if lane.stats.compression else None
        return find_visible_tokens(lane.used, lane.recorder, compression)

    def is_identical(self, lane: AnswerLane) -> bool | None:
        """Whether a lane's answer is the plain one, up to the shorter one if cancelled; None if one is empty."""
        if not self.plain.streamer.token_ids or not lane.streamer.token_ids:
            return None
        return lane.difference is None

    @property
    def identical(self) -> bool | None:
        """Whether all answers are equal, up to the shortest one if cancelled; None if one is empty."""
        results = [self.is_identical(lane) for lane in self.lanes]
        if False in results:
            return False
        return None if None in results else True

    def speedup_decode(self, lane: AnswerLane) -> float | None:
        """Ratio of tokens per second to those of plain `generate`, first token to last; None if one is not measured."""
        plain, ours = self.plain.tokens_per_s, lane.tokens_per_s
        return ours / plain if plain and ours else None

    def speedup_e2e(self, lane: AnswerLane) -> float | None:
        """Ratio of total seconds, vision encoding counted on both sides; None if one answer was cut short."""
        if not lane.total_s or len(self.plain.streamer.token_ids) != len(lane.streamer.token_ids):
            return None
        return (self.encode_s + self.plain.total_s) / (self.encode_s + lane.total_s)

    @property
    def needs_loop(self) -> bool:
        """Whether the loop without drafts is to be measured: an answer has drafts, and the baseline is another."""
        has_drafts = any(lane.stats.drafted_rounds for lane in self.lanes)
        is_plain, is_long = self.plain.drafter is None, len(self.plain.streamer.token_ids) > 1
        return has_drafts and is_plain and is_long and not self.cancelled

    @property
    def speedup_loop(self) -> float | None:
        """Tokens per second of mmspec without drafts over those of the baseline, over the same tokens."""
        if self.plain.drafter is not None:
            return 1.0
        count, times = len(self.loop.streamer.token_ids), self.plain.streamer.token_times
        is_measured = count > 1 and not self.loop.stats.fallback_calls and len(times) >= count
        seconds = times[count - 1] - times[0] if is_measured else 0.0
        return self.loop.tokens_per_s * seconds / (count - 1) if seconds > 0 and self.loop.tokens_per_s else None

    def credit(self, lane: AnswerLane) -> Credit:
        """Which part of the speed-up of a lane is that of the loop, and which that of its drafts."""
        return split_speedup(lane, self.speedup_decode(lane), self.speedup_loop)

    def round_cost(self, lane: AnswerLane) -> float | None:
        """R: seconds of a round divided by seconds of a plain step. Decode speed-up = tau / R."""
        speedup = self.speedup_decode(lane)
        return lane.stats.tau / speedup if speedup else None
