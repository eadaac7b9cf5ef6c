"""Videos and pictures decoded in processes of their own: a hostile file may crash a decoder, or hang it.

`Isolated` opens videos as `mmspec.vision.video.backends` does, with the same errors and two more: the process died, or it took
too long. Samplers run here, so any will do. What these processes may do is in `mmspec.vision.video.sandbox`. Knows nothing of
which reader is tried, or why.
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
from dataclasses import fields
from types import TracebackType
from typing import Any

from PIL import Image

from mmspec.vision.images import ImageError
from mmspec.vision.video.backends import About, EndedEarlyError, NoFramesError, Reader, Size, Source
from mmspec.vision.video.decode_worker import exactly, receive, send

LIMIT_S = 300.0
"""Seconds that one reader may spend on one file."""
STILL_S = 30.0
"""Seconds that one picture may take."""
MEMORY = 8 << 30
"""Bytes that one process may have: several frames of the largest size that is read, and what the decoder keeps."""
ENDS_S = 5.0
"""Seconds for a process to be gone that has closed its end of the pipe."""
ABOUT = tuple(field.name for field in fields(About))
_CODE = "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
_CODE += "from mmspec.vision.video.decode_worker import main; main(**given)"


class DecoderCrashedError(ValueError):
    """The process that decoded a file died."""


class DecoderHungError(ValueError):
    """The process that decoded a file was ended because it took too long."""


def command(limit_s: float, memory: int) -> list[str]:
    """What starts a process. It looks for modules where this one does; the user's own script is not run again."""
    given = {"path": sys.path, "limit_s": limit_s, "memory": memory}
    return [sys.executable, "-P", "-c", _CODE, json.dumps(given)]


class Isolated:
    """Opens videos in processes that are started when needed, kept for the next file, and replaced if they die.

    One process serves one video at a time; threads that read at once have one each. Close it, or use it with `with`.

        with Isolated() as isolated:
            for path in paths:
                frames = read_frames(path, isolated=isolated)

    Args:
        limit_s: seconds that one reader may spend on one file. memory: bytes that one process may have, where the
            system can bound that.

    Raises:
        ValueError: a limit that is not positive.
    """

    def __init__(self, limit_s: float = LIMIT_S, memory: int = MEMORY) -> None:
        if not 0 < limit_s < float("inf") or memory < 1:
            raise ValueError(f"limit_s and memory must be positive and finite; got {limit_s} and {memory}.")
        self.limit_s, self.memory = limit_s, memory
        self._idle, self._all = list[_Child](), set[_Child]()
        self._lock, self._closed = threading.Lock(), False

    def open(self, reader: str, source: Source) -> Reader:
        """A video, opened in another process with the reader of that name.

        Raises:
            DecoderCrashedError, DecoderHungError: see there; also while reading. ImportError: the reader is not
                installed. NoFramesError, MemoryError: as the reader says. RuntimeError: any other of its errors.
        """
        return _Remote(self, self._take(), reader, source)

    def picture(self, source: Source, max_pixels: int) -> Image.Image:
        """A picture, decoded in another process: see `mmspec.vision.images.read_still`.

        Raises:
            ImageError: whatever is wrong with it. DecoderCrashedError, DecoderHungError: see there.
        """
        child = self._take()
        try:
            head: dict[str, Any] = {"do": "picture", "max_pixels": max_pixels}
            body = source if isinstance(source, bytes) else b""
            head |= {"bytes": len(body)} if isinstance(source, bytes) else {"path": os.path.abspath(source)}
            size = (0, 0)

            def parts(answer: dict[str, Any]) -> tuple[int, int]:
                nonlocal size
                size = int(answer["width"]), int(answer["height"])
                if min(size) < 1 or size[0] * size[1] > max_pixels:
                    raise ValueError(f"an answer has at most {max_pixels} pixels; got {size[0]} x {size[1]}.")
                return 1, 3 * size[0] * size[1]

            limit = min(self.limit_s, STILL_S)
            _, data = child.ask(head, time.monotonic() + limit, ("width", "height"), body, parts=parts, limit_s=limit)
            return Image.frombytes("RGB", size, data[0])
        finally:
            self.give_back(child)

    def _take(self) -> _Child:
        """A process that has nothing to do."""
        with self._lock:
            if self._closed:
                raise RuntimeError("these processes were closed; make a new Isolated().")
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                self._drop(child)
            child = _Child(command(self.limit_s, self.memory), self.limit_s)
            self._all.add(child)
            return child

    def give_back(self, child: _Child) -> None:
        """It has nothing to do any more, or is dead."""
        with self._lock:
            if child.alive and not self._closed:
                self._idle.append(child)
            else:
                self._drop(child)

    def _drop(self, child: _Child) -> None:
        child.end()
        self._all.discard(child)

    def close(self) -> None:
        """End all processes, also those at work."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            for child in list(self._all):
                self._drop(child)

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Child:
    """One process, and how to ask it. One thread asks at a time; any may end it."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # nothing is computed there
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | alone,
            start_new_session=True,  # Ctrl-C is for whoever started it
        )
        self._limit_s, self._hung = limit_s, False

    @property
    def alive(self) -> bool:
        """Whether it may be asked."""
        return not self._hung and self._process.poll() is None

    def ask(
        self,
        head: dict[str, Any],
        deadline: float,
        wanted: Sequence[str],
        body: bytes = b"",
        *,
        parts: Callable[[dict[str, Any]], tuple[int, int]] = lambda answer: (0, 0),
        limit_s: float | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to a request: what is `wanted` of it, and so many times so many bytes, as `parts` says of it.

        Raises:
            DecoderCrashedError, DecoderHungError, and what `_raise` makes of a failure that is told.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), self._expire)
        watch.daemon = True
        watch.start()
        try:
            send(self._process.stdin, head, [body])
            answer = receive(self._process.stdout)
            if answer is None:
                raise EOFError
            if "failed" not in answer and set(wanted) - set(answer):
                raise ValueError(f"an answer holds {', '.join(wanted)}; got {', '.join(answer)}.")
            many, size = (0, 0) if "failed" in answer else parts(answer)
            data = [exactly(self._process.stdout, size) for _ in range(many)]
        except (OSError, EOFError, ValueError) as error:
            raise self._death(limit_s or self._limit_s) from error
        finally:
            watch.cancel()
            watch.join()  # it may be at work: whoever takes this process next must see that it is dead
        if "failed" in answer:
            _raise(answer)
        return {name: answer[name] for name in wanted}, data

    def _expire(self) -> None:
        self._hung = True
        self._process.kill()

    def _death(self, limit_s: float) -> Exception:
        """What became of it; it is gone afterwards."""
        try:
            code: int | None = self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            code = None
        self.end()
        if self._hung:
            return DecoderHungError(f"more than {limit_s:g} seconds")
        return DecoderCrashedError(_cause(code))

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was still to be written
                pipe.close()


class _Remote:
    """A video that is open in another process: a `Reader`."""

    def __init__(self, home: Isolated, child: _Child, reader: str, source: Source) -> None:
        self._home, self._child = home, child
        self._deadline = time.monotonic() + home.limit_s
        head: dict[str, Any] = {"do": "open", "reader": reader}
        body = source if isinstance(source, bytes) else b""
        head |= {"bytes": len(body)} if body else {"path": os.path.abspath(source)}
        try:
            self.about = About(**child.ask(head, self._deadline, ABOUT, body)[0])
        except BaseException:
            home.give_back(child)
            raise

    def read(self, chosen: Sequence[int], size: Size) -> tuple[list[Image.Image], list[float]]:
        """See `Reader`."""
        width, height = size
        head = {"do": "read", "chosen": [int(index) for index in chosen], "width": width, "height": height}
        expected = len(chosen), 3 * width * height
        answer, data = self._child.ask(head, self._deadline, ("times",), parts=lambda _: expected)
        return [Image.frombytes("RGB", size, part) for part in data], [float(time) for time in answer["times"]]

    def close(self) -> None:
        """See `Reader`. The process is kept for the next video."""
        if self._child.alive:
            with suppress(DecoderCrashedError, DecoderHungError, RuntimeError):  # what was wanted has been read
                self._child.ask({"do": "close"}, self._deadline, ())
        self._home.give_back(self._child)


def _raise(answer: dict[str, Any]) -> None:
    """The error that was told."""
    told = str(answer.get("told", ""))
    known: dict[str, Callable[[], Exception]] = {
        "nothing": lambda: NoFramesError(told),
        "early": lambda: EndedEarlyError(int(answer.get("total", 0))),
        "missing": lambda: ImportError(told),
        "memory": MemoryError,
        "picture": lambda: ImageError(str(answer.get("kind", "BrokenImage")), told),
    }
    raise known.get(str(answer["failed"]), lambda: RuntimeError(told))()


def _cause(code: int | None) -> str:
    """Why a process ended, by its exit code."""
    if code is None:
        return "its answer makes no sense"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


__all__ = ["LIMIT_S", "MEMORY", "DecoderCrashedError", "DecoderHungError", "Isolated"]
