"""Plain `generate`, the loop without drafts and each drafter, interleaved in one process; ratios of paired runs.

Timing: each contestant is a clone of the model that shares its weights; the plain one is never patched. `total_s` is
the wall clock of the whole call on a synchronised device. For plain generate a stopping criterion records the time of
each token; the mmspec loop measures itself. `decode_s` is from the first token to the last, without image encoding and
prefill, which `ttft_s` contains. Synthetic requests do not end before `new_tokens`: the end token gets an id outside
the vocabulary on all sides, so that every contestant emits the same number of tokens. Scene requests end at the end
token.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList

import mmspec
from mmspec.app.modeling.load import clone, synchronize
from mmspec.app.modeling.sampling import Sampling
from mmspec.comparison import TimestampCriterion
from mmspec.interfaces import Observer
from mmspec.metrics.stats import Stats
from research.bench.drafter_specs import patch_model
from research.bench.rows import ResultRow
from research.bench.specs import get_block_size, weight_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

HF, HF_AGAIN, NO_DRAFT = "hf", "hf-again", "none"
WARM_UP_CALLS = 2
"""Of each contestant, on a request of its own: the first call compiles and measures kernels."""
MIN_ROUNDS = 7
"""Rounds that are measured whatever their time: medians of fewer say little."""
NUM_RESAMPLES = 1000
"""Bootstrap resamples of runs or requests."""


@dataclass(frozen=True)
class TimedRun:
    """One call of `generate`, timed.

    Attributes:
        total_s: seconds of the call. ttft_s: until the first token. decode_s: from the first token to the last.
        output_ids: [B, T] new tokens.
        num_tokens: new tokens of all rows, padding not counted. min_row_tokens: of the shortest row.
        stats: of the mmspec loop; None for plain generate.
    """

    total_s: float
    ttft_s: float
    decode_s: float
    output_ids: Tensor
    num_tokens: int
    stats: Stats | None = None
    min_row_tokens: int = 0

    @property
    def step_s(self) -> float:
        """Mean seconds of one round of our loop."""
        return self.stats.round_s if self.stats else math.nan


@dataclass
class Contestant:
    """A name, a model that may be patched, and its runs."""

    name: str
    model: PreTrainedModel
    runs: list[TimedRun] = field(default_factory=list)


def disable_eos(model: PreTrainedModel) -> PreTrainedModel:
    """Let rows continue to `max_new_tokens`: the end token gets an id outside the vocabulary."""
    config = model.generation_config
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos or 0
    config.eos_token_id = [model.get_output_embeddings().weight.shape[0]]
    return model


def build_contestants(
    model: PreTrainedModel,
    drafters: Sequence[str],
    processor: ProcessorMixin,
    stop_at_eos: bool = False,
    nodes: int | None = None,
) -> list[Contestant]:
    """Plain twice (the second is the noise band), our loop without drafts, then each drafter.

    Args:
        drafters: as `research.bench.drafter_specs.parse_spec` reads them (`msd@3+pool:49`).
        stop_at_eos: rows end at the end token. nodes: size of every tree; None lets the controller choose.
    """

    def copy_model() -> PreTrainedModel:
        return clone(model) if stop_at_eos else disable_eos(clone(model))

    plain = copy_model()
    contestants = [Contestant(HF, plain), Contestant(HF_AGAIN, plain)]
    contestants += [
        Contestant(name, patch_model(copy_model(), name, processor, nodes))
        for name in dict.fromkeys((NO_DRAFT, *drafters))
    ]
    return contestants


@contextmanager
def gc_paused() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would take longer than small runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_once(
    contestant: Contestant,
    inputs: Mapping[str, Any],
    new_tokens: int,
    temperature: float,
    seed: int,
    observer: Observer | None = None,
) -> TimedRun:
    """One call of `generate`, timed; `observer` listens to its rounds."""
    model, device = contestant.model, contestant.model.device
    is_patched, timestamps = mmspec.is_patched(model), TimestampCriterion()
    options: dict[str, Any] = {"max_new_tokens": new_tokens}
    options |= Sampling(temperature).generation_kwargs(model.generation_config)
    if not is_patched:
        options["stopping_criteria"] = StoppingCriteriaList([timestamps])
    if observer is not None:
        options["mmspec"] = {"observers": [observer]}
    torch.manual_seed(seed)
    gc.collect()
    synchronize(device)
    start_time = time.perf_counter()
    ids = model.generate(**inputs, **options)
    synchronize(device)
    total_s = time.perf_counter() - start_time
    ids = ids[:, inputs["input_ids"].shape[1] :]
    sizes = count_row_tokens(ids, model.generation_config.eos_token_id)
    num_tokens, min_row_tokens = sum(sizes), min(sizes)
    if not is_patched:
        ttft_s, decode_s = timestamps.times[0] - start_time, timestamps.times[-1] - timestamps.times[0]
        return TimedRun(total_s, ttft_s, decode_s, ids, num_tokens, min_row_tokens=min_row_tokens)
    stats = mmspec.stats(model, last=True)
    if stats.fallback_calls:
        raise RuntimeError(
            f"{contestant.name!r} cannot be measured: fallback to plain generate: {stats.fallback_reason}"
        )
    return TimedRun(total_s, stats.ttft_s, stats.decode_s, ids, num_tokens, stats, min_row_tokens)


def count_tokens(ids: Tensor, eos_ids: int | list[int] | None) -> int:
    """Tokens of all rows, each up to its end token, which counts."""
    return sum(count_row_tokens(ids, eos_ids))


def count_row_tokens(ids: Tensor, eos_ids: int | list[int] | None) -> list[int]:
    """Tokens of each row, up to its end token."""
    if eos_ids is None:
        return [ids.shape[1]] * len(ids)
    end = torch.isin(ids, torch.tensor(eos_ids, device=ids.device)).long()
    return (end.cumsum(1) == end).sum(1).tolist()  # no end token before


@gc_paused()
def run_rounds(
    contestants: Sequence[Contestant],
    requests: Sequence[Mapping[str, Any]],
    new_tokens: int,
    temperature: float,
    seed: int,
    tick: Callable[[], object],
    deadline: float | None = None,
    min_rounds: int = MIN_ROUNDS,
) -> None:
    """One round per request: `hf`, the others in rotating order, `hf-again`; the first request warms up.

    Requests must differ: a drafter that learns from call to call knows the answers otherwise.

    Args:
        deadline: `time.perf_counter()` after which no round begins once there are `min_rounds`; None for no limit.
    """
    first, last = ([one for one in contestants if one.name == name] for name in (HF, HF_AGAIN))
    others = [one for one in contestants if one.name not in (HF, HF_AGAIN)]
    for contestant in contestants:
        contestant.runs.clear()
    for contestant in (*contestants,) * WARM_UP_CALLS:
        run_once(contestant, requests[0], new_tokens, temperature, seed)
        tick()
    for number, inputs in enumerate(requests[1:], 1):
        if deadline is not None and number > min_rounds and time.perf_counter() > deadline:
            return
        start = number % max(1, len(others))
        for contestant in (*first, *others[start:], *others[:start], *last):
            contestant.runs.append(run_once(contestant, inputs, new_tokens, temperature, seed + number))
            tick()


def build_result_rows(contestants: Sequence[Contestant]) -> Iterator[ResultRow]:
    """A row per contestant, from its runs and the runs of `hf` and `none` on the same requests.

    The baseline of a round is the mean of `hf` and `hf-again`, which bracket it; of `hf-again` it is `hf`.
    """
    by_name = {contestant.name: contestant for contestant in contestants}
    first, own = by_name[HF].runs, by_name[NO_DRAFT].runs
    bracketed = list(map(_mean_times, first, by_name[HF_AGAIN].runs)) if HF_AGAIN in by_name else first
    for contestant in contestants:
        runs = contestant.runs
        plain = first if contestant.name in (HF, HF_AGAIN) else bracketed
        batch = len(runs[0].output_ids)
        stats = [run.stats for run in runs if run.stats]
        whole = Stats()
        for one in stats:
            whole.add(one)
        row: ResultRow = {"drafter": contestant.name, "batch": batch, "tokens": sum(run.num_tokens for run in runs)}
        row["tau"] = whole.tau
        row["R"] = (
            _median([_ratio(run.step_s, base.step_s) for run, base in zip(runs, own, strict=True)]) if stats else None
        )
        row["tokens_per_s"] = _median([_ratio(run.num_tokens - batch, run.decode_s) for run in runs])
        ratios = {
            "speedup_hf": [_ratio(base.decode_s, run.decode_s) for run, base in zip(runs, plain, strict=True)],
            "speedup_own": [_ratio(base.decode_s, run.decode_s) for run, base in zip(runs, own, strict=True)],
            "speedup_e2e": [_ratio(base.total_s, run.total_s) for run, base in zip(runs, plain, strict=True)],
        }
        row |= {name: _median(values) for name, values in ratios.items()}
        row["speedup_e2e_pooled"] = sum(base.total_s for base in plain) / sum(run.total_s for run in runs)
        row["identical"] = all(
            torch.equal(run.output_ids, base.output_ids) for run, base in zip(runs, plain, strict=True)
        )
        row |= phase_times_ms(stats)
        row["drafted_share"] = whole.drafted_rounds / whole.rounds if whole.rounds else None
        row["acceptance_by_depth"] = [round(share, 3) for share in whole.acceptance_by_depth]
        row["accepted_at_position"] = [round(share, 3) for share in accumulate(whole.acceptance_by_depth, mul)]
        row["tokens_min"] = min(run.min_row_tokens for run in runs)
        row |= weight_sizes(contestant.model) | {"block": get_block_size(contestant.model)}
        for name in ("num_visual_tokens", "num_compressed_tokens"):  # before and after the compressor
            row[name] = getattr(whole, name)
        row["ttft_ms"] = median(1e3 * run.ttft_s for run in runs)
        for name, values in ratios.items():
            good = [value for value in values if not math.isnan(value)]
            row |= {f"{name}_lo": min(good, default=None), f"{name}_hi": max(good, default=None)}
            row[f"{name}_ci"] = [round(limit, 5) for limit in median_ci(good)]
            row[f"{name}_runs"] = [None if math.isnan(value) else round(value, 4) for value in values]
        yield {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def _mean_times(before: TimedRun, after: TimedRun) -> TimedRun:
    """The baseline of a round: `before` with the mean seconds of both."""
    total_s, decode_s = (before.total_s + after.total_s) / 2, (before.decode_s + after.decode_s) / 2
    return replace(before, total_s=total_s, decode_s=decode_s)


def phase_times_ms(stats: Sequence[Stats]) -> dict[str, float | None]:
    """Milliseconds per round of target forward and sampling, drafting, overhead: medians over calls."""

    def typical(phase: str) -> float | None:
        return _median([1e3 * getattr(one, f"{phase}_s") / one.rounds for one in stats if one.rounds])

    return {f"{phase}_ms": typical(phase) for phase in ("score", "draft", "overhead")}


def bootstrap_interval(statistic: Callable[[Sequence[int]], float], count: int) -> tuple[float, float, float]:
    """(value, low, high) of a statistic of `count` runs, given by index; 95% of the resamples lie within."""
    rng, every = random.Random(0), range(count)
    spread = sorted(statistic(rng.choices(every, k=count)) for _ in range(NUM_RESAMPLES))
    return statistic(every), spread[NUM_RESAMPLES // 40], spread[-NUM_RESAMPLES // 40]


def median_ci(values: Sequence[float]) -> list[float]:
    """[low, high] of the median, 95% by bootstrap; empty if there are no values."""
    return (
        list(bootstrap_interval(lambda indices: median(values[i] for i in indices), len(values))[1:]) if values else []
    )


def _ratio(above: float, below: float) -> float:
    """`above / below`; NaN where an answer of one token leaves nothing to decode."""
    return above / below if below else math.nan


def _median(values: Sequence[float]) -> float | None:
    good = [value for value in values if not math.isnan(value)]
    return median(good) if good else None
