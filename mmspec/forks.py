"""What a forked child needs (workers of a server that loads the model first, of a data loader).

Only the thread that forks lives on in the child. A lock that another one held is never released there, and the OpenMP
threads of the one that lives on (GNU OpenMP, of torch) are gone, but waited for: a child whose parent has computed with
several threads computes with one, as the workers of torch's `DataLoader` do.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from typing import Any, Self, TypeVar

import torch

L = TypeVar("L")

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Here(threading.local):
    """Whether this thread has computed with several OpenMP threads."""

    has_team = False


_HERE = _Here()


def free_in_child(lock: L) -> L:
    """The lock, which is free in a forked child. Not for locks that are held while user code runs, which may fork."""
    _LOCKS.add(lock)
    return lock


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child."""
    return free_in_child(threading.Lock())


class Locked:
    """What threads share. A deep copy is made while nobody changes it, and has a lock of its own.

    Attributes:
        lock: held while it changes.
    """

    def __init__(self) -> None:
        self.lock = new_lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = copy.copy(self)
        twin.lock = new_lock()
        with self.lock:
            own = {name: value for name, value in vars(self).items() if name != "lock"}
            vars(twin).update(copy.deepcopy(own, memo))
        return twin


def note_threads() -> None:
    """To be called before this thread computes."""
    if torch.get_num_threads() > 1:
        _HERE.has_team = True


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()
    if _HERE.has_team:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
