"""The Compare tab: one question about a picture or a clip, answered plainly, then by mmspec, then both as a race."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT, SCENES_MODEL, VIDEO_PROMPT, default_prompt
from mmspec.app.errors import UsageError
from mmspec.app.io.images import media_images
from mmspec.app.modeling.chat import Turn
from mmspec.app.scenes.domain_check import OUT_OF_DOMAIN_HINT, looks_like_scene
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render as render
from mmspec.app.ui.comparison import ComparisonRun, ComparisonSide
from mmspec.app.ui.context import (
    DEVICE_QUEUE,
    FAILURE_MESSAGE,
    PRIVATE_API,
    UNQUEUED,
    VALIDATION,
    Context,
    Controls,
    build_controls,
    format_queue_position,
    report_errors,
)
from mmspec.app.ui.report import AnswerTrace, Report, build_report
from mmspec.app.ui.streamer import IncrementalDetokenizer
from mmspec.app.ui.worker import LeftQueueError

REPLAY_SPEEDS = {"real time": 1, "4 times slower": 4, "16 times slower": 16}
PHASE_MESSAGES = {
    "waiting": "Waiting for the device.",
    "loading": "Loading the model.",
    "looking": "Looking at the picture.",
    "plain": "Plain generate is answering; mmspec is next.",
    "mmspec": "mmspec is answering.",
    "done": "Putting it together.",
}


@dataclass(frozen=True)
class CompareComponents:
    """The parts of the tab that change while it runs."""

    image: Any
    video: Any
    question: Any
    ask: Any
    stop: Any
    status: Any
    plain: Any
    mmspec: Any
    results: Any
    replay: Any
    download: Any
    conversation: Any


def format_timing(count: int, rate: float, ttft_s: float, seconds: float) -> str:
    """What a side has done so far: tokens, tokens per second, seconds to the first token, seconds in all."""
    parts = [f"{count} tokens"] if count else []
    parts += [f"{rate:.1f} tokens/s"] if rate else []
    parts += [f"first after {ttft_s:.2f} s"] if ttft_s else []
    parts += [f"{seconds:.2f} s"] if seconds else []
    return ", ".join(parts)


@dataclass(frozen=True)
class Conversation:
    """What was said so far, about the picture or clip at `path`. Another picture is another conversation."""

    path: str | None = None
    turns: tuple[Turn, ...] = ()


class ComparisonView:
    """A race as it looks now."""

    def __init__(self, comparison: ComparisonRun) -> None:
        self.comparison = comparison
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    def render(self) -> tuple[str, str, str]:
        """The status, and both sides. What has not changed Gradio does not send."""
        race = self.comparison
        phase = "loading" if race.phase == "waiting" and race.model_store.is_loading else race.phase
        text = format_queue_position(race.num_ahead) if phase == "waiting" and race.num_ahead else PHASE_MESSAGES[phase]
        return render.render_status(text), self._side("plain", race.plain), self._side("mmspec", race.mmspec)

    def _side(self, name: str, side: ComparisonSide) -> str:
        race, told = (
            self.comparison,
            format_timing(len(side.streamer.token_ids), side.streamer.tokens_per_s, side.ttft_s, side.elapsed_s),
        )
        return render.render_partial_answer(
            name, race.turns, race.question, self._text(name, side), told, race.phase == name
        )

    def _text(self, name: str, side: ComparisonSide) -> str:
        if self.comparison.loaded_model is None:
            return ""
        pieces = self._detokenizers.setdefault(
            name, IncrementalDetokenizer(self.comparison.loaded_model.processor.tokenizer)
        )
        return "".join(pieces.decode(list(side.streamer.token_ids)))


def build_compare_tab(context: Context, run: Any) -> CompareComponents:
    """Draw the tab. run: the state that holds the last finished `Report`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picture, clip, tabs = _build_media_inputs()
            settings = build_controls(context, 128, "compare")
        with gr.Column(scale=5, min_width=320):
            parts = _build_panels(context, picture, clip)
    _connect_events(context, parts, tabs, settings, run)
    return parts


def _build_media_inputs() -> tuple[Any, Any, Any]:
    with gr.Tabs() as tabs:
        with gr.Tab("Picture", id="picture"):
            picture = gr.Image(
                sources=["upload", "webcam", "clipboard"],
                type="filepath",
                label="Picture",
                alt_text="The picture that is asked about",
                height=280,
                elem_id="mm-picture",
                buttons=["fullscreen"],
            )
            shown = [[str(path)] for path in list_example_files() if path.suffix == ".png"]
            gr.Examples(shown, picture, label="Example pictures", elem_id="mm-examples", api_visibility="private")
        with gr.Tab("Clip", id="clip"):
            clip = gr.Video(sources=["upload"], label="Clip", height=280, elem_id="mm-clip")
            shown = [[str(path)] for path in list_example_files() if path.suffix == ".mp4"]
            gr.Examples(shown, clip, label="Example clips", elem_id="mm-clip-examples", api_visibility="private")
    return picture, clip, tabs


def _build_panels(context: Context, picture: Any, clip: Any) -> CompareComponents:
    talk = gr.State(Conversation())
    question = gr.Textbox(
        PROMPT,
        label="Question",
        placeholder="Ask about the picture",
        lines=1,
        max_lines=4,
        elem_id="mm-question",
    )
    with gr.Row():
        ask = gr.Button("Ask both", variant="primary", elem_id="mm-ask", min_width=90)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-stop", min_width=90)
        fresh = gr.Button("Start over", elem_id="mm-fresh", min_width=90)
    status = gr.HTML(render.render_status("Choose a picture or a clip, and ask."), elem_id="mm-status")
    with gr.Row():
        with gr.Column(min_width=280):
            plain = gr.HTML(render.render_partial_answer("plain", (), "", "", "", False), elem_id="mm-plain")
        with gr.Column(min_width=280):
            ours = gr.HTML(render.render_partial_answer("mmspec", (), "", "", "", False), elem_id="mm-mmspec")
    gr.HTML(render.LEGEND)
    with gr.Row(elem_classes="mm-end"):
        speed = gr.Dropdown(
            list(REPLAY_SPEEDS), value="real time", label="Replay speed", min_width=150, elem_id="mm-speed"
        )
        replay = gr.Button("Replay the race", interactive=False, elem_id="mm-replay", min_width=150)
        download = gr.DownloadButton("Download as JSON", interactive=False, elem_id="mm-download", min_width=150)
    results = gr.HTML("", elem_id="mm-results")
    replay.click(
        None, speed, None, js=f"(speed) => {{ window.mmspecReplay({REPLAY_SPEEDS}[speed] ?? 1); }}", **PRIVATE_API
    )
    parts = CompareComponents(picture, clip, question, ask, stop, status, plain, ours, results, replay, download, talk)
    cleared = [talk, plain, ours, results, status, replay, download]
    gr.on([fresh.click, picture.change, clip.change], lambda: _reset_outputs(), None, cleared, **UNQUEUED)
    return parts


def _reset_outputs() -> tuple[Any, ...]:
    """An empty conversation."""
    sides = [render.render_partial_answer(name, (), "", "", "", False) for name in ("plain", "mmspec")]
    off = gr.update(interactive=False)
    return (Conversation(), *sides, "", render.render_status("Choose a picture or a clip, and ask."), off, off)


def _connect_events(context: Context, parts: CompareComponents, tabs: Any, settings: Controls, run: Any) -> None:
    kind = gr.State("picture")

    def chosen(event: gr.SelectData, question: str) -> tuple[str, str]:
        """A question that nobody has touched goes with what is shown."""
        name = "clip" if event.value == "Clip" else "picture"
        return name, default_prompt(name == "clip") if question in (PROMPT, VIDEO_PROMPT) else question

    tabs.select(chosen, parts.question, [kind, parts.question], **UNQUEUED)
    asked = [parts.image, parts.video, kind, parts.question, parts.conversation, *settings.inputs]

    @report_errors
    def begin(request: gr.Request, question: str) -> tuple[Any, ...]:
        context.limits.check_question(question)  # before what is shown of the last one goes
        context.sessions.begin(_session_name(request))
        off = gr.update(interactive=False)
        return off, gr.update(interactive=True), "", off, off

    @report_errors
    def answer(request: gr.Request, picture: Any, clip: Any, kind: Any, *rest: Any) -> Iterator[tuple[str, str, str]]:
        question, talk, *chosen = rest
        path = _upload_path(clip if kind == "clip" else picture)
        yield from stream_comparison(context, path, question, talk, tuple(chosen), _session_name(request))

    @report_errors
    def finish(request: gr.Request) -> dict[Any, Any]:
        made = context.sessions.take_result(_session_name(request))
        return (
            {parts.status: render.render_status("Stopped.")}
            if made is None
            else build_final_updates(context, parts, run, made)
        )

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(_session_name(request))
        return gr.update(interactive=True), gr.update(interactive=False)

    def failed(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), render.render_status(FAILURE_MESSAGE))

    def halt(request: gr.Request) -> None:
        context.sessions.cancel(request.session_hash)

    buttons = [parts.ask, parts.stop]
    growing, late = [parts.status, parts.plain, parts.mmspec], [parts.results, parts.replay, parts.download]
    started = gr.on(
        [parts.ask.click, parts.question.submit],
        begin,
        parts.question,
        [*buttons, *late],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    running = started.success(
        answer,
        asked,
        growing,  # no others: Gradio makes every output that is skipped anew, at each step, in the server's thread
        show_progress="minimal",
        preprocess=False,  # or Gradio would decode the picture without our limits; it still checks that it is an upload
        show_progress_on=[parts.status],
        **DEVICE_QUEUE,
        **PRIVATE_API,
    )
    finished = running.success(
        finish,
        None,
        [*growing, *late, parts.conversation, parts.question, run],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    finished.then(end, None, buttons, **UNQUEUED)
    finished.failure(failed, None, [*buttons, parts.status], **UNQUEUED)
    running.failure(failed, None, [*buttons, parts.status], **UNQUEUED)  # gradio 6.31 leaves `then` out after an error
    parts.stop.click(halt, None, None, **UNQUEUED)


def _upload_path(upload: Any) -> str | None:
    """Where an uploaded file lies, as Gradio's own parts are given it."""
    path = upload.get("path") if isinstance(upload, dict) else None
    return path if isinstance(path, str) else None


def _session_name(request: gr.Request | None) -> str:
    return str(getattr(request, "session_hash", None) or "api")


@dataclass(frozen=True)
class CompareResult:
    """What came of a question: its report, the conversation before it, and what else is to be said."""

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
    session: str,
) -> Iterator[tuple[str, str, str]]:
    """Answer one question; yields the status and both sides. What comes of it is left with the session.

    Raises:
        UsageError: the file, the question or the settings do not do.
    """
    limits, halt = context.limits, context.sessions.get_signal(session)
    turns = conversation.turns if conversation.path == path else ()
    choice = context.parse_settings(*settings)
    asked = limits.check_question(question)
    if len(turns) >= limits.max_turns:
        raise UsageError(f"This conversation has {limits.max_turns} questions, which is the limit; begin a new one.")
    file = limits.check_media_path(path)
    race = ComparisonRun(context.model_store, lambda: limits.load_media(file), turns, asked, choice, halt)
    view = ComparisonView(race)
    try:
        for ahead in context.worker.submit_and_poll(race.run, halt, yield_first=True):
            race.num_ahead = ahead
            yield view.render()
    except LeftQueueError:
        return
    if race.loaded_model is not None:
        note = (
            ""
            if choice.model != SCENES_MODEL or looks_like_scene(media_images(race.media)[0])
            else f" The picture {OUT_OF_DOMAIN_HINT}."
        )
        context.sessions.store_result(
            session, CompareResult(build_report(race), Conversation(path, turns), race.cancelled, note)
        )


def build_final_updates(
    context: Context, components: CompareComponents, run: Any, result: CompareResult
) -> dict[Any, Any]:
    """What is shown when a race is over."""
    on = gr.update(interactive=True)
    report, talk = result.report, result.conversation
    keep = bool(report.plain.text) and not result.cancelled
    turns = talk.turns
    return {
        components.status: render.render_status(("Stopped." if result.cancelled else "Done.") + result.note),
        components.plain: _render_finished(report, report.plain, turns),
        components.mmspec: _render_finished(report, report.mmspec, turns),
        components.results: render.render_results(report)
        if report.identical is not None
        else render.render_verdict(report),
        components.replay: on,
        components.download: gr.update(value=str(context.temp_storage.write_report(report)), interactive=True),
        components.conversation: Conversation(talk.path, (*turns, Turn(report.question, report.plain.text)))
        if keep
        else talk,
        components.question: gr.update(
            value=report.question if not keep or report.question in (PROMPT, VIDEO_PROMPT) else ""
        ),
        run: report,
    }


def _render_finished(report: Report, track: AnswerTrace, turns: tuple[Turn, ...]) -> str:
    side = report.metrics["sides"][track.name]
    told = format_timing(side["n_tokens"], side["tokens_per_s"], side["ttft_s"], side["total_s"])
    return render.render_answer(track, turns, report.question, told)


__all__ = [
    "CompareComponents",
    "CompareResult",
    "ComparisonView",
    "Conversation",
    "build_compare_tab",
    "stream_comparison",
]
