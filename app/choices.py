"""Whether choosing what a drafter is shown, prompt by prompt, beats showing it always the same.

From rows of `study_visual`: those that choose (elastic, measured) against the one fixed way that is best over all
shapes, and against the best way for each request. The latter is found by forwards, which timing cannot blur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.app.measure import bootstrap

CHOOSERS = ("elastic", "measured")
"""Compressors that choose for each prompt what is shown."""
Row = Mapping[str, Any]
Lists = dict[str, list[float]]


def names_of(row: Row) -> list[str]:
    """The ways that a row stands for. A share of the tokens is one way, though their number differs between shapes."""
    what = row["way"].rpartition(":")[0]
    return [f"{what} at 1/{share}" if share else f"{what}:1" for share in row["shares"]] or [row["way"]]


def against(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """{way that chooses: how it stands}; ratios are [value, low, high] over requests, above 1 it needs less.

    Only of ways that were run on every shape; nothing if none chooses, or none is fixed.
    """
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    found: dict[str, dict[str, Row]] = {}
    for row in (row for row in rows if "prefill_ms" in row):
        for name in names_of(row):
            found.setdefault(name, {})[row["shape"]] = row
    every = {name: [parts[shape] for shape in shapes] for name, parts in found.items() if len(parts) == len(shapes)}
    chosen = {name: lists(parts) for name, parts in every.items() if parts[0]["family"] in CHOOSERS}
    fixed = {name: lists(parts) for name, parts in every.items() if name not in chosen}
    return {way: told(mine, fixed) for way, mine in chosen.items()} if fixed else {}


def lists(parts: Sequence[Row]) -> Lists:
    """Seconds, forwards and tokens shown, of all requests of all shapes."""
    kept = [row["visual"] if row["kept"] is None else row["kept"] for row in parts for _ in row["seconds"]]
    return {"kept": kept} | {key: [value for row in parts for value in row[key]] for key in ("seconds", "forwards")}


def told(mine: Lists, fixed: Mapping[str, Lists]) -> dict[str, Any]:
    """How one way stands to those that are fixed."""
    name = min(fixed, key=lambda name: sum(fixed[name]["seconds"]))
    count = len(mine["seconds"])
    each = [min(fixed.values(), key=lambda one: (one["forwards"][i], one["kept"][i])) for i in range(count)]
    best: Lists = {key: [one[key][i] for i, one in enumerate(each)] for key in ("seconds", "forwards")}
    return {
        "requests": count,
        "best_fixed": name,
        "over_best_fixed": ratio(fixed[name], mine, "seconds"),
        "over_best_fixed_forwards": ratio(fixed[name], mine, "forwards"),
        "over_best_each": ratio(best, mine, "seconds"),
        "over_best_each_forwards": ratio(best, mine, "forwards"),
    }


def ratio(above: Lists, below: Lists, key: str) -> tuple[float, float, float]:
    """(value, low, high) of the ratio of sums."""
    return bootstrap(lambda at: sum(above[key][i] for i in at) / sum(below[key][i] for i in at), len(above[key]))


def line_of(way: str, figures: Mapping[str, Any]) -> str:
    """One way that chooses, as it is printed."""

    def both(key: str) -> str:
        form = "{:.3f} [{:.3f}, {:.3f}]".format
        return f"seconds x{form(*figures[key])}, forwards x{form(*figures[f'{key}_forwards'])}"

    return (
        f"{way}: over {figures['best_fixed']}, the best fixed way on all shapes: {both('over_best_fixed')}; over the "
        f"way with the fewest forwards for each request: {both('over_best_each')}"
    )


__all__ = ["CHOOSERS", "against", "line_of", "names_of"]
