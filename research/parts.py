"""Measurements in parts, each a command in a process of its own with a time limit; what was measured is kept.

A part writes its rows to a JSON file while it runs. Once it has ended, however that was, they are appended to one file
of JSON lines, and after them a line about the part itself: `ok`, `failed: ...`, `stopped after N s`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.messages import printable

MIN_SECONDS = 5.0
"""With less time left no part begins."""
GRACE_SECONDS = 3.0
"""Between the signal that asks a part to end and the one that ends it."""


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: in the rows.
        arguments: of Python, as in `-m research.bench`; `{json}` in them stands for the file of its rows.
        seconds: that it may take.
        about: further columns of its rows.
    """

    name: str
    arguments: Sequence[str]
    seconds: float
    about: dict[str, Any]


def run_parts(parts: Sequence[Part], out: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run the parts one after the other; returns all rows.

    Args:
        out: the file of JSON lines; beside it `NAME.log` of each part. It is replaced.
        limit_s: seconds for all; a part that would go beyond is stopped.
    """
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    with out.open("w", encoding="utf-8") as stream:
        for part in parts:
            left = limit_s - (time.monotonic() - start)
            rows: list[dict[str, Any]] = []
            status: dict[str, Any] = {"status": "not run: no time left"}
            if left >= MIN_SECONDS:
                rows, status = _run(part, out, min(part.seconds, left))
            for row in [*rows, status]:
                found.append({"part": part.name, **part.about, **row})
                stream.write(json.dumps(found[-1]) + "\n")
                stream.flush()
            print(f"{part.name}: {len(rows)} rows, {status['status']}", file=sys.stderr, flush=True)
    return found


def _run(part: Part, out: Path, seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a part, and how it ended."""
    file, log = (out.with_name(f"{out.stem}.{part.name}.{suffix}") for suffix in ("json", "log"))
    file.unlink(missing_ok=True)
    command = [sys.executable, *(str(file) if word == "{json}" else word for word in part.arguments)]
    begin = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        is_late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
    status = f"stopped after {seconds:.0f} s" if is_late else _describe(process.returncode)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = printable(lines[-1])[:300] if lines and status != "ok" else None
    return _read(file), {"status": status, "seconds": round(time.monotonic() - begin, 1), "output": last}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs, and the processes that it has started."""
    for number, wait in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                continue


def _describe(code: int) -> str:
    return "ok" if code == 0 else f"failed: signal {-code}" if code < 0 else f"failed: exit code {code}"


def _read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of `research.bench`, of whichever kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found: list[dict[str, Any]] = []
    for one in content if isinstance(content, list) else [content]:
        about = {key: value for key, value in one.items() if key in ("shape", "dtype")}
        rows = one.get("rows", [one])
        found += [about | row for row in rows if row.get("category", "all") == "all"]
        skipped = {**one.get("skipped", {}), **one.get("left_out", {})}
        found += [{"peer": peer, "error": reason} for peer, reason in skipped.items()]
        found += [{"note": note} for note in one.get("notes", ())]
    return found
