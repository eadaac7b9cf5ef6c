"""Whether drafters are as far ahead of `none` as the costs of their parts predict."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.economy.chooser import Chooser
from mmspec.economy.store import SWITCH
from mmspec.metrics.stats import Stats
from research.arguments import module_parser
from research.studies.half_precision import requests
from research.studies.regret import DRAFTERS, SCENES_DRAFTERS, inputs_of, shared_copy

EPILOG = """
method
  Greedy calls of at most --tokens tokens by `none` and by each drafter, in turn, call by call, over the same weights;
  the first --warm ones are left out. Noted are the parts of each round: seconds of its draft, by what drafted and how
  many levels, of scoring by nodes, and of the rest. The calls are halved: the mean seconds of the parts in one half
  predict what the rounds of the other take, of which only levels, nodes and tokens are read. Measured is the time from
  the first token of a call to its last.

examples
  python -m research.studies.predicted_speed --models scenes,./SmolLM2-135M-Instruct
"""
Part = tuple[str, int, float]
"""What was done, its size (levels or nodes), and seconds."""
Round = tuple[Part, ...]
HEADER = """| model, type | drafter | tokens a round | draft, score, rest: ms a round | ms a token, predicted \
| measured | over `none`, predicted | measured | measured / predicted |
|---|---|---|---|---|---|---|---|---|"""


def predict(rounds: Sequence[Round], others: Sequence[Round]) -> float:
    """Seconds of rounds by the mean parts of others; of the nearest size where they lack one, of its own else."""
    known: dict[str, dict[int, list[float]]] = {}
    for what, size, seconds in (part for one in others for part in one):
        known.setdefault(what, {}).setdefault(size, []).append(seconds)
    means = {what: {size: mean(runs) for size, runs in sizes.items()} for what, sizes in known.items()}

    def mean_s(what: str, size: int, measured: float) -> float:
        sizes = means.get(what, {size: measured})
        return sizes[min(sizes, key=lambda one: (abs(one - size), one))]

    return sum(mean_s(*part) for one in rounds for part in one)


def decode(model: Any, inputs: dict[str, Any], tokens: int) -> tuple[list[Round], Stats]:
    """The rounds of one call of a patched model, and its counters."""
    rounds, record = list[Round](), Chooser.record

    def noted(chooser: Chooser, num_nodes: int, **measured: Any) -> None:
        source = "no draft" if chooser.source is None else chooser.source.name
        parts = (source, chooser.levels, "draft_s"), ("score", num_nodes, "score_s"), ("rest", num_nodes, "overhead_s")
        rounds.append(tuple((what, size, measured[name]) for what, size, name in parts))
        record(chooser, num_nodes, **measured)

    with torch.no_grad(), mock.patch.object(Chooser, "record", noted):
        model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return rounds, mmspec.stats(model, last=True)


def study(name: str, options: argparse.Namespace) -> Iterator[str]:
    """The rows of one model."""
    model, prepared = requests(name, options.prompts)
    model, given = model.to(getattr(torch, options.dtype)).eval(), list(prepared)
    names = SCENES_DRAFTERS if name == "scenes" else DRAFTERS
    models = {drafter: mmspec.patch(shared_copy(model), drafter) for drafter in names}
    calls: dict[str, list[tuple[list[Round], Stats]]] = {drafter: [] for drafter in names}
    for number, inputs in enumerate(inputs_of(iter(given), 1, len(given) + options.warm, model.dtype)):
        turn = number % len(names)
        for drafter in (*names[turn:], *names[:turn]):
            calls[drafter].append(decode(models[drafter], inputs, options.tokens))
    ms: dict[str, tuple[float, float]] = {}
    for drafter, each in calls.items():
        mmspec.unpatch(models[drafter])
        each = each[options.warm :]
        some, others = ([one for rounds, _ in each[start::2] for one in rounds] for start in (0, 1))
        rounds, stats = [*some, *others], [one for _, one in each]
        tokens = max(1, sum(one.tokens - one.first_tokens for one in stats))
        seconds = predict(some, others) + predict(others, some), sum(one.decode_s for one in stats)
        ms[drafter] = 1e3 * seconds[0] / tokens, 1e3 * seconds[1] / tokens
        parts = ", ".join(f"{1e3 * mean(one[part][2] for one in rounds):.2f}" for part in range(3)) if rounds else ""
        predicted, measured = (none / own for none, own in zip(ms["none"], ms[drafter], strict=True))
        cells = [f"{Path(name).name}, {options.dtype}", f"`{drafter}`", f"{tokens / max(1, len(rounds)):.2f}", parts]
        cells += [f"{one:.2f}" for one in (*ms[drafter], predicted, measured, measured / predicted)]
        yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = module_parser("research.studies.predicted_speed", __doc__, EPILOG)
    parser.add_argument("--models", type=split_commas, default=["scenes"], metavar="M,M", help="folders, or scenes")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=positive_int, default=2, metavar="N", help="of each task")
    parser.add_argument("--tokens", type=positive_int, default=128, metavar="N")
    parser.add_argument("--warm", type=positive_int, default=3, metavar="N", help="calls that are left out")
    options = parser.parse_args(argv)
    os.environ[SWITCH] = "0"  # costs of other processes
    print(HEADER)
    for name in options.models:
        for line in study(name, options):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
