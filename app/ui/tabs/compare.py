"""The Compare tab: one question about a picture or clip, answered by plain `generate`, then by mmspec, and a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT, VIDEO_PROMPT, default_prompt
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render
from mmspec.app.ui.comparison_stream import CompareResult, Conversation, format_timing, stream_comparison
from mmspec.app.ui.context import (
    PRIVATE_API,
    UNQUEUED,
    VALIDATION,
    Context,
    Controls,
    build_controls,
    get_client,
    report_errors,
)
from mmspec.app.ui.report import AnswerTrace, Report
from mmspec.app.ui.tabs.run_events import RUN_EVENT, RunControls, begin_run, connect_run_end

REPLAY_SPEEDS = {"real time": 1, "4 times slower": 4, "16 times slower": 16}
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
    kind = _connect_media_tabs(tabs, parts.question)
    _connect_compare_events(context, parts, kind, settings, report)
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


def _connect_media_tabs(tabs: Any, question: Any) -> Any:
    """Let a default question follow the selected tab; returns the `gr.State` with its kind, "picture" or "clip"."""
    kind = gr.State("picture")

    def select_kind(event: gr.SelectData, text: str) -> tuple[str, str]:
        name = "clip" if event.value == "Clip" else "picture"
        return name, default_prompt(name == "clip") if text in (PROMPT, VIDEO_PROMPT) else text

    tabs.select(select_kind, question, [kind, question], **UNQUEUED)
    return kind


def _connect_compare_events(
    context: Context, parts: CompareComponents, kind: Any, settings: Controls, report: Any
) -> None:
    @report_errors
    def begin(request: gr.Request, question: str) -> tuple[Any, ...]:
        context.limits.check_question(question)  # before the results of the last run are cleared
        disabled = gr.update(interactive=False)
        return *begin_run(context, request), "", disabled, disabled

    @report_errors
    def answer(request: gr.Request, image: Any, video: Any, kind: Any, *values: Any) -> Iterator[tuple[str, str, str]]:
        question, conversation, *chosen = values
        path = _upload_path(video if kind == "clip" else image)
        yield from stream_comparison(context, path, question, conversation, tuple(chosen), get_client(request))

    @report_errors
    def finish(request: gr.Request) -> dict[Any, Any]:
        result = context.sessions.take_result(get_client(request).session)
        if result is None:
            return {parts.status: render.render_status("Stopped.")}
        return build_final_updates(context, parts, report, result)

    live_outputs = [parts.status, parts.plain, parts.mmspec]
    final_outputs = [parts.results, parts.replay, parts.download]
    controls = RunControls(parts.ask, parts.stop, parts.status)
    started = gr.on(
        [parts.ask.click, parts.question.submit],
        begin,
        parts.question,
        [*controls.buttons, *final_outputs],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    running = started.success(
        answer,
        [parts.image, parts.video, kind, parts.question, parts.conversation, *settings.inputs],
        live_outputs,  # no others: Gradio rebuilds every skipped output at each step, in the server's thread
        preprocess=False,  # Gradio would decode the picture without our limits; it still checks that it is an upload
        show_progress_on=[parts.status],
        **RUN_EVENT,
    )
    finished = running.success(
        finish,
        None,
        [*live_outputs, *final_outputs, parts.conversation, parts.question, report],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    connect_run_end(context, controls, [running, finished])


def _upload_path(upload: Any) -> str | None:
    """Path of an uploaded file, from the value of an unprocessed component."""
    path = upload.get("path") if isinstance(upload, dict) else None
    return path if isinstance(path, str) else None


def build_final_updates(
    context: Context, components: CompareComponents, report_state: Any, result: CompareResult
) -> dict[Any, Any]:
    """Values of all outputs after a run. A cancelled or empty answer does not become a turn of the conversation."""
    report, conversation = result.report, result.conversation
    turns = conversation.turns
    is_turn = bool(report.plain.text) and not result.cancelled
    if is_turn:
        conversation = Conversation(conversation.path, (*turns, ChatTurn(report.question, report.plain.text)))
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


def _render_finished(report: Report, trace: AnswerTrace, turns: tuple[ChatTurn, ...]) -> str:
    side = report.metrics["sides"][trace.name]
    timing = format_timing(side["n_tokens"], side["tokens_per_s"], side["ttft_s"], side["total_s"])
    return render.render_answer(trace, turns, report.question, timing)


__all__ = ["CompareComponents", "build_compare_tab", "build_final_updates"]
