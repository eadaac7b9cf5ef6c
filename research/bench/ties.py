"""Ties: rows of a bench whose intervals overlap are not ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from research.bench.rows import ResultRow

RankedRow = tuple[str, float, Sequence[float]]
"""Name, ratio and its 95% limits."""


def intervals_overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two [low, high] have a point in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def neighbour_ties(rows: Sequence[RankedRow]) -> list[tuple[str, str]]:
    """Pairs of neighbours by ratio whose intervals overlap, the faster one first."""
    ranked = sorted(rows, key=lambda row: -row[1])
    return [(one[0], other[0]) for one, other in pairwise(ranked) if intervals_overlap(one[2], other[2])]


def bench_ties(rows: Sequence[ResultRow]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(series, ties) of every batch size and prompt length of `research.bench`; the baseline's row is `hf-again`."""

    def series(row: ResultRow) -> str:
        return f"batch {row['batch']}, prompt {row['prompt_tokens']}"

    for name, group in groupby(rows, key=series):
        ranked = [(row["drafter"], row["speedup_hf"], row["speedup_hf_ci"]) for row in group if row["drafter"] != "hf"]
        ties = neighbour_ties([(one, ratio, limits) for one, ratio, limits in ranked if ratio is not None and limits])
        if ties:
            yield name, ties


def tie_lines(rows: Sequence[ResultRow]) -> list[str]:
    """A line for each series with ties."""
    return [
        f"ties ({series}; intervals overlap): {'; '.join(' and '.join(pair) for pair in pairs)}"
        for series, pairs in bench_ties(rows)
    ]
