"""Whether an adaptive compressor, which chooses prompt by prompt, is faster than every fixed one.

Works on rows of `research.studies.visual`. An adaptive compressor (elastic) is compared with the best
fixed one, by the seconds of all requests and in the mean over shapes, where long answers weigh as much as short ones;
and with the best fixed one for each request. The latter is selected by forwards, which have no timing noise, and by
seconds: that is an optimistic bound, since the minimum of several noisy times is below every expected time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from research.bench.measure import bootstrap_interval
from research.bench.rows import ResultRow, num_drafter_tokens

ADAPTIVE_COMPRESSORS = ("elastic",)
"""Compressors that choose the number of visual tokens for each prompt."""
RequestValues = dict[str, list[float]]
"""{"seconds", "forwards", "tokens": a value for each request}."""


def run_names(row: Mapping[str, Any]) -> list[str]:
    """Names of the contestants of a row: one for each share, since the budget of a share differs between shapes."""
    spec = row["spec"].rpartition(":")[0]
    return [f"{spec} at 1/{share}" if share else f"{spec}:1" for share in row["shares"]] or [row["spec"]]


def compare_adaptive(rows: Sequence[ResultRow]) -> dict[str, ResultRow]:
    """{name of an adaptive contestant: its comparison}; ratios are [value, low, high], above 1 it is faster.

    Only contestants that ran on every shape count; empty if none of them is adaptive, or none is fixed.
    """
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by_name: dict[str, dict[str, ResultRow]] = {}
    for row in (row for row in rows if "prefill_ms" in row):
        for name in run_names(row):
            by_name.setdefault(name, {})[row["shape"]] = row
    complete = {
        name: [by_shape[shape] for shape in shapes]
        for name, by_shape in by_name.items()
        if len(by_shape) == len(shapes)
    }
    adaptive = {name: parts for name, parts in complete.items() if parts[0]["family"] in ADAPTIVE_COMPRESSORS}
    fixed = {name: parts for name, parts in complete.items() if name not in adaptive}
    return {name: compare_to_fixed(parts, fixed) for name, parts in adaptive.items()} if fixed else {}


def collect_requests(parts: Sequence[ResultRow]) -> RequestValues:
    """Seconds, forwards and visual tokens of the drafter, of all requests of all shapes."""
    tokens = [num_drafter_tokens(row) for row in parts for _ in row["seconds"]]
    return {"tokens": tokens} | {key: [value for row in parts for value in row[key]] for key in ("seconds", "forwards")}


def compare_to_fixed(parts: Sequence[ResultRow], fixed: Mapping[str, Sequence[ResultRow]]) -> ResultRow:
    """Compare an adaptive contestant with the fixed ones; a row per shape for each of them."""
    adaptive = collect_requests(parts)
    others = {name: collect_requests(rows) for name, rows in fixed.items()}
    each = range(len(parts[0]["seconds"]))
    by_sum = min(others, key=lambda name: sum(others[name]["seconds"]))
    by_shape = min(fixed, key=lambda name: mean_over_shapes(fixed[name], parts, each))
    fewest = best_per_request(others, lambda values, i: (values["forwards"][i], values["tokens"][i]))
    fastest = best_per_request(others, lambda values, i: (values["seconds"][i],))
    return {
        "requests": len(adaptive["seconds"]),
        "best_fixed": by_sum,
        "over_best_fixed": ratio_of_sums(others[by_sum], adaptive, "seconds"),
        "over_best_fixed_forwards": ratio_of_sums(others[by_sum], adaptive, "forwards"),
        "best_fixed_by_shape": by_shape,
        "over_best_fixed_by_shape": bootstrap_interval(
            lambda indices: mean_over_shapes(fixed[by_shape], parts, indices), len(each)
        ),
        "over_best_each": ratio_of_sums(fewest, adaptive, "seconds"),
        "over_best_each_forwards": ratio_of_sums(fewest, adaptive, "forwards"),
        "over_optimistic_bound": ratio_of_sums(fastest, adaptive, "seconds"),
    }


def best_per_request(
    contestants: Mapping[str, RequestValues], key: Callable[[RequestValues, int], tuple[float, ...]]
) -> RequestValues:
    """Seconds and forwards of the contestant with the smallest `key` for each request."""
    count = len(next(iter(contestants.values()))["seconds"])
    best = [min(contestants.values(), key=lambda values: key(values, i)) for i in range(count)]
    return {name: [values[name][i] for i, values in enumerate(best)] for name in ("seconds", "forwards")}


def ratio_of_sums(numerator: RequestValues, denominator: RequestValues, key: str) -> tuple[float, float, float]:
    """(value, low, high) of the ratio of sums over requests."""
    above, below = numerator[key], denominator[key]

    def ratio(indices: Sequence[int]) -> float:
        return sum(above[i] for i in indices) / sum(below[i] for i in indices)

    return bootstrap_interval(ratio, len(above))


def mean_over_shapes(numerator: Sequence[ResultRow], denominator: Sequence[ResultRow], indices: Sequence[int]) -> float:
    """The ratio of the seconds of some requests of each shape, in the geometric mean over shapes.

    The geometric mean of inverse ratios is the inverse, so the choice of the denominator does not matter.
    """

    def seconds(row: ResultRow) -> float:
        return sum(row["seconds"][i] for i in indices)

    return geometric_mean(seconds(above) / seconds(below) for above, below in zip(numerator, denominator, strict=True))


def format_comparison(name: str, comparison: Mapping[str, Any]) -> str:
    """The comparison of one adaptive contestant, as it is printed."""

    def ratio(key: str) -> str:
        return "x{:.3f} [{:.3f}, {:.3f}]".format(*comparison[key])

    def both(key: str) -> str:
        return f"seconds {ratio(key)}, forwards {ratio(f'{key}_forwards')}"

    lines = [
        f"{comparison['best_fixed_by_shape']}, the best fixed compressor in the mean over shapes: "
        f"seconds {ratio('over_best_fixed_by_shape')}",
        f"{comparison['best_fixed']}, the best fixed compressor in the sum of all requests: {both('over_best_fixed')}",
        f"the fixed compressor with the fewest forwards for each request: {both('over_best_each')}",
        "the fastest fixed compressor for each request, selected after the fact from noisy times, an optimistic bound: "
        f"seconds {ratio('over_optimistic_bound')}",
    ]
    return "\n".join(f"{name}: over {line}" for line in lines)


__all__ = ["ADAPTIVE_COMPRESSORS", "compare_adaptive", "format_comparison", "run_names"]
