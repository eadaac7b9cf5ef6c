"""The Learning tab: descriptions of pictures, with a drafter that learns from them as they are written."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import Any

import gradio as gr

from mmspec.app.ui import plots
from mmspec.app.ui.context import UNQUEUED, VALIDATION, Context, format_queue_position, get_client, report_errors
from mmspec.app.ui.learning import (
    CALLS_PER_MEAN,
    LEARNING_DRAFTERS,
    MAX_PICTURES,
    UNTRAINED_DRAFTER,
    LearningRun,
    draw_pictures,
    pool_calls,
)
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.opening import Opening
from mmspec.app.ui.render import render_numbers, render_status
from mmspec.app.ui.tabs.run_events import RUN_EVENT, RunControls, begin_run, connect_run_end
from mmspec.app.ui.thumbnails import MEDIA_SIZE, to_data_uri
from mmspec.app.ui.worker import Client, LeftQueueError

INTRO = (
    "A drafter starts from nothing and learns from every answer of the model (<code>patch(model, learn=True)</code>). "
    f"Each picture is described twice: with it, and with <code>{UNTRAINED_DRAFTER}</code>, which does not learn. The "
    "answers are the same; only the number of tokens per forward differs. Nothing that is learned here is stored."
)
DEFAULT_PICTURES = 60
STEPS = (
    '<ol class="mm-steps"><li>Pictures are drawn: things on a background, none twice.</li>'
    "<li>The model describes each of them twice, with the drafter that learns and with "
    f"<code>{UNTRAINED_DRAFTER}</code>. The last picture stands here with its description.</li>"
    "<li>After each answer the drafter learns from it; a curve shows the tokens per forward of both. {expected}</li>"
    '</ol><p class="mm-legend">Pictures like these:</p><div class="mm-samples">{samples}</div>'
)
"""Shown until there is something else to see."""
NUM_SAMPLE_PICTURES = 6
EXPECTED_BUILTIN = "Those of the one that learns should rise within the first 30 to 60 pictures."
EXPECTED = "Whether those of the one that learns rise, and how soon, depends on the model and its answers."
LEARNING_NEW_TOKENS = 160


def build_learning_tab(context: Context, opening: Opening) -> None:
    """Create the tab and connect its events.

    Args:
        context: the app.
        opening: its race gives the first estimate of how long a run takes.
    """
    store = context.model_store
    gr.HTML(f'<p class="mm-intro">{INTRO}</p>')
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model = gr.Dropdown(
                store.model_names, value=store.model_names[0], label="Model", elem_id="mm-learning-model"
            )
            drafter = gr.Dropdown(
                list(LEARNING_DRAFTERS),
                value=LEARNING_DRAFTERS[0],
                label="Drafter that learns",
                info="instant: light heads on the model's last hidden state. arbitrated: those, lookup and recycling, "
                "whichever pays most",
                elem_id="mm-learning-drafter",
            )
            pictures = gr.Slider(
                4,
                MAX_PICTURES,
                value=DEFAULT_PICTURES,
                step=1,
                label="Pictures",
                info="Drawn now; none is used twice",
                elem_id="mm-learning-pictures",
            )
            seed = gr.Number(0, precision=0, label="Seed of the pictures", minimum=0)
            with gr.Row():
                start = gr.Button("Start", variant="primary", elem_id="mm-learn", min_width=120)
                cancel = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-unlearn", min_width=90)
        with gr.Column(scale=5, min_width=320):
            status = gr.HTML(render_status(format_plan(None, DEFAULT_PICTURES)), elem_id="mm-learning-status")
            curve = gr.HTML("", elem_id="mm-learning-curve")
            numbers = gr.HTML(render_steps(store), elem_id="mm-learning-numbers")

    def plan(model: Any, total: Any) -> str:
        return render_status(format_plan(store.answer_seconds.get(str(model)), total))

    async def plan_at_load(model: Any, total: Any) -> str:
        await opening.wait()
        return plan(model, total)

    gr.on([model.change, pictures.change], plan, [model, pictures], status, **UNQUEUED)
    gr.context.Context.root_block.load(plan_at_load, [model, pictures], status, **VALIDATION)

    @functools.partial(report_errors, sessions=context.sessions)
    def begin(request: gr.Request) -> tuple[Any, Any]:
        return begin_run(context, request)

    @functools.partial(report_errors, sessions=context.sessions)
    def work(request: gr.Request, model: str, drafter: str, total: float, seed: float) -> Iterator[dict[Any, Any]]:
        num_rendered = 0
        for run, is_running in stream_learning(context, model, drafter, total, seed, get_client(request)):
            updates: dict[Any, Any] = {status: render_status(format_learning_progress(run, is_running))}
            if not is_running or run.num_done != num_rendered:
                num_rendered = run.num_done
                updates |= {curve: plots.learning_curve(run), numbers: render_learning(run) or render_steps(store)}
            yield updates

    controls = RunControls(start, cancel, status)
    started = start.click(begin, None, controls.buttons, show_progress_on=[status], **VALIDATION)
    running = started.success(
        work,
        [model, drafter, pictures, seed],
        [status, curve, numbers],
        show_progress_on=[status],
        **RUN_EVENT,
    )
    connect_run_end(context, controls, started, [running])


def stream_learning(
    context: Context, model: str, drafter: str, total: float, seed: float, client: Client
) -> Iterator[tuple[LearningRun, bool]]:
    """Describe pictures; yields the run at every poll, and whether it is still running.

    Args:
        context: the app.
        model: as chosen.
        drafter: that learns.
        total: number of pictures.
        seed: of the pictures.
        client: the page, and its network address.

    Raises:
        UsageError: a setting is refused, or the queue is full.
    """
    cancel_signal = context.sessions.get_signal(client.session)
    settings = context.parse_settings(model, drafter, None, 0, seed, LEARNING_NEW_TOKENS)
    count = int(context.limits.check_number("Pictures", total, 1, MAX_PICTURES))
    run = LearningRun(context.model_store, settings, count)
    work = functools.partial(run.run, cancel_signal)
    try:
        for num_ahead in context.worker.submit_and_poll(work, cancel_signal, yield_first=True, client=client):
            run.num_ahead = num_ahead
            yield run, True
    except LeftQueueError:
        run.cancelled, run.num_ahead = True, 0
    yield run, False


def format_learning_progress(run: LearningRun, is_running: bool) -> str:
    """The status line."""
    if run.num_ahead:
        return format_queue_position(run.num_ahead)
    counted = f"{run.num_done} of {run.total} pictures"
    if not is_running:
        return f"{counted}; stopped." if run.cancelled else f"{counted}, described twice."
    if not run.num_done:
        return "Preparing a copy of the model that learns."
    left = run.seconds_left
    return f"{counted}; running." if left is None else f"{counted}; running, about {format_seconds(left)} left."


def format_plan(answer_s: float | None, total: Any) -> str:
    """What Start will do, and about how long it takes where a comparison has shown how long an answer does.

    Args:
        answer_s: seconds of one answer; None if unknown.
        total: number of pictures, as sent by a page.
    """
    count = int(total) if isinstance(total, int | float) and 1 <= total <= MAX_PICTURES else DEFAULT_PICTURES
    plan = f"Start describes {count} pictures, each of them twice"
    if answer_s is None:
        return f"{plan}; after a few it says how long the rest takes. Stop ends it at any time."
    duration = format_seconds(2 * count * answer_s)
    return f"{plan}: about {duration}, as the last answer took {answer_s:.1f} s. Stop ends it at any time."


def render_steps(store: ModelStore) -> str:
    """What will happen."""
    return STEPS.format(expected=EXPECTED_BUILTIN if store.is_builtin else EXPECTED, samples=_render_samples())


@functools.cache
def _render_samples() -> str:
    """A few pictures of the kind that is described."""
    images = (request.images[0] for request in islice(draw_pictures(0), NUM_SAMPLE_PICTURES))
    return "".join(f'<img src="{escape(to_data_uri(image, MEDIA_SIZE))}" alt="A drawn picture">' for image in images)


def format_seconds(seconds: float) -> str:
    """A time in words, coarse as it is an estimate."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} minutes"


def render_learning(run: LearningRun) -> str:
    """The numbers of a run, and the last description; empty before the first."""
    if not run.num_done:
        return ""
    learned, baseline, state = run.learning.curve, run.baseline, run.learning
    first, last, other = (
        pool_calls(points)
        for points in (learned[:CALLS_PER_MEAN], learned[-CALLS_PER_MEAN:], baseline[-CALLS_PER_MEAN:])
    )
    assert first is not None and last is not None and other is not None
    count = min(CALLS_PER_MEAN, run.num_done)
    speed = last.tokens_per_s / other.tokens_per_s if other.tokens_per_s else 0.0
    share = state.learn_s / state.call_s if state.call_s else 0.0
    cells = [
        (f"first {count}", f"{first.tokens_per_forward:.2f}", "tokens per forward of the first pictures"),
        (
            f"last {count}",
            f"{last.tokens_per_forward:.2f}",
            f"now; {UNTRAINED_DRAFTER}: {other.tokens_per_forward:.2f}",
        ),
        ("speed", f"{speed:.2f}x", f"tokens per second over those of {UNTRAINED_DRAFTER}, last {count} pictures"),
        ("learning", f"{share:.1%}", f"of the time of the calls; {state.num_updates} times new weights"),
        ("identical", f"{run.num_identical} of {run.num_done}", "answers of both drafters, token for token"),
    ]
    why = f'<p class="mm-legend">Learning ended: {escape(state.disabled_reason)}</p>' if state.disabled_reason else ""
    picture = f'<img src="{escape(run.picture)}" alt="The picture that is described">' if run.picture else ""
    answer = f'<div class="mm-turn-answer">{escape(run.text)}</div>'
    text = f'<div class="mm-side mm-so-far mm-described">{picture}{answer}</div>'
    return render_numbers(cells) + why + '<p class="mm-legend">The last description</p>' + text
