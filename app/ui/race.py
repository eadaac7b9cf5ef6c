"""The race as HTML: all answers side by side with every token's time. `static/race.js` plays it; this escapes all text.

Three states: empty, live (while the answers are generated, one after the other) and finished (played from the recorded
times). The same markup is the page's, and that of the shared file.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.ui.credit import BASELINES, LOOP, NO_DRAFTS, PLAIN_GENERATE
from mmspec.app.ui.report import AnswerTrace, Report
from mmspec.app.ui.thumbnails import TimedImage

LEGEND = (
    '<p class="mm-legend"><span class="mm-accepted">draft token accepted</span> '
    '<span class="mm-corrected">draft token rejected, corrected by the model</span> '
    '<span class="mm-plain">nothing drafted</span></p>'
)
MAX_RACE_IMAGES = 4
"""Frames of a clip that are drawn beside the question."""
MAX_LIVE_CHARS = 60
"""Characters of an answer that are shown while it is recorded."""


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
        note: beside the title, such as "recording 1 of 2".
    """

    name: str
    drafter: str | None
    text: str = ""
    timing: str = ""
    tokens_per_s: float = 0.0
    state: str = "waiting"
    note: str = ""


EMPTY_LANES = (LiveLane("plain", None), LiveLane("mmspec", ""))


def render_empty_race() -> str:
    """The race before the first question."""
    return _render_card(
        '<div class="mm-score"><p class="mm-empty">Start the race to see both answers.</p></div>',
        "".join(_render_live_lane(lane) for lane in EMPTY_LANES),
    )


def render_live_race(
    turns: Sequence[ChatTurn], question: str, lanes: Sequence[LiveLane], images: Sequence[TimedImage] = ()
) -> str:
    """The race while it is recorded: each lane says where its recording stands, and the last words of its answer.

    The whole answers are shown once, by the race.

    Args:
        turns: earlier turns of the conversation.
        question: of this turn.
        lanes: that of the baseline first.
        images: the picture, or frames of the clip; empty until they are decoded.
    """
    score = '<div class="mm-score"><p class="mm-empty">Each answer is recorded alone; then they race.</p></div>'
    return _render_card(
        render_conversation(turns, question, images) + score,
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
    head = render_conversation(turns, report.question, images) + _render_score(report)
    fastest = max(trace.tokens_per_s for trace in traces)
    is_alone = len(traces) == 2  # then its ratio is the headline
    lanes = "".join(_render_lane(trace, fastest, has_ratio=not is_alone) for trace in traces)
    return _render_card(head, lanes, f' data-race="{secrets.token_hex(4)}"') + LEGEND


@dataclass(frozen=True)
class RacedTurn(ChatTurn):
    """A turn with the speed-up of its race; None where it was not measured."""

    speedup: float | None = None


def render_conversation(turns: Sequence[ChatTurn], question: str, images: Sequence[TimedImage] = ()) -> str:
    """Earlier turns and the question of this one; the picture stands beside the first question of them all.

    Each answer is drawn once: later turns build on that of the baseline. Of a `RacedTurn` its speed-up is kept.
    """
    parts = []
    for number, turn in enumerate(turns):
        speedup = turn.speedup if isinstance(turn, RacedTurn) else None
        kept = f'<small class="mm-kept">{_format_speedup(speedup)}</small>' if speedup is not None else ""
        answer = f'<div class="mm-turn-answer">{escape(turn.answer.strip())} {kept}</div>'
        parts.append(_render_question(() if number else images, turn.question, "") + answer)
    return "".join(parts) + _render_question(() if turns else images, question, "mm-asked")


def lane_title(drafter: str | None) -> str:
    """Title of a lane; a drafter that is a folder is called by its name."""
    if drafter is None:
        return PLAIN_GENERATE
    if drafter == NO_DRAFTS:
        return LOOP
    return f"mmspec, {Path(drafter).name}" if drafter else "mmspec"


def _format_speedup(value: float) -> str:
    return f"{value:.1f}x"


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


def _render_question(images: Sequence[TimedImage], question: str, kind: str) -> str:
    step = max(1, -(-len(images) // MAX_RACE_IMAGES))
    pictures = "".join(f'<img src="{escape(image.uri)}" alt="The input of the model">' for image in images[::step])
    bubble = f'<div class="mm-turn-question {kind}">{escape(question)}</div>' if question else ""
    return f'<div class="mm-asking">{pictures}{bubble}</div>' if pictures or bubble else ""


def _render_score(report: Report) -> str:
    """The large ratio of the fastest lane, the verdict, and which part of the ratio is that of the drafts."""
    run, choice, best = report.metrics["run"], report.metrics["choice"], report.best
    ratio = note = credit = ""
    if best.speedup is not None:
        kind = "mm-ratio" if best.speedup >= 1 else "mm-ratio mm-slower"
        ratio = (
            f'<b class="{kind}" data-ratio="{best.speedup:.4f}" data-lane="mm-{best.name}">'
            f"{_format_speedup(best.speedup)}</b>"
        )
        fastest = "the fastest lane, " if len(report.lanes) > 1 else ""
        other = next(name for name in BASELINES if name != choice["baseline"])
        note = (
            f"Tokens per second of {fastest}{lane_title(best.drafter)}, over those of {choice['baseline']}, the "
            f"baseline (the settings offer {other}). Model {choice['model']}, {run['device']}, {run['dtype']}."
        )
        parts = (("mm-credit", best.credit.sentence if best.credit else ""), ("mm-reused", _reuse_sentence(report)))
        credit = "".join(f'<p class="{kind}">{escape(sentence)}</p>' for kind, sentence in parts if sentence)
    words = f"<div>{render_verdict(report)}{credit}<small>{escape(note)}</small></div>"
    return f'<div class="mm-score">{ratio}{words}</div>'


def _reuse_sentence(report: Report) -> str:
    """What earlier turns had computed of the prompt of the fastest lane, beside the baseline, which computes all."""
    best, plain = report.best, report.plain
    if best.credit is None or not best.credit.num_reused or not best.token_times or not plain.token_times:
        return ""
    count = f"{best.credit.num_reused} of {report.metrics['prompt_tokens']} prompt tokens were computed before"
    return (
        f"{'Clip' if report.is_clip else 'Picture'} reused: {count}, first token after {best.token_times[0]:.2f} s; "
        f"{report.metrics['choice']['baseline']} computes all of them, {plain.token_times[0]:.2f} s."
    )


def _render_lane(trace: AnswerTrace, fastest: float, *, has_ratio: bool) -> str:
    """A lane whose answer is complete: every token with its kind and its time."""
    texts = [text if index else text.lstrip() for index, text in enumerate(trace.token_texts)]
    rows = zip(texts, trace.token_times, trace.token_kinds, strict=True)
    spans = "".join(f'<span class="mm-{kind}" data-t="{at_s:.4f}">{escape(text)}</span>' for text, at_s, kind in rows)
    num_tokens, ttft_s = len(texts), trace.token_times[0] if trace.token_times else 0.0
    timing = format_timing(num_tokens, ttft_s, trace.total_s)
    ratio = "" if trace.speedup is None or not has_ratio else _format_speedup(trace.speedup)
    kind = "mm-lane-ratio mm-slower" if (trace.speedup or 1) < 1 else "mm-lane-ratio"
    return _render_section(
        trace.name,
        trace.drafter,
        spans,
        timing,
        tokens_per_s=trace.tokens_per_s,
        share=trace.tokens_per_s / fastest if fastest else 0.0,
        note=f'<span class="{kind}">{ratio}</span>',
        attributes=f' data-rate="{trace.tokens_per_s:.3f}"',
        is_slower=(trace.speedup or 1) < 1,
    )


def _render_live_lane(lane: LiveLane) -> str:
    caret = '<span class="mm-caret" aria-hidden="true"></span>' if lane.state == "running" else ""
    answer = escape(_last_words(lane.text)) + caret
    note = f'<span class="mm-recording" role="status">{escape(lane.note)}</span>' if lane.note else ""
    return _render_section(lane.name, lane.drafter, answer, lane.timing, tokens_per_s=lane.tokens_per_s, note=note)


def _last_words(text: str) -> str:
    """The end of a growing answer, on about one line."""
    words = " ".join(text.split())
    return words if len(words) <= MAX_LIVE_CHARS else "\u2026 " + words[-MAX_LIVE_CHARS:].partition(" ")[2]


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
    is_slower: bool = False,
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
        is_slower: than the baseline; then its bar is not green.
    """
    title, kind = lane_title(drafter), "mm-side mm-lane mm-slower" if is_slower else "mm-side mm-lane"
    rate = f"{tokens_per_s:.0f} tokens/s" if tokens_per_s else ""
    return (
        f'<section class="{kind}" id="mm-{name}" aria-label="{escape(title)}"{attributes}>'
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
