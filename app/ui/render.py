"""What the pages show, as HTML and SVG. Whatever anyone wrote or a model said is escaped here, without exception.

Knows reports and rounds, and no pages. Colours and sizes are in `styles.css`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mmspec.app.bench.rounds import CORRECTED, Round
from mmspec.app.modeling.chat import Turn
from mmspec.app.ui.report import AnswerTrace, Report

COLUMN_WIDTH, ROW_HEIGHT, NODE_WIDTH, TREE_MARGIN = 146, 36, 120, 12
"""Pixels of a drawn tree: from one depth to the next, from one leaf to the next, width of a node, edge."""
MAX_LABEL_CHARS = 11
"""Of a token, in its node."""
LEGEND = (
    '<p class="mm-legend"><span class="mm-accepted">guessed and kept</span> '
    '<span class="mm-corrected">said instead of the guess</span> '
    '<span class="mm-plain">said where nothing was guessed</span></p>'
)
SIDE_TITLES = {"plain": "plain generate", "mmspec": "mmspec"}


def render_conversation(turns: Sequence[Turn]) -> str:
    """What was said before."""
    return "".join(
        f'<div class="mm-turn-question">{escape(turn.question)}</div><div class="mm-turn-answer">{escape(turn.answer.strip())}</div>'
        for turn in turns
    )


def render_panel(name: str, body: str, timing: str = "") -> str:
    """One of the two sides."""
    return (
        f'<section class="mm-side" data-side="{name}" aria-label="{SIDE_TITLES[name]}">'
        f'<header><b>{SIDE_TITLES[name]}</b> <span class="mm-clock">{escape(timing)}</span></header>{body}</section>'
    )


def render_partial_answer(name: str, turns: Sequence[Turn], question: str, text: str, timing: str, busy: bool) -> str:
    """A side whose answer is still growing."""
    caret = '<span class="mm-caret" aria-hidden="true"></span>' if busy else ""
    asked = f'<div class="mm-turn-question">{escape(question)}</div>' if question else ""
    said = f'<div class="mm-turn-answer mm-now">{escape(text.lstrip())}{caret}</div>' if question else ""
    empty = "" if question or turns else '<p class="mm-empty">Nothing asked yet.</p>'
    return render_panel(name, render_conversation(turns) + asked + said + empty, timing)


def render_answer(trace: AnswerTrace, turns: Sequence[Turn], question: str, timing: str) -> str:
    """A side whose answer is there: every token with its kind, and its time for the replay."""
    pieces = [piece if place else piece.lstrip() for place, piece in enumerate(trace.token_texts)]
    rows = zip(pieces, trace.token_times, trace.token_kinds, strict=True)
    spans = "".join(f'<span class="mm-{kind}" data-t="{at:.4f}">{escape(text)}</span>' for text, at, kind in rows)
    said = f'<div class="mm-turn-answer mm-now" data-total="{trace.total_s:.4f}">{spans}</div>'
    return render_panel(
        trace.name,
        render_conversation(turns) + f'<div class="mm-turn-question">{escape(question)}</div>' + said,
        timing,
    )


def render_verdict(report: Report) -> str:
    """Whether both sides said the same."""
    kind = {True: "same", False: "differs", None: "open"}[report.identical]
    sign = {True: "✓", False: "≠", None: "…"}[report.identical]
    return f'<p class="mm-badge mm-{kind}" role="status"><span aria-hidden="true">{sign}</span> {escape(report.verdict)}</p>'


def render_status(text: str, kind: str = "") -> str:
    """A line on what goes on."""
    return f'<p class="mm-status {kind}" role="status">{escape(text)}</p>'


def render_results(report: Report) -> str:
    """All that is told about a finished race."""
    return f'<div class="mm-results">{render_verdict(report)}{render_headline(report)}{render_metrics_table(report)}{render_plots(report)}{render_visible_tokens(report)}</div>'


def render_headline(report: Report) -> str:
    """The four numbers that matter."""
    figures = report.metrics
    cells = [
        ("decode speed-up", _format_ratio(figures["speedup_decode"]), "tokens per second, first token to last"),
        ("end to end", _format_ratio(figures["speedup_e2e"]), "the whole answer, looking at the picture included"),
        ("tau", f"{figures['tau']:.2f}", "tokens per forward of the model"),
        ("R", "-" if figures["R"] is None else f"{figures['R']:.2f}", "cost of a round, in plain steps"),
    ]
    return (
        '<dl class="mm-head">'
        + "".join(
            f'<div title="{escape(why)}"><dt>{name}</dt><dd>{value}</dd><small>{escape(why)}</small></div>'
            for name, value, why in cells
        )
        + "</dl>"
    )


def _format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def render_metrics_table(report: Report) -> str:
    """Both sides, number by number."""
    sides = report.metrics["sides"]
    rows = (
        ("tokens", "n_tokens", "{:d}"),
        ("tokens/s", "tokens_per_s", "{:.1f}"),
        ("first token after", "ttft_s", "{:.3f} s"),
        ("whole answer", "total_s", "{:.3f} s"),
    )
    body = "".join(
        f"<tr><th scope='row'>{name}</th>"
        + "".join(f"<td>{form.format(sides[side][key])}</td>" for side in ("plain", "mmspec"))
        + "</tr>"
        for name, key, form in rows
    )
    seen = f"{report.metrics['vision_s']:.3f} s, once for both"
    body += f"<tr><th scope='row'>looking at the picture</th><td colspan='2'>{seen}</td></tr>"
    head = "<tr><td></td><th scope='col'>plain</th><th scope='col'>mmspec</th></tr>"
    return f'<table class="mm-table"><thead>{head}</thead><tbody>{body}</tbody></table>'


def render_plots(report: Report) -> str:
    """How many tokens rounds emitted, and where their time went."""
    stats = report.metrics["stats"]
    lengths = {int(size): count for size, count in stats["accept_length_hist"].items()}
    most = max(lengths, default=1)
    histogram = [(f"{size}", float(lengths.get(size, 0))) for size in range(1, most + 1)] if lengths else []
    phases = [
        ("picture", report.metrics["vision_s"]),
        ("prompt", stats["prefill_s"]),
        ("draft", stats["draft_s"]),
        ("score", stats["score_s"]),
        ("rest", stats["overhead_s"]),
    ]
    times = [(name, 1000 * seconds) for name, seconds in phases]
    return (
        '<div class="mm-plots">'
        + render_bars("Tokens per round", histogram, "{:.0f} rounds")
        + render_bars("Where mmspec's time went", times, "{:.1f} ms")
        + "</div>"
    )


def render_visible_tokens(report: Report) -> str:
    """The picture with the tokens that the drafter saw."""
    told = report.metrics["drafter_saw"]
    if told is None:
        return ""
    alt = "The picture; what the drafter did not see of it is grey"
    images = "".join(f'<img src="{escape(uri)}" alt="{alt}">' for uri in report.image_uris)
    return f'<figure class="mm-visible-tokens"><figcaption>{escape(told["text"])}</figcaption>{images}</figure>'


def render_bars(title: str, rows: Sequence[tuple[str, float]], form: str) -> str:
    """A plot of horizontal bars."""
    top = max((value for _, value in rows), default=0.0) or 1.0
    drawn = "".join(
        f'<div class="mm-bar"><span>{escape(name)}</span><i style="width:{100 * value / top:.1f}%"></i>'
        f"<b>{form.format(value)}</b></div>"
        for name, value in rows
    )
    return f'<figure class="mm-plot"><figcaption>{escape(title)}</figcaption>{drawn or "<p>no rounds</p>"}</figure>'


# the tree of one round


def layout_tree(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, line) of each node: leaves one below the other, a parent in the middle of its children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    depths, lines = [0] * len(parents), [0.0] * len(parents)
    for node, parent in enumerate(parents):
        depths[node] = 0 if parent < 0 else depths[parent] + 1
    free, stack = 0, [0]
    while stack:  # goes down before it goes on
        node = stack.pop()
        below = children.get(node, [])
        if not below:
            lines[node], free = float(free), free + 1
        stack.extend(reversed(below))
    for node in reversed(range(len(parents))):  # children come after their parents
        if below := children.get(node, []):
            lines[node] = (lines[below[0]] + lines[below[-1]]) / 2
    return depths, lines


def render_tree(one: Round, token_labels: Mapping[int, str]) -> str:
    """The tree as SVG: kept path, rejected branches, how likely the drafter thought each, and the model's own word."""
    count, kept = len(one.tokens), set(one.accepted_nodes[1:])
    parents = [*one.parents, *([one.accepted_nodes[len(one.emitted) - 1]] if one.emitted else [])]
    spots = [_node_position(depth, line) for depth, line in zip(*layout_tree(parents), strict=True)]
    own = "mm-node-correction" if one.token_kinds[-1:] == (CORRECTED,) else "mm-node-bonus"
    kinds = ["mm-root" if not node else "mm-node-accepted" if node in kept else "mm-rejected" for node in range(count)]
    labels = [
        (token_labels.get(token, str(token)), _format_probability(one, node)) for node, token in enumerate(one.tokens)
    ]
    if one.emitted:
        kinds.append(own)
        labels.append((token_labels.get(one.emitted[-1], ""), "model"))
    edges = [
        _render_edge(spots[parent], spots[node], kinds[node]) for node, parent in enumerate(parents) if parent >= 0
    ]
    nodes = [_render_node(spot, *label, kind) for spot, label, kind in zip(spots, labels, kinds, strict=True)]
    width, height = max(x for x, _ in spots) + NODE_WIDTH + TREE_MARGIN, max(y for _, y in spots) + ROW_HEIGHT
    told = f"Draft tree of {one.num_draft_tokens} guesses, {one.num_accepted_tokens} of them kept"
    return (
        f'<div class="mm-tree"><svg role="img" aria-label="{told}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg"><title>{told}</title>'
        f"{''.join(edges)}{''.join(nodes)}</svg></div>"
    )


def _node_position(depth: int, line: float) -> tuple[float, float]:
    """Upper left corner of a node."""
    return TREE_MARGIN + depth * COLUMN_WIDTH, TREE_MARGIN + line * ROW_HEIGHT


def _render_edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    x1, y1, x2, y2 = start[0] + NODE_WIDTH, start[1] + 14, end[0], end[1] + 14
    half = (x1 + x2) / 2
    curve = f"M{x1:.0f} {y1:.0f} C{half:.0f} {y1:.0f} {half:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="mm-edge {kind}" d="{curve}"/>'


def _render_node(at: tuple[float, float], name: str, note: str, kind: str) -> str:
    x, y = at
    short = name if len(name) <= MAX_LABEL_CHARS else name[: MAX_LABEL_CHARS - 1] + "…"
    small = f'<tspan class="mm-probability" dx="5">{escape(note)}</tspan>' if note else ""
    return (
        f'<g class="mm-node {kind}"><title>{escape(name)} {escape(note)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{NODE_WIDTH}" height="28" rx="6"/>'
        f'<text x="{x + 8:.0f}" y="{y + 18:.0f}">{escape(short)}{small}</text></g>'
    )


def _format_probability(one: Round, node: int) -> str:
    if not node or one.scores is None:
        return ""
    above = one.scores[one.parents[node]]
    return f"{100 * min(1.0, one.scores[node] / above):.0f}%" if above > 0 else ""


def render_round(report: Report, round_index: int) -> str:
    """What a round did, its tree, and the answer with its tokens marked."""
    one = report.rounds[round_index]
    if not round_index:
        said = "The prompt's own forward gives the first token; nothing is guessed there."
    elif one.num_proposed is None:
        said = "The drafter was not asked: of late its guesses did not pay. One forward, one token."
    elif not one.num_draft_tokens:
        said = f"The drafter proposed {_pluralize(one.num_proposed - 1, 'guess', 'guesses')}; none was worth its cost. One token."
    else:
        said = (
            f"{_pluralize(one.num_draft_tokens, 'guess', 'guesses')} scored in one forward, {one.num_accepted_tokens} kept; "
            f"with the model's own word {_pluralize(len(one.emitted), 'token', 'tokens')}."
        )
    head = (
        f'<p class="mm-status" role="status"><b>Round {round_index} of {len(report.rounds) - 1}.</b> {escape(said)}</p>'
    )
    return head + render_tree(one, report.token_labels) + LEGEND + _render_answer_so_far(report, one)


def _pluralize(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _render_answer_so_far(report: Report, one: Round) -> str:
    """The answer: what was there before faint, what this round said marked, the rest left out."""
    pieces, kinds = report.mmspec.token_texts, report.mmspec.token_kinds
    before = escape("".join(pieces[: one.start]).lstrip())
    end = min(one.start + len(one.emitted), len(pieces))
    now = "".join(f'<span class="mm-{kinds[place]}">{escape(pieces[place])}</span>' for place in range(one.start, end))
    said = f'<div class="mm-turn-answer mm-now"><span class="mm-past">{before}</span>{now}</div>'
    return f'<div class="mm-side mm-so-far">{said}</div>'


def render_captions(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of a batch."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("file", "caption", "tokens", "tau", "seconds"))
    body = "".join(_render_caption_row(row) for row in rows)
    body = body or '<tr><td colspan="5" class="mm-empty">No captions yet.</td></tr>'
    drawn = f'<table class="mm-table mm-captions"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="mm-wide">{drawn}</div>'


def _render_caption_row(row: Mapping[str, Any]) -> str:
    name = f"<td>{escape(str(row['file_name']))}</td>"
    if row["error"]:
        return f'<tr class="mm-failed">{name}<td colspan="4">{escape(str(row["error"]["message"]))}</td></tr>'
    numbers = (("tokens", row["n_new_tokens"]), ("tau", f"{row['tau']:.2f}"), ("seconds", f"{row['seconds']:.2f}"))
    cells = "".join(f'<td data-label="{label}">{value}</td>' for label, value in numbers)
    return f"<tr>{name}<td>{escape(str(row['caption']))}</td>{cells}</tr>"


__all__ = [
    "LEGEND",
    "layout_tree",
    "render_answer",
    "render_bars",
    "render_captions",
    "render_conversation",
    "render_partial_answer",
    "render_results",
    "render_round",
    "render_status",
    "render_tree",
    "render_verdict",
    "render_visible_tokens",
]
