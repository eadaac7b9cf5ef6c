"""What the choice of `auto` costs: whole calls of each drafter, in turn, over those of the best fixed one."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.economy.chooser import Chooser
from mmspec.economy.store import SWITCH
from research.arguments import module_parser
from research.studies.half_precision import repeated, requests

EPILOG = """
method
  Greedy calls of up to --tokens tokens, by transformers alone (`generate`, three calls) and by each drafter, in turn,
  so that a busy machine slows all of them. Each drafter has a patched model of its own over the same weights, and
  nothing that was stored by earlier processes: making a copy counts for the call in which it is made, or the first one.
  Every call is a line of --out as soon as it ends; short cells come first. When --minutes are over, no further call of
  each drafter is begun, but the first of a cell. Printed for each cell as it ends (model, type, rows, tokens):
  milliseconds a token in the first call, the first ten and the last ten, the speed of `auto` over the best fixed
  drafter and over `none`, and what drafted in the rounds of `auto`. Lines have what it waits for, too.

examples
  python -m research.studies.regret --models ./Qwen2.5-Coder-0.5B --quick
  python -m research.studies.regret --models scenes,./SmolLM2-135M-Instruct --minutes 60
"""
DRAFTERS = ("none", "hybrid", "quantized")
"""Fixed ones; scenes has heads of its own."""
SCENES_DRAFTERS = ("none", "flash", "msd", "quantized")
GENERATE_CALLS = 3
"""Calls of plain `generate`, whose time does not change from call to call; it is the slowest."""
WINDOWS = {"first": slice(0, 1), "first ten": slice(0, 10), "last ten": slice(-10, None)}


@dataclass(frozen=True)
class OneCall:
    """Seconds, new tokens, and rounds by what was to draft in them."""

    seconds: float
    new_tokens: int
    rounds: Counter[str] = field(default_factory=Counter)


def counted(plan: Callable[[Chooser], bool], rounds: Counter[str]) -> Callable[[Chooser], bool]:
    """`Chooser.plan` that counts what it plans."""

    def planned(chooser: Chooser) -> bool:
        found = plan(chooser)
        rounds["plain" if chooser.source is None else chooser.source.name] += 1
        return found

    return planned


def shared_copy(model: Any) -> Any:
    """A model over the same weights, to be patched on its own."""
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


def inputs_of(prepared: Iterator[dict[str, Any]], rows: int, count: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Inputs of so many calls; each request is repeated as the rows of a batch."""
    calls = itertools.islice(itertools.cycle(itertools.islice(prepared, count)), count)
    return [{name: repeated(value, rows, dtype) for name, value in call.items()} for call in calls]


def run_cell(cell: dict[str, Any], options: argparse.Namespace, end_time: float) -> dict[str, list[OneCall]]:
    """The calls of each drafter until `end_time`; each is written as it ends."""
    model, prepared = requests(cell["model"], 1000)
    model = model.to(getattr(torch, cell["dtype"])).eval()
    calls = inputs_of(prepared, cell["rows"], options.calls, model.dtype)
    names = ("generate", *(SCENES_DRAFTERS if cell["model"] == "scenes" else DRAFTERS), "auto")
    models = {name: shared_copy(model) for name in names}
    found: dict[str, list[OneCall]] = {name: [] for name in names}
    started = dict.fromkeys(names, 0.0)
    for name in names[1:]:
        start = time.perf_counter()
        mmspec.patch(models[name], drafter=name)
        started[name] = time.perf_counter() - start
    for number, call in enumerate(calls):
        if number and time.perf_counter() > end_time:
            break
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if name == "generate" and number >= GENERATE_CALLS:
                continue
            rounds = Counter[str]()
            with torch.no_grad(), mock.patch.object(Chooser, "plan", counted(Chooser.plan, rounds)):
                start = time.perf_counter()
                tokens = models[name].generate(**call, do_sample=False, max_new_tokens=cell["tokens"])
                seconds = time.perf_counter() - start + (started[name] if number == 0 else 0.0)
            one = OneCall(seconds, int(tokens.numel() - call["input_ids"].numel()), rounds)
            found[name].append(one)
            line = cell | {"drafter": name, "call": number} | vars(one)
            line |= {"waits_for": None if name == "generate" else mmspec.stats(models[name], last=True).waits_for}
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    for name in names[1:]:
        mmspec.unpatch(models[name])
    return found


def table(cell: dict[str, Any], found: dict[str, list[OneCall]]) -> Iterator[str]:
    """Lines of one cell: milliseconds a token, and what `auto` reaches."""
    yield ", ".join(map(str, cell.values())) + f": {len(found['auto'])} calls"
    for window, calls in WINDOWS.items():
        means = {
            name: 1e3 * sum(one.seconds for one in each[calls]) / max(1, sum(one.new_tokens for one in each[calls]))
            for name, each in found.items()
        }
        fixed = {name: ms for name, ms in means.items() if name not in ("generate", "auto")}
        best = min(fixed, key=lambda name: fixed[name])
        shares = f"auto {fixed[best] / means['auto']:.2f} of {best}, {fixed['none'] / means['auto']:.2f} of none"
        rounds = sum((one.rounds for one in found["auto"][calls]), Counter[str]())
        drafted = ", ".join(f"{name} {count}" for name, count in rounds.most_common())
        yield f"  {window:<10}" + "".join(f" {name} {ms:.1f}" for name, ms in means.items()) + f"; {shares}; {drafted}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study."""
    parser = module_parser("research.studies.regret", __doc__, EPILOG)
    parser.add_argument("--models", type=split_commas, default=["scenes"], help="folders, or scenes (default)")
    parser.add_argument("--dtypes", type=split_commas, default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=split_commas, default=["1", "8"], help="rows of a batch")
    parser.add_argument("--tokens", type=split_commas, default=["32", "128", "512"], help="tokens of a call")
    parser.add_argument("--calls", type=positive_int, default=50)
    parser.add_argument("--out", type=Path, default=Path("regret.jsonl"), help="a line for each call (appended)")
    parser.add_argument("--quick", action="store_true", help="bfloat16, one row, ten calls of 64 tokens")
    parser.add_argument("--minutes", type=positive_int, help="begin no further calls after so many")
    options = parser.parse_args(argv)
    os.environ[SWITCH] = "0"
    if options.quick:
        options.dtypes, options.rows, options.tokens, options.calls = ["bfloat16"], ["1"], ["64"], 10
    end_time = time.perf_counter() + (60 * options.minutes if options.minutes else math.inf)
    cells = itertools.product(options.models, options.dtypes, map(int, options.rows), map(int, options.tokens))
    for values in sorted(cells, key=lambda values: values[2] * values[3]):
        if time.perf_counter() > end_time:
            break
        cell = dict(zip(("model", "dtype", "rows", "tokens"), values, strict=True))
        for line in table(cell, run_cell(cell, options, end_time)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
