"""Calls of a suite to rows: per peer, form, batch size and category; ratios with intervals, percentiles, ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from research.bench.measure import median_ci
from research.bench.rows import ResultRow
from research.bench.suite.runner import BASELINE_AGAIN, CallRecord
from research.bench.ties import intervals_overlap, neighbour_ties

ALL = "all"
"""The row over all categories."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class SuiteRow:
    """One line of the report.

    Attributes:
        peer, form, batch, category: what it is about; `category` is `ALL` for the mean over all.
        calls, failed: calls that succeeded and that did not. error: of the first that did not.
        same: calls with the tokens of the baseline.
        tau: tokens per forward of a row; None where unknown.
        ms_per_token: all seconds of decoding over all its tokens. tokens_per_s: its inverse.
        speedup_decode, speedup_whole: medians over calls; `_ci`: their 95% limits.
        latency_s: {percentile: seconds of a call}. ttft_ms: median.
        memory_mib: most beyond the weights in any call; None if unknown.
        tie: the interval of `speedup_decode` overlaps that of the baseline's second run.
    """

    peer: str
    form: str
    batch: int
    category: str
    calls: int
    failed: int
    error: str | None
    same: int
    tau: float | None = None
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    speedup_decode: float | None = None
    speedup_decode_ci: list[float] | None = None
    speedup_whole: float | None = None
    speedup_whole_ci: list[float] | None = None
    latency_s: dict[int, float] | None = None
    ttft_ms: float | None = None
    memory_mib: float | None = None
    tie: bool = False

    def as_dict(self) -> ResultRow:
        """For JSON."""
        return {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(self).items()}


def summarise_calls(records: Sequence[CallRecord]) -> list[SuiteRow]:
    """Rows of every series: first over all categories, then of each one if there are several."""
    rows = []
    for form, batch in dict.fromkeys((one.form, one.batch) for one in records):
        series = [one for one in records if (one.form, one.batch) == (form, batch)]
        categories = list(dict.fromkeys(one.category for one in series))
        for category in (ALL, *(categories if len(categories) > 1 else ())):
            part = [one for one in series if category in (ALL, one.category)]
            noise = _ratios(_good(part, BASELINE_AGAIN), decode_ratio)
            for peer in dict.fromkeys(one.peer for one in part):
                calls = [one for one in part if one.peer == peer]
                rows.append(_row(peer, form, batch, category, calls, median_ci(noise)))
    return rows


def _row(
    peer: str, form: str, batch: int, category: str, calls: Sequence[CallRecord], noise: Sequence[float]
) -> SuiteRow:
    good = [one for one in calls if one.run is not None]
    errors = [one.error for one in calls if one.error is not None]
    counts = (len(good), len(errors), errors[0] if errors else None, sum(one.same is True for one in good))
    runs = [one.run for one in good if one.run is not None]
    if not runs:
        return SuiteRow(peer, form, batch, category, *counts)
    decode_s, num_decoded = sum(run.decode_s for run in runs), sum(run.num_decoded for run in runs)
    stats = [run.stats for run in runs if run.stats is not None]
    row_rounds = sum(one.row_rounds for one in stats)
    decode, whole = _ratios(good, decode_ratio), _ratios(good, whole_ratio)
    limits = median_ci(decode)
    memory = [run.memory_mib for run in runs if run.memory_mib is not None]
    seconds = [run.total_s for run in runs if not run.without_media]
    return SuiteRow(
        peer,
        form,
        batch,
        category,
        *counts,
        tau=sum(one.tokens - one.first_tokens for one in stats) / row_rounds if row_rounds else None,
        ms_per_token=1e3 * decode_s / num_decoded if num_decoded else None,
        tokens_per_s=num_decoded / decode_s if decode_s else None,
        speedup_decode=median(decode) if decode else None,
        speedup_decode_ci=_rounded(limits),
        speedup_whole=median(whole) if whole else None,
        speedup_whole_ci=_rounded(median_ci(whole)),
        latency_s={p: round(percentile(seconds, p), 5) for p in PERCENTILES} if seconds else None,
        ttft_ms=1e3 * median(run.ttft_s for run in runs) if seconds else None,
        memory_mib=max(memory, default=None),
        tie=bool(limits) and bool(noise) and intervals_overlap(limits, noise),
    )


def decode_ratio(one: CallRecord) -> float:
    """Milliseconds per token of the baseline over those of the call; NaN if there was nothing to decode."""
    assert one.run is not None
    return one.base_ms_per_token / one.run.ms_per_token if one.run.ms_per_token else math.nan


def whole_ratio(one: CallRecord) -> float:
    """Seconds of the baseline's call over those of the call; NaN if the call is no whole one."""
    assert one.run is not None
    return one.base_total_s / one.run.total_s if one.run.total_s and not one.run.without_media else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def find_ties(rows: Sequence[SuiteRow]) -> list[tuple[str, str]]:
    """Pairs of neighbours by decode speed whose intervals overlap, of one form, batch size and category."""
    return neighbour_ties(
        [(row.peer, row.speedup_decode or 0.0, row.speedup_decode_ci) for row in rows if row.speedup_decode_ci]
    )


def call_as_dict(one: CallRecord) -> dict[str, Any]:
    """A call for JSON: without the tokens, which the rows compare."""
    about = {key: getattr(one, key) for key in ("peer", "form", "batch", "category", "item", "turn")}
    if one.run is None:
        return about | {"error": one.error}
    run = one.run
    numbers = {
        "total_s": run.total_s,
        "ttft_s": run.ttft_s,
        "decode_s": run.decode_s,
        "base_ms_per_token": one.base_ms_per_token,
        "base_total_s": one.base_total_s,
    }
    counts: dict[str, Any] = {"tokens": run.num_tokens, "decoded": run.num_decoded, "same": one.same}
    counts["without_media"] = run.without_media
    return about | {key: round(value, 5) for key, value in numbers.items()} | counts


def _good(records: Sequence[CallRecord], peer: str) -> list[CallRecord]:
    return [one for one in records if one.peer == peer and one.run is not None]


def _ratios(records: Sequence[CallRecord], ratio: Callable[[CallRecord], float]) -> list[float]:
    values = [ratio(one) for one in records if one.run is not None]
    return [value for value in values if not math.isnan(value)]


def _rounded(limits: Sequence[float]) -> list[float] | None:
    return [round(limit, 4) for limit in limits] if limits else None
