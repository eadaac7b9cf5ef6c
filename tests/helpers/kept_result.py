"""The last results of the slow tests, a line for each of their files: they run for hours, so in parts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

OUTCOMES = ("passed", "failed", "error", "skipped")
HEADER = "Last results of the slow tests: date, commit, packages, outcomes, seconds of the tests, file"


def write_results(
    file: Path, counts: Mapping[str, Mapping[str, int]], seconds: Mapping[str, float], failed: Mapping[str, list[str]]
) -> None:
    """Replace the lines of the test files that ran; those of others stay.

    Args:
        file: to write.
        counts: {test file: {outcome: tests}}, of `OUTCOMES`; others are left out.
        seconds: {test file: seconds of its tests}.
        failed: {test file: its tests that failed or could not begin}.
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    rows = {}
    if file.exists():
        rows = {line.rpartition(" | ")[2]: line for line in file.read_text(encoding="utf-8").splitlines()[2:]}
    for name, of_file in counts.items():
        total = ", ".join(f"{of_file.get(outcome, 0)} {outcome}" for outcome in OUTCOMES)
        lost = "".join(f"; {test.rpartition('::')[2]}" for test in failed.get(name, ()))
        row = (time.strftime("%Y-%m-%d"), commit, packages, total + lost, f"{seconds.get(name, 0):.0f} s", name)
        rows[name] = " | ".join(row)
    lines = [HEADER, "", *(rows[name] for name in sorted(rows))]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
