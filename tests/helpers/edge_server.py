"""`mmspec demo` with small limits, in a child process whose stderr and memory a test can inspect."""

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

IDLE_TIMEOUT_S = 2.0
MAX_FILE_MB = 2
MAX_REQUEST_BYTES = 5_000_000
MAX_STORED_BYTES = 30_000_000


@dataclass(frozen=True)
class ServerProcess:
    """A running server.

    Attributes:
        port: of 127.0.0.1.
        pid: of the process.
        root: folder of its temporary files.
        log: file with its stderr.
        events: {handler name: number of the event}.
        inputs: {number of the event: number of inputs}.
    """

    port: int
    pid: int
    root: Path
    log: Path
    events: dict[str, int]
    inputs: dict[int, int]

    @property
    def host(self) -> str:
        """Value of `Host`."""
        return f"127.0.0.1:{self.port}"

    def peak_mb(self) -> float:
        """Peak resident memory in MB."""
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert match is not None
        return int(match[1]) / 1000

    def files(self) -> list[Path]:
        """All stored uploads."""
        return [path for path in (self.root / "uploads").rglob("*") if path.is_file()]


@contextmanager
def run_server(log: Path) -> Iterator[ServerProcess]:
    """Serve until the block is left; stderr goes to `log`."""
    command = [sys.executable, str(Path(__file__))]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            info = json.loads(line)
            inputs = dict(info["inputs"])
            yield ServerProcess(info["port"], process.pid, Path(info["root"]), log, info["events"], inputs)
        finally:
            process.stdin.close()  # ends the server
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def main() -> None:
    """Serve until stdin is closed; the first line on stdout describes the server as JSON."""
    from mmspec.app.ui.limits import Limits
    from mmspec.app.ui.middleware.bodies import RequestLimits
    from mmspec.app.ui.model_store import ModelStore
    from mmspec.app.ui.server import serve

    logging.basicConfig(level=logging.INFO)
    request_limits = RequestLimits(
        max_request_bytes=MAX_REQUEST_BYTES,
        max_stored_bytes=MAX_STORED_BYTES,
        min_free_bytes=0,
        idle_timeout_s=IDLE_TIMEOUT_S,
        base_timeout_s=6.0,
    )
    limits = Limits(max_file_mb=MAX_FILE_MB, max_new_tokens=64, max_files=20)
    store = ModelStore("tiny")
    with serve(store, limits=limits, request_limits=request_limits, port=0, allowed=["demo.example.org"]) as server:
        server.context.worker.submit(lambda: None).result()
        info = {
            "port": server.app.server_port,
            "root": str(server.context.temp_storage.root),
            "events": {getattr(fn.fn, "__name__", ""): number for number, fn in server.app.fns.items()},
            "inputs": [(number, len(fn.inputs)) for number, fn in server.app.fns.items()],
        }
        print(json.dumps(info), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
