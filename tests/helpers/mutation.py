"""Bugs planted in the real engine, one at a time; the suite must see each. As a script: `python tests/helpers/mutation.py`.

`MMSPEC_MUTANT=name pytest tests/...` runs any tests with one planted. A mutant whose target is gone is an error: after
a change of the engine, move it to where the bug would be made today.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz as fuzz
import torch
from torch import Tensor

import mmspec.engine.kv_cache
import mmspec.engine.loop
import mmspec.engine.output
import mmspec.engine.sampler
import mmspec.targets.hf
from mmspec.engine.tree import DraftTree

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""(owner, attribute, function from the original to the faulty one)."""


def _no_path(original: Any) -> Any:
    def faulty(tree: DraftTree, *args: Any) -> Any:
        return original(replace(tree, tokens=torch.zeros_like(tree.tokens)), *args)

    return faulty


def _swapped_rows(original: Any) -> Any:
    def faulty(tree: DraftTree, sequences: Tensor, *args: Any) -> Any:
        return original(tree, sequences.flip(0), *args)

    return faulty


def _one_noise(original: Any) -> Any:
    def faulty(self: Any, columns: Tensor) -> Tensor:
        return original(self, columns[:, :1].expand_as(columns))

    return faulty


def _late_noise(original: Any) -> Any:
    def faulty(self: Any, columns: Tensor) -> Tensor:
        return original(self, columns + 1)

    return faulty


def _swapped_noise(original: Any) -> Any:
    def faulty(self: Any, columns: Tensor) -> Tensor:
        return original(self, columns.flip(0)).flip(0)

    return faulty


def _sibling_seen(original: Any) -> Any:
    def faulty(self: Any, tree: DraftTree, *args: Any) -> Any:
        siblings = tree.parents[:, :, None] == tree.parents[:, None, :]
        return original(self, replace(tree, ancestor_mask=tree.ancestor_mask | siblings), *args)

    return faulty


def _first_kept(original: Any) -> Any:
    def faulty(self: Any, path: Tensor, counts: Tensor, walked: Sequence[Sequence[int]]) -> None:
        original(self, path, counts, [list(range(len(row))) for row in walked])

    return faulty


def _judged_at_the_end(original: Any) -> Any:
    def faulty(self: Any, column: int, tokens: list[int]) -> list[bool]:
        return original(self, column, tokens) if column + 1 >= self._reached() else [False] * len(tokens)

    return faulty


def _no_stops(original: Any) -> Any:
    def faulty(tree: DraftTree, picks: Tensor, limits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tree, picks, limits, None)

    return faulty


def _restored_late(original: Any) -> Any:
    def faulty(self: Any, column: int) -> None:
        original(self, column + 1 if column + 1 in self._snapshots else column)

    return faulty


def _positions_by_length(original: Any) -> Any:
    def faulty(self: Any) -> None:
        original(self)
        self._last_position = torch.full_like(self._last_position, self.base - 1)

    return faulty


def _draft_emitted(original: Any) -> Any:
    def faulty(tree: DraftTree, *args: Any, **kwargs: Any) -> Any:
        path, counts, tokens = original(tree, *args, **kwargs)
        if tree.num_nodes > 1:
            drafted = tree.valid[:, 1] & (tree.parents[:, 1] == 0)
            tokens[:, 0] = torch.where(drafted, tree.tokens[:, 1], tokens[:, 0])
        return path, counts, tokens

    return faulty


def _pads_seen(original: Any) -> Any:
    def faulty(self: Any) -> None:
        original(self)
        self._padding = None

    return faulty


def _no_window(original: Any) -> Any:
    def faulty(self: Any, *args: Any) -> Any:
        with mock.patch.object(self, "_window", 10**6):
            return original(self, *args)

    return faulty


def _scores_of_the_root(original: Any) -> Any:
    def faulty(self: Any, kept: Any, source: Tensor, verdict: Any) -> None:
        original(
            self, kept, source, replace(verdict, accepted_nodes=[[0] * len(row) for row in verdict.accepted_nodes])
        )

    return faulty


def _never_cut(original: Any) -> Any:
    def faulty(self: Any, row: int, length: int) -> None:
        return None

    return faulty


def _pads_of_other_rows(original: Any) -> Any:
    def faulty(processor: Any, rows: Tensor) -> Any:
        return original(processor, torch.zeros_like(rows))

    return faulty


def _not_rewound(original: Any) -> Any:
    def faulty(self: Any, lengths: Sequence[int]) -> None:
        return None

    return faulty


def _cache_short(original: Any) -> Any:
    def faulty(self: Any, columns: int) -> Any:
        return original(self, max(1, columns - 1))

    return faulty


_SAMPLING, _TARGET = mmspec.engine.sampler, mmspec.targets.hf.HFTarget
_OUTPUT_BUFFER, _NOISE, _ENGINE = (
    mmspec.engine.output.OutputBuffer,
    mmspec.engine.sampler.SamplingNoise,
    mmspec.engine.loop,
)

MUTANTS: dict[str, list[Replacement]] = {
    "history without the path": [(_SAMPLING, "_histories", _no_path)],
    "one noise for all nodes": [(_NOISE, "at", _one_noise)],
    "noise off by one column": [(_NOISE, "at", _late_noise)],
    "a sibling visible in the mask": [(_TARGET, "_mask", _sibling_seen)],
    "the wrong KV rows kept": [(mmspec.engine.kv_cache.RaggedKVCache, "keep_path", _first_kept)],
    "stop conditions only at the end of a round": [
        (_OUTPUT_BUFFER, "_run_criteria", _judged_at_the_end),
        (_ENGINE, "accept_path", _no_stops),
    ],
    "generator restored one draw late": [(_NOISE, "restore_rng", _restored_late)],
    "row ids swapped in the history": [(_SAMPLING, "_histories", _swapped_rows)],
    "row ids swapped in the noise": [(_NOISE, "at", _swapped_noise)],
    "position ids by length": [(_TARGET, "_prepare_rounds", _positions_by_length)],
    "draft token emitted instead of picked token": [(_ENGINE, "accept_path", _draft_emitted)],
    "pads visible": [(_TARGET, "_prepare_rounds", _pads_seen)],
    "no sliding window in trees": [(_TARGET, "_mask", _no_window)],
    "scores of the root for the whole path": [(_OUTPUT_BUFFER, "_collect", _scores_of_the_root)],
    "provisional tokens never cut": [(_OUTPUT_BUFFER, "_cut", _never_cut)],
    "repetition penalty with another row's pads": [(_SAMPLING, "_for_rows", _pads_of_other_rows)],
    "cut tokens left in the cache": [(_TARGET, "crop", _not_rewound)],
    "returned cache one position short": [(_TARGET, "export_cache", _cache_short)],
}
"""Name -> what to swap. The first eleven are the bugs that the design asks for."""


@contextmanager
def plant_bug(name: str) -> Iterator[None]:
    """The engine with one bug in it, for a while."""
    swaps = [
        mock.patch.object(owner, attribute, make(getattr(owner, attribute))) for owner, attribute, make in MUTANTS[name]
    ]
    for swap in swaps:
        swap.start()
    try:
        yield
    finally:
        for swap in swaps:
            swap.stop()


@dataclass
class Detection:
    """Who saw a bug first, and after how long; `by` is empty if nobody did."""

    name: str
    detected_by: str
    seconds: float


def detect(name: str, seeds: Sequence[int], run_named_tests: bool = True) -> Detection:
    """Run the slice with the bug planted until something differs; if nothing does, the traps."""
    began = time.perf_counter()
    with plant_bug(name):
        for seed in seeds:
            result = fuzz.run_seed(seed)
            if result.differences:
                by = f"seed {seed}, {result.differences[0].kind}"
                return Detection(name, by, time.perf_counter() - began)
    by = _first_failing_test(name) if run_named_tests else ""
    return Detection(name, by, time.perf_counter() - began)


def _first_failing_test(name: str) -> str:
    """The first named test that goes red with the bug planted."""
    red = _failing_tests(["test_traps.py"], {"MMSPEC_MUTANT": name})
    innocent = set(red) - set(_failing_tests(red, {})) if red else set()
    return min(innocent, default="")


def _failing_tests(tests: list[str], more: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=8", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment, here = {**os.environ, **more}, Path(__file__).parent.parent
    run = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    return [line.split(" ")[1] for line in run.stdout.splitlines() if line.startswith("FAILED")]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants by name; all of them if none is given")
    parser.add_argument("--count", type=int, default=150, help="cases of the slice")
    args = parser.parse_args(argv)
    fuzz.init_worker()
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    escaped = 0
    for name in args.names or MUTANTS:
        catch = detect(name, range(args.count))
        escaped += not catch.detected_by
        print(
            f"{'caught' if catch.detected_by else 'ESCAPED':8} {catch.seconds:6.1f} s  {name}: {catch.detected_by or 'nobody saw it'}",
            flush=True,
        )
    return int(escaped > 0)


if __name__ == "__main__":
    raise SystemExit(main())
