"""`compare`: the same request plain and patched, in turn, from the same random state: same tokens? how much sooner?"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from mmspec.metrics.stats import Stats
from mmspec.patching import KEY, disabled, is_patched, stats


@dataclass(frozen=True)
class Divergence:
    """Where two outputs first differ.

    Attributes:
        row, column: batch row and output column (0 is the first new token). plain, patched: the two token ids (-1:
            the output had ended). margin: how far the plain model's raw logit of its token was above the other's;
            at rounding level the two were a tie.
    """

    row: int
    column: int
    plain: int
    patched: int
    margin: float


@dataclass(frozen=True)
class Timing:
    """One run: seconds in all, to the first token, from the first to the last; tokens per row times rows."""

    total_s: float
    ttft_s: float
    decode_s: float
    tokens: int


@dataclass
class Comparison:
    """What `compare` found. Speed-ups are medians of paired runs; above 1 means that patched was faster."""

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
        """Tokens per forward of a live row in the patched runs."""
        return self.stats.tau

    @property
    def round_cost(self) -> float:
        """Cost of one round in plain decoding steps: decode speed-up = tau / R."""
        return self.tau / self.speedup_decode if self.speedup_decode else float("nan")

    @property
    def speedup_decode(self) -> float:
        """From the first token to the last."""
        return _ratio([run.decode_s for run in self.plain], [run.decode_s for run in self.patched])

    @property
    def speedup_e2e(self) -> float:
        """The whole call, image encoding and prefill included."""
        return _ratio([run.total_s for run in self.plain], [run.total_s for run in self.patched])

    def as_dict(self) -> dict[str, Any]:
        """Everything but the ids, ready for JSON."""
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
        same = "identical" if self.identical else f"{self.rows_identical}/{self.rows} rows identical"
        if self.first_divergence:
            d = self.first_divergence
            same += f"; row {d.row} first differs at token {d.column}: {d.plain} / {d.patched}, margin {d.margin:.2e}"
        runs = (("plain", self.plain), ("patched", self.patched))
        lines = [f"{'':8} {'total s':>9} {'first token s':>14} {'tokens/s':>9}"]
        for name, timings in runs:
            total, first = median(t.total_s for t in timings), median(t.ttft_s for t in timings)
            rate = median(t.tokens / t.decode_s if t.decode_s else 0.0 for t in timings)
            lines.append(f"{name:8} {total:9.3f} {first:14.3f} {rate:9.1f}")
        lines.append(
            f"outputs {same}; tau {self.tau:.2f}, R {self.round_cost:.2f}, "
            f"speed-up {self.speedup_decode:.2f}x decoding, {self.speedup_e2e:.2f}x end to end"
        )
        return "\n".join(lines)


def compare(model: Any, inputs: Mapping[str, Any], *, repeats: int = 1, **generate_kwargs: Any) -> Comparison:
    """Run a request plain and patched, in turn, and say whether the tokens are the same and what it cost.

    Args:
        model: a patched model. inputs: what the processor made (`generate` is called with `**inputs`).
        repeats: pairs of runs, after one warm-up pair; times are noisy, so take five or more to quote them. Every
            run starts from a copy of the drafter as it is now, since one that remembers would know the answer.
        generate_kwargs: passed to both, e.g. `max_new_tokens=100, do_sample=True`.

    Raises:
        ValueError: the model is not patched, or `repeats` is below 1.
    """
    if not is_patched(model):
        raise ValueError("mmspec.compare needs a patched model; call mmspec.patch(model) first.")
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more; got {repeats}.")
    request = {**inputs, **generate_kwargs}
    options = dict(request.pop("mmspec", None) or {})
    drafter = options.pop("drafter", None) or model.__dict__[KEY].config.drafter
    plain, patched, total = [], [], Stats()
    found: tuple[Tensor, Tensor, list[bool]] | None = None
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        for number in range(repeats + (repeats > 1)):
            plain_ids, plain_run = _timed(model, request, speculate=False)
            fresh = drafter if isinstance(drafter, str | torch.nn.Module) else copy.deepcopy(drafter)
            mine = request | {"mmspec": options | {"drafter": fresh}}
            patched_ids, patched_run = _timed(model, mine, speculate=True)
            same = _rows_identical(plain_ids, patched_ids, _pad(model, request))
            if found is None or (all(found[2]) and not all(same)):  # one pair that differs is enough
                found = plain_ids, patched_ids, same
            if number or repeats == 1:  # the first pair warms up
                plain.append(plain_run)
                patched.append(patched_run)
                total.add(stats(model, last=True))
        assert found is not None
        plain_ids, patched_ids, same = found
        divergence = None if all(same) else _diverge(model, request, plain_ids, patched_ids, same.index(False))
    return Comparison(all(same), len(same), sum(same), divergence, plain, patched, total, plain_ids, patched_ids)


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
            torch.cuda.synchronize(input_ids.device)  # or the first time would precede the end of the prefill
        self.times.append(time.perf_counter())
        if self._not_done is None:
            self._not_done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._not_done


def _timed(model: Any, request: dict[str, Any], speculate: bool) -> tuple[Tensor, Timing]:
    """One run from the current random state, which it leaves as it was."""
    state = torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state(model.device) if model.device.type == "cuda" else None
    stamp = TimestampCriterion()
    began = time.perf_counter()
    if speculate:
        ids = _ids(model.generate(**request))
    else:
        criteria = StoppingCriteriaList([*(request.get("stopping_criteria") or []), stamp])
        with disabled(model):
            ids = _ids(model.generate(**{**request, "stopping_criteria": criteria}))
    if cuda is not None:
        torch.cuda.synchronize(model.device)
        torch.cuda.set_rng_state(cuda, model.device)
    total = time.perf_counter() - began
    torch.random.set_rng_state(state)
    prompt = request["input_ids"].shape[1]
    tokens = (ids.shape[1] - prompt - 1) * ids.shape[0]
    if not speculate:
        return ids, Timing(total, stamp.times[0] - began, stamp.times[-1] - stamp.times[0], tokens)
    last = stats(model, last=True)
    if last.fallback_calls:
        return ids, Timing(total, float("nan"), total, tokens)
    return ids, Timing(total, last.ttft_s, last.decode_s, tokens)


def _ids(output: Any) -> Tensor:
    ids: Tensor = output if isinstance(output, Tensor) else output.sequences
    return ids


def _pad(model: Any, request: Mapping[str, Any]) -> int:
    """What finished rows are filled with; -1 if rows never finish before the batch."""
    config = request.get("generation_config") or model.generation_config
    for value in (request.get("pad_token_id"), config.pad_token_id, request.get("eos_token_id"), config.eos_token_id):
        if value is not None:
            return int(value[0] if isinstance(value, list) else value)
    return -1


def _rows_identical(a: Tensor, b: Tensor, pad: int) -> list[bool]:
    """Which rows say the same; a batch that ends sooner leaves off padding of its other rows."""
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=pad) for ids in (a, b))
    same: list[bool] = (a == b).all(1).tolist()
    return same


def _diverge(model: Any, request: dict[str, Any], plain: Tensor, patched: Tensor, row: int) -> Divergence:
    """Decode plainly up to the first difference and look at the logits there."""
    prompt = request["input_ids"].shape[1]
    a, b = plain[row, prompt:].tolist(), patched[row, prompt:].tolist()
    length = max(len(a), len(b))
    a, b = a + [-1] * (length - len(a)), b + [-1] * (length - len(b))
    column = next((c for c in range(length) if a[c] != b[c]), 0)
    margin = float("nan")
    if a[column] >= 0 and b[column] >= 0:
        with disabled(model):
            again = model.generate(**{**request, "return_dict_in_generate": True, "output_logits": True})
        logits = again.logits[column][row]
        margin = float(logits[a[column]] - logits[b[column]])
    return Divergence(row, column, a[column], b[column], margin)


def _ratio(plain: list[float], patched: list[float]) -> float:
    """Median of the paired ratios."""
    pairs = [p / q for p, q in zip(plain, patched, strict=True) if q > 0]
    return median(pairs) if pairs else float("nan")
