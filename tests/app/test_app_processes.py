"""Caption jobs of several ranks, one after the other and of a launcher. Kills: `test_app_kills.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_rows import rows_of

from mmspec.app.cli.main import main
from research.synthetic_images import write_images

TIMES = ("seconds", "ttft_s")
"""Columns that differ from run to run. What the drafter did (rounds, tau) does too: the budget goes by the clock."""
VARYING = (*TIMES, "n_rounds", "tau")


def essence(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in VARYING} for row in rows_of(path)]


def test_ranks_one_after_the_other_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; the next test has a process for each."""
    write_images(tmp_path / "p", 5)
    args = ["caption", str(tmp_path / "p"), "--max-new-tokens", "4", "--batch-size", "2", "--model", "tiny"]
    assert main([*args, "--out", str(tmp_path / "one.jsonl")]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert main([*args, "--out", str(tmp_path / "out.jsonl")]) == 0
    stderr = capsys.readouterr().err
    assert "mmspec rank 0: 3 captioned" in stderr and "mmspec rank 1: 2 captioned" in stderr
    assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == list(range(5))
    assert essence(tmp_path / "out.jsonl") == essence(tmp_path / "one.jsonl")
    assert not list(tmp_path.glob("*.rank*"))


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    write_images(tmp_path / "p", 9)
    (tmp_path / "p" / "broken.png").write_text("no picture")
    launcher = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    words = f"-m accelerate.commands.launch {launcher} -m mmspec caption --max-new-tokens 8 --model tiny --no-progress"
    command = [sys.executable, *words.split(), str(tmp_path / "p"), "--out", str(tmp_path / "out.jsonl")]
    run = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parent,  # not the repository root, whose mmspec/ would hide the installed one
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == list(range(10)), run.stderr
    assert [bool(row["error"]) for row in rows_of(tmp_path / "out.jsonl")] == [False] * 9 + [True]
    assert run.returncode == 1 and not list(tmp_path.glob("*.rank*"))
