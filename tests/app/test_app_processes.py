"""Caption jobs as processes of their own: several ranks, the launcher, and interrupts. Kills: `test_app_kills.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job_rows import rows_of

from mmspec.app.cli.main import main
from research.synthetic_images import write_images

TIMES = ("seconds", "ttft_s")
"""Columns that differ from run to run. What the drafter did (rounds, tau) does too: the budget goes by the clock."""
VARYING = (*TIMES, "n_rounds", "tau")


def start(
    *args: object, environ: dict[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        *launcher,
        "-m",
        "mmspec",
        "caption",
        *map(str, args),
        "--model",
        "tiny",
        "--no-progress",
    ]
    extra = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environ or {})}
    folder = Path(__file__).parent  # not the repository root, whose mmspec/ would hide the installed one
    return subprocess.Popen(
        command, env=os.environ | extra, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


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
def test_two_ranks_make_one_file(tmp_path: Path) -> None:
    write_images(tmp_path / "p", 9)
    args = (tmp_path / "p", "--max-new-tokens", 8, "--batch-size", 2)
    ranks = [
        start(*args, "--out", tmp_path / "out.jsonl", environ={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in (0, 1)
    ]
    assert main(["caption", *map(str, args), "--model", "tiny", "--out", str(tmp_path / "one.jsonl")]) == 0
    stderr = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], stderr
    assert "mmspec rank 0: 5 captioned" in stderr[0] and "mmspec rank 1: 4 captioned" in stderr[1]
    assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == list(range(9))
    assert essence(tmp_path / "out.jsonl") == essence(tmp_path / "one.jsonl")
    assert not list(tmp_path.glob("*.rank*"))


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    write_images(tmp_path / "p", 9)
    (tmp_path / "p" / "broken.png").write_text("no picture")
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
                "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip
    run = start(tmp_path / "p", "--max-new-tokens", 8, "--out", tmp_path / "out.jsonl", launcher=launcher)
    stderr = run.communicate(timeout=240)[1]
    assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == list(range(10)), stderr
    assert [bool(row["error"]) for row in rows_of(tmp_path / "out.jsonl")] == [False] * 9 + [True]
    assert run.returncode == 1 and not list(tmp_path.glob("*.rank*"))


@pytest.mark.slow  # its sibling in one process: test_app_jobs.py
def test_ctrl_c_finishes_the_batch_and_explains_how_to_continue(tmp_path: Path) -> None:
    write_images(tmp_path / "p", 40)
    out = tmp_path / "out.jsonl"
    run = start(tmp_path / "p", "--max-new-tokens", 100, "--batch-size", 2, "--out", out)
    wait_for(out, 1, run)
    run.send_signal(signal.SIGINT)
    stderr = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and "run the same command again" in stderr and "Traceback" not in stderr
    assert 0 < len(rows_of(out)) < 40 and len(rows_of(out)) % 2 == 0


def wait_for(out: Path, lines: int, run: subprocess.Popen[str]) -> None:
    """Until `out` has that many lines."""
    while run.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < lines):
        time.sleep(0.002)
