"""`research.bench --against`, ties and `--overview`: a bench repeats itself under simulated noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench_parts import die, share_of_rounds

from mmspec.app.errors import UsageError
from mmspec.metrics.stats import Stats
from research.bench import measure
from research.bench.against import bench_ratios, read_ratios, repeat_line, repeat_table, suite_ratios
from research.bench.command import main
from research.bench.config import DEFAULT_ROUNDS
from research.bench.measure import Contestant, TimedRun, build_result_rows, run_rounds
from research.bench.overview import OVERVIEW, overview_markdown
from research.bench.processes import Part, run_in_processes
from research.bench.ties import tie_lines

pytestmark = pytest.mark.research

SPEEDS = {"hf": 1.0, "hf-again": 1.0, "none": 0.3, "flash": 0.15}
"""Seconds of decoding of a prompt of length 1."""


@dataclass
class NoisyMachine:
    """Times calls as a shared machine does.

    Attributes:
        rng: of the noise.
        jitter: standard deviation of the logarithm of a call's time.
        drift: by so much the machine is slower at its slowest, in waves of some minutes.
        stall: share of calls that take twice the time.
    """

    rng: random.Random
    jitter: float = 0.03
    drift: float = 0.3
    stall: float = 0.05
    clock: float = 0.0

    def decode_s(self, name: str, prompt: float) -> float:
        """Seconds of a call that takes `prompt * SPEEDS[name]` on a quiet machine."""
        slowness = 1 + self.drift * (0.5 + 0.5 * math.sin(self.clock / 40))
        seconds = prompt * SPEEDS[name] * slowness * math.exp(self.rng.gauss(0, self.jitter))
        seconds *= 2 if self.rng.random() < self.stall else 1
        self.clock += seconds
        return seconds


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[NoisyMachine], list[dict[str, Any]]]:
    """Runs the rounds of a bench on a simulated machine."""

    def run(machine: NoisyMachine) -> list[dict[str, Any]]:
        def run_once(contestant: Contestant, inputs: Any, *_: Any) -> TimedRun:
            seconds = machine.decode_s(contestant.name, inputs["length"])
            stats = Stats(rounds=1, decode_s=seconds) if contestant.name in ("none", "flash") else None
            return TimedRun(seconds + 0.2, 0.2, seconds, IDS, 5, stats, 5)

        monkeypatch.setattr(measure, "run_once", run_once)
        prompts = random.Random(0)  # the same prompts in every run, the longest nearly twice as long as the shortest
        requests = [{"length": prompts.uniform(0.7, 1.3)} for _ in range(DEFAULT_ROUNDS + 1)]
        contestants = [Contestant(name, None) for name in SPEEDS]  # type: ignore[arg-type]
        run_rounds.__wrapped__(contestants, requests, 1, 0.0, 0, lambda: None)  # type: ignore[attr-defined]
        return [row | {"prompt_tokens": 9} for row in build_result_rows(contestants)]

    return run


IDS = measure.torch.zeros(1, 5)


def differences(table: list[list[str]]) -> Iterator[float]:
    """Per cent, of the lines of a `repeat_table`."""
    return (float(line[-1].rstrip("%")) for line in table[1:])


def test_two_runs_differ_by_less_than_5_percent(
    bench: Callable[[NoisyMachine], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that drifts by 30% and stalls in 1 of 20 calls, with 3% of noise in each call."""
    monkeypatch.setattr(measure, "NUM_RESAMPLES", 40)  # intervals are not looked at
    within = 0
    for seed in range(20):
        first, second = (bench_ratios(bench(NoisyMachine(random.Random(f"{seed} {run}")))) for run in "ab")
        within += max(map(abs, differences(repeat_table(second, first)))) <= 5
    assert within >= 19


def test_noise_shows_in_the_row_of_the_baseline(bench: Callable[[NoisyMachine], list[dict[str, Any]]]) -> None:
    quiet, loud = (bench(NoisyMachine(random.Random(1), jitter=jitter)) for jitter in (0.01, 0.3))
    widths = [row["speedup_hf_ci"][1] - row["speedup_hf_ci"][0] for rows in (quiet, loud) for row in rows[1:2]]
    assert quiet[1]["drafter"] == "hf-again" and widths[1] > 5 * widths[0]
    assert quiet[1]["speedup_hf_ci"][0] < 1 < quiet[1]["speedup_hf_ci"][1]
    assert abs(quiet[3]["speedup_hf"] / (1 / 0.15) - 1) < 0.03 and abs(quiet[3]["speedup_own"] / 2 - 1) < 0.03


def test_rounds_begin_and_end_with_the_baseline_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def run_once(contestant: Contestant, inputs: int, *_: Any) -> TimedRun:
        calls.append((contestant.name, inputs))
        return TimedRun(1, 0.1, 0.9, IDS, 5)

    monkeypatch.setattr(measure, "run_once", run_once)
    contestants = [Contestant(name, None) for name in SPEEDS]  # type: ignore[arg-type]
    run_rounds(contestants, list(range(11)), 1, 0.0, 0, lambda: None)  # type: ignore[arg-type]
    warm_up, rounds = calls[:8], [calls[start : start + 4] for start in range(8, len(calls), 4)]
    assert {number for _, number in warm_up} == {0} and [one[0][1] for one in rounds] == list(range(1, 11))
    assert all(one[0][0] == "hf" and one[-1][0] == "hf-again" and len(set(one)) == 4 for one in rounds)
    assert {one[1][0] for one in rounds} == {"none", "flash"} and all(len(one.runs) == 10 for one in contestants)
    run_rounds(contestants, list(range(11)), 1, 0.0, 0, lambda: None, deadline=0.0)  # type: ignore[arg-type]
    assert all(len(one.runs) == 7 for one in contestants)


def test_only_rounds_of_both_runs_are_compared(tmp_path: Path) -> None:
    def row(name: str, ratios: list[float | None]) -> dict[str, Any]:
        keys = ("speedup_hf_runs", "speedup_own_runs", "speedup_e2e_runs")
        return {"drafter": name, "batch": 1, "prompt_tokens": 9} | dict.fromkeys(keys, ratios)

    before, now = bench_ratios([row("flash", [1.0, 2.0, None, 90.0])]), bench_ratios([row("flash", [1.1, 2.2, 3.0])])
    assert repeat_table(now, before)[1] == ["flash", "batch 1, prompt 9", "x hf", "2", "1.50", "1.65", "+10.0%"]
    assert repeat_line(now, before).startswith("Largest difference: 10.0% (flash, batch 1, prompt 9, x hf)")
    assert repeat_line(now, {}) == "No round is in both runs."
    call = {"peer": "a", "form": "images", "batch": 1, "item": "i", "turn": 0, "decoded": 10, "decode_s": 0.05}
    call |= {"total_s": 0.2, "base_ms_per_token": 10.0, "base_total_s": 0.4, "without_media": False}
    found = suite_ratios([call, call | {"peer": "hf"}, call | {"item": "j", "decoded": 0}, {**call, "error": "x"}])
    assert found == {
        ("a", "images, batch 1", "x hf"): {"i 0": 2.0},
        ("a", "images, batch 1", "x hf, whole"): {"i 0": 2.0, "j 0": 2.0},
    }
    old = tmp_path / "old.json"
    old.write_text(json.dumps([{"drafter": "none", "batch": 1, "prompt_tokens": 9}]))
    with pytest.raises(UsageError, match="--against names the JSON of an earlier run"):
        read_ratios(old)


def test_overlapping_intervals_are_ties() -> None:
    def row(name: str, ratio: float, limits: list[float]) -> dict[str, Any]:
        return {"drafter": name, "batch": 1, "prompt_tokens": 9, "speedup_hf": ratio, "speedup_hf_ci": limits}

    rows = [row("hf", 1, [1, 1]), row("hf-again", 1, [0.9, 1.1]), row("none", 1.15, [1.05, 1.3])]
    rows += [row("msd", 4, [3.5, 4.2]), row("flash", 4.3, [4.1, 4.5]), row("hybrid", 2, [1.9, 2.1])]
    assert tie_lines(rows) == ["ties (batch 1, prompt 9; intervals overlap): flash and msd; none and hf-again"]
    assert tie_lines(rows[:2] + rows[3:4]) == []


def test_a_bench_against_itself(tmp_path: Path, capsys: Any) -> None:
    args = ["--model", "tiny", "--drafters", "none", "--new-tokens", "4", "--repeats", "2"]
    assert main([*args, "--json", str(tmp_path / "first.json")]) == 0
    assert main([*args, "--against", str(tmp_path / "first.json")]) == 0
    printed = capsys.readouterr().out
    assert "## Against first.json" in printed and "| none | batch 1, prompt " in printed
    assert "Largest difference: " in printed
    assert main(["--overview", "--model", "tiny"]) == 2
    assert "--overview has tasks of its own" in capsys.readouterr().err


def test_the_table_of_the_overview() -> None:
    def row(name: str, ratio: float, **more: Any) -> dict[str, Any]:
        run = {"threads": 2, "processor": "P", "date": "2026-11-25", "commit": "abc", "mmspec": "1", "torch": "2"}
        run |= {"transformers": "5", "command": "python -m research.bench --overview"}
        found = {"setting": OVERVIEW[0].title, "drafter": name, "speedup_hf": ratio, "speedup_own": 1.0, "R": 2.0}
        found |= {"speedup_hf_ci": [ratio - 0.1, ratio + 0.1], "speedup_e2e": ratio, "tau": 1.5, "identical": True}
        found |= {"model": "scenes", "dtype": "float32", "run": run, "not_used": False, "drafted_share": 0.5}
        found |= {"batch": 1, "prompt_tokens": 9}
        return found | more

    rows = [row("hf", 1), row("hf-again", 1, R=None), row("none", 1.15), row("msd", 2, not_used=True)]
    lines = overview_markdown(rows).splitlines()
    assert "identical: scenes, float32, 2 threads of P, 2026-11-25, commit abc;" in lines[0]
    assert lines[1] == "mmspec 1, torch 2, transformers 5; `python -m research.bench --overview`."
    assert lines[5] == "| long descriptions | `generate` again | 1.50 |  | 1.00 [0.90, 1.10] | 1.00 | 1.00 |"
    assert lines[6] == "|  | `none` | 1.50 | 2.00 | 1.15 [1.05, 1.25] (tie) | 1.00 | 1.15 |"
    assert lines[7].startswith("|  | `msd`, used in 50% of rounds | 1.50 |") and "tie" not in lines[7]
    assert lines[-1] == "Ties (95% intervals overlap): long descriptions: `none` and `hf-again`."
    assert "NOT all outputs identical" in overview_markdown([*rows, row("x", 3, identical=False)])


def test_rounds_are_shared_by_processes() -> None:
    requests = list(range(12))  # the first one warms up
    parts = [Part(number, 3).of(requests) for number in range(3)]
    assert [part[0] for part in parts] == [0, 0, 0]
    assert [one for part in parts for one in part[1:]] == requests[1:] and {len(part) for part in parts} == {4, 5}
    ticks: list[int] = []
    found = run_in_processes(share_of_rounds, (requests,), 2, lambda: ticks.append(1))
    assert found["rounds"] == requests[1:] and len(set(found["process"])) == 2 and len(ticks) == 2
    assert [float(tensor) for tensor in found["tensor"]] == [5.0]
    with pytest.raises(UsageError, match="process 1 of 1 of the bench died"):
        run_in_processes(die, (), 1, lambda: None)


@pytest.mark.slow
def test_a_bench_of_two_processes(tmp_path: Path, capsys: Any) -> None:
    args = ["--model", "tiny", "--drafters", "none", "--new-tokens", "4", "--repeats", "3", "--processes", "2"]
    assert main([*args, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["drafter"] for row in rows] == ["hf", "hf-again", "none"] and all(row["identical"] for row in rows)
    assert all(len(row["speedup_hf_runs"]) == row["repeats"] == 3 for row in rows)
    assert main(["--overview", "--processes", "2"]) == 2
    assert "--overview measures in one process" in capsys.readouterr().err


def test_a_bench_that_is_stopped_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of two batch sizes: the first as a whole, of the second the rounds in which all have run."""
    run_once, calls = measure.run_once, []

    def stopped(contestant: Contestant, inputs: Any, *args: Any, **options: Any) -> TimedRun:
        calls.append(inputs["input_ids"].shape[0])
        if calls.count(2) == 12:  # three of a kind, twice to warm up, and two of the second round
            raise KeyboardInterrupt
        return run_once(contestant, inputs, *args, **options)

    monkeypatch.setattr(measure, "run_once", stopped)
    args = ["--model", "tiny", "--drafters", "none", "--new-tokens", "4", "--repeats", "3", "--batch-sizes", "1,2"]
    assert main([*args, "--json", str(tmp_path / "rows.json")]) == 130
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["batch"], row["repeats"]) for row in rows] == [(1, 3)] * 3 + [(2, 1)] * 3
    assert "stopped; what was measured until then:" in capsys.readouterr().out
