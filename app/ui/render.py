"""HTML and SVG of the pages. All text of users and models is escaped here.

Depends on reports and rounds, not on gradio. Colours and sizes are in `static/styles.css`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmspec.app.ui import plots
from mmspec.app.ui.race import LEGEND
from mmspec.app.ui.refusals import explain_refusal
from mmspec.app.ui.report import Report
from mmspec.app.ui.rounds import Round
from mmspec.app.ui.tree_view import render_tree


def render_status(text: str, kind: str = "") -> str:
    """The status line."""
    return f'<p class="mm-status {kind}" role="status">{escape(text)}</p>'


def render_sentence(model: str, drafter: str, device: str, description: str = "") -> str:
    """What the page compares.

    Args:
        model: as chosen; a folder is shortened to its name.
        drafter: "auto" until it is known.
        device: "auto" until it is known.
        description: what the model is; empty until it is known.
    """
    kind = f" ({escape(description)})" if description else ""
    where = "this machine" if device == "auto" else device
    draft = "an automatically chosen drafter" if drafter == "auto" else f"the drafter <b>{escape(drafter)}</b>"
    return (
        f'<p class="mm-intro">The model <b>{escape(Path(model).name)}</b>{kind} on {escape(where)} answers one '
        f"question twice: with plain <code>generate</code>, and with mmspec: a faster decode loop, in which {draft} "
        "proposes tokens and the model checks several in one forward, where that pays.</p>"
    )


def render_frames(report: Report) -> str:
    """The frames that were read of a clip, with their times; empty for a picture."""
    if not report.is_clip:
        return ""
    frames = "".join(
        f'<figure><img src="{escape(image.uri)}" alt="Frame {number}"><figcaption>'
        f"{f'{image.time_s:.1f} s' if image.time_s is not None else number}</figcaption></figure>"
        for number, image in enumerate(report.media, 1)
    )
    return f'<p class="mm-legend">{len(report.media)} frames were read</p><div class="mm-frames">{frames}</div>'


def render_results(report: Report) -> str:
    """The charts of a finished run, and the numbers that the race does not show."""
    text = f'<p class="mm-legend">{escape(plots.describe_lengths(report))}</p>'
    pair = f'<div class="mm-charts">{plots.length_histogram(report)}{plots.phase_times(report)}</div>'
    return f'<div class="mm-results">{plots.lengths_chart(report)}{text}{render_headline(report)}{pair}</div>'


def _vision_cell(metrics: dict[str, Any]) -> tuple[str, str, str]:
    if metrics["vision_reused"]:
        return "vision encoding", "none", "that of the turn before serves all lanes"
    return "vision encoding", f"{metrics['vision_s']:.3f} s", "once for all lanes"


def render_headline(report: Report) -> str:
    """The numbers that the race does not show; those of mmspec are of its first lane."""
    metrics = report.metrics
    cells = [
        ("end to end", _format_ratio(metrics["speedup_e2e"]), "the whole answer, vision encoding included"),
        _vision_cell(metrics),
        ("tau", f"{metrics['tau']:.2f}", "accepted length: tokens per forward of the model"),
        ("R", "-" if metrics["R"] is None else f"{metrics['R']:.2f}", "cost of a round in plain decoding steps"),
    ]
    return render_numbers(cells)


def render_numbers(cells: Sequence[tuple[str, str, str]]) -> str:
    """Large numbers side by side: (name, value, note) of each."""
    return (
        '<dl class="mm-head">'
        + "".join(
            f'<div title="{escape(note)}"><dt>{escape(name)}</dt><dd>{escape(value)}'
            f"<small>{escape(note)}</small></dd></div>"
            for name, value, note in cells
        )
        + "</dl>"
    )


def _format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def render_visible_tokens(report: Report) -> str:
    """What the first drafter read of the picture, and what the compressor retained: a sentence, a number, pictures."""
    visible = report.metrics["visible_tokens"]
    if visible is None:
        return ""
    chosen = report.metrics["choice"]["compressor"]
    compressor = f"Compressor {chosen}." if chosen else "No compressor was chosen."
    count = ""
    if visible["num_visible"] is not None and visible["num_total"] is not None:
        count = f"<b>{visible['num_visible']} of {visible['num_total']} visual tokens</b> "
    alt = "The picture; tokens that the drafter did not read are grey"
    images = "".join(f'<img src="{escape(uri)}" alt="{alt}">' for uri in report.image_uris)
    note = " Grey: not read. The model itself always reads the whole picture." if images else ""
    return (
        '<figure class="mm-visible-tokens"><h2>What the drafter saw</h2>'
        f"<figcaption>{count}{escape(visible['summary'])} {escape(compressor)}{note}</figcaption>{images}</figure>"
    )


def render_round(report: Report, round_index: int) -> str:
    """Summary of a round, its tree, and the answer with the tokens of the round marked."""
    item = report.rounds[round_index]
    if not round_index:
        summary = "Prefill: the forward of the prompt gives the first token; nothing is drafted."
    elif item.num_proposed is None:
        summary = "The controller did not draft: recent drafts did not pay. One forward, one token."
    elif not item.num_draft_tokens:
        num_proposed = _pluralize(item.num_proposed - 1, "draft token", "draft tokens")
        summary = f"The drafter proposed {num_proposed}; none was expected to pay its cost. One token."
    else:
        summary = (
            f"{_pluralize(item.num_draft_tokens, 'draft token', 'draft tokens')} verified in one forward, "
            f"{item.num_accepted_tokens} accepted; "
            f"with the token of the model {_pluralize(len(item.emitted), 'token', 'tokens')}."
        )
    title = f"<b>Round {round_index} of {len(report.rounds) - 1}.</b>"
    head = f'<p class="mm-status" role="status">{title} {escape(summary)}</p>'
    return head + render_tree(item, report.token_labels) + LEGEND + _render_answer_so_far(report, item)


def _pluralize(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def _render_answer_so_far(report: Report, item: Round) -> str:
    """The answer up to this round: earlier tokens faint, those of the round marked."""
    texts, kinds = report.mmspec.token_texts, report.mmspec.token_kinds
    before = escape("".join(texts[: item.start]).lstrip())
    end = min(item.start + len(item.emitted), len(texts))
    now = "".join(f'<span class="mm-{kinds[index]}">{escape(texts[index])}</span>' for index in range(item.start, end))
    answer_html = f'<div class="mm-turn-answer mm-now"><span class="mm-past">{before}</span>{now}</div>'
    return f'<div class="mm-side mm-so-far">{answer_html}</div>'


CAPTION_COLUMNS = {
    "file": "the file, named as it was given",
    "caption": "the whole text that the model wrote",
    "tokens": "length of the caption in tokens of the model, its end included",
    "tokens per forward": "tokens that one forward of the model gave on average (tau); 1 is plain decoding",
    "seconds": "time of the batch that the file was in, divided by its files",
}
"""{column of the table of captions: explanation}."""


def render_captions(rows: Sequence[Mapping[str, Any]], thumbnails: Mapping[str, str] | None = None) -> str:
    """The table of captions of a batch.

    Args:
        rows: of a caption job.
        thumbnails: {id of a row: data URI}.
    """
    head = "".join(
        f"<th scope='col' title='{escape(note)}'>{escape(name)}</th>" for name, note in CAPTION_COLUMNS.items()
    )
    body = "".join(_render_caption_row(row, (thumbnails or {}).get(row["id"], "")) for row in rows)
    body = body or '<tr><td colspan="5" class="mm-empty">No captions yet.</td></tr>'
    table = f'<table class="mm-table mm-captions"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    notes = "; ".join(f"<b>{escape(name)}</b>: {escape(note)}" for name, note in CAPTION_COLUMNS.items())
    return f'<div class="mm-wide">{table}</div><p class="mm-legend">{notes}.</p>'


def _render_caption_row(row: Mapping[str, Any], thumbnail: str) -> str:
    given = escape(str(row["file_name"]))
    picture = f'<img src="{escape(thumbnail)}" alt="Small picture of {given}">' if thumbnail else ""
    file_name = given.replace("_", "_<wbr>")  # where a long name may be wrapped
    name = f'<td><div class="mm-file">{picture}<span>{file_name}</span></div></td>'
    if row["error"]:
        error = row["error"]
        reason = explain_refusal(str(error["type"]), str(error["message"]))
        return f'<tr class="mm-failed">{name}<td colspan="4">{escape(reason)}</td></tr>'
    limit = f" <small>(stopped at the limit of {row['n_new_tokens']} tokens)</small>" if _is_cut(row) else ""
    numbers = (
        ("tokens", row["n_new_tokens"]),
        ("tokens per forward", f"{row['tau']:.2f}"),
        ("seconds", f"{row['seconds']:.2f}"),
    )
    cells = "".join(f'<td data-label="{label}">{value}</td>' for label, value in numbers)
    return f"<tr>{name}<td>{escape(str(row['caption']))}{limit}</td>{cells}</tr>"


def _is_cut(row: Mapping[str, Any]) -> bool:
    """Whether the caption ended because of the number of tokens, so that it may lack its end."""
    return row.get("finish_reason") == "length"
