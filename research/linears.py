"""How fast linear layers of few rows are on a CPU, kernel by kernel, and what the compiled kernel brings in loops.

    python -m research.linears --json linears.json

Products: every kernel, and the compiled one in each type of weight, reads weights in turn, more than the caches hold,
so that its speed in GB/s compares with that of reading memory, measured in the same repeat. Loops: on the
scenes model, each drafter with the compiled kernel and without. Other jobs on the machine disturb wall-clock
times: the default is one thread and its own CPU time, for everything (`--threads 2 --clock wall` for the other).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes import load_scenes_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.linear import transposed_linear
from mmspec.cpu.quantise import quantise
from mmspec.cpu.weights import Weight
from mmspec.patching import KEY
from research.bench.measure import HF, NO_DRAFT, Contestant, TimedRun, build_contestants, run_rounds
from research.bench.requests import build_scene_requests
from research.bench.session import provenance

SCENES_SHAPES = ((384, 384), (1024, 384), (384, 1024), (1536, 384))
SMOLLM2_SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
"""[out, in] of the linear layers of SmolLM2-135M."""
NUM_ROWS = (1, 2, 4, 8, 16, 32)
WEIGHT_BYTES = 120 << 20
"""Bytes of the weights that a kernel reads in one repeat."""
LOOP_DRAFTERS = ("none", "hybrid", "flash")
WITHOUT = " without"
"""End of the name of a contestant that does not use the compiled kernel."""

Record = dict[str, Any]


def time_products(shape: tuple[int, int], num_rows: int, repeats: int, kernel: CKernel | None) -> Record:
    """GB/s of every kernel for one weight shape [out, in] and number of rows, and of reading memory.

    The names of the compiled kernel's other entries are the weights' types; those of two bytes have rows of their type.
    """
    count = max(2, WEIGHT_BYTES // (4 * shape[0] * shape[1]))
    weights = [torch.randn(shape) / shape[1] ** 0.5 for _ in range(count)]
    rows = torch.randn(num_rows, shape[1])
    works: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "torch": (lambda weight: functional.linear(rows, weight), weights),
        "transposed": (lambda layer: transposed_linear(layer.weight, layer.bias, rows), list(map(_layer, weights))),
    }
    if kernel is not None:
        works["native"] = (lambda weight: kernel.linear(weight, None, rows), weights)
        for name, others in _other_types(kernel, weights).items():
            narrow = rows.to(others[0].dtype) if isinstance(others[0], Tensor) else rows
            works[name] = (partial(_multiply, kernel, narrow), others)
    memory = torch.ones(WEIGHT_BYTES // 4)
    seconds: dict[str, list[float]] = {name: [] for name in ("read", *works)}
    for number in range(repeats + 1):
        timed = {"read": _seconds(memory.sum)}
        for name, (compute, some) in works.items():
            timed[name] = _seconds(partial(_run_all, compute, some))
        if number:  # the first warms up
            for name, value in timed.items():
                seconds[name].append(value)
    size = {name: sum(map(_nbytes, some)) / 1e9 for name, (_, some) in works.items()} | {"read": memory.nbytes / 1e9}
    speeds = {name: [size[name] / value for value in values] for name, values in seconds.items()}
    of_read = {name: [a / b for a, b in zip(speeds[name], speeds["read"], strict=True)] for name in works}
    return {
        "shape": list(shape),
        "rows": num_rows,
        "gb_per_s": {name: _spread(values) for name, values in speeds.items()},
        "of_read": {name: _spread(values) for name, values in of_read.items()},
        "ms": {name: _spread([1e3 * value / len(works[name][1]) for value in seconds[name]]) for name in works},
    }


def _other_types(kernel: CKernel, weights: Sequence[Tensor]) -> dict[str, list[Weight]]:
    """{type: the weights in it}, as many bytes of each as of float32 but for quantised ones."""
    types: dict[str, list[Weight]] = {
        str(dtype).removeprefix("torch."): [weight.to(dtype) for weight in (*weights, *weights)]
        for dtype in (torch.bfloat16, torch.float16)
    }
    return types | {
        f"int{bits}": [quantise(kernel, weight, bits) for weight in (*weights, *weights)] for bits in (8, 4)
    }


def _multiply(kernel: CKernel, rows: Tensor, weight: Weight) -> None:
    kernel.linear(weight, None, rows)


def _layer(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def _nbytes(weight: Weight | nn.Linear) -> int:
    return weight.weight.nbytes if isinstance(weight, nn.Linear) else weight.nbytes


def _run_all(compute: Callable[[Any], object], weights: Sequence[Any]) -> None:
    for weight in weights:
        compute(weight)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _spread(values: Sequence[float]) -> list[float]:
    """[median, smallest, largest]"""
    return [round(value, 3) for value in (median(values), min(values), max(values))]


def time_loops(count: int) -> list[Record]:
    """A record per drafter: decoding of long descriptions with the compiled kernel, without it, and plain generate."""
    model, processor = load_scenes_model()
    contestants = build_contestants(model, LOOP_DRAFTERS, processor, stop_at_eos=True)
    without = build_contestants(model, LOOP_DRAFTERS, processor, stop_at_eos=True)[-len(LOOP_DRAFTERS) :]
    for contestant in without:
        contestant.model.__dict__[KEY].autotuner.allow_c = False
        contestant.name += WITHOUT
    requests = build_scene_requests(Captioner(model, processor), "describe", FIRST_HELD_OUT_SEED, 1, count)
    run_rounds([*contestants, *without], requests, 160, 0.0, 0, lambda: None)
    by_name = {contestant.name: contestant for contestant in (*contestants, *without)}
    return [_loop_record(drafter, by_name) for drafter in LOOP_DRAFTERS]


def _loop_record(drafter: str, by_name: dict[str, Contestant]) -> Record:
    native, before, plain = by_name[drafter].runs, by_name[drafter + WITHOUT].runs, by_name[HF].runs
    own = by_name[NO_DRAFT].runs

    def ratio(above: Sequence[TimedRun], below: Sequence[TimedRun]) -> list[float]:
        return _spread([a.decode_s / b.decode_s for a, b in zip(above, below, strict=True)])

    return {
        "drafter": drafter,
        "runs": len(native),
        "speedup_hf": ratio(plain, native),
        "speedup_hf_without": ratio(plain, before),
        "speedup_kernel": ratio(before, native),
        "speedup_own": ratio(own, native),
        "tau": [_tau(runs) for runs in (native, before)],
        "round_ms": [round(1e3 * median(run.step_s for run in runs), 2) for runs in (native, before)],
        "identical": all(
            torch.equal(run.output_ids, want.output_ids)
            for runs in (native, before)
            for run, want in zip(runs, plain, strict=True)
        ),
    }


def _tau(runs: Sequence[TimedRun]) -> float:
    """Tokens per round."""
    stats = [run.stats for run in runs if run.stats is not None]
    return round(sum(one.tokens for one in stats) / sum(one.rounds for one in stats), 2)


def format_products(records: Sequence[Record]) -> str:
    """One line for each shape and number of rows: GB/s and, in brackets, the share of the speed of memory."""
    lines = []
    for record in records:
        speeds = record["gb_per_s"]
        cells = [f"{name} {speeds[name][0]:.1f} ({100 * share[0]:.0f}%)" for name, share in record["of_read"].items()]
        shape = "{}x{}".format(*record["shape"])
        lines.append(f"{shape:>10} {record['rows']:>2} rows  read {speeds['read'][0]:.1f}  " + "  ".join(cells))
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=None, help="write the records")
    parser.add_argument("--repeats", type=int, default=7, help="of the products (default 7)")
    parser.add_argument("--count", type=int, default=12, help="requests of the loops (default 12); 0 for none")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: time of one thread (default)")
    parser.add_argument(
        "--shapes", nargs="*", default=None, metavar="OUTxIN", help="of weights (default: small models)"
    )
    args = parser.parse_args()
    if args.clock == "cpu":
        if args.threads != 1:
            parser.error("--clock cpu counts one thread: it needs --threads 1")
        time.perf_counter = time.thread_time  # also what the loop and the autotuner measure by
    torch.set_num_threads(args.threads)
    kernel = load_kernel()
    with torch.inference_mode():
        given = [(int(out), int(size)) for out, _, size in (text.partition("x") for text in args.shapes or ())]
        shapes = given or (*SCENES_SHAPES, *SMOLLM2_SHAPES)
        products = [time_products(shape, rows, args.repeats, kernel) for shape in shapes for rows in NUM_ROWS]
    print(format_products(products))
    loops = time_loops(args.count) if args.count else []
    for record in loops:
        print(record)
    if args.json is not None:
        command = " ".join(["python -m research.linears", *sys.argv[1:]])
        run = provenance(command, torch.device("cpu")) | {
            "clock": args.clock,
            "kernel_level": None if kernel is None else kernel.level,
        }
        records = {"run": run, "products": products, "loops": loops}
        args.json.write_text(json.dumps(records) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
