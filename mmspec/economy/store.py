"""Measured costs on disk, so that a process starts with the trees that the last one had found best.

One JSON file of numbers for each device, number of threads, shape of the target and drafter, in `costs` of the user's
cache folder. A file that cannot be read or written, or that another program wrote, is ignored: only the first answers
of the process are slower then. `MMSPEC_COST_CACHE=0` turns it off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from mmspec.files import atomic_write, cache_folder, make_private_folder
from mmspec.messages import printable

logger = logging.getLogger("mmspec")

SWITCH = "MMSPEC_COST_CACHE"
"""Environment variable; "0" neither reads nor writes costs."""
FORMAT = "mmspec-costs-3"
FILE_NAME = re.compile(r"[0-9a-f]{24}\.json")
MAX_BYTES = 1 << 20
"""Larger files are not read."""


_TOLD: set[tuple[str, Path]] = set()
_UNCHANGED: ContextVar[bool] = ContextVar("mmspec_unchanged_costs", default=False)


@contextmanager
def unchanged_costs() -> Iterator[None]:
    """Within the context, calls of this thread store no costs: a measurement must not decide for later processes."""
    token = _UNCHANGED.set(True)
    try:
        yield
    finally:
        _UNCHANGED.reset(token)


def cost_folder() -> Path:
    """The folder of all costs."""
    return cache_folder() / "costs"


def cost_files() -> list[Path]:
    """The files of all costs; those of other programs are not listed."""
    return [path for path in sorted(cost_folder().glob("*.json")) if FILE_NAME.fullmatch(path.name)]


def device_description(device: torch.device) -> str:
    """What the speed of a device depends on, as far as it is known: its name, and the threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {_processor_name()} {torch.get_num_threads()} threads"


class CostStore:
    """The file of one drafter on one target and device."""

    def __init__(self, key: Mapping[str, object], folder: Path | None = None) -> None:
        """
        Args:
            key: what the costs depend on, ready for JSON.
            folder: of all costs; None for `costs` in the user's cache folder.
        """
        self.key = json.dumps(key, sort_keys=True)
        folder = cost_folder() if folder is None else folder
        self.path = folder / f"{hashlib.sha256(self.key.encode()).hexdigest()[:24]}.json"

    @staticmethod
    def is_enabled() -> bool:
        """Whether costs are stored at all."""
        return os.environ.get(SWITCH, "1") != "0"

    def read(self, take: Callable[[dict[str, Any]], None]) -> bool:
        """Pass on the content of the file, as it was written; `take` may refuse it. Returns whether it was taken.

        What cannot be used is one line at `INFO` for each file.
        """
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(MAX_BYTES))
            if content["format"] != FORMAT or content["key"] != self.key:
                raise ValueError("it is of another target or another program")
            take(content)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _tell_once("is ignored", self.path, error)
            return False
        return True

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file. Does nothing where it cannot be written, and within `unchanged_costs`."""
        if _UNCHANGED.get():
            return
        content = {"format": FORMAT, "key": self.key, **content}
        try:
            make_private_folder(self.path.parent)
            with atomic_write(self.path) as part:
                part.write_text(json.dumps(content))
        except OSError as error:
            _tell_once("cannot be written", self.path, error)


def _tell_once(what: str, path: Path, error: Exception) -> None:
    """One line for each file of a process: costs are then found anew, as if nothing were known."""
    if (what, path) not in _TOLD:
        _TOLD.add((what, path))
        logger.info("mmspec: %s %s: %s", printable(str(path)), what, printable(str(error))[:200])


def _processor_name() -> str:
    """Model name of the processor, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
