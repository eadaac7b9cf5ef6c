"""Answers one question of the Compare tab: runs it on the device and renders it while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.io.images import media_images
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.scenes.domain_check import OUT_OF_DOMAIN_HINT, looks_like_scene
from mmspec.app.ui import render
from mmspec.app.ui.comparison import ComparisonRun, ComparisonSide
from mmspec.app.ui.context import Context, format_queue_position
from mmspec.app.ui.report import Report, build_report
from mmspec.app.ui.streamer import IncrementalDetokenizer
from mmspec.app.ui.worker import Client, LeftQueueError

PHASE_MESSAGES = {
    "waiting": "Waiting for the device.",
    "loading": "Loading the model.",
    "encoding": "Encoding the picture.",
    "plain": "Plain generate is answering; mmspec is next.",
    "mmspec": "mmspec is answering.",
    "done": "Preparing the results.",
}


def format_timing(num_tokens: int, tokens_per_s: float, ttft_s: float, elapsed_s: float) -> str:
    """Progress of one side: tokens, tokens per second, time to first token, elapsed time. Zeros are left out."""
    parts = [f"{num_tokens} tokens"] if num_tokens else []
    parts += [f"{tokens_per_s:.1f} tokens/s"] if tokens_per_s else []
    parts += [f"first after {ttft_s:.2f} s"] if ttft_s else []
    parts += [f"{elapsed_s:.2f} s"] if elapsed_s else []
    return ", ".join(parts)


@dataclass(frozen=True)
class Conversation:
    """Turns so far, about the picture or clip at `path`. Another picture starts another conversation."""

    path: str | None = None
    turns: tuple[ChatTurn, ...] = ()


class ComparisonView:
    """Renders a run in progress."""

    def __init__(self, comparison: ComparisonRun) -> None:
        self.comparison = comparison
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    def render(self) -> tuple[str, str, str]:
        """HTML of the status and of both sides. Gradio sends only what has changed."""
        run = self.comparison
        phase = "loading" if run.phase == "waiting" and run.model_store.is_loading else run.phase
        is_queued = phase == "waiting" and run.num_ahead > 0
        text = format_queue_position(run.num_ahead) if is_queued else PHASE_MESSAGES[phase]
        return render.render_status(text), self._side("plain", run.plain), self._side("mmspec", run.mmspec)

    def _side(self, name: str, side: ComparisonSide) -> str:
        run, streamer = self.comparison, side.streamer
        timing = format_timing(len(streamer.token_ids), streamer.tokens_per_s, side.ttft_s, side.elapsed_s)
        is_active = run.phase == name
        return render.render_partial_answer(name, run.turns, run.question, self._text(name, side), timing, is_active)

    def _text(self, name: str, side: ComparisonSide) -> str:
        model = self.comparison.loaded_model
        if model is None:
            return ""
        detokenizer = self._detokenizers.setdefault(name, IncrementalDetokenizer(model.processor.tokenizer))
        return "".join(detokenizer.decode(list(side.streamer.token_ids)))


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
) -> Iterator[tuple[str, str, str]]:
    """Answer one question; yields HTML of the status and both sides. Stores a `CompareResult` with the page.

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
    turns = conversation.turns if conversation.path == path else ()
    run_settings = context.parse_settings(*settings)
    checked_question = limits.check_question(question)
    if len(turns) >= limits.max_turns:
        raise UsageError(f"This conversation has {limits.max_turns} questions, which is the limit; start a new one.")
    file = limits.check_media_path(path)
    run = ComparisonRun(
        context.model_store, lambda: limits.load_media(file), turns, checked_question, run_settings, cancel_signal
    )
    view = ComparisonView(run)
    try:
        for num_ahead in context.worker.submit_and_poll(run.run, cancel_signal, yield_first=True, client=client):
            run.num_ahead = num_ahead
            yield view.render()
    except LeftQueueError:
        return
    if run.loaded_model is not None:
        is_in_domain = run_settings.model != SCENES_MODEL or looks_like_scene(media_images(run.media)[0])
        note = "" if is_in_domain else f" The picture {OUT_OF_DOMAIN_HINT}."
        result = CompareResult(build_report(run), Conversation(path, turns), run.cancelled, note)
        context.sessions.store_result(client.session, result)


__all__ = ["CompareResult", "ComparisonView", "Conversation", "format_timing", "stream_comparison"]
