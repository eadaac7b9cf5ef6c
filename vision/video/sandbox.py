"""What the process that decodes may do: memory, CPU time, open files, network. Where the system can bound that.

Outside of such a process these functions do nothing. While a process is sealed it cannot open anything, neither a file
nor a connection, except within `files`: a new descriptor would lie above the limit.
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

ADDRESSES = 16 << 30
"""Bytes of address space beyond the memory limit: mapped libraries, reserved arenas and stacks of threads."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000

_sealed = False


def confine(memory: int) -> None:
    """Bound this process for good: memory, no core files, no writing to files, no network. Call it before any thread.

    Args:
        memory: bytes of data; the address space may have `ADDRESSES` more.
    """
    if resource is None:
        return
    bounds = [("RLIMIT_DATA", memory), ("RLIMIT_AS", memory + ADDRESSES), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0)]
    for name, most in bounds:
        _limit(name, most, hard=True)
    _leave_network()


def _leave_network() -> None:
    """On Linux, a network of its own, without an interface. A user that may not have one keeps the usual one.

    A namespace of users is only made where nothing depends on the rights of root.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        if unshare(_NEW_NETWORK) and os.geteuid():
            unshare(_NEW_USER | _NEW_NETWORK)


def _limit(name: str, most: int, hard: bool = False) -> None:
    """Set a limit that the system knows; one that is lower already stays."""
    what = getattr(resource, name, None)
    if what is None:
        return
    with suppress(ValueError, OSError):
        highest: Any = resource.getrlimit(what)[1]
        if highest != resource.RLIM_INFINITY:
            most = min(most, highest)
        resource.setrlimit(what, (most, most if hard else highest))


def memory(most: int) -> None:
    """Bytes of data that this process may have from now on, up to the limit of `confine`."""
    if resource is not None:
        _limit("RLIMIT_DATA", most)


def cpu(seconds: float) -> None:
    """CPU time that this process may use from now on, in seconds of one core; more ends it."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit("RLIMIT_CPU", math.ceil(used.ru_utime + used.ru_stime + seconds))


@contextmanager
def sealed() -> Iterator[None]:
    """Open nothing meanwhile."""
    global _sealed
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _sealed = True
    _allow(0)
    try:
        yield
    finally:
        _sealed = False
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def files(count: int) -> Iterator[None]:
    """Let this process open so many files meanwhile, if it is sealed."""
    if not _sealed:
        yield
        return
    _allow(count)
    try:
        yield
    finally:
        _allow(0)


def _allow(count: int) -> None:
    """Set the limit to the first descriptor that is free, plus `count`."""
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wide = 1 << 10 if highest == resource.RLIM_INFINITY else min(1 << 10, highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wide, highest))
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wide, free + count), highest))


__all__ = ["confine", "cpu", "files", "memory", "sealed"]
