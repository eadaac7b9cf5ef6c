"""The Compare tab: one question about a picture or clip, answered by plain `generate`, then by mmspec, and a replay."""

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
from mmspec.app.ui import render
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
    get_client,
    report_errors,
)
from mmspec.app.ui.report import AnswerTrace, Report, build_report
from mmspec.app.ui.streamer import IncrementalDetokenizer
from mmspec.app.ui.worker import Client, LeftQueueError

REPLAY_SPEEDS = {"real time": 1, "4 times slower": 4, "16 times slower": 16}
PHASE_MESSAGES = {
    "waiting": "Waiting for the device.",
    "loading": "Loading the model.",
    "encoding": "Encoding the picture.",
    "plain": "Plain generate is answering; mmspec is next.",
    "mmspec": "mmspec is answering.",
    "done": "Preparing the results.",
}
INITIAL_STATUS = "Choose a picture or a clip, and ask."


@dataclass(frozen=True)
class CompareComponents:
    """Components of the tab that its events read or update."""

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
    turns: tuple[Turn, ...] = ()


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


def build_compare_tab(context: Context, report: Any) -> CompareComponents:
    """Create the tab and connect its events.

    Args:
        context: the app.
        report: `gr.State` that receives the last finished `Report`.
    """
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            image, video, tabs = _build_media_inputs()
            settings = build_controls(context, 128, "compare")
        with gr.Column(scale=5, min_width=320):
            parts = _build_panels(image, video)
    _connect_events(context, parts, tabs, settings, report)
    return parts


def _build_media_inputs() -> tuple[Any, Any, Any]:
    with gr.Tabs() as tabs:
        with gr.Tab("Picture", id="picture"):
            image = gr.Image(
                sources=["upload", "webcam", "clipboard"],
                type="filepath",
                label="Picture",
                alt_text="The picture of the question",
                height=280,
                elem_id="mm-picture",
                buttons=["fullscreen"],
            )
            examples = [[str(path)] for path in list_example_files() if path.suffix == ".png"]
            gr.Examples(examples, image, label="Example pictures", elem_id="mm-examples", api_visibility="private")
        with gr.Tab("Clip", id="clip"):
            video = gr.Video(sources=["upload"], label="Clip", height=280, elem_id="mm-clip")
            examples = [[str(path)] for path in list_example_files() if path.suffix == ".mp4"]
            gr.Examples(examples, video, label="Example clips", elem_id="mm-clip-examples", api_visibility="private")
    return image, video, tabs


def _build_panels(image: Any, video: Any) -> CompareComponents:
    conversation = gr.State(Conversation())
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
        reset = gr.Button("Start over", elem_id="mm-fresh", min_width=90)
    status = gr.HTML(render.render_status(INITIAL_STATUS), elem_id="mm-status")
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
        replay = gr.Button("Replay both", interactive=False, elem_id="mm-replay", min_width=150)
        download = gr.DownloadButton("Download as JSON", interactive=False, elem_id="mm-download", min_width=150)
    results = gr.HTML("", elem_id="mm-results")
    script = f"(speed) => {{ window.mmspecReplay({REPLAY_SPEEDS}[speed] ?? 1); }}"
    replay.click(None, speed, None, js=script, **PRIVATE_API)
    outputs = [conversation, plain, ours, results, status, replay, download]
    gr.on([reset.click, image.change, video.change], lambda: _reset_outputs(), None, outputs, **UNQUEUED)
    return CompareComponents(
        image, video, question, ask, stop, status, plain, ours, results, replay, download, conversation
    )


def _reset_outputs() -> tuple[Any, ...]:
    """Values of the outputs for an empty conversation."""
    sides = [render.render_partial_answer(name, (), "", "", "", False) for name in ("plain", "mmspec")]
    disabled = gr.update(interactive=False)
    return (Conversation(), *sides, "", render.render_status(INITIAL_STATUS), disabled, disabled)


def _connect_events(context: Context, parts: CompareComponents, tabs: Any, settings: Controls, report: Any) -> None:
    kind = gr.State("picture")

    def select_kind(event: gr.SelectData, question: str) -> tuple[str, str]:
        """A default question follows the selected tab; an edited one stays."""
        name = "clip" if event.value == "Clip" else "picture"
        return name, default_prompt(name == "clip") if question in (PROMPT, VIDEO_PROMPT) else question

    tabs.select(select_kind, parts.question, [kind, parts.question], **UNQUEUED)

    @report_errors
    def begin(request: gr.Request, question: str) -> tuple[Any, ...]:
        context.limits.check_question(question)  # before the results of the last run are cleared
        context.sessions.begin(get_client(request).session)
        disabled = gr.update(interactive=False)
        return disabled, gr.update(interactive=True), "", disabled, disabled

    @report_errors
    def answer(request: gr.Request, image: Any, video: Any, kind: Any, *values: Any) -> Iterator[tuple[str, str, str]]:
        question, conversation, *chosen = values
        path = _upload_path(video if kind == "clip" else image)
        client = get_client(request)
        yield from stream_comparison(
            context, path, question, conversation, tuple(chosen), client.session, client.address
        )

    @report_errors
    def finish(request: gr.Request) -> dict[Any, Any]:
        result = context.sessions.take_result(get_client(request).session)
        if result is None:
            return {parts.status: render.render_status("Stopped.")}
        return build_final_updates(context, parts, report, result)

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(get_client(request).session)
        return gr.update(interactive=True), gr.update(interactive=False)

    def fail(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), render.render_status(FAILURE_MESSAGE))

    def cancel_run(request: gr.Request) -> None:
        context.sessions.cancel(request.session_hash)

    buttons = [parts.ask, parts.stop]
    live_outputs = [parts.status, parts.plain, parts.mmspec]
    final_outputs = [parts.results, parts.replay, parts.download]
    started = gr.on(
        [parts.ask.click, parts.question.submit],
        begin,
        parts.question,
        [*buttons, *final_outputs],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    running = started.success(
        answer,
        [parts.image, parts.video, kind, parts.question, parts.conversation, *settings.inputs],
        live_outputs,  # no others: Gradio rebuilds every skipped output at each step, in the server's thread
        show_progress="minimal",
        preprocess=False,  # Gradio would decode the picture without our limits; it still checks that it is an upload
        show_progress_on=[parts.status],
        **DEVICE_QUEUE,
        **PRIVATE_API,
    )
    finished = running.success(
        finish,
        None,
        [*live_outputs, *final_outputs, parts.conversation, parts.question, report],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    finished.then(end, None, buttons, **UNQUEUED)
    finished.failure(fail, None, [*buttons, parts.status], **UNQUEUED)
    running.failure(fail, None, [*buttons, parts.status], **UNQUEUED)  # Gradio 6.31 skips `then` after an error
    parts.stop.click(cancel_run, None, None, **UNQUEUED)


def _upload_path(upload: Any) -> str | None:
    """Path of an uploaded file, from the value of an unprocessed component."""
    path = upload.get("path") if isinstance(upload, dict) else None
    return path if isinstance(path, str) else None


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
    session: str,
    address: str = "",
) -> Iterator[tuple[str, str, str]]:
    """Answer one question; yields HTML of the status and both sides. Stores a `CompareResult` with the session.

    Args:
        context: the app.
        path: uploaded picture or clip.
        question: as typed.
        conversation: continued if it is about the same file.
        settings: values of the controls, as `Context.parse_settings` takes them.
        session: name of the page.
        address: network address of the client.

    Raises:
        UsageError: the file, the question or the settings are refused, or the queue is full.
    """
    limits = context.limits
    cancel_signal = context.sessions.get_signal(session)
    turns = conversation.turns if conversation.path == path else ()
    run_settings = context.parse_settings(*settings)
    checked_question = limits.check_question(question)
    if len(turns) >= limits.max_turns:
        raise UsageError(f"This conversation has {limits.max_turns} questions, which is the limit; start a new one.")
    file = limits.check_media_path(path)
    run = ComparisonRun(
        context.model_store, lambda: limits.load_media(file), turns, checked_question, run_settings, cancel_signal
    )
    view, client = ComparisonView(run), Client(session, address)
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
        context.sessions.store_result(session, result)


def build_final_updates(
    context: Context, components: CompareComponents, report_state: Any, result: CompareResult
) -> dict[Any, Any]:
    """Values of all outputs after a run. A cancelled or empty answer does not become a turn of the conversation."""
    report, conversation = result.report, result.conversation
    turns = conversation.turns
    is_turn = bool(report.plain.text) and not result.cancelled
    if is_turn:
        conversation = Conversation(conversation.path, (*turns, Turn(report.question, report.plain.text)))
    keeps_question = not is_turn or report.question in (PROMPT, VIDEO_PROMPT)
    has_both = report.identical is not None
    return {
        components.status: render.render_status(("Stopped." if result.cancelled else "Done.") + result.note),
        components.plain: _render_finished(report, report.plain, turns),
        components.mmspec: _render_finished(report, report.mmspec, turns),
        components.results: render.render_results(report) if has_both else render.render_verdict(report),
        components.replay: gr.update(interactive=True),
        components.download: gr.update(value=str(context.temp_storage.write_report(report)), interactive=True),
        components.conversation: conversation,
        components.question: gr.update(value=report.question if keeps_question else ""),
        report_state: report,
    }


def _render_finished(report: Report, trace: AnswerTrace, turns: tuple[Turn, ...]) -> str:
    side = report.metrics["sides"][trace.name]
    timing = format_timing(side["n_tokens"], side["tokens_per_s"], side["ttft_s"], side["total_s"])
    return render.render_answer(trace, turns, report.question, timing)


__all__ = [
    "CompareComponents",
    "CompareResult",
    "ComparisonView",
    "Conversation",
    "build_compare_tab",
    "stream_comparison",
]
