"""Rows of `research.studies.visual` as lines for the terminal and as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from research.bench.rows import num_drafter_tokens
from research.studies.intervals import format_ci

COMPRESSOR_HEADINGS = ["drafter", "visual tokens", "tau", "over", "names accepted", "names' tau", "prefill ms", "over"]
COMPRESSOR_HEADINGS += ["operations over", "KV KiB", "over", "decode speed over", "call speed over"]
COMPRESSOR_HEADINGS += ["decode speed over hf", "identical"]
"""Columns of the tables."""
TITLE = "**{shape}: {num_visual_tokens} visual tokens, {requests} requests; over: ratio to {base}**"


def format_compressor_row(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    num_compressed = row["num_compressed_tokens"]
    tokens = "" if num_compressed is None else f"{num_compressed:.0f} ({row['share']:.1%})"
    cells = [
        f"{row['shape']:<7} {row['spec']:<28} {tokens:>12}",
        f"tau {format_ci(row['tau'])}, x{format_ci(row['tau_over'])}",
    ]
    cells.append(f"names {row['names'][0]:.2f}, tau {row['names_tau'][0]:.2f}")
    if "prefill_ms" in row:
        form = "prefill {prefill_ms:.1f} ms (x{prefill_over:.2f}), operations x{mflops_over:.3f}, KV x{kv_over:.3f}"
        cells.append(form.format(**row))
    cells.append("decode x{speedup_decode:.2f}, call x{speedup_e2e:.2f}, hf x{speedup_hf:.2f}".format(**row))
    return "  ".join(cells) + ("" if row["identical"] else "  DIFFERS")


def format_compressor_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table for each shape."""
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        group = [row for row in rows if row["shape"] == shape]
        lines = [COMPRESSOR_HEADINGS, ["---"] * len(COMPRESSOR_HEADINGS), *map(_cells, group)]
        parts.append("\n".join([TITLE.format(**group[0]), "", *(f"| {' | '.join(line)} |" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row, in the order of `COMPRESSOR_HEADINGS`."""
    cells = [row["spec"], "-" if row["share"] is None else f"{num_drafter_tokens(row):.0f} ({row['share']:.1%})"]
    cells += [format_ci(row["tau"]), format_ci(row["tau_over"]), f"{row['names'][0]:.0%}", format_ci(row["names_tau"])]
    if "prefill_ms" in row:
        form = "{prefill_ms:.1f}|{prefill_over:.2f}|{mflops_over:.3f}|{kv_kib:.1f}|{kv_over:.3f}"
        cells += form.format(**row).split("|")
    else:
        cells += ["-"] * 5
    cells += [format_ci((row[name], *row[f"{name}_ci"])) for name in ("speedup_decode", "speedup_e2e")]
    return [*cells, f"{row['speedup_hf']:.2f}", "yes" if row["identical"] else "NO"]


__all__ = ["COMPRESSOR_HEADINGS", "format_compressor_row", "format_compressor_tables"]
