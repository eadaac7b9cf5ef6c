"""The result of a run of the slow tests, in a small file that is kept: they run for hours, and not on every commit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

OUTCOMES = ("passed", "failed", "error", "skipped")


def write_result(file: Path, counts: Mapping[str, int], failed: Sequence[str], seconds: float) -> None:
    """Replace `file`.

    Args:
        file: to write.
        counts: {outcome: tests}, of `OUTCOMES`; others are left out.
        failed: the tests that failed or could not begin.
        seconds: of the run.
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    total = ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in OUTCOMES)
    lines = [f"The last `make slow`: {time.strftime('%Y-%m-%d')}, commit {commit}, {packages}", ""]
    lines += [f"{total}; {seconds / 60:.0f} minutes", *(f"failed: {name}" for name in failed)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
