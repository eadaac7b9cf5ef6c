"""The race as HTML: all answers side by side with every token's time. `static/race.js` plays it; this escapes all text.

Three states: empty, live (while the answers are generated, one after the other) and finished (played from the recorded
times). The same markup is the page's, and that of the shared file.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.ui.report import AnswerTrace, Report
from mmspec.app.ui.thumbnails import TimedImage

LEGEND = (
    '<p class="mm-legend"><span class="mm-accepted">draft token accepted</span> '
    '<span class="mm-corrected">draft token rejected, corrected by the model</span> '
    '<span class="mm-plain">nothing drafted</span></p>'
)
MAX_RACE_IMAGES = 4
"""Frames of a clip that are drawn beside the question."""


@dataclass(frozen=True)
class LiveLane:
    """A lane whose answer is being generated, or waits for its turn.

    Attributes:
        name: see `AnswerLane`.
        drafter: None for plain `generate`.
        text: so far.
        timing: progress as text.
        tokens_per_s: so far.
        state: "waiting", "running" or "done".
    """

    name: str
    drafter: str | None
    text: str = ""
    timing: str = ""
    tokens_per_s: float = 0.0
    state: str = "waiting"


EMPTY_LANES = (LiveLane("plain", None), LiveLane("mmspec", ""))


def render_empty_race() -> str:
    """The race before the first question."""
    return _render_card(
        _render_question((), "")
        + '<div class="mm-score"><p class="mm-empty">Start the race to see both answers.</p></div>',
        "".join(_render_live_lane(lane) for lane in EMPTY_LANES),
    )


def render_live_race(turns: Sequence[ChatTurn], question: str, lanes: Sequence[LiveLane]) -> str:
    """The race while it is recorded.

    Args:
        turns: earlier turns of the conversation.
        question: of this turn.
        lanes: plain `generate` first.
    """
    score = '<div class="mm-score"><p class="mm-empty">Each answer is recorded alone; then they race.</p></div>'
    return _render_card(
        render_conversation(turns) + _render_question((), question) + score,
        "".join(_render_live_lane(lane) for lane in lanes),
    )


def render_race(report: Report, turns: Sequence[ChatTurn] = (), *, media: bool = True) -> str:
    """The finished race, to be played.

    Args:
        report: of the run.
        turns: earlier turns of the conversation.
        media: draw the picture, or frames of the clip, beside the question.
    """
    traces = (report.plain, *report.lanes)
    images = report.media if media else ()
    head = render_conversation(turns) + _render_question(images, report.question) + _render_score(report)
    fastest = max(trace.tokens_per_s for trace in traces)
    lanes = "".join(_render_lane(trace, fastest) for trace in traces)
    return _render_card(head, lanes, f' data-race="{secrets.token_hex(4)}"') + LEGEND


def render_conversation(turns: Sequence[ChatTurn]) -> str:
    """Earlier turns. Each answer is drawn once: later turns build on that of plain `generate`."""
    return "".join(
        f'<div class="mm-turn-question">{escape(turn.question)}</div>'
        f'<div class="mm-turn-answer">{escape(turn.answer.strip())}</div>'
        for turn in turns
    )


def lane_title(drafter: str | None) -> str:
    """Title of a lane."""
    if drafter is None:
        return "plain generate"
    return f"mmspec, drafter {drafter}" if drafter else "mmspec"


def render_verdict(report: Report) -> str:
    """Whether all answers are equal. Where they are complete and equal, in words that need no explanation."""
    kind, sign = {True: ("same", "✓"), False: ("differs", "≠"), None: ("open", "…")}[report.identical]
    is_complete = report.identical and not report.metrics["stopped"]
    text = f"identical, token for token ({len(report.plain.token_texts)} tokens)" if is_complete else report.verdict
    return f'<span class="mm-badge mm-{kind}" role="status">{sign} {escape(text)}</span>'


def _render_card(head: str, lanes: str, attributes: str = "") -> str:
    return (
        f'<article class="mm-race"{attributes} aria-label="Answers side by side">'
        f'<div class="mm-race-head">{head}</div><div class="mm-lanes">{lanes}</div></article>'
    )


def _render_question(images: Sequence[TimedImage], question: str) -> str:
    step = max(1, -(-len(images) // MAX_RACE_IMAGES))
    pictures = "".join(f'<img src="{escape(image.uri)}" alt="The input of the model">' for image in images[::step])
    bubble = f'<div class="mm-turn-question mm-asked">{escape(question)}</div>' if question else ""
    return f'<div class="mm-asking">{pictures}{bubble}</div>' if pictures or bubble else ""


def _render_score(report: Report) -> str:
    """The large ratio and the verdict."""
    run, choice = report.metrics["run"], report.metrics["choice"]
    medium = "clip" if report.is_clip else "picture"
    speedup, whole = report.mmspec.speedup, report.metrics["speedup_e2e"]
    ratio = note = ""
    if speedup is not None:
        kind = "mm-ratio" if speedup >= 1 else "mm-ratio mm-slower"
        ratio = f'<b class="{kind}" data-ratio="{speedup:.4f}">{speedup:.1f}x</b>'
        note = f"tokens per second, mmspec ÷ plain generate; model {choice['model']}, {run['device']}, {run['dtype']}."
        note += f" Whole answer, {medium} included: {whole:.1f}x" if whole else ""
    return f'<div class="mm-score">{ratio}<div>{render_verdict(report)}<small>{escape(note)}</small></div></div>'


def _render_lane(trace: AnswerTrace, fastest: float) -> str:
    """A lane whose answer is complete: every token with its kind and its time."""
    texts = [text if index else text.lstrip() for index, text in enumerate(trace.token_texts)]
    rows = zip(texts, trace.token_times, trace.token_kinds, strict=True)
    spans = "".join(f'<span class="mm-{kind}" data-t="{at_s:.4f}">{escape(text)}</span>' for text, at_s, kind in rows)
    num_tokens, ttft_s = len(texts), trace.token_times[0] if trace.token_times else 0.0
    timing = format_timing(num_tokens, ttft_s, trace.total_s)
    ratio = "" if trace.speedup is None else f"{trace.speedup:.1f}x"
    return _render_section(
        trace.name,
        trace.drafter,
        spans,
        timing,
        tokens_per_s=trace.tokens_per_s,
        share=trace.tokens_per_s / fastest if fastest else 0.0,
        note=f'<span class="mm-lane-ratio">{ratio}</span>',
        attributes=f' data-rate="{trace.tokens_per_s:.3f}"',
    )


def _render_live_lane(lane: LiveLane) -> str:
    caret = '<span class="mm-caret" aria-hidden="true"></span>' if lane.state == "running" else ""
    answer = escape(lane.text.lstrip()) + caret
    return _render_section(lane.name, lane.drafter, answer, lane.timing, tokens_per_s=lane.tokens_per_s)


def _render_section(
    name: str,
    drafter: str | None,
    answer: str,
    timing: str,
    *,
    tokens_per_s: float = 0.0,
    share: float = 0.0,
    note: str = "",
    attributes: str = "",
) -> str:
    """A lane.

    Args:
        name: see `AnswerLane`.
        drafter: None for plain `generate`.
        answer: HTML.
        timing: text below the answer.
        tokens_per_s: beside the bar.
        share: width of the bar, 0 to 1.
        note: HTML beside the title.
        attributes: of the section.
    """
    title = lane_title(drafter)
    rate = f"{tokens_per_s:.0f} tokens/s" if tokens_per_s else ""
    return (
        f'<section class="mm-side mm-lane" id="mm-{name}" aria-label="{escape(title)}"{attributes}>'
        f"<header><b>{escape(title)}</b>{note}</header>"
        f'<div class="mm-rate"><i><span style="width:{100 * share:.1f}%"></span></i><b>{rate}</b></div>'
        f'<div class="mm-turn-answer mm-now">{answer}</div><p class="mm-clock">{escape(timing)}</p></section>'
    )


def format_timing(num_tokens: int, ttft_s: float, elapsed_s: float) -> str:
    """Progress of a lane: tokens, time to first token, elapsed time. Zeros are left out."""
    parts = [f"{num_tokens} tokens"] if num_tokens else []
    parts += [f"first after {ttft_s:.2f} s"] if ttft_s else []
    parts += [f"{elapsed_s:.2f} s"] if elapsed_s else []
    return ", ".join(parts)


__all__ = [
    "LEGEND",
    "LiveLane",
    "format_timing",
    "lane_title",
    "render_conversation",
    "render_empty_race",
    "render_live_race",
    "render_race",
    "render_verdict",
]
