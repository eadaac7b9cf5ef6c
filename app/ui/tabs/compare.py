"""The Compare tab: one question about a picture or clip, answered by plain `generate` and by mmspec, then raced."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT, VIDEO_PROMPT, default_prompt
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render
from mmspec.app.ui.comparison_stream import CompareResult, Conversation, stream_comparison
from mmspec.app.ui.context import (
    PRIVATE_API,
    UNQUEUED,
    VALIDATION,
    Context,
    Controls,
    build_controls,
    describe_error,
    get_client,
    report_errors,
)
from mmspec.app.ui.opening import (
    CLIP_QUESTIONS,
    GENERAL_CLIP_QUESTIONS,
    OPENING_IMAGE,
    OPENING_QUESTION,
    PICTURE_QUESTIONS,
    Opening,
)
from mmspec.app.ui.race import render_empty_race, render_race
from mmspec.app.ui.refusals import FileRefusedError
from mmspec.app.ui.report import Report
from mmspec.app.ui.tabs.results import ResultComponents, build_results, clear_results, update_results
from mmspec.app.ui.tabs.run_events import RUN_EVENT, UNKNOWN_FAILURE, RunControls, begin_run, connect_run_end

INITIAL_STATUS = "Choose a picture or a clip and a question, then start the race."
OPENING_STATUS = "Recorded on this machine when the demo started. Start the race to run it again."
QUESTION_LABEL, FOLLOW_UP_LABEL = "Question", "Follow-up question"
DEFAULT_QUESTIONS = (OPENING_QUESTION, PROMPT, VIDEO_PROMPT)
"""Questions that follow the selected tab."""


@dataclass(frozen=True)
class CompareComponents:
    """Components of the tab that its events read or update."""

    sentence: Any
    image: Any
    video: Any
    frames: Any
    turns: Any
    question: Any
    ask: Any
    stop: Any
    reset: Any
    status: Any
    race: Any
    conversation: Any
    results: ResultComponents

    @property
    def final_outputs(self) -> list[Any]:
        """What a finished run updates."""
        parts = [self.status, self.race, self.frames, self.turns, self.conversation, self.question, self.sentence]
        return [*parts, *self.results.outputs]


def build_compare_tab(context: Context, report: Any, opening: Opening) -> CompareComponents:
    """Create the tab and connect its events.

    Args:
        context: the app.
        report: `gr.State` that receives the last finished `Report`.
        opening: the race to open with.
    """
    sentence = gr.HTML(render.render_sentence(*context.model_store.default_names), elem_id="mm-sentence")
    question = gr.Textbox(
        OPENING_QUESTION,
        label=QUESTION_LABEL,
        placeholder="Ask about the picture",
        lines=1,
        max_lines=4,
        elem_id="mm-question",
        render=False,
    )
    with gr.Row(elem_id="mm-compare"):
        with gr.Column(scale=2, min_width=300, elem_id="mm-inputs"):
            with gr.Column(elem_id="mm-form"):
                question.render()
                with gr.Row():
                    ask = gr.Button("Start the race", variant="primary", elem_id="mm-ask", min_width=140)
                    stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-stop", min_width=60)
                    reset = gr.Button("Start over", elem_id="mm-fresh", min_width=90)
                turns = gr.HTML("", elem_id="mm-turns")
            image, video, frames, tabs = _build_media_inputs(question, context.model_store.is_builtin)
            settings = build_controls(context, 128, "compare", with_lanes=True)
        with gr.Column(scale=5, min_width=320, elem_id="mm-answers"):
            status = gr.HTML(render.render_status(INITIAL_STATUS), elem_id="mm-status")
            # The race starts by itself as soon as its value holds a finished one.
            start = "const start = () => window.mmspecRace.autoplay(element); watch('value', start); start();"
            race = gr.HTML(render_empty_race(), elem_id="mm-race", js_on_load=start)
            results = build_results(context, report)
    conversation = gr.State(Conversation())
    parts = CompareComponents(
        sentence, image, video, frames, turns, question, ask, stop, reset, status, race, conversation, results
    )
    kind = _connect_media_tabs(tabs, question)
    _connect_reset(parts)
    _connect_compare_events(context, parts, kind, settings, report)
    _connect_opening(context, parts, report, opening)
    return parts


def _build_media_inputs(question: Any, is_builtin: bool) -> tuple[Any, Any, Any, Any]:
    files = list_example_files()
    with gr.Tabs() as tabs:
        with gr.Tab("Picture", id="picture"):
            image = gr.Image(
                str(OPENING_IMAGE),
                sources=["upload", "webcam", "clipboard"],
                type="filepath",
                label="Picture",
                alt_text="The picture of the question",
                height=220,
                elem_id="mm-picture",
                buttons=["fullscreen"],
            )
            pictures = [[str(path)] for path in files if path.suffix == ".png"]
            gr.Examples(pictures, image, label="Example pictures", elem_id="mm-examples", **PRIVATE_API)
            chips = [[text] for text in PICTURE_QUESTIONS]
            gr.Examples(chips, question, label="Example questions", elem_id="mm-questions", **PRIVATE_API)
        with gr.Tab("Clip", id="clip"):
            video = gr.Video(sources=["upload"], label="Clip", height=280, elem_id="mm-clip")
            frames = gr.HTML("", elem_id="mm-frames")
            clips = [[str(path)] for path in files if path.suffix == ".mp4"]
            gr.Examples(clips, video, label="Example clips", elem_id="mm-clip-examples", **PRIVATE_API)
            chips = [[text] for text in (CLIP_QUESTIONS if is_builtin else GENERAL_CLIP_QUESTIONS)]
            gr.Examples(chips, question, label="Example questions", elem_id="mm-clip-questions", **PRIVATE_API)
    return image, video, frames, tabs


def _connect_media_tabs(tabs: Any, question: Any) -> Any:
    """Let a default question follow the selected tab; returns the `gr.State` with its kind, "picture" or "clip"."""
    kind = gr.State("picture")

    def select_kind(event: gr.SelectData, text: str) -> tuple[str, Any]:
        kind = "clip" if event.value == "Clip" else "picture"
        value = _default_question(kind) if _is_default(text) else text
        return kind, gr.update(value=value, placeholder=f"Ask about the {kind}")

    tabs.select(select_kind, question, [kind, question], **UNQUEUED)
    return kind


def _default_question(kind: str) -> str:
    """The question that a tab starts with."""
    return default_prompt(True) if kind == "clip" else OPENING_QUESTION


def _is_default(question: str) -> bool:
    """Whether a question is one of a tab's, or none."""
    return not question.strip() or question in DEFAULT_QUESTIONS


def _connect_reset(parts: CompareComponents) -> None:
    """Another file, and the button, start a new conversation."""
    kept = [parts.status, parts.race, parts.frames, parts.turns, parts.conversation]
    outputs = [*kept, parts.question, *parts.results.outputs]

    def reset() -> dict[Any, Any]:
        return {
            parts.status: render.render_status(INITIAL_STATUS),
            parts.race: render_empty_race(),
            parts.frames: "",
            parts.turns: "",
            parts.conversation: Conversation(),
            parts.question: gr.update(label=QUESTION_LABEL, placeholder="Ask about it"),
            **clear_results(parts.results),
        }

    def follow_file(upload: Any, conversation: Conversation) -> Any:
        if conversation.path == _upload_path(upload):
            return {parts.status: gr.skip()}
        error = conversation.error  # of the last run, which stays until the next
        return reset() | ({parts.status: render.render_status(error, "mm-error")} if error else {})

    parts.reset.click(reset, None, outputs, **UNQUEUED)
    for file in (parts.image, parts.video):
        file.change(follow_file, [file, parts.conversation], outputs, preprocess=False, **UNQUEUED)
    # In the page, so that what a visitor types in the meantime is not lost.
    clip, picture = (json.dumps(_default_question(kind)) for kind in ("clip", "picture"))
    is_clip = "document.querySelector('#mm-clip')?.checkVisibility()"
    script = f"(question) => question.trim() ? question : {is_clip} ? {clip} : {picture}"
    events = [parts.reset.click, parts.image.change, parts.video.change]
    gr.on(events, None, parts.question, parts.question, js=script, **PRIVATE_API)


def _connect_compare_events(
    context: Context, parts: CompareComponents, kind: Any, settings: Controls, report_state: Any
) -> None:
    report = functools.partial(report_errors, sessions=context.sessions)

    @report
    def begin(request: gr.Request, question: str) -> tuple[Any, ...]:
        context.limits.check_question(question)  # before the results of the last run are cleared
        cleared = clear_results(parts.results)
        return *begin_run(context, request), *(cleared[part] for part in parts.results.outputs)

    @report
    def answer(request: gr.Request, image: Any, video: Any, kind: Any, *values: Any) -> Iterator[tuple[str, str]]:
        question, conversation, *chosen = values
        path = _upload_path(video if kind == "clip" else image)
        yield from stream_comparison(context, path, question, conversation, tuple(chosen), get_client(request))

    @report
    def finish(request: gr.Request) -> dict[Any, Any]:
        result = context.sessions.take_result(get_client(request).session)
        if result is None:
            return {parts.status: render.render_status("Stopped.")}
        return build_final_updates(context, parts, report_state, result)

    def fail(error: Exception | None) -> dict[Any, Any]:
        """The race that was not recorded goes, and so does the preview of a file that was refused."""
        is_refused = isinstance(error, FileRefusedError)
        files = {parts.image: None, parts.video: None} if is_refused else {}
        failed = Conversation(error=describe_error(error) if error is not None else UNKNOWN_FAILURE)
        kept = {parts.conversation: failed, parts.frames: "", parts.turns: ""} if is_refused else {}
        return {parts.race: render_empty_race(), **files, **kept}

    live_outputs = [parts.status, parts.race]
    controls = RunControls(parts.ask, parts.stop, parts.status)
    started = gr.on(
        [parts.ask.click, parts.question.submit],
        begin,
        parts.question,
        [*controls.buttons, *parts.results.outputs],
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
        [*parts.final_outputs, report_state],
        show_progress_on=[parts.status],
        **VALIDATION,
    )
    touched = [parts.race, parts.image, parts.video, parts.conversation, parts.frames, parts.turns]
    connect_run_end(context, controls, started, [running, finished], fail, touched)


def _connect_opening(context: Context, parts: CompareComponents, report: Any, opening: Opening) -> None:
    """Show the recorded race to a page that opens, unless its visitor was faster."""

    async def open_page(request: gr.Request, image: Any) -> dict[Any, Any]:
        result = await opening.wait()
        if result is None or context.sessions.has_run(get_client(request).session):
            model, drafter, device = context.model_store.default_names
            description = context.model_store.descriptions.get(model, "")
            return {parts.sentence: render.render_sentence(model, drafter, device, description)}
        updates = build_final_updates(context, parts, report, result)
        return updates | {
            parts.status: render.render_status(OPENING_STATUS + result.note),
            # A conversation begins with the visitor's question.
            parts.conversation: Conversation(_upload_path(image)),
            parts.turns: "",
            parts.question: gr.skip(),
        }

    load = gr.context.Context.root_block.load
    load(open_page, parts.image, [*parts.final_outputs, report], preprocess=False, **VALIDATION)


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
        conversation = conversation.after(report)
    medium = "clip" if report.is_clip else "picture"
    asks_on = {"label": FOLLOW_UP_LABEL, "placeholder": f"Ask more about this {medium}"} if is_turn else {}
    return {
        components.status: render.render_status(("Stopped." if result.cancelled else "Done.") + result.note),
        components.race: render_race(report, turns),
        components.frames: render.render_frames(report),
        components.conversation: conversation,
        components.turns: render_turns(len(conversation.turns)),
        components.question: gr.update(value="" if is_turn else report.question, **asks_on),
        components.sentence: _render_sentence(report),
        report_state: report,
        **update_results(context, components.results, report),
    }


def render_turns(count: int) -> str:
    """What "Start over" does, where there is something to forget."""
    if not count:
        return ""
    asked = "one question" if count == 1 else f"{count} questions"
    return f'<p class="mm-legend">The model remembers {asked}. Start over forgets that; the picture stays.</p>'


def _render_sentence(report: Report) -> str:
    metrics = report.metrics
    run, model = metrics["run"], metrics["choice"]["model"]
    return render.render_sentence(model, report.mmspec.drafter or "", run["device"], run["description"])
