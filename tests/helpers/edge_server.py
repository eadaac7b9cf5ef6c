"""`mmspec demo` with small bounds, in a process of its own whose stderr and memory can be looked at."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

IDLE_S = 2.0
MEGABYTES = 2
REQUEST = 5_000_000
HELD = 30_000_000


@dataclass(frozen=True)
class Server:
    """One that runs. root: of its files. log: all that it wrote to stderr."""

    port: int
    pid: int
    root: Path
    log: Path
    events: dict[str, int]
    inputs: dict[int, int]

    @property
    def host(self) -> str:
        """As `Host` has it."""
        return f"127.0.0.1:{self.port}"

    def peak_mb(self) -> float:
        """The most memory it ever had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1000

    def files(self) -> list[Path]:
        """The uploads."""
        return [path for path in (self.root / "uploads").rglob("*") if path.is_file()]


@contextmanager
def running(log: Path) -> Iterator[Server]:
    """Serve until the block is left."""
    command = [sys.executable, str(Path(__file__))]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            told = json.loads(line)
            yield Server(told["port"], process.pid, Path(told["root"]), log, told["events"], dict(told["inputs"]))
        finally:
            process.stdin.close()  # ends it
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def main() -> None:
    """Serve until stdin is closed."""
    from mmspec.app.ui.limits import Limits
    from mmspec.app.ui.middleware.bodies import RequestLimits
    from mmspec.app.ui.model_store import ModelStore
    from mmspec.app.ui.server import serve

    logging.basicConfig(level=logging.INFO)
    bounds = RequestLimits(
        max_request_bytes=REQUEST, max_stored_bytes=HELD, min_free_bytes=0, idle_timeout_s=IDLE_S, base_timeout_s=6.0
    )
    limits = Limits(max_file_mb=MEGABYTES, max_new_tokens=64, max_files=20)
    with serve(ModelStore("tiny"), limits=limits, bounds=bounds, port=0, allowed=["demo.example.org"]) as site:
        site.context.worker.submit(lambda: None).result()
        events = {getattr(fn.fn, "__name__", ""): number for number, fn in site.app.fns.items()}
        inputs = [(number, len(fn.inputs)) for number, fn in site.app.fns.items()]
        told = {
            "port": site.app.server_port,
            "root": str(site.context.temp_storage.root),
            "events": events,
            "inputs": inputs,
        }
        print(json.dumps(told), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
