"""What a caption job writes to standard error while it runs: one bar or lines, warnings above it, a true summary."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import test_app_jobs as jobs
from caption_jobs import Fake
from PIL import Image

from mmspec.app.caption import progress
from mmspec.app.caption.progress import CaptionProgress, comparison_lines, format_duration, print_stderr
from mmspec.app.io.jsonl import Row
from mmspec.app.modeling.captioner import ComparisonTotals


def row(error: bool = False) -> Row:
    failure = {"type": "Broken", "message": "is broken"} if error else None
    return {"file_name": "a", "error": failure, "n_new_tokens": 9, "n_rounds": 4, "seconds": 0.1}


def screen(written: str) -> list[str]:
    """The lines that a terminal shows: a carriage return overwrites the line from its beginning."""
    lines = []
    for line in written.split("\n"):
        shown: list[str] = []
        for part in line.replace("\x1b[A", "").split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return [line for line in lines if line]


def test_there_is_one_bar_and_warnings_are_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    library = logging.getLogger("a.library")
    library.addHandler(logging.StreamHandler(stream))
    library.propagate = False
    with CaptionProgress(10, 3, True, "caption") as bar:
        for number in range(4):
            bar.add([row(error=number == 2)])
            print_stderr(f"mmspec: line {number}")
            library.warning("record %d", number)
            text = warnings.formatwarning(f"warning {number}", UserWarning, "a.py", 1)  # as `warnings.warn` writes it
            print(text, end="", file=sys.stderr)
            print("printed", number, file=sys.stderr)
    assert sys.stderr is stream, "the stream is given back"
    shown = screen(stream.getvalue())
    for number in range(4):
        assert f"mmspec: line {number}" in shown and f"record {number}" in shown and f"printed {number}" in shown
        assert any(line.endswith(f"UserWarning: warning {number}") for line in shown)
    bars = [line for line in shown if "caption:" in line]
    assert len(bars) == 1 and bars[0] == shown[-1]
    assert re.search(r"7/10 \[\d\d:\d\d<\d\d:\d\d, .*image.*, tau 2\.00, 1 errors\]", bars[0]), bars
    library.handlers.clear()


def test_without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    with CaptionProgress(10, 3, None, "caption") as lines:
        time.sleep(0.05)
        lines.add([row(), row(error=True)])
        time.sleep(0.1)
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("mmspec: caption: 3 of 10 images, 0.00 images/s") and "left" not in err[0]
    assert re.fullmatch(r"mmspec: caption: 5 of 10 images, [\d.]+ images/s, tau 2\.00, 1 errors, \d+ s left", err[-1])
    number = len(err)
    time.sleep(0.05)
    assert number >= 2 and capsys.readouterr().err == "", "nothing after the end"
    with CaptionProgress(None, 0, False, "caption"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    assert "5 images" in CaptionProgress(None, 5, False, "caption").line()


def test_what_an_earlier_run_did_is_no_speed_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with progress.Progress("train", 100, "step", show=False) as steps:
        steps.resume(10)
        clock[0] = 30.0
        steps.update(15, "loss 0.500")
    assert steps.line() == "mmspec: train: 25 of 100 steps, 0.50 steps/s, loss 0.500, 2 min left"


def test_durations() -> None:
    assert [format_duration(one) for one in (3.2, 89, 91, 3600, 12_000)] == [
        "3 s",
        "89 s",
        "2 min",
        "60 min",
        "3 h 20 min",
    ]


def test_a_comparison_states_the_speed_that_it_measured() -> None:
    totals = ComparisonTotals(rows=10, identical=10, plain_s=12.0, patched_s=8.0)
    expected = (
        "identical: 10/10 to plain generate; 1.50 times its speed (12.0 s and 8.0 s in generate without the first"
    )
    assert comparison_lines(totals, False) == [f"{expected} batch)"]
    assert "too little to measure" in comparison_lines(ComparisonTotals(rows=4, identical=4), False)[0]
    assert comparison_lines(ComparisonTotals(), False) == []


def test_the_summary_agrees_with_the_file(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p").mkdir()
    for number in range(10):
        Image.new("RGB", (10 + number, 8)).save(tmp_path / "p" / f"{number}.png")
    (tmp_path / "p" / "3.png").write_bytes(b"broken")
    assert jobs.job(tmp_path, Fake()).run() == 1
    err = capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert f"{len(rows)} rows in {tmp_path}/out.jsonl, {sum(bool(one['error']) for one in rows)} of them errors" in err
    assert jobs.job(tmp_path).run() == 1
    assert "10 rows in" in capsys.readouterr().err


def test_something_is_said_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom mmspec.app.cli.main import main\n"
        "class Stop(BaseException): pass\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': raise Stop\n"
        "sys.meta_path.insert(0, Finder())\n"
        "try: main(['caption', 'a.png', '--model', 'some/model'])\n"
        "except Stop: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("mmspec: loading some/model ..."), done.stderr
