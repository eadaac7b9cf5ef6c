"""The report of a suite as Markdown, and as JSON with every call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mmspec.files import atomic_write
from research.bench.against import RoundRatios, repeat_line, repeat_table
from research.bench.measure import MIN_ROUNDS
from research.bench.peers.base import MEDIA, TEXT
from research.bench.results import ResultFiles
from research.bench.rows import ResultRow
from research.bench.suite.runner import BASELINE, BASELINE_AGAIN
from research.bench.suite.session import SuiteResult
from research.bench.suite.summary import ALL, SuiteRow, call_as_dict, find_ties

FORM_TITLES = {MEDIA: "prompts with images", TEXT: "text"}
TEXT_FORM = "text form: image tokens removed, no end token, answers of full length"
LIMITS = (
    "`x hf` is decoding, first token to last; `x hf, whole` the whole call. Prefill and image encoding are not "
    "accelerated.",
    "`hf-again` is the baseline once more at the end of each round: its interval is the noise of this machine.",
    "Peers with `embeddings` read the prompt with its images encoded by the model: the text is the same, the whole "
    "call is not comparable.",
    "In half precision near-ties may differ between any two programs; `same` counts calls with the same tokens.",
)
Cells = list[str]


def report_title(result: SuiteResult) -> str:
    """One line: suite, model, precision, device."""
    run, config = result.run, result.config
    return f"Suite {config.suite}: {config.model}, {run['dtype']}, {run['device']}, {run['threads']} threads"


def provenance_lines(result: SuiteResult) -> list[str]:
    """Command, versions, date of the run, and the time of reading the weights once."""
    run = result.run
    versions = ", ".join(f"{name} {run[name]}" for name in ("mmspec", "torch", "transformers"))
    lines = [f"`{run['command']}`", f"{run['date']}, {run['processor']}, commit {run['commit']}, {versions}"]
    if result.versions:
        lines.append("; ".join(f"{peer}: {version}" for peer, version in result.versions.items()))
    if result.reading:
        before, after = result.reading[0], result.reading[-1]
        size = before.weight_bytes / 2**20
        lines.append(
            f"Reading the text weights once ({size:.0f} MiB): {before.ms:.2f} ms before the calls, {after.ms:.2f} ms "
            f"after them ({before.bytes_per_s / 1e9:.1f} and {after.bytes_per_s / 1e9:.1f} GB/s measured)"
        )
    return lines


def remark_lines(result: SuiteResult) -> list[str]:
    """Ties, skipped and failed peers, other texts, items that were not run."""
    lines = []
    for form, batch in _series(result.rows):
        rows = rows_of_table(result.rows, form, batch, ALL)
        ties = [f"{one} and {other}" for one, other in find_ties(rows) if BASELINE not in (one, other)]
        if ties:
            lines.append(f"Ties ({FORM_TITLES[form]}, batch {batch}; intervals overlap): {'; '.join(ties)}")
        for row in rows:
            if row.calls and row.same < row.calls:
                lines.append(
                    f"{row.peer} ({FORM_TITLES[form]}, batch {batch}): other text in {row.calls - row.same} calls"
                )
            if row.failed:
                lines.append(f"{row.peer}: {row.failed} calls failed: {row.error}")
    lines += [f"{peer} left out: {reason}" for peer, reason in result.left_out.items()]
    lines += [f"{peer} skipped: {reason}" for peer, reason in result.skipped.items()]
    lines += [f"item {item} not run: {problem}" for item, problem in result.problems.items()]
    if any(row.calls < MIN_ROUNDS for row in result.rows if row.category == ALL):
        lines.append(f"Fewer than {MIN_ROUNDS} calls per row: intervals say little")
    return lines + result.notes


def rows_of_table(rows: Sequence[SuiteRow], form: str, batch: int, category: str) -> list[SuiteRow]:
    """Rows of one table, the baseline first."""
    return [row for row in rows if (row.form, row.batch, row.category) == (form, batch, category)]


def overall_table(result: SuiteResult, form: str, batch: int) -> list[Cells]:
    """Heading and rows over all categories."""
    heads = ["peer", "reads", "same", "tau", "ms/token", "x hf", "x hf, whole", "p50 / p90 / p99 s", "memory MiB"]
    rows = rows_of_table(result.rows, form, batch, ALL)
    return [heads, *([row.peer, _reads(row), *_cells(row)] for row in rows)]


def category_table(result: SuiteResult, form: str, batch: int) -> list[Cells]:
    """Heading and a row per peer: tau and decode speed-up of each category; empty if there is only one."""
    names = list(dict.fromkeys(row.category for row in result.rows if (row.form, row.batch) == (form, batch)))[1:]
    if not names:
        return []
    peers = [row.peer for row in rows_of_table(result.rows, form, batch, ALL)]
    found = {(row.peer, row.category): row for row in result.rows if (row.form, row.batch) == (form, batch)}
    lines = [["peer", *names]]
    for peer in peers:
        rows = [found.get((peer, name)) for name in names]
        lines.append([peer, *(_category_cell(row) for row in rows)])
    return lines


def batch_table(result: SuiteResult) -> list[Cells]:
    """Heading and a row per peer: decode speed-up at each batch size; empty if there is only one."""
    rows = [row for row in result.rows if row.category == ALL and row.form != TEXT]
    batches = list(dict.fromkeys(row.batch for row in rows))
    if len(batches) < 2:
        return []
    found = {(row.peer, row.batch): row for row in rows}
    peers = dict.fromkeys(row.peer for row in rows)
    table = [["peer", *(f"batch {batch}" for batch in batches)]]
    return [*table, *([peer, *(_category_cell(found.get((peer, batch))) for batch in batches)] for peer in peers)]


def sections(result: SuiteResult) -> Iterator[tuple[str, list[Cells]]]:
    """Title and table of each part of the report."""
    for form, batch in _series(result.rows):
        has_images = any(one == MEDIA for one, _ in _series(result.rows))
        title = TEXT_FORM if form == TEXT and has_images else FORM_TITLES[form]
        yield f"{title[0].upper()}{title[1:]}, batch {batch}", overall_table(result, form, batch)
        if table := category_table(result, form, batch):
            yield f"By category, batch {batch}: x hf (tau)", table
    if table := batch_table(result):
        yield "Batch sweep: x hf (tau)", table


def format_markdown(result: SuiteResult) -> str:
    """The whole report."""
    parts = [f"# {report_title(result)}", *(f"{line}  " for line in provenance_lines(result))]
    for title, table in sections(result):
        parts += ["", f"## {title}", "", markdown_table(table)]
    if remarks := remark_lines(result):
        parts += ["", "## Remarks", "", *(f"- {line}" for line in remarks)]
    return "\n".join([*parts, "", "## How to read it", "", *(f"- {line}" for line in LIMITS), ""])


def against_section(name: str, now: RoundRatios, before: RoundRatios) -> str:
    """The section on an earlier run, whose file is `name`."""
    table = markdown_table(repeat_table(now, before))
    return f"## Against {name}\n\n{table}\n\n{repeat_line(now, before)}\n"


def format_json(result: SuiteResult) -> ResultRow:
    """The run, the rows and every call."""
    reading = [{"ms": one.ms, "bytes": one.weight_bytes, "bytes_per_s": one.bytes_per_s} for one in result.reading]
    return {
        "run": result.run,
        "read_weights": reading,
        "rows": [row.as_dict() for row in result.rows],
        "versions": result.versions,
        "skipped": result.skipped,
        "left_out": result.left_out,
        "problems": result.problems,
        "calls": [call_as_dict(one) for one in result.calls],
    }


def write_json(result: SuiteResult, files: ResultFiles) -> None:
    """Write the file of `--json`, if there is one: whole, or not at all."""
    if files.json is not None:
        with atomic_write(files.json) as part:
            part.write_text(json.dumps(format_json(result), indent=1) + "\n", encoding="utf-8")


def markdown_table(table: Sequence[Cells]) -> str:
    """A table, its first row the heading."""
    head, *rows = (f"| {' | '.join(cells)} |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *rows])


def _series(rows: Sequence[SuiteRow]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row.form, row.batch) for row in rows))


def _reads(row: SuiteRow) -> str:
    """What the peer read in this series."""
    return "embeddings" if row.form == MEDIA and row.calls and row.latency_s is None else row.form


def _cells(row: SuiteRow) -> Cells:
    if not row.calls:
        return [f"failed: {row.error}", *[""] * 6]
    latency = "-" if row.latency_s is None else " / ".join(f"{seconds:.2f}" for seconds in row.latency_s.values())
    speed = _with_limits(row.speedup_decode, row.speedup_decode_ci)
    if row.tie and row.peer not in (BASELINE, BASELINE_AGAIN):
        speed += " (tie)"
    return [
        f"{row.same}/{row.calls}",
        _number(row.tau),
        _number(row.ms_per_token),
        speed,
        _with_limits(row.speedup_whole, row.speedup_whole_ci),
        latency,
        "-" if row.memory_mib is None else f"{row.memory_mib:.0f}",
    ]


def _category_cell(row: SuiteRow | None) -> str:
    if row is None or row.speedup_decode is None:
        return "-"
    tau = f" ({row.tau:.2f})" if row.tau is not None else ""
    return _with_limits(row.speedup_decode, row.speedup_decode_ci) + tau


def _with_limits(value: float | None, limits: Sequence[float] | None) -> str:
    if value is None or not limits:
        return "-"
    if limits[0] == limits[1] and limits[0] != 1:  # a single call has no interval
        return f"{value:.2f}"
    return f"{value:.2f} [{limits[0]:.2f}, {limits[1]:.2f}]"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"
