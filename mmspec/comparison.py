"""`compare`: run one request plain and patched in turn, from the same random state, and compare tokens and times."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from mmspec.arguments import option_getter
from mmspec.economy.store import unchanged_costs
from mmspec.interfaces import Drafter
from mmspec.interfaces.drafter import as_drafter
from mmspec.metrics.stats import Stats
from mmspec.patching import disabled, is_patched, patch_state, stats


@dataclass(frozen=True)
class Divergence:
    """The first difference between two outputs.

    Attributes:
        row: batch row.
        column: output column; 0 is the first new token.
        plain: token id of the plain run; -1 if its output had ended.
        patched: token id of the patched run; -1 if its output had ended.
        margin: raw logit of the plain token minus that of the patched token, both of the plain model; at the level of
            rounding errors the two were tied. nan if one output had ended.
    """

    row: int
    column: int
    plain: int
    patched: int
    margin: float


@dataclass(frozen=True)
class Timing:
    """Times of one run.

    Attributes:
        total_s: seconds of the whole call.
        ttft_s: seconds to the first token.
        decode_s: seconds from the first token to the last.
        tokens: tokens after the first per row, times rows.
    """

    total_s: float
    ttft_s: float
    decode_s: float
    tokens: int


@dataclass
class Comparison:
    """Result of `compare`. Speed-ups are medians over pairs of runs; above 1 the patched run is faster.

    Attributes:
        identical: whether all rows of all pairs have the same tokens.
        rows: rows of the output.
        rows_identical: rows with the same tokens in the reported pair.
        first_divergence: first difference of the reported pair, or None.
        plain: times of the plain runs.
        patched: times of the patched runs.
        stats: counters of the patched runs.
        plain_ids: [rows, length] output of the reported plain run.
        patched_ids: [rows, length] output of the reported patched run.
    """

    identical: bool
    rows: int
    rows_identical: int
    first_divergence: Divergence | None
    plain: list[Timing]
    patched: list[Timing]
    stats: Stats
    plain_ids: Tensor = field(repr=False)
    patched_ids: Tensor = field(repr=False)

    @property
    def tau(self) -> float:
        """Mean tokens per active row and round in the patched runs."""
        return self.stats.tau

    @property
    def round_cost(self) -> float:
        """Cost of one round in units of a plain decoding step: `speedup_decode = tau / round_cost`."""
        return self.tau / self.speedup_decode if self.speedup_decode else float("nan")

    @property
    def speedup_decode(self) -> float:
        """Speed-up from the first token to the last."""
        return _ratio([run.decode_s for run in self.plain], [run.decode_s for run in self.patched])

    @property
    def speedup_e2e(self) -> float:
        """Speed-up of the whole call, vision encoding and prefill included."""
        return _ratio([run.total_s for run in self.plain], [run.total_s for run in self.patched])

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived metrics except the ids, ready for JSON."""
        return {
            "identical": self.identical,
            "rows": self.rows,
            "rows_identical": self.rows_identical,
            "first_divergence": asdict(self.first_divergence) if self.first_divergence else None,
            "plain": [asdict(run) for run in self.plain],
            "patched": [asdict(run) for run in self.patched],
            "tau": self.tau,
            "R": self.round_cost,
            "speedup_decode": self.speedup_decode,
            "speedup_e2e": self.speedup_e2e,
            "stats": self.stats.as_dict(),
        }

    def __str__(self) -> str:
        agreement = "identical" if self.identical else f"{self.rows_identical}/{self.rows} rows identical"
        if self.first_divergence:
            d = self.first_divergence
            agreement += (
                f"; row {d.row} first differs at token {d.column}: {d.plain} / {d.patched}, margin {d.margin:.2e}"
            )
        runs = (("plain", self.plain), ("patched", self.patched))
        lines = [f"{'':8} {'total s':>9} {'first token s':>14} {'tokens/s':>9}"]
        for name, timings in runs:
            total, first = median(t.total_s for t in timings), median(t.ttft_s for t in timings)
            rate = median(t.tokens / t.decode_s if t.decode_s else 0.0 for t in timings)
            lines.append(f"{name:8} {total:9.3f} {first:14.3f} {rate:9.1f}")
        if self.stats.calls and self.stats.fallback_calls == self.stats.calls:
            return "\n".join(
                [*lines, f"outputs {agreement}; decoded by transformers alone: {self.stats.fallback_reason}"]
            )
        lines.append(
            f"outputs {agreement}; tau {self.tau:.2f}, R {self.round_cost:.2f}, "
            f"speed-up {self.speedup_decode:.2f}x decoding, {self.speedup_e2e:.2f}x end to end"
        )
        return "\n".join(lines)


def compare(model: Any, inputs: Mapping[str, Any] | Tensor, *, repeats: int = 1, **generate_kwargs: Any) -> Comparison:
    """Run a request plain and patched in turn, and compare outputs and times.

    With sampling both runs start from the same state of torch's generators, to which it is set back: no other thread
    should draw meanwhile.

    Args:
        model: a patched model.
        inputs: output of the processor, passed to `generate` as keyword arguments; or a tensor of input ids [B, L].
        repeats: pairs of runs, after one warm-up pair if there are several. Times are noisy: five or more to quote.
            Every patched run uses a replica of the drafter in its present state, since a drafter that remembers the
            previous run would know the output. Replicas share the drafter's weights.
        generate_kwargs: passed to both runs, such as `max_new_tokens=100, do_sample=True`.

    Raises:
        ValueError: the model is not patched, or `repeats` is below 1.
        TypeError: `inputs` is neither a mapping nor a tensor.
    """
    if not is_patched(model):
        raise ValueError("mmspec.compare needs a patched model; call mmspec.patch(model) first.")
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more; got {repeats}.")
    if isinstance(inputs, Tensor):
        inputs = {"input_ids": inputs}
    if not isinstance(inputs, Mapping):
        kind = type(inputs).__name__
        raise TypeError(f"inputs must be the output of the processor, a mapping, or a tensor of input ids; got {kind}.")
    request = {**inputs, **generate_kwargs}
    options = dict(request.pop("mmspec", None) or {})
    drafter = options.pop("drafter", None) or patch_state(model).config.drafter
    plain: list[Timing] = []
    patched: list[Timing] = []
    total = Stats()
    reported: tuple[Tensor, Tensor, list[bool]] | None = None
    samples = bool(option_getter(request, model)("do_sample"))
    devices = [model.device] if model.device.type == "cuda" else []
    with unchanged_costs(), torch.random.fork_rng(devices, enabled=samples):
        for pair in range(repeats + (repeats > 1)):
            plain_ids, plain_time = _timed_run(model, request, speculate=False)
            replica = drafter if isinstance(drafter, str) else replicate(drafter)
            speculative = request | {"mmspec": options | {"drafter": replica}}
            patched_ids, patched_time = _timed_run(model, speculative, speculate=True)
            identical = _rows_identical(plain_ids, patched_ids, _pad_token_id(model, request))
            if reported is None or (all(reported[2]) and not all(identical)):  # report the first pair that differs
                reported = plain_ids, patched_ids, identical
            if pair or repeats == 1:  # the first of several pairs warms up
                plain.append(plain_time)
                patched.append(patched_time)
                total.add(stats(model, last=True))
        assert reported is not None
        plain_ids, patched_ids, identical = reported
        divergence = None
        if not all(identical):
            divergence = _first_divergence(model, request, plain_ids, patched_ids, identical.index(False))
    return Comparison(
        identical=all(identical),
        rows=len(identical),
        rows_identical=sum(identical),
        first_divergence=divergence,
        plain=plain,
        patched=patched,
        stats=total,
        plain_ids=plain_ids,
        patched_ids=patched_ids,
    )


def replicate(drafter: Drafter) -> Drafter:
    """A drafter in the same state that learns independently. Modules (weights) are shared, not copied.

    Calls `Drafter.replicate`; where that makes none, makes a deep copy. A drafter that is itself a module is
    returned unchanged.
    """
    if (twin := as_drafter(drafter).replicate()) is not None:
        return twin
    if isinstance(drafter, nn.Module):
        return drafter
    memo: dict[int, Any] = {}
    _share_modules(drafter, memo)
    return copy.deepcopy(drafter, memo)


def _share_modules(drafter: object, memo: dict[int, Any]) -> None:
    """Enter modules as their own copies into a deep copy's memo.

    Follows attributes, lists, tuples and dictionaries of drafters, since drafters may wrap others.
    """
    visited: set[int] = set()
    pending: list[Any] = [drafter]
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, nn.Module):
            memo[id(value)] = value
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif value is drafter or hasattr(value, "propose"):
            pending += getattr(value, "__dict__", {}).values()


class TimestampCriterion(StoppingCriteria):
    """Records the time of each generated token and never stops. One Python call per step, on the plain side only.

    Attributes:
        times: `time.perf_counter()` after each token, on an idle device.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._not_done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)  # else the time is that of the launch
        self.times.append(time.perf_counter())
        if self._not_done is None:
            self._not_done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._not_done


def _timed_run(model: Any, request: dict[str, Any], speculate: bool) -> tuple[Tensor, Timing]:
    """One run from the current random state. If the request samples, the state is set back afterwards."""
    samples = option_getter(request, model)("do_sample")
    devices = [model.device] if model.device.type == "cuda" else []
    token_times = TimestampCriterion()
    start = time.perf_counter()
    with torch.random.fork_rng(devices, enabled=bool(samples)):
        if speculate:
            ids = _ids(model.generate(**request))
        else:
            criteria = StoppingCriteriaList([*(request.get("stopping_criteria") or []), token_times])
            with disabled(model):
                ids = _ids(model.generate(**{**request, "stopping_criteria": criteria}))
        if devices:
            torch.cuda.synchronize(model.device)
        total_s = time.perf_counter() - start
    tokens = (ids.shape[1] - request["input_ids"].shape[1] - 1) * ids.shape[0]
    if not speculate:
        first, last = token_times.times[0], token_times.times[-1]
        return ids, Timing(total_s, first - start, last - first, tokens)
    call = stats(model, last=True)
    if call.fallback_calls:
        return ids, Timing(total_s, float("nan"), total_s, tokens)
    return ids, Timing(total_s, call.ttft_s, call.decode_s, tokens)


def _ids(output: Any) -> Tensor:
    ids: Tensor = output if isinstance(output, Tensor) else output.sequences
    return ids


def _pad_token_id(model: Any, request: Mapping[str, Any]) -> int:
    """The id that finished rows are padded with; -1 if rows cannot finish before the batch."""
    config = request.get("generation_config") or model.generation_config
    for value in (request.get("pad_token_id"), config.pad_token_id, request.get("eos_token_id"), config.eos_token_id):
        if value is not None:
            return int(value[0] if isinstance(value, list) else value)
    return -1


def _rows_identical(plain_ids: Tensor, patched_ids: Tensor, pad_token_id: int) -> list[bool]:
    """Per row, whether the tokens are equal up to trailing padding."""
    length = max(plain_ids.shape[1], patched_ids.shape[1])
    plain_ids, patched_ids = (
        nn.functional.pad(ids, (0, length - ids.shape[1]), value=pad_token_id) for ids in (plain_ids, patched_ids)
    )
    identical: list[bool] = (plain_ids == patched_ids).all(1).tolist()
    return identical


def _first_divergence(
    model: Any, request: dict[str, Any], plain_ids: Tensor, patched_ids: Tensor, row: int
) -> Divergence:
    """The first difference in a row; decodes plainly once more for the logits there."""
    prompt_length = request["input_ids"].shape[1]
    plain = plain_ids[row, prompt_length:].tolist()
    patched = patched_ids[row, prompt_length:].tolist()
    length = max(len(plain), len(patched))
    plain += [-1] * (length - len(plain))
    patched += [-1] * (length - len(patched))
    column = next((index for index in range(length) if plain[index] != patched[index]), 0)
    margin = float("nan")
    if plain[column] >= 0 and patched[column] >= 0:
        with disabled(model):
            output = model.generate(**{**request, "return_dict_in_generate": True, "output_logits": True})
        logits = output.logits[column][row]
        margin = float(logits[plain[column]] - logits[patched[column]])
    return Divergence(row, column, plain[column], patched[column], margin)


def _ratio(plain: list[float], patched: list[float]) -> float:
    """Median of the paired ratios; nan without a positive denominator."""
    ratios = [plain_s / patched_s for plain_s, patched_s in zip(plain, patched, strict=True) if patched_s > 0]
    return median(ratios) if ratios else float("nan")
