"""`--against`: the ratios of an earlier run of the same bench beside those of this one, over the rounds of both.

Which rounds a run has depends on its time, so only rounds that both runs have are compared: then the prompts are the
same, and what differs is the machine and chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mmspec.app.errors import UsageError, one_line
from research.bench.rows import ResultRow

RatioKey = tuple[str, str, str]
"""Row, series, and which ratio."""
RoundRatios = dict[RatioKey, dict[Any, float]]
"""The ratio of every round, by what identifies the round."""
BENCH_RATIOS = {"speedup_hf": "x hf", "speedup_own": "x own", "speedup_e2e": "x e2e"}


def bench_ratios(rows: Sequence[ResultRow]) -> RoundRatios:
    """Of the rows of `research.bench`.

    Raises:
        KeyError: of a version that did not write the ratios of rounds.
    """
    return {
        (row["drafter"], row.get("setting") or f"batch {row['batch']}, prompt {row['prompt_tokens']}", name): {
            number: ratio for number, ratio in enumerate(row[f"{key}_runs"]) if ratio is not None
        }
        for row in rows
        if row["drafter"] != "hf"
        for key, name in BENCH_RATIOS.items()
        if not (row["drafter"] == "none" and key == "speedup_own")  # 1 by definition
    }


def suite_ratios(calls: Sequence[Mapping[str, Any]]) -> RoundRatios:
    """Of the calls in the JSON of a suite."""
    found: RoundRatios = {}
    for call in calls:
        if call["peer"] == "hf" or "error" in call:
            continue
        series, prompt = f"{call['form']}, batch {call['batch']}", f"{call['item']} {call['turn']}"
        if call["decoded"] and call["decode_s"]:
            ratio = call["base_ms_per_token"] / (1e3 * call["decode_s"] / call["decoded"])
            found.setdefault((call["peer"], series, "x hf"), {})[prompt] = ratio
        if call["total_s"] and not call.get("without_media", True):
            found.setdefault((call["peer"], series, "x hf, whole"), {})[prompt] = call["base_total_s"] / call["total_s"]
    return found


def read_ratios(file: Path | None) -> RoundRatios:
    """The ratios of an earlier run; none without a file.

    Raises:
        UsageError: not the JSON of a run, or of a version that wrote no ratios of rounds.
    """
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return bench_ratios(found) if isinstance(found, list) else suite_ratios(found["calls"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--against names the JSON of an earlier run; {file}: {one_line(error)}") from error


def repeat_table(now: RoundRatios, before: RoundRatios) -> list[list[str]]:
    """Heading and a line per ratio of both runs: medians over the rounds of both, and how they differ."""
    lines = [["row", "series", "ratio", "rounds", "before", "now", "difference"]]
    for key, old, new, rounds in _common(now, before):
        lines.append([*key, str(rounds), f"{old:.2f}", f"{new:.2f}", f"{100 * (new / old - 1):+.1f}%"])
    return lines


def repeat_line(now: RoundRatios, before: RoundRatios) -> str:
    """The largest difference, and that of the A/A rows."""
    changes = {key: 100 * abs(new / old - 1) for key, old, new, _ in _common(now, before)}
    if not changes:
        return "No round is in both runs."
    worst = max(changes, key=lambda key: changes[key])
    again = max((change for key, change in changes.items() if key[0] == "hf-again"), default=math.nan)
    return f"Largest difference: {changes[worst]:.1f}% ({', '.join(worst)}); of the A/A rows {again:.1f}%."


def _common(now: RoundRatios, before: RoundRatios) -> list[tuple[RatioKey, float, float, int]]:
    """(key, median before, median now, rounds) of the ratios of both runs."""
    found = []
    for key, ratios in now.items():
        rounds = [one for one in ratios if one in before.get(key, {})]
        if rounds:
            old, new = (median(one[number] for number in rounds) for one in (before[key], ratios))
            found.append((key, old, new, len(rounds)))
    return found
