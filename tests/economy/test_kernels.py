"""Timed choices: a slow first run, a stall and a small difference do not decide; the budget; what is kept."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.costs import load_kernel_choices, store_kernel_choices
from mmspec.economy.kernels import PROCESS_S, TOTAL_S, KernelChoices, ProductKey, fastest
from mmspec.economy.store import CostStore, unchanged_costs

NAMES = ("c", "plain", "transposed")


class Machine:
    """Runs alternatives on a clock of its own.

    Attributes:
        now: seconds.
        runs: number of runs of each alternative.
    """

    def __init__(
        self, seconds: dict[str, float], first_s: float = 0.0, stall: tuple[str, int] = ("", 0), stall_s: float = 1.0
    ) -> None:
        """`first_s` is what each first run takes longer, `stall` the run that takes `stall_s` more."""
        self.seconds, self.first_s, self.stall, self.stall_s = seconds, first_s, stall, stall_s
        self.now, self.runs = 0.0, Counter[str]()

    def clock(self) -> float:
        return self.now

    def run(self, name: str, case: object) -> bool:
        self.runs[name] += 1
        self.now += self.seconds[name] + self.first_s * (self.runs[name] == 1)
        self.now += self.stall_s * ((name, self.runs[name]) == self.stall)
        return True


def key(out_features: int = 64, dtype: torch.dtype = torch.bfloat16) -> ProductKey:
    return 2, dtype, 32, out_features, 64


@pytest.mark.parametrize("first_s", [0.0, 0.5])
@pytest.mark.parametrize("winner", NAMES)
def test_neither_first_runs_nor_stalls_decide(winner: str, first_s: float) -> None:
    """The winner is 3% faster, and any of its runs or of the others may stall."""
    for stalled in NAMES:
        for number in range(6):
            seconds = {name: 0.97e-4 if name == winner else 1e-4 for name in NAMES}
            machine = Machine(seconds, first_s, (stalled, number))
            assert fastest(NAMES, [1], machine.run, clock=machine.clock) == winner
            assert KernelChoices(machine.clock).choose(key(), NAMES, [1], machine.run) == winner


@pytest.mark.parametrize("stalled", NAMES)
def test_a_clock_that_goes_backwards_decides_nothing(stalled: str) -> None:
    """The default runs then, and nothing is kept: a later process decides."""
    machine = Machine(dict.fromkeys(NAMES, 1e-3) | {"plain": 1e-4}, stall=(stalled, 3), stall_s=-9.0)
    choices = KernelChoices(machine.clock)
    assert choices.choose(key(), NAMES, [1], machine.run) == "c" and not choices.known
    assert choices.spent_s == 0 and choices.choose(key(128), NAMES, [1], machine.run) == "plain"


def test_a_clock_that_stands_decides_nothing() -> None:
    choices = KernelChoices(lambda: 7.0)
    assert choices.choose(key(), ("plain", "c"), [1], lambda name, case: True) == "plain" and not choices.known


def test_each_case_counts_the_same_and_what_cannot_run_is_left_out() -> None:
    now, times = [0.0], {("c", 1): 1.0, ("c", 8): 9.0, ("plain", 1): 3.0, ("plain", 8): 6.0, ("slow", 1): 99.0}

    def run(name: str, case: int) -> bool | None:
        if name == "missing":
            return None
        now[0] += times[name, case]
        return True

    assert fastest(("c", "plain", "slow", "missing"), (1, 8), run, clock=lambda: now[0]) == "c"
    assert fastest(("missing",), (1, 8), run) is None


def test_the_budget_of_a_process_and_of_all() -> None:
    machine, choices = Machine(dict.fromkeys(NAMES, 1e-3)), KernelChoices()
    choices = KernelChoices(machine.clock)
    for number in range(100):
        choices.choose(key(1 + number), NAMES, [1], machine.run)
    assert 0 < choices.spent_s <= PROCESS_S and len(choices.known) < 100
    for _ in range(10):
        later = KernelChoices(machine.clock)
        later.restore(json.loads(json.dumps(choices.snapshot())))
        for number in range(100):
            later.choose(key(1 + number), NAMES, [1], machine.run)
        assert later.spent_s <= PROCESS_S
        choices = later
    assert choices.earlier_s <= TOTAL_S and not choices.spent_s
    assert choices.choose(key(dtype=torch.float32), NAMES, [1], machine.run) == "c", "the default"


def test_what_is_not_timed_is_computed_as_its_likes() -> None:
    choices = KernelChoices()
    choices.known = {key(64): "plain", key(1024): "transposed", key(64, torch.float32): "c"}
    choices.spent_s = PROCESS_S
    assert choices.choose(key(128), NAMES, [1], pytest.fail) == "plain"
    assert choices.choose(key(900), NAMES, [1], pytest.fail) == "transposed"
    assert choices.choose(key(900), ("c", "plain"), [1], pytest.fail) == "plain", "transposed is no candidate"


def test_the_file_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A second process knows; another machine, a file that is half written or foreign: as if nothing were known."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("MMSPEC_COST_CACHE", "1")
    machine = Machine({"c": 2e-4, "plain": 1e-4})
    first = KernelChoices(machine.clock)
    load_kernel_choices(first)
    first.choose(key(), ("c", "plain"), [1], machine.run)
    with unchanged_costs():
        store_kernel_choices(first)
    assert not list(tmp_path.rglob("*.json")) and first.snapshot()["kernels"]
    first.has_news = True
    store_kernel_choices(first)
    (path,) = tmp_path.rglob("*.json")

    def chosen() -> tuple[str, float]:
        choices, other = KernelChoices(machine.clock), Machine({"c": 1e-4, "plain": 2e-4})
        load_kernel_choices(choices)
        choices._clock = other.clock
        return choices.choose(key(), ("c", "plain"), [1], other.run), choices.spent_s

    assert chosen() == ("plain", 0.0), "known: nothing is timed"
    caplog.set_level(logging.INFO, "mmspec")
    content = path.read_text()
    changes: list[Any] = [{"kernels": [[2, "bfloat16", 32, 64, 64, "rm -rf"]]}, {"spent_s": -1}, {"spent_s": "\x1b[1m"}]
    changes += [{"kernels": [[2, "int8", 32, 64, 64, "c"]]}, {"kernels": 3}, {"format": "other"}, {"key": "other"}]
    changed = [json.dumps(json.loads(content) | change) for change in changes]
    for broken in (*changed, content[: len(content) // 2], "", "[]"):
        path.write_text(broken)
        assert chosen()[0] == "c" and chosen()[1] > 0, broken
    assert len(caplog.messages) == 1 and "is ignored" in caplog.messages[0], "said once"
    monkeypatch.setenv("MMSPEC_CACHE", str(path))
    for first.has_news in (True, True):
        store_kernel_choices(first)
    assert len(caplog.messages) == 2 and "cannot be written" in caplog.messages[1], "said once"
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    path.write_text(content)
    monkeypatch.setattr("mmspec.economy.store._processor_name", lambda: "another")
    assert chosen()[0] == "c" and CostStore.is_enabled()
