"""The share of the memory's speed at which linear layers of few rows read their weights on a CPU, path by path.

    python -m research.linears --json research/results/linears.json

A path is torch, or the C kernels with one of the instruction sets that `MMSPEC_ISA` names, with weights of one type.
Each reads the matrices of decoder layers of SmolLM2-135M in turn, more than the caches hold; the speed of memory is
that of a sum over as many bytes, in the same repeat. Other jobs on the machine disturb wall-clock times: the default
is one thread and its own CPU time (`--threads 2 --clock wall` for the other). The file keeps one run for each
processor, number of threads and clock; what is printed is the table of all of them, which `python -m
research.readme_tables` writes into the page of results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel
from mmspec.cpu.c_library import CPU_INFO, ISA_NAMES, KernelUnavailableError, processor_level
from mmspec.cpu.quantise import quantise
from mmspec.cpu.weights import QuantisedWeight, Weight
from research.bench.session import provenance

LAYER_SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
"""[out, in] of the linear layers of a decoder layer of SmolLM2-135M."""
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
WEIGHT_BYTES = 120 << 20
"""Bytes of the weights that a path reads in one repeat."""
PAIRS_LEVEL = 3
"""The first instruction set whose products differ from those of the one before in bfloat16 alone."""

Record = dict[str, Any]


@dataclass
class ReadingPath:
    """A kernel and weights of one type.

    Attributes:
        dtype: of the weights.
        name: torch, or an instruction set.
        multiply: of a weight and rows.
        weights: read in turn.
        rows_dtype: of the rows.
    """

    dtype: str
    name: str
    multiply: Callable[[Any, Tensor], object]
    weights: Sequence[Weight]
    rows_dtype: torch.dtype

    def read(self, rows: dict[int, Tensor]) -> float:
        """Seconds that products of all weights with rows {columns: [rows, columns]} take."""
        typed = {size: one.to(self.rows_dtype) for size, one in rows.items()}
        start = time.perf_counter()
        for weight in self.weights:
            self.multiply(weight, typed[weight.shape[1]])
        return time.perf_counter() - start


def build_paths() -> list[ReadingPath]:
    """All that this processor has."""
    try:
        best = processor_level()
    except KernelUnavailableError:
        best = 0
    kernels = {name: CKernel(level) for name, level in ISA_NAMES.items() if level <= best}
    paths = []
    for dtype in (torch.float32, torch.bfloat16):
        weights, name = build_weights(dtype), str(dtype).removeprefix("torch.")
        paths.append(ReadingPath(name, "torch", _multiply_by_torch, weights, dtype))
        for isa, kernel in kernels.items():
            if dtype is torch.bfloat16 or kernel.level < PAIRS_LEVEL:
                paths.append(ReadingPath(name, isa, partial(_multiply, kernel), weights, dtype))
    for bits in (8, 4) if kernels else ():
        isa, kernel = list(kernels.items())[-1]
        copies = [quantise(kernel, weight, bits) for weight in build_weights(torch.bfloat16)]
        paths.append(ReadingPath(f"int{bits}", isa, partial(_multiply, kernel), copies, torch.bfloat16))
    return paths


def build_weights(dtype: torch.dtype) -> list[Tensor]:
    """Random matrices of decoder layers, in their order."""
    layer_bytes = sum(out * size for out, size in LAYER_SHAPES) * dtype.itemsize
    shapes = LAYER_SHAPES * max(1, WEIGHT_BYTES // layer_bytes)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _multiply(kernel: CKernel, weight: Weight, rows: Tensor) -> None:
    kernel.linear(weight, None, rows)


def _multiply_by_torch(weight: Tensor, rows: Tensor) -> None:
    functional.linear(rows, weight)


def time_paths(paths: Sequence[ReadingPath], num_rows: int, repeats: int) -> list[Record]:
    """A record for each path: GB/s, and shares of the speed of memory, [median, smallest, largest]."""
    generator = torch.Generator().manual_seed(1)
    rows = {size: torch.randn(num_rows, size, generator=generator) for _, size in LAYER_SHAPES}
    memory = torch.ones(WEIGHT_BYTES // 4)
    timed = [path for path in paths if num_rows <= MAX_C_ROWS or not isinstance(path.weights[0], QuantisedWeight)]
    speeds: list[list[tuple[float, float]]] = [[] for _ in timed]
    for number in range(repeats + 1):
        start = time.perf_counter()
        memory.sum()
        of_memory = memory.nbytes / 1e9 / (time.perf_counter() - start)
        for path, found in zip(timed, speeds, strict=True):
            size = sum(weight.nbytes for weight in path.weights) / 1e9
            if number:  # the first warms up
                found.append((size / path.read(rows), of_memory))
            else:
                path.read(rows)
    return [
        {
            "weights": path.dtype,
            "path": path.name,
            "rows": num_rows,
            "gb_per_s": _spread([speed for speed, _ in found]),
            "memory_gb_per_s": _spread([of_memory for _, of_memory in found]),
            "share": _spread([speed / of_memory for speed, of_memory in found]),
        }
        for path, found in zip(timed, speeds, strict=True)
    ]


def _spread(values: Sequence[float]) -> list[float]:
    """[median, smallest, largest]"""
    return [round(value, 3) for value in (median(values), min(values), max(values))]


def processor() -> str:
    """Its name, family and model, which names of virtual machines leave out."""
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.exists() else ""
    found = [re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE) for key in ("model name", "cpu family", "model")]
    name, family, model = (one[1].strip() if one else "?" for one in found)
    return f"{name}, family {family}, model {model}"


def linears_markdown(runs: Sequence[Record]) -> str:
    """One table of all runs: processor, path, and for each number of rows the share of the memory's speed."""
    lines = [
        f"| processor | weights | path | {' | '.join(f'{rows} row' + 's' * (rows > 1) for rows in NUM_ROWS)} |",
        "|---|---|---|" + "---|" * len(NUM_ROWS),
    ]
    for one in runs:
        run, records = one["run"], one["records"]
        memory = median(record["memory_gb_per_s"][0] for record in records)
        threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
        where = f"{run['processor']}; {threads}, memory {memory:.0f} GB/s, load of the machine {run['load']:.1f}"
        where += f"; {run['date']}, commit {run['commit']}"
        for dtype, path in dict.fromkeys((record["weights"], record["path"]) for record in records):
            shares = {r["rows"]: r["share"][0] for r in records if (r["weights"], r["path"]) == (dtype, path)}
            cells = [f"{100 * shares[rows]:.0f}%" if rows in shares else "" for rows in NUM_ROWS]
            lines.append(f"| {where} | {dtype} | {path} | {' | '.join(cells)} |")
            where = ""
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=None, help="keep the run there, beside those of other processors")
    parser.add_argument("--repeats", type=int, default=7, help="default 7")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: time of one thread (default)")
    args = parser.parse_args()
    if args.clock == "cpu":
        if args.threads != 1:
            parser.error("--clock cpu counts one thread: it needs --threads 1")
        time.perf_counter = time.thread_time
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        paths = build_paths()
        records = [record for rows in NUM_ROWS for record in time_paths(paths, rows, args.repeats)]
    command = " ".join(["python -m research.linears", *sys.argv[1:]])
    run = provenance(command, torch.device("cpu")) | {
        "processor": processor(),
        "clock": args.clock,
        "load": os.getloadavg()[0],
    }
    runs: list[Record] = []
    if args.json is not None and args.json.exists():
        runs = json.loads(args.json.read_text(encoding="utf-8"))
    key = ("processor", "threads", "clock")
    runs = [one for one in runs if [one["run"][name] for name in key] != [run[name] for name in key]]
    runs.append({"run": run, "records": records})
    print(linears_markdown(runs))
    if args.json is not None:
        args.json.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
