"""Whether choosing what a drafter is shown, prompt by prompt, beats showing it always the same.

From rows of `study_visual`: those that choose (elastic, cost-based) against the one fixed way that is best, by the
seconds of all requests and in the mean over shapes, where long answers count no more than short ones; and against the
best way for each request. The latter is found by forwards, which timing cannot blur, and by seconds: that is a bound no
chooser is held to, since the least of many noisy times is less than any way takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from mmspec.app.bench.measure import bootstrap_interval

ADAPTIVE_COMPRESSORS = ("elastic", "cost-based", "measured")  # the last one: rows of older versions
"""Compressors that choose for each prompt what is shown."""
Row = Mapping[str, Any]
RequestValues = dict[str, list[float]]


def run_names(row: Row) -> list[str]:
    """The ways that a row stands for. A share of the tokens is one way, though their number differs between shapes."""
    what = row["way"].rpartition(":")[0]
    return [f"{what} at 1/{share}" if share else f"{what}:1" for share in row["shares"]] or [row["way"]]


def compare_adaptive(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """{way that chooses: how it stands}; ratios are [value, low, high] over requests, above 1 it needs less.

    Only of ways that were run on every shape; nothing if none chooses, or none is fixed.
    """
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    found: dict[str, dict[str, Row]] = {}
    for row in (row for row in rows if "prefill_ms" in row):
        for name in run_names(row):
            found.setdefault(name, {})[row["shape"]] = row
    every = {name: [parts[shape] for shape in shapes] for name, parts in found.items() if len(parts) == len(shapes)}
    chosen = {name: parts for name, parts in every.items() if parts[0]["family"] in ADAPTIVE_COMPRESSORS}
    fixed = {name: parts for name, parts in every.items() if name not in chosen}
    return {way: compare_to_fixed(mine, fixed) for way, mine in chosen.items()} if fixed else {}


def collect_requests(parts: Sequence[Row]) -> RequestValues:
    """Seconds, forwards and tokens shown, of all requests of all shapes."""
    kept = [row["visual"] if row["kept"] is None else row["kept"] for row in parts for _ in row["seconds"]]
    return {"kept": kept} | {key: [value for row in parts for value in row[key]] for key in ("seconds", "forwards")}


def compare_to_fixed(parts: Sequence[Row], fixed: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """How one way stands to those that are fixed; of each a row per shape."""
    mine, others = collect_requests(parts), {name: collect_requests(rows) for name, rows in fixed.items()}
    each = range(len(parts[0]["seconds"]))
    by_sum = min(others, key=lambda name: sum(others[name]["seconds"]))
    by_shape = min(fixed, key=lambda name: mean_over_shapes(fixed[name], parts, each))
    fewest = best_per_request(others, lambda one, i: (one["forwards"][i], one["kept"][i]))
    quickest = best_per_request(others, lambda one, i: (one["seconds"][i],))
    return {
        "requests": len(mine["seconds"]),
        "best_fixed": by_sum,
        "over_best_fixed": ratio_of_sums(others[by_sum], mine, "seconds"),
        "over_best_fixed_forwards": ratio_of_sums(others[by_sum], mine, "forwards"),
        "best_fixed_by_shape": by_shape,
        "over_best_fixed_by_shape": bootstrap_interval(
            lambda at: mean_over_shapes(fixed[by_shape], parts, at), len(each)
        ),
        "over_best_each": ratio_of_sums(fewest, mine, "seconds"),
        "over_best_each_forwards": ratio_of_sums(fewest, mine, "forwards"),
        "over_optimistic_bound": ratio_of_sums(quickest, mine, "seconds"),
    }


def best_per_request(
    ways: Mapping[str, RequestValues], by: Callable[[RequestValues, int], tuple[float, ...]]
) -> RequestValues:
    """Seconds and forwards of the way that is best for each request."""
    count = len(next(iter(ways.values()))["seconds"])
    best = [min(ways.values(), key=lambda one: by(one, i)) for i in range(count)]
    return {key: [one[key][i] for i, one in enumerate(best)] for key in ("seconds", "forwards")}


def ratio_of_sums(above: RequestValues, below: RequestValues, key: str) -> tuple[float, float, float]:
    """(value, low, high) of the ratio of sums."""
    return bootstrap_interval(
        lambda at: sum(above[key][i] for i in at) / sum(below[key][i] for i in at), len(above[key])
    )


def mean_over_shapes(above: Sequence[Row], below: Sequence[Row], at: Sequence[int]) -> float:
    """The ratio of seconds of some requests of each shape, in the mean over shapes.

    The geometric mean, which is the same whichever of the two the ratios are to.
    """

    def seconds(row: Row) -> float:
        return sum(row["seconds"][i] for i in at)

    return geometric_mean(seconds(one) / seconds(other) for one, other in zip(above, below, strict=True))


def format_comparison(way: str, figures: Mapping[str, Any]) -> str:
    """One way that chooses, as it is printed."""

    def form(key: str) -> str:
        return "x{:.3f} [{:.3f}, {:.3f}]".format(*figures[key])

    def both(key: str) -> str:
        return f"seconds {form(key)}, forwards {form(f'{key}_forwards')}"

    lines = [
        f"{figures['best_fixed_by_shape']}, the best fixed way in the mean over shapes: "
        f"seconds {form('over_best_fixed_by_shape')}",
        f"{figures['best_fixed']}, the best fixed way in the sum of all requests: {both('over_best_fixed')}",
        f"the way with the fewest forwards for each request: {both('over_best_each')}",
        "the quickest way for each request, picked after the fact from noisy times, an optimistic bound: "
        f"seconds {form('over_optimistic_bound')}",
    ]
    return "\n".join(f"{way}: over {line}" for line in lines)


__all__ = ["ADAPTIVE_COMPRESSORS", "compare_adaptive", "format_comparison", "run_names"]
