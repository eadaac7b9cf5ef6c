"""Whether `backend="auto"` may record on a device: a check in a process of its own, once per device and versions.

A failed capture can leave a process without a usable GPU, and an inexact one would change texts. So the first call that
would be recorded starts the check (`mmspec.app.device_probe`) in the background and runs unrecorded, as do all calls
until there is a verdict. It is one JSON file in `device-checks` of the user's cache folder, and holds for all later
processes with the same device, torch, CUDA, transformers, mmspec and `SETTINGS`. `MMSPEC_DEVICE_CHECK=0` turns check
and recording off, but for `backend="recorded"`. Whatever prevents a verdict (no rights to start a process, a folder
that cannot be written, a full device) means: not recorded in this process, one line, no error. A process that ends
earlier ends the check.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmspec.files import atomic_write, cache_folder, make_private_folder

try:
    import fcntl
except ImportError:  # Windows: two processes may check at the same time
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("mmspec")

CHECK_SWITCH = "MMSPEC_DEVICE_CHECK"
"""Environment variable; "0" neither checks devices nor records on them, unless `backend="recorded"`."""
SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that decide whether and what a GPU captures."""
CHECK_FORMAT = "mmspec-device-check-1"
CHECK_FILE = re.compile(r"[0-9a-f]{24}\.(json|lock)")
DEVICE_CHECK_TIMEOUT_S = 120.0
RETRY_S = 5.0
"""Seconds until a process looks again for the verdict of another one that is checking."""
MAX_FILE_BYTES = 1 << 16
PROBE_MODULE = "mmspec.app.device_probe"
_PROBE_CODE = f"""
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module({PROBE_MODULE!r}, None, "__main__")
"""
"""Imports mmspec from where this process has it."""
CRASH_SIGNALS = tuple(
    -getattr(signal, name) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
)
"""Exit codes of a process that a fault has ended. Others (killed, interrupted) are no verdict."""
WINDOWS_FAULT = 0xC0000000
"""Exit codes from here on are faults on Windows."""


class NoVerdictError(Exception):
    """The check could not be made."""


def check_folder() -> Path:
    """The folder of all verdicts."""
    return cache_folder() / "device-checks"


def check_files() -> list[Path]:
    """The files of all verdicts, and of the locks held while checking; those of other programs are not listed."""
    return [path for path in sorted(check_folder().glob("*.*")) if CHECK_FILE.fullmatch(path.name)]


def device_key(device: torch.device) -> dict[str, Any]:
    """What a verdict depends on."""
    is_cuda = device.type == "cuda"
    return {
        "format": CHECK_FORMAT,
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if is_cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "transformers": importlib.metadata.version("transformers"),
        "mmspec": _source_digest(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


@functools.cache
def _source_digest() -> str:
    """A hash of mmspec's own files: a checkout changes without its version."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


class DeviceChecks:
    """The verdicts on the devices of this process. Threads may share the object."""

    def __init__(
        self, command: Callable[[torch.device], Sequence[str]] | None = None, timeout_s: float = DEVICE_CHECK_TIMEOUT_S
    ) -> None:
        """
        Args:
            command: of the process that checks a device; None for that of `PROBE_MODULE`.
            timeout_s: after which it is killed.
        """
        self._command = command or probe_command
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._verdicts: dict[str, bool] = {}  # by key
        self._threads: dict[str, threading.Thread] = {}
        self._retry_at: dict[str, float] = {}
        self._keys: dict[torch.device, dict[str, Any] | None] = {}  # None: cannot be checked

    def passed(self, device: torch.device) -> bool:
        """Whether recordings on the device are known to be exact. Starts the check if there is no verdict."""
        if os.environ.get(CHECK_SWITCH, "1") == "0":
            return False
        with self._lock:
            if device not in self._keys:
                try:
                    check_folder()
                    self._keys[device] = device_key(device)
                except Exception as error:  # no home folder, files that cannot be read, no metadata of a package
                    self._keys[device] = None
                    self._warn_unchecked(device, error)
            expected = self._keys[device]
            if expected is None:
                return False
            key = json.dumps(expected, sort_keys=True)
            thread = self._threads.get(key)
            is_running = thread is not None and thread.is_alive()
            if key in self._verdicts or is_running or time.monotonic() < self._retry_at.get(key, 0.0):
                return self._verdicts.get(key, False)
            file = verdict_path(key)
            verdict = read_verdict(file, expected)
            if verdict is not None:
                self._verdicts[key] = verdict["passed"]
                if not verdict["passed"]:
                    logger.info("mmspec: rounds are not recorded on %s (%s; %s)", device, verdict["reason"], file)
                return self._verdicts[key]
            thread = threading.Thread(target=self._check, args=(device, key, file), daemon=True, name="mmspec-check")
            self._threads[key] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is shutting down
                self._give_up(key, device, error)
            return False

    def wait(self) -> None:
        """Wait for the checks that are running."""
        for thread in list(self._threads.values()):
            thread.join()

    def settle(self, device: torch.device) -> bool:
        """The same as `passed`, after waiting for the check: for measurements, in which nothing should change."""
        self.passed(device)
        self.wait()
        return self.passed(device)

    def _check(self, device: torch.device, key: str, file: Path) -> None:
        """Find a verdict and store it; in a thread of its own."""
        try:
            with _locked(file.with_suffix(".lock")) as is_locked:
                expected = json.loads(key)
                verdict = read_verdict(file, expected)  # of a process that has just finished
                if verdict is None and not is_locked:
                    self._retry_at[key] = time.monotonic() + RETRY_S
                    return
                if verdict is None:
                    name = expected["device"]
                    logger.info("mmspec: checking recorded rounds on %s, once: about 20 s, in the background", name)
                    verdict = {"key": expected} | run_probe(self._command(device), expected, self._timeout_s)
                    _write_verdict(file, verdict)
                    if verdict["passed"]:
                        logger.info("mmspec: recorded rounds are exact on %s; rounds are recorded from now on", name)
                    else:
                        logger.warning("mmspec: rounds are not recorded on %s: %s", name, verdict["reason"])
            self._verdicts[key] = verdict["passed"]
        except Exception as error:  # whatever it is, the user's calls go on
            self._give_up(key, device, error)

    def _give_up(self, key: str, device: torch.device, error: Exception) -> None:
        """No verdict in this process."""
        self._verdicts[key] = False
        self._warn_unchecked(device, error)

    def _warn_unchecked(self, device: torch.device, error: Exception) -> None:
        reason = str(error) if isinstance(error, NoVerdictError) else f"{type(error).__name__}: {error}"
        logger.warning("mmspec: recorded rounds on %s cannot be checked, so they are not used (%s)", device, reason)


def verdict_path(key: str) -> Path:
    """The file of a verdict."""
    return check_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def stored_verdicts() -> list[dict[str, Any]]:
    """All verdicts that are stored, of other versions as well."""
    found = (read_verdict(path) for path in check_files() if path.suffix == ".json")
    return [verdict for verdict in found if verdict is not None]


def read_verdict(path: Path, key: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """A stored verdict (`key`, `passed`, `reason`); None if there is none, or if it is not the user's own.

    Args:
        path: of the file.
        key: what it must be about; None for whatever it is.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                raise ValueError("other users can write it")
            content = json.loads(file.read(MAX_FILE_BYTES))
        found = content["key"]
        is_other = found["format"] != CHECK_FORMAT if key is None else found != key
        if is_other or not isinstance(content["passed"], bool):
            raise ValueError("it is of another device or another program")
        return {"key": found, "passed": content["passed"], "reason": str(content["reason"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.info("mmspec: %s is ignored: %s", path, error)
        return None


def probe_command(device: torch.device) -> list[str]:
    """The command that checks a device.

    Raises:
        NoVerdictError: this interpreter cannot be started again: there is none, or the program is a frozen one, which
            would start itself.
    """
    python = sys.executable
    if not python or getattr(sys, "frozen", False) or not Path(python).name.lower().startswith(("python", "pypy")):
        raise NoVerdictError(f"no Python interpreter to start: sys.executable is {python!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    return [python, "-P", "-c", _PROBE_CODE, paths, "--device", str(device)]


def run_probe(
    command: Sequence[str], key: Mapping[str, Any], timeout_s: float = DEVICE_CHECK_TIMEOUT_S
) -> dict[str, Any]:
    """Run the check in a process of its own, which ends with this one.

    Returns:
        {"passed": bool, "reason": str or None}.

    Raises:
        NoVerdictError: the process was not the one to judge by: it could not import mmspec, saw another device, was
            killed from outside, or found the device occupied.
        OSError: it could not be started.
    """
    environment = os.environ | {CHECK_SWITCH: "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # an interrupt from the keyboard is for this process only
    )
    try:
        atexit.register(process.kill)  # refused while the interpreter ends
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"passed": False, "reason": f"the check took more than {timeout_s:g} s"}
    finally:
        atexit.unregister(process.kill)
        process.kill()
        process.wait()
    code = process.returncode
    try:
        content = json.loads(stdout.splitlines()[-1])
        passed, reason, found = content["passed"], content["reason"], content["key"]
    except (IndexError, ValueError, KeyError, TypeError):
        if code in CRASH_SIGNALS or code >= WINDOWS_FAULT:
            return {"passed": False, "reason": f"the process of the check died (exit code {code})"}
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise NoVerdictError(f"its process ended with exit code {code}: {last[:200]}") from None
    if passed is None:
        raise NoVerdictError(str(reason))
    if found != key:
        raise NoVerdictError(f"its process saw {found}, this one {dict(key)}")
    return {"passed": bool(passed), "reason": reason}


def _write_verdict(path: Path, verdict: Mapping[str, Any]) -> None:
    with atomic_write(path) as part:
        part.touch(mode=0o600)
        part.write_text(json.dumps(verdict))


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Context in which no other process checks the same device; False if one does.

    Raises:
        OSError: the folder cannot be written.
    """
    make_private_folder(path.parent)
    with path.open("ab") as file:
        if fcntl is None:
            yield True
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True  # closing the file releases it


DEVICE_CHECKS = DeviceChecks()
"""Those of this process."""
