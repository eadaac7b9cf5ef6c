"""`WorkerProcess`: a process that decodes files, its pipes, its time limit, and why it ended.

The other end is `mmspec.vision.video.decode_worker`. Which worker decodes what is decided in
`mmspec.vision.video.decoder_pool`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mmspec.messages import one_line
from mmspec.vision.images import ImageError
from mmspec.vision.video.deadline import Deadline
from mmspec.vision.video.decode_worker import END, READY, read_exactly, read_message, write_message
from mmspec.vision.video.reader import NoFramesError, RecountedError

EXIT_TIMEOUT_S = 5.0
"""Seconds to wait for the exit of a worker that closed its end of the pipe."""
THREAD_WAITS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between attempts to start a thread."""
KILLED = tuple(-getattr(signal, name, default) for name, default in (("SIGKILL", 9), ("SIGALRM", 14)))
"""Exit codes of a worker that did not end itself."""
T = TypeVar("T")
_WORKER_CODE = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path'); "
    "from mmspec.vision.video.decode_worker import run_worker; run_worker(**options)"
)


class DecoderCrashedError(ValueError):
    """The worker process crashed while it decoded a file.

    Attributes:
        was_killed: By a signal that no decoder sends itself: SIGKILL, as the system ran out of memory or somebody ended
            it, or its own alarm before this process's deadline, as both were suspended. The file is then worth another
            attempt.
        exit_code: Of the process; None if it did not end by itself.
    """

    was_killed = False
    exit_code: int | None = None


class DecoderHungError(ValueError):
    """The worker process exceeded its time limit and was killed."""


def worker_command(timeout_s: float, memory: int) -> list[str]:
    """The command line of a worker. It uses this process's module path; the user's main script is not run again."""
    options = {"path": sys.path, "timeout_s": timeout_s, "memory": memory}
    return [sys.executable, "-P", "-c", _WORKER_CODE, json.dumps(options)]


class DecoderStartError(Exception):
    """No worker can be started: the machine lacks processes, threads or memory. It says nothing about any file.

    Neither a `ValueError` nor an `OSError`, which callers take for a fault of the file.
    """

    def __init__(self, cause: object) -> None:
        super().__init__(
            f"no process that decodes files can be started ({cause}): this machine is short of processes, threads or "
            "memory (ulimit -u, the limits of the container)"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, again and again for some seconds if the system has none to give.

    Raises:
        DecoderStartError: It had none.
    """
    for wait_s in (*THREAD_WAITS_S, None):
        try:
            thread.start()
            return
        except RuntimeError as error:
            if wait_s is None:
                raise DecoderStartError(error) from error
            time.sleep(wait_s)


class WorkerProcess:
    """One worker and its pipes. One thread at a time sends requests; any thread may terminate it."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # workers do no numerical work
        allocator = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve more than they use
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | single_thread | allocator,
                start_new_session=True,  # Ctrl-C goes to the parent only
            )
        except (OSError, MemoryError) as error:
            raise DecoderStartError(getattr(error, "strerror", None) or type(error).__name__) from error
        self._timeout_s = timeout_s
        self._timed_out = False

    @property
    def is_alive(self) -> bool:
        """Whether it accepts requests."""
        return not self._timed_out and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait for the message with which a worker begins.

        Raises:
            DecoderStartError: It ended before.
            DecoderCrashedError: It sent something else.
            DecoderHungError: It took longer than a file may.
        """
        try:
            deadline = Deadline(self._timeout_s)
            if self._exchange(deadline, self._read_header) != READY:
                raise self._termination_error(deadline)
        except DecoderCrashedError as error:
            if error.exit_code is None:
                raise
            raise DecoderStartError(error) from error

    def request(
        self,
        header: dict[str, Any],
        deadline: Deadline,
        check: Callable[[dict[str, Any]], tuple[int, int]] = lambda answer: (0, 0),
        body: bytes = b"",
        read_range: Callable[[int, int], bytes] | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and wait for the answer.

        Args:
            header: Header of the request.
            deadline: The worker is killed when it has passed.
            check: Maps the answer's header to (number of parts, bytes of each); KeyError, TypeError or ValueError: it
                is malformed.
            body: Bytes after the header.
            read_range: Answers the worker's own requests for bytes of a file, from their start and number.

        Returns:
            The answer's header, and the parts after it.

        Raises:
            DecoderCrashedError: The worker crashed, or its answer is malformed.
            DecoderHungError: The deadline passed.
            DecoderStartError: There is no thread that could watch it.
            Exception: What `_raise_failure` makes of a failure that the worker reports.
        """

        def exchange() -> tuple[dict[str, Any], list[bytes]]:
            assert self._process.stdin is not None and self._process.stdout is not None
            write_message(self._process.stdin, header, [body])
            while "need" in (answer := self._read_header()):
                self._send_range(read_range, answer["need"])
            count, size = (0, 0) if "failed" in answer else check(answer)
            parts = [read_exactly(self._process.stdout, size) for _ in range(count)]
            if read_exactly(self._process.stdout, len(END)) != END:
                raise ValueError(f"an answer has {count} x {size} bytes; got more.")
            return answer, parts

        answer, parts = self._exchange(deadline, exchange)
        if "failed" in answer:
            _raise_failure(answer)
        return answer, parts

    def _send_range(self, read_range: Callable[[int, int], bytes] | None, need: Sequence[int]) -> None:
        """Send the bytes that the worker needs, or why they cannot be read."""
        assert self._process.stdin is not None
        try:
            if read_range is None:
                raise ValueError("no file was sent")
            start, size = map(int, need)
            data = read_range(start, size)
        except Exception as error:  # file systems raise types of their own
            write_message(self._process.stdin, {"failed": one_line(error)})
        else:
            write_message(self._process.stdin, {"bytes": len(data)}, [data])

    def _read_header(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if (header := read_message(self._process.stdout)) is None:
            raise EOFError
        return header

    def _exchange(self, deadline: Deadline, exchange: Callable[[], T]) -> T:
        """What `exchange` returns, which reads and writes until the deadline."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(deadline, done), name="mmspec-deadline", daemon=True)
        start_thread(watcher)
        try:
            return exchange()
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise self._termination_error(deadline) from error
        finally:
            done.set()
            watcher.join()  # it may be ending it: the next user of this worker must find `is_alive` up to date

    def _watch(self, deadline: Deadline, done: threading.Event) -> None:
        if not deadline.wait(done):
            self._timed_out = True
            self._process.kill()

    def _termination_error(self, deadline: Deadline) -> Exception:
        """Terminate the worker and return the exception that says why it failed."""
        try:
            code: int | None = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.terminate()
        if self._timed_out:
            return DecoderHungError(f"more than {deadline.seconds:g} seconds")
        crashed = DecoderCrashedError(_describe_exit(code))
        crashed.exit_code = code
        crashed.was_killed = code in KILLED
        return crashed

    def terminate(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # data that was not written yet
                pipe.close()


def _raise_failure(answer: dict[str, Any]) -> None:
    """Raise the exception that a worker reports."""
    message = str(answer.get("message", ""))
    exceptions: dict[str, Callable[[], Exception]] = {
        "no_frames": lambda: NoFramesError(message),
        "recounted": lambda: RecountedError(int(answer.get("num_frames", 0))),
        "not_installed": lambda: ImportError(message),
        "memory": MemoryError,
        "image": lambda: ImageError(str(answer.get("kind", "BrokenImage")), message),
    }
    raise exceptions.get(str(answer["failed"]), lambda: RuntimeError(message))()


def _describe_exit(code: int | None) -> str:
    """Why a process ended, from its exit code; None if it still ran."""
    if code is None:
        return "malformed answer"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
