"""Measurements in parts: what was measured is kept, whatever ends a part; the GPU trial in small, the real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from research import gpu_trial, parts, real_weights
from research.bench.command import build_parser
from research.parts import Part, run_parts

pytestmark = pytest.mark.research

ROOT = Path(__file__).parents[2]
WRITE = "import json, sys; json.dump({'rows': [{'ms': 1}, {'ms': 2}]}, open(sys.argv[1], 'w')); "


def part(name: str, code: str, seconds: float = 20.0) -> Part:
    return Part(name, ("-c", WRITE + code, "{json}"), seconds, {"size": name})


def test_rows_are_kept_whatever_ends_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(parts, "GRACE_SECONDS", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.stdout.close(); time.sleep(60)"
    given = [
        part("good", ""),
        part("killed", "import os; os.kill(os.getpid(), 4)"),
        part("wrong", "sys.exit('no such model')"),
        part("slow", stubborn, 1.0),
        Part("empty", ("-c", ""), 20.0, {}),
    ]
    out = tmp_path / "o.jsonl"
    found = run_parts(given, out, 60.0)
    assert [json.loads(line) for line in out.read_text().splitlines()] == found
    ends = {row["part"]: row for row in found if "status" in row}
    assert {name: row["status"] for name, row in ends.items()} == {
        "good": "ok",
        "killed": "failed: signal 4",
        "wrong": "failed: exit code 1",
        "slow": "stopped after 1 s",
        "empty": "ok",
    }
    assert ends["wrong"]["output"] == "no such model" and ends["slow"]["seconds"] < 20
    rows = [row for row in found if "ms" in row]
    assert len(rows) == 8 and rows[0] == {"part": "good", "size": "good", "ms": 1}
    assert run_parts(given[:1], out, 1.0)[-1]["status"] == "not run: no time left"


@pytest.mark.parametrize("small", [False, True])
def test_the_trial_fits_into_nine_minutes_and_its_commands_parse(small: bool) -> None:
    found = gpu_trial.parts("cpu", small)
    assert sum(one.seconds for one in found) <= gpu_trial.LIMIT_S == 540.0
    for one in found:
        if one.arguments[1] == "research.bench":
            build_parser().parse_args(list(one.arguments[2:]))
    nodes = {one.name for one in found}
    assert nodes == {"versions", "exactness", "rounds-2b", "rounds-7b", "calls-7b", "scenes"}


def test_exactness_is_a_row_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trial, "CHECKED", ())
    monkeypatch.setattr(gpu_trial, "TEXT_TYPES", ("qwen3",))
    monkeypatch.setattr(gpu_trial, "TEXT_DRAFTERS", ("none", "no-such-drafter"))
    rows = list(gpu_trial.exactness(torch.device("cpu")))
    assert rows[0] == {
        "model": "qwen3", "dtype": "float32", "backend": "auto", "drafter": "none", "calls": 4, "same": 4,
        "left_to_transformers": 0,
    }  # fmt: skip
    assert "no-such-drafter" in rows[1]["error"] and len(rows) == 4
    assert gpu_trial.main([str(tmp_path / "r.json"), "--part", "exactness"]) == 1
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == rows


@pytest.mark.slow
def test_the_trial_in_small(tmp_path: Path) -> None:
    """On a CPU, from another folder, with our packages copied as the script does it."""
    command = ["sh", str(ROOT / "research" / "gpu_trial.sh"), "--small", "--device", "cpu", "out.jsonl"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, check=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["part"]: row["status"] for row in rows if "status" in row} == dict.fromkeys(
        ("versions", "exactness", "rounds-2b", "rounds-7b", "calls-7b", "scenes"), "ok"
    )


def test_real_weights_are_parts_by_model_and_type(tmp_path: Path, capsys: Any) -> None:
    for name, size in (("a", 100), ("b", 300)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    args = [str(tmp_path / "a"), str(tmp_path / "b"), "--minutes", "8", "--assistant", str(tmp_path / "a")]
    seen: list[Part] = []

    def run(chosen: list[Part], out: Path, limit_s: float) -> list[dict[str, Any]]:
        seen.extend(chosen)
        ratios = {"speedup_decode": 2.0, "speedup_decode_ci": [1.5, 2.5], "speedup_whole": None}
        row = {"peer": "auto", "same": 9, "calls": 10, "ttft_ms": 5.0, "ms_per_token": 3.25, "memory_mib": None}
        return [
            {"model": "a", "dtype": "float32", **row, **ratios},
            {"model": "a", "dtype": "float32", "peer": "llama.cpp", "error": "not installed"},
            {"model": "a", "dtype": "float32", "status": "failed: signal 4", "output": "x"},
        ]

    real_weights.run_parts, before = run, real_weights.run_parts
    try:
        assert real_weights.main([*args, "--out", str(tmp_path / "o.jsonl")]) == 0
    finally:
        real_weights.run_parts = before
    assert [(one.name, one.seconds) for one in seen] == [
        ("a-float32", 60.0), ("b-float32", 180.0), ("a-bfloat16", 60.0), ("b-bfloat16", 180.0)
    ]  # fmt: skip
    for one in seen:
        found = build_parser().parse_args(list(one.arguments[2:]))
        assert found.peers == real_weights.PEERS and found.drafters == [*real_weights.DRAFTERS, str(tmp_path / "a")]
    lines = capsys.readouterr().out.splitlines()
    assert "| a | float32 | auto | 9/10 | 5.0 | 3.2 | 2.00 [1.50, 2.50] |  |  |" in lines
    assert "- a float32, llama.cpp: not installed" in lines
    assert "- a float32, the part: failed: signal 4; x" in lines
    with pytest.raises(SystemExit):
        real_weights.main([str(tmp_path)])
    assert "no folder with weights" in capsys.readouterr().err
