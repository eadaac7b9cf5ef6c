"""Mutation tests: bugs planted in the engine, one at a time, that the suite must detect.

As a script: `python tests/helpers/mutation.py`. `MMSPEC_MUTANT=name pytest tests/...` runs any tests with one bug
planted. A mutant whose attribute does not exist is an error: after a change of the engine, move it to the code that
could have the bug now.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz
import torch
from c_bugs import faulty_kernel
from torch import Tensor

import mmspec.backend
import mmspec.engine.kv_cache
import mmspec.engine.output
import mmspec.engine.rng
import mmspec.engine.sampler
import mmspec.engine.verifier
import mmspec.targets.c_forwards
import mmspec.targets.forward
import mmspec.targets.hf
from mmspec.cpu.c_kernel import CKernel
from mmspec.engine.tree import DraftTree

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""(owner, attribute, function from the original to the faulty one)."""

TESTS = Path(__file__).parent.parent
REGRESSION_TESTS = "engine/test_regressions.py"


def _empty_path(original: Any) -> Any:
    def faulty(tree: DraftTree, *args: Any) -> Any:
        return original(replace(tree, tokens=torch.zeros_like(tree.tokens)), *args)

    return faulty


def _swapped_history_rows(original: Any) -> Any:
    def faulty(tree: DraftTree, sequences: Tensor, *args: Any) -> Any:
        return original(tree, sequences.flip(0), *args)

    return faulty


def _same_noise_for_all_nodes(original: Any) -> Any:
    def faulty(self: Any, slots: Tensor) -> Tensor:
        return original(self, slots[:, :1].expand_as(slots))

    return faulty


def _noise_of_next_step(original: Any) -> Any:
    def faulty(self: Any, slots: Tensor) -> Tensor:
        return original(self, (slots + 1) % self.window)

    return faulty


def _swapped_noise_rows(original: Any) -> Any:
    def faulty(self: Any, slots: Tensor) -> Tensor:
        return original(self, slots.flip(0)).flip(0)

    return faulty


def _visible_siblings(original: Any) -> Any:
    def faulty(self: Any, tree: DraftTree, *args: Any) -> Any:
        siblings = tree.parents[:, :, None] == tree.parents[:, None, :]
        return original(self, replace(tree, ancestor_mask=tree.ancestor_mask | siblings), *args)

    return faulty


def _first_nodes_in_cache(original: Any) -> Any:
    def faulty(self: Any, path: Tensor, counts: Tensor, accepted_nodes: Sequence[Sequence[int]]) -> None:
        original(self, path, counts, [list(range(len(row))) for row in accepted_nodes])

    return faulty


def _criteria_at_the_end_of_a_round(original: Any) -> Any:
    def faulty(self: Any, step: int, tokens: list[int]) -> list[bool]:
        return original(self, step, tokens) if step + 1 >= self._num_complete() else [False] * len(tokens)

    return faulty


def _no_stop_ids(original: Any) -> Any:
    def faulty(tree: DraftTree, sampled_ids: Tensor, max_emit: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tree, sampled_ids, max_emit, None)

    return faulty


def _one_draw_too_many(original: Any) -> Any:
    def faulty(self: Any, step: int) -> None:
        original(self, step + 1 if step + 1 in self._states else step)

    return faulty


def _positions_by_length(original: Any) -> Any:
    def faulty(self: Any) -> None:
        original(self)
        base = torch.zeros_like(self.call_tensors.position_base)
        self.call_tensors = replace(self.call_tensors, position_base=base)

    return faulty


def _draft_token_emitted(original: Any) -> Any:
    def faulty(tree: DraftTree, *args: Any, **kwargs: Any) -> Any:
        path, counts, tokens = original(tree, *args, **kwargs)
        if tree.num_nodes > 1:
            has_child = tree.node_mask[:, 1] & (tree.parents[:, 1] == 0)
            tokens[:, 0] = torch.where(has_child, tree.tokens[:, 1], tokens[:, 0])
        return path, counts, tokens

    return faulty


def _visible_pads(original: Any) -> Any:
    def faulty(self: Any) -> None:
        original(self)
        self.call_tensors = replace(self.call_tensors, padding=None)

    return faulty


def _no_sliding_window(original: Any) -> Any:
    def faulty(self: Any, *args: Any) -> Any:
        with mock.patch.object(self, "_window", 10**6):
            return original(self, *args)

    return faulty


def _scores_of_root(original: Any) -> Any:
    def faulty(self: Any, collected: Any, source: Tensor, result: Any) -> None:
        roots = [[0] * len(row) for row in result.accepted_nodes]
        original(self, collected, source, replace(result, accepted_nodes=roots))

    return faulty


def _never_truncated(original: Any) -> Any:
    def faulty(self: Any, row: int, length: int) -> None:
        return None

    return faulty


def _pads_of_row_0(original: Any) -> Any:
    def faulty(processor: Any, rows: Tensor) -> Any:
        return original(processor, torch.zeros_like(rows))

    return faulty


def _never_cropped(original: Any) -> Any:
    def faulty(self: Any, lengths: Sequence[int], zero_tail: bool = False) -> None:
        return None

    return faulty


def _short_cache(original: Any) -> Any:
    def faulty(self: Any, num_steps: int) -> Any:
        return original(self, max(1, num_steps - 1))

    return faulty


def _c_bug(text: str, replacement: str) -> Callable[[Any], Any]:
    """A mutation of `load_kernel`: a kernel built from sources in which a text is replaced; None without a compiler."""

    @cache
    def build() -> CKernel:
        return faulty_kernel(text, replacement)

    def mutate(original: Any) -> Any:
        return lambda: None if original() is None else build()

    return mutate


def _compiled_rounds(text: str, replacement: str) -> list[Replacement]:
    return [(mmspec.backend, "load_kernel", _c_bug(text, replacement))]


_SAMPLER = mmspec.engine.sampler
_VERIFIER = mmspec.engine.verifier
_NOISE = mmspec.engine.rng.SamplingNoise
_OUTPUT = mmspec.engine.output.OutputBuffer
_TARGET = mmspec.targets.hf.HFTarget
_FORWARD = mmspec.targets.forward.NodeForward

MUTANTS: dict[str, list[Replacement]] = {
    "history without the path": [(_SAMPLER, "_group_nodes", _empty_path)],
    "one noise for all nodes": [(_NOISE, "read", _same_noise_for_all_nodes)],
    "noise off by one step": [(_NOISE, "read", _noise_of_next_step)],
    "a sibling visible in the mask": [
        (_FORWARD, "_mask", _visible_siblings),
        (mmspec.targets.c_forwards.CForwards, "score", _visible_siblings),
    ],
    "the wrong nodes in the KV cache": [(mmspec.engine.kv_cache.RaggedKVCache, "keep_path", _first_nodes_in_cache)],
    "stop conditions only at the end of a round": [
        (_OUTPUT, "_run_criteria", _criteria_at_the_end_of_a_round),
        (_VERIFIER, "accept_path", _no_stop_ids),
    ],
    "generator left one draw late": [(_NOISE, "close", _one_draw_too_many)],
    "rows swapped in the history": [(_SAMPLER, "_group_nodes", _swapped_history_rows)],
    "rows swapped in the noise": [(_NOISE, "read", _swapped_noise_rows)],
    "position ids by length": [(_TARGET, "_prepare_rounds", _positions_by_length)],
    "draft token emitted instead of the sampled id": [(_VERIFIER, "accept_path", _draft_token_emitted)],
    "pads visible": [(_TARGET, "_prepare_rounds", _visible_pads)],
    "no sliding window in trees": [(_FORWARD, "_mask", _no_sliding_window)],
    "scores of the root for the whole path": [(_OUTPUT, "_collect", _scores_of_root)],
    "provisional tokens never cut": [(_OUTPUT, "_truncate", _never_truncated)],
    "repetition penalty with another row's pads": [(_SAMPLER, "_for_rows", _pads_of_row_0)],
    "cut tokens left in the cache": [(_TARGET, "crop", _never_cropped)],
    "returned cache one position short": [(_TARGET, "export_cache", _short_cache)],
}
"""Name -> replacements. The first eleven are the bugs that the design names."""
C_MUTANTS: dict[str, list[Replacement]] = {
    "C: all nodes visible": _compiled_rounds("if (!d->ancestors[(b * d->nodes", "if (0 && !d->ancestors[(b * d->nodes"),
    "C: pads visible": _compiled_rounds("if (!padding[t])", "if (0)"),
    "C: a node at the position of the root": _compiled_rounds("d->lengths[b] + d->depths[r],", "d->lengths[b],"),
    "C: keys behind the length of row 0": _compiled_rounds(
        "keys + (d->lengths[b] + n) * D", "keys + (d->lengths[0] + n) * D"
    ),
}
"""Bugs in rounds in C. Those in drafts in C cannot change the output: they are in `test_c_draft`."""
MUTANTS |= C_MUTANTS


@contextmanager
def plant_bug(name: str) -> Iterator[None]:
    """Context in which the engine has one bug."""
    with ExitStack() as stack:
        for owner, attribute, mutate in MUTANTS[name]:
            stack.enter_context(mock.patch.object(owner, attribute, mutate(getattr(owner, attribute))))
        yield


@dataclass
class Detection:
    """How a bug was detected.

    Attributes:
        name: the mutant.
        detected_by: the fuzz case or test that failed first; empty if none did.
        seconds: time until then.
    """

    name: str
    detected_by: str
    seconds: float


def detect(name: str, seeds: Sequence[int], run_named_tests: bool = True) -> Detection:
    """Run the fuzz cases of `seeds` with the bug planted until one differs; if none does, the regression tests."""
    start = time.perf_counter()
    with plant_bug(name):
        for seed in seeds:
            result = fuzz.run_seed(seed)
            if result.differences:
                by = f"seed {seed}, {result.differences[0].kind}"
                return Detection(name, by, time.perf_counter() - start)
    by = _first_failing_test(name) if run_named_tests else ""
    return Detection(name, by, time.perf_counter() - start)


def _first_failing_test(name: str) -> str:
    """The first test that fails with the bug planted and passes without it."""
    failing = _failing_tests([REGRESSION_TESTS], {"MMSPEC_MUTANT": name})
    failing_without_bug = _failing_tests(failing, {}) if failing else []
    return min(set(failing) - set(failing_without_bug), default="")


def _failing_tests(tests: list[str], extra_env: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=8", "--tb=no", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, **extra_env}
    run = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, check=False)
    return [line.split(" ")[1] for line in run.stdout.splitlines() if line.startswith("FAILED")]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; all if none is given")
    parser.add_argument("--count", type=int, default=150, help="number of fuzz cases per mutant")
    args = parser.parse_args(argv)
    fuzz.init_worker()
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    escaped = 0
    for name in args.names or MUTANTS:
        detection = detect(name, range(args.count))
        escaped += not detection.detected_by
        status = "caught" if detection.detected_by else "ESCAPED"
        print(f"{status:8} {detection.seconds:6.1f} s  {name}: {detection.detected_by or 'not detected'}", flush=True)
    return int(escaped > 0)


if __name__ == "__main__":
    raise SystemExit(main())
