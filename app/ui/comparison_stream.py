"""Answers one question of the Compare tab: runs it on the device and renders it while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.io.images import media_images
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.scenes.domain_check import OUT_OF_DOMAIN_HINT, looks_like_scene
from mmspec.app.ui import render
from mmspec.app.ui.comparison import AnswerLane, ComparisonRun
from mmspec.app.ui.context import ANONYMOUS, Context, format_queue_position
from mmspec.app.ui.race import LiveLane, RacedTurn, format_timing, lane_title, render_live_race
from mmspec.app.ui.report import Report, build_report
from mmspec.app.ui.streamer import IncrementalDetokenizer
from mmspec.app.ui.thumbnails import TimedImage, draw_media
from mmspec.app.ui.worker import Client, LeftQueueError

PHASE_MESSAGES = {
    "waiting": "Waiting for the device.",
    "loading": "Loading the model.",
    "encoding": "Encoding the picture or clip.",
    "answering": "Recording the answers.",
    "done": "Preparing the race.",
}


@dataclass(frozen=True)
class Conversation:
    """Turns so far, about the picture or clip at `path`. Another picture starts another conversation.

    Attributes:
        path: of the upload; None if there is none.
        turns: so far.
        error: why the last run was refused; empty if it was not.
    """

    path: str | None = None
    turns: tuple[ChatTurn, ...] = ()
    error: str = ""

    def after(self, report: Report) -> Conversation:
        """The conversation with one more turn."""
        turn = RacedTurn(report.question, report.plain.text, report.best.speedup)
        return Conversation(self.path, (*self.turns, turn))

    def before(self, path: str | None, question: str) -> tuple[ChatTurn, ...]:
        """The turns before a question about `path`. A question asked twice in a row replaces its last answer."""
        turns = self.turns if self.path == path else ()
        while turns and turns[-1].question == question:
            turns = turns[:-1]
        return turns


class ComparisonView:
    """Renders a run in progress."""

    def __init__(self, comparison: ComparisonRun) -> None:
        self.comparison = comparison
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}
        self._images: Sequence[TimedImage] = ()

    def render(self) -> tuple[str, str]:
        """HTML of the status and of the race. Gradio sends only what has changed."""
        run = self.comparison
        lanes = [self._live_lane(number, lane) for number, lane in enumerate((run.plain, *run.lanes), 1)]
        if not self._images and run.is_media_loaded:
            self._images = draw_media(run.media)
        race = render_live_race(run.turns, run.question, lanes, self._images)
        return render.render_status(self._status()), race

    def _status(self) -> str:
        run, lane = self.comparison, self.comparison.lane
        if run.phase == "waiting" and run.num_ahead:
            return format_queue_position(run.num_ahead)
        if run.phase == "answering" and lane is not None:
            if lane is run.loop:
                return "Measuring mmspec without drafts, to tell its share of the speed-up. The race follows."
            number = (run.plain, *run.lanes).index(lane) + 1
            title = lane_title(lane.resolved_drafter)
            return f"Running: {title} is answering ({number} of {len(run.lanes) + 1}). The race follows."
        is_loading = run.phase == "waiting" and run.model_store.is_loading
        return PHASE_MESSAGES["loading" if is_loading else run.phase]

    def _live_lane(self, number: int, lane: AnswerLane) -> LiveLane:
        streamer = lane.streamer
        timing = format_timing(len(streamer.token_ids), lane.ttft_s, lane.elapsed_s)
        state = "running" if lane is self.comparison.lane else "done" if lane.total_s else "waiting"
        place = f"{number} of {len(self.comparison.lanes) + 1}"
        note = {"running": f"recording {place}", "done": f"recorded {place}", "waiting": f"next: {place}"}[state]
        text, rate = self._text(lane), streamer.tokens_per_s
        return LiveLane(lane.name, lane.resolved_drafter, text, timing, rate, state, note)

    def _text(self, lane: AnswerLane) -> str:
        model = self.comparison.loaded_model
        if model is None:
            return ""
        detokenizer = self._detokenizers.setdefault(lane.name, IncrementalDetokenizer(model.processor.tokenizer))
        return "".join(detokenizer.decode(list(lane.streamer.token_ids)))


@dataclass(frozen=True)
class CompareResult:
    """Result of one question.

    Attributes:
        report: both answers and their metrics.
        conversation: the turns before this question.
        cancelled: the run ended early.
        note: appended to the status.
    """

    report: Report
    conversation: Conversation
    cancelled: bool
    note: str


def stream_comparison(
    context: Context,
    path: str | None,
    question: str,
    conversation: Conversation,
    settings: tuple[Any, ...],
    client: Client,
) -> Iterator[tuple[str, str]]:
    """Answer one question; yields HTML of the status and of the race. Stores a `CompareResult` with the page.

    Args:
        context: the app.
        path: uploaded picture or clip.
        question: as typed.
        conversation: continued if it is about the same file.
        settings: values of the controls, as `Context.parse_settings` takes them.
        client: the page, and its network address.

    Raises:
        UsageError: the file, the question or the settings are refused, or the queue is full.
    """
    limits = context.limits
    cancel_signal = context.sessions.get_signal(client.session)
    run_settings = context.parse_settings(*settings)
    checked_question = limits.check_question(question)
    turns = conversation.before(path, checked_question)
    if len(turns) >= limits.max_turns:
        raise UsageError(f"This conversation has {limits.max_turns} questions, which is the limit; start a new one.")
    file = limits.check_media_path(path)
    run = ComparisonRun(
        context.model_store,
        lambda: limits.load_media(file),
        turns,
        checked_question,
        run_settings,
        cancel_signal,
        file,
        "" if client.session == ANONYMOUS else client.session,
    )
    view = ComparisonView(run)
    try:
        for num_ahead in context.worker.submit_and_poll(run.run, cancel_signal, yield_first=True, client=client):
            run.num_ahead = num_ahead
            yield view.render()
    except LeftQueueError:
        return
    if run.loaded_model is not None:
        context.sessions.store_result(client.session, build_result(run, Conversation(path, turns)))


def build_result(run: ComparisonRun, conversation: Conversation) -> CompareResult:
    """The result of a run that has ended and whose model was loaded.

    Args:
        run: the run.
        conversation: the turns before its question.
    """
    is_in_domain = run.settings.model != SCENES_MODEL or looks_like_scene(media_images(run.media)[0])
    note = "" if is_in_domain else f" The picture {OUT_OF_DOMAIN_HINT}."
    return CompareResult(build_report(run), conversation, run.cancelled, note)
