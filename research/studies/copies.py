"""What a target's own copy in few bits costs and brings: memory and time of making it, acceptance, time a token.

One process, all ways interleaved, wall clock from the first token to the last; one round of all requests warms up.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.modeling.load import clone
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.drafters.ngram.output_ngrams import text_ngrams
from mmspec.targets.layer_access import layer_access
from mmspec.targets.quantised_copy import QuantisedCopy
from mmspec.targets.registry import find_adapter
from research.arguments import module_parser
from research.bench.shape.models import build_shape_model, find_shape
from research.studies.whole_model import load_target

EPILOG = """
method
  --target: every request is decoded by `none`, `hybrid`, copies of 4 and of 8 bits, alone and with n-grams that draft
  for them, and `auto`, greedily or at --temperature with the same seed; texts are compared with that of `none`.
  --shape: a text model of that shape with random weights; only the making of copies is measured. The peak is that of
  the process while it makes a copy, above what it had before, in percent of the model's bytes.

examples
  python -m research.studies.copies --target scenes --dtype bfloat16
  python -m research.studies.copies --target FOLDER --dtype bfloat16 --temperature 1
  python -m research.studies.copies --shape smolvlm2-2.2b --dtype bfloat16
"""
BITS = (4, 8)


@dataclass
class Making:
    """How a copy was made: seconds, its bytes, and the peak above what the process had, of the model's bytes."""

    bits: int
    seconds: float
    num_bytes: int
    share: float
    peak_share: float


@dataclass
class Way:
    """What one drafter did: milliseconds a token of each request, behind the first token, and counters of all."""

    name: str
    ms: list[float] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    tokens: int = 0
    rounds: int = 0
    num_identical: int = 0

    def add(self, stats: mmspec.Stats, num_tokens: int, is_identical: bool) -> None:
        """Count a call."""
        self.ms.append(1e3 * stats.decode_s / max(1, num_tokens - 1))
        self.tokens += num_tokens - 1
        self.num_identical += is_identical
        self.accepted += stats.num_accepted_tokens
        self.drafted += stats.num_draft_tokens
        self.rounds += stats.rounds


class PeakMemory:
    """The largest resident memory of this process since the last `reset`, on Linux."""

    def reset(self) -> int:
        """Forget the peak; returns the bytes that are resident now."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return self._read("VmRSS")

    def peak(self) -> int:
        """Bytes of the peak."""
        return self._read("VmHWM")

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure_making(model: Any, repeats: int) -> list[Making]:
    """Copies of each number of bits, `repeats` times; that of the median time."""
    model_bytes, memory = sum(one.nbytes for one in model.parameters()), PeakMemory()
    adapter, found = find_adapter(model), []
    access = layer_access(adapter)
    for bits in BITS:
        tries = []
        for _ in range(repeats):
            before, start = memory.reset(), time.perf_counter()
            copy = QuantisedCopy(adapter, access, bits)
            seconds, peak, size = time.perf_counter() - start, memory.peak(), copy.nbytes
            tries.append(Making(bits, seconds, size, size / model_bytes, (peak - before) / model_bytes))
            del copy
        found.append(sorted(tries, key=lambda one: one.seconds)[len(tries) // 2])
    return found


def drafters() -> dict[str, Any]:
    """The ways, by name."""
    ways: dict[str, Any] = {"none": "none", "hybrid": "hybrid"}
    for bits in BITS:
        ways[f"{bits} bits"] = QuantizedDrafter(bits=bits)
        ways[f"{bits} bits, n-grams draft for it"] = QuantizedDrafter(bits=bits, guide=text_ngrams())
    return {**ways, "auto": "auto"}


def measure_drafting(
    model: Any, requests: Sequence[Mapping[str, Tensor]], repeats: int, tokens: int, temperature: float
) -> list[Way]:
    """Every request by every way, in rotating order."""
    twins = {name: mmspec.patch(clone(model), drafter) for name, drafter in drafters().items()}
    ways = {name: Way(name) for name in twins}
    sampling = {"do_sample": bool(temperature), "temperature": temperature or None, "top_p": None, "top_k": None}
    for turn in range(repeats + 1):
        for index, inputs in enumerate(requests):
            expected: list[int] | None = None
            names = list(twins)
            first = 1 + (turn + index) % (len(names) - 1)
            for name in (names[0], *names[first:], *names[1:first]):
                torch.manual_seed(index)
                output = twins[name].generate(**inputs, max_new_tokens=tokens, **sampling)
                ids = output[0, inputs["input_ids"].shape[1] :].tolist()
                expected = ids if expected is None else expected
                if turn:
                    ways[name].add(mmspec.stats(twins[name], last=True), len(ids), ids == expected)
    return list(ways.values())


def format_making(found: Sequence[Making]) -> str:
    """A table of copies."""
    lines = ["| bits | seconds | MB | of the model's bytes | peak above the model |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.bits} | {one.seconds:.1f} | {one.num_bytes / 1e6:.0f} | {one.share:.0%} | {one.peak_share:.0%} |"
        for one in found
    ]
    return "\n".join(lines)


def format_ways(ways: Sequence[Way]) -> str:
    """A table of drafters."""
    lines = [
        "| drafter | identical | accepted | tokens a round | ms a token | times `none` |",
        "|---|---|---|---|---|---|",
    ]
    for way in ways:
        ratios = [before / after for before, after in zip(ways[0].ms, way.ms, strict=True)]
        accepted = f"{way.accepted / way.drafted:.0%}" if way.drafted else ""
        lines.append(
            f"| {way.name} | {way.num_identical}/{len(way.ms)} | {accepted} | {way.tokens / max(1, way.rounds):.2f} "
            f"| {median(way.ms):.2f} | {median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command line."""
    parser = module_parser("research.studies.copies", __doc__, EPILOG)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", help="scenes, a vision-language model, or a language model")
    where.add_argument("--shape", help="a text model of this shape with random weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--data", type=split_commas, default=[], help="text files of requests to a language model")
    parser.add_argument("--count", type=positive_int, default=4, help="requests")
    parser.add_argument("--repeats", type=positive_int, default=3)
    parser.add_argument("--new-tokens", type=positive_int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    report: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(args).items()}}
    if args.shape:
        model: Any = build_shape_model(find_shape(args.shape), dtype, torch.device("cpu"), 0)
    else:
        model, requests = _load(args, dtype)
    making = measure_making(model, args.repeats)
    report["making"] = [asdict(one) for one in making]
    write(format_making(making))
    if args.target:
        ways = measure_drafting(model, requests, args.repeats, args.new_tokens, args.temperature)
        report["drafting"] = [asdict(one) for one in ways]
        write("\n" + format_ways(ways))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _load(args: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]]]:
    """The target and its requests, of one type."""
    model, _, requests = load_target(args.target, args.count, args.data)
    cast = [
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        for inputs in requests
    ]
    return model.to(dtype), cast


if __name__ == "__main__":
    sys.exit(main())
