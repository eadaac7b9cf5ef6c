"""What a call changes for a while outside itself, and undoes however it ends: names in dicts, context variables, modes.

A signal handler, or another thread, may raise at any moment, also between `__enter__` and the first line of a `with`
block, or before the first line of `__exit__`. So three rules hold. A change is noted before it is made, and undoing
what is not done does nothing. `undone` undoes, at the end of a call, what its contexts have left, and twice. And what
two such errors leave is undone when the next change is made, or by `undo_lost`.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, ParamSpec, Self, TypeVar

import torch

from mmspec.forks import free_in_child

P = ParamSpec("P")
R = TypeVar("R")

_NUMBERS = itertools.count()
_MISSING: Any = object()


class _Call(list["Undoable"]):
    """What a call has changed, in this order. Only its frame holds it."""


class _Here(threading.local):
    """The call that runs in this thread."""

    call: weakref.ref[_Call] | None = None


_HERE = _Here()


class Undoable:
    """Context of a change that lasts until its end."""

    def __enter__(self) -> Self:
        call = None if _HERE.call is None else _HERE.call()
        try:
            if call is not None:
                call.append(self)
            self._make()
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()
        call = None if _HERE.call is None else _HERE.call()
        if call is not None and call[-1:] == [self]:
            call.pop()

    def _make(self) -> None:
        """Make the change. It may be interrupted anywhere."""
        raise NotImplementedError

    def _undo(self) -> None:
        """Undo what is made of it; nothing if nothing is."""
        raise NotImplementedError


def undone(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: what this thread has changed meanwhile is undone when the function ends, in whatever way."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        outer, call = _HERE.call, _Call([_GradMode()])
        try:
            try:
                _HERE.call = weakref.ref(call)
                return function(*args, **kwargs)
            finally:
                _undo_all(call)
        finally:  # the other may have been interrupted
            _HERE.call = outer
            _undo_all(call)

    return run


def _undo_all(call: _Call) -> None:
    for change in reversed(call):
        change._undo()


# --- modes of torch ---------------------------------------------------------------------------------------------------


class _GradMode(Undoable):
    """Whether there are gradients, which `torch.no_grad` leaves as it is where it is interrupted at its end."""

    def __init__(self) -> None:
        self._is_enabled = torch.is_grad_enabled()

    def _undo(self) -> None:
        torch.set_grad_enabled(self._is_enabled)


class InferenceMode(ContextDecorator, Undoable):
    """`torch.inference_mode`, which where it is interrupted at its end goes on until somebody drops the traceback."""

    _guard: Any = None

    def _recreate_cm(self) -> Self:
        return type(self)()

    def _make(self) -> None:
        self._guard = torch._C._InferenceMode(True)

    def _undo(self) -> None:
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None


# --- names in dicts ---------------------------------------------------------------------------------------------------


class _Name:
    """A name in a dict whose value is replaced.

    Attributes:
        names: the dict.
        name: the name.
        original: its value, or `_MISSING`.
        replacement: what stands there instead.
        users: numbers of the contexts for which it does.
    """

    __slots__ = ("name", "names", "original", "replacement", "users")

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self.names = names
        self.name = name
        self.original = self.replacement = _MISSING
        self.users: set[int] = set()

    def replace(self, make: Callable[[int, Any], Any], index: int) -> None:
        """Replace the value, unless that is done already."""
        current = self.names.get(self.name, _MISSING)
        if current is _MISSING or current is not self.replacement:
            self.original = current
            self.replacement = make(index, None if current is _MISSING else current)
            self.names[self.name] = self.replacement

    def restore(self) -> None:
        """Put the value back, unless that is done already, or user code has replaced it in the meantime."""
        if self.replacement is not _MISSING and self.names.get(self.name) is self.replacement:
            if self.original is _MISSING:
                del self.names[self.name]
            else:
                self.names[self.name] = self.original


_LOCK = free_in_child(threading.RLock())
"""Held while the following change."""
_REPLACED: dict[tuple[int, str], _Name] = {}
"""{(id of a dict, name)}; the dict is held, so that its id is not given to another one"""
_USERS: dict[int, weakref.ref[Replaced]] = {}
"""{number of a context that replaces names}"""


class Replaced(Undoable):
    """Context in which names in dicts have other values. Several calls may replace one name at the same time.

    Attributes:
        number: distinguishes it from others.
        thread: in which it is entered.
    """

    def __init__(self, names: Iterable[tuple[dict[str, Any], str]], make: Callable[[int, Any], Any]) -> None:
        """
        Args:
            names: dicts, such as the `__dict__` of a module, and the name in each.
            make: makes a replacement from the index and the value (None if there is none), for the first of the
                contexts that replace it.
        """
        self.number = next(_NUMBERS)
        self.thread = threading.get_ident()
        self._names = list(names)
        self._make_value = make

    def _make(self) -> None:
        with _LOCK:
            undo_lost()
            _USERS[self.number] = weakref.ref(self)
            for index, (names, name) in enumerate(self._names):
                key = id(names), name
                if key not in _REPLACED:
                    _REPLACED[key] = _Name(names, name)
                found = _REPLACED[key]
                found.users.add(self.number)
                found.replace(self._make_value, index)

    def _undo(self) -> None:
        with _LOCK:
            for names, name in self._names:
                if (found := _REPLACED.get((id(names), name))) is not None:
                    _drop_users(found, {self.number})
            _USERS.pop(self.number, None)


def undo_lost() -> None:
    """Undo what was replaced for contexts that are gone, and that an interrupt has kept from undoing it."""
    with _LOCK:
        lost = {number for number, user in _USERS.items() if user() is None}
        if lost:
            _undo_for(lost)


def _undo_for(users: set[int]) -> None:
    for found in list(_REPLACED.values()):
        _drop_users(found, users)
    for number in users:
        _USERS.pop(number, None)


def _drop_users(found: _Name, users: set[int]) -> None:
    found.users -= users
    if not found.users:
        found.restore()
        _REPLACED.pop((id(found.names), found.name), None)


def _forget_other_threads() -> None:
    """In a child after a fork: the other threads do not exist there, whatever they were doing."""
    thread = threading.get_ident()
    _undo_for({number for number, user in _USERS.items() if (one := user()) is None or one.thread != thread})


os.register_at_fork(after_in_child=_forget_other_threads)


# --- context variables ------------------------------------------------------------------------------------------------


class VariableSet(Undoable):
    """Context in which a context variable has a value; its default is None."""

    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self._variable = variable
        self._value = value
        self._before = variable.get()

    def _make(self) -> None:
        self._variable.set(self._value)

    def _undo(self) -> None:
        if self._variable.get() is self._value:
            self._variable.set(self._before)
