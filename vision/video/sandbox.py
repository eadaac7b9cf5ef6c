"""Limits of the process that decodes files: memory, CPU time, open files, network. As far as the system supports them.

Outside of such a process these functions do nothing. Within `deny_open` the process can open neither a file nor a
connection, except within `allow_open`: a new descriptor would exceed RLIMIT_NOFILE.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

ADDRESS_SPACE_MARGIN = 16 << 30
"""Bytes of address space beyond the memory limit: mapped libraries, reserved arenas, thread stacks."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

_open_denied = False


def limit_process(memory_bytes: int) -> None:
    """Permanently limit this process: memory, no core files, no writes to files, no network. Call before any thread.

    Args:
        memory_bytes: Limit on data; the address space may be larger by `ADDRESS_SPACE_MARGIN`.
    """
    if resource is None:
        return
    _set_limit("RLIMIT_DATA", memory_bytes, hard=True)
    _set_limit("RLIMIT_AS", memory_bytes + ADDRESS_SPACE_MARGIN, hard=True)
    _set_limit("RLIMIT_CORE", 0, hard=True)
    _set_limit("RLIMIT_FSIZE", 0, hard=True)
    _unshare_network()


def _unshare_network() -> None:
    """On Linux, enter a network namespace without interfaces; without the permission, stay in the current one.

    A user namespace is created only for unprivileged users, so nothing loses the rights of root.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        if unshare(_CLONE_NEWNET) and os.geteuid():
            unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def _set_limit(name: str, value: int, hard: bool = False) -> None:
    """Set a resource limit if the system has it; never above the current hard limit."""
    kind = getattr(resource, name, None)
    if kind is None:
        return
    with suppress(ValueError, OSError):
        current: Any = resource.getrlimit(kind)[1]
        if current != resource.RLIM_INFINITY:
            value = min(value, current)
        resource.setrlimit(kind, (value, value if hard else current))


def limit_memory(max_bytes: int) -> None:
    """Set the data limit of this process from now on, up to that of `limit_process`."""
    if resource is not None:
        _set_limit("RLIMIT_DATA", max_bytes)


def limit_cpu_time(seconds: float) -> None:
    """End this process when it has used `seconds` more of CPU time (one core)."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _set_limit("RLIMIT_CPU", math.ceil(used.ru_utime + used.ru_stime + seconds))


@contextmanager
def deny_open() -> Iterator[None]:
    """Within the context no file or socket can be opened."""
    global _open_denied
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _open_denied = True
    _set_free_descriptors(0)
    try:
        yield
    finally:
        _open_denied = False
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def allow_open(count: int) -> Iterator[None]:
    """Within the context `count` files can be opened despite `deny_open`."""
    if not _open_denied:
        yield
        return
    _set_free_descriptors(count)
    try:
        yield
    finally:
        _set_free_descriptors(0)


def _set_free_descriptors(count: int) -> None:
    """Set RLIMIT_NOFILE to the lowest free descriptor plus `count`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    upper = 1 << 10 if hard == resource.RLIM_INFINITY else min(1 << 10, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (upper, hard))
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(upper, lowest_free + count), hard))
