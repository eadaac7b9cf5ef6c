"""A copy of user code with its state, so that calls of the copy leave no trace in the user's own object."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

MAX_OBJECTS = 10_000
"""What holds more objects is not copied."""
MAX_NUMBERS = 1 << 20
"""A larger tensor is shared by its copies."""
_SHARED = (str, bytes, int, float, type(None), type, nn.Module, ModuleType)
_CONTAINERS = (set, deque, list, dict)

_Note = Callable[[Any], Any]


def private_copy(value: Any) -> Any:
    """A copy of `value` and of what it may change: attributes, containers, what its functions close over, and the
    states of xgrammar and outlines. Models, large tensors and objects without attributes are shared.

    Raises:
        OverflowError: it holds more than `MAX_OBJECTS` objects.
        Exception: of code of the user's that copies.
    """
    return _copy(value, {})


def copied_if_small(value: Any) -> Any:
    """`private_copy`; the object itself if it cannot be copied."""
    try:
        return private_copy(value)
    except Exception:  # also of code of the user's
        return value


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _SHARED):
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    if len(memo) >= MAX_OBJECTS:
        raise OverflowError(f"more than {MAX_OBJECTS} objects")

    def note(copied: Any) -> Any:
        memo[id(value)] = value, copied  # the value itself, so that its id stays its own
        return copied

    if callable(getattr(value, "fork", None)):  # `xgrammar.GrammarMatcher`
        return note(value.fork())
    if isinstance(value, Tensor):
        return note(value.clone() if value.numel() <= MAX_NUMBERS else value)
    if isinstance(value, (FunctionType, MethodType, partial)):
        return _copy_function(value, memo, note)
    if isinstance(value, _CONTAINERS) or type(value) is tuple:
        return _copy_container(value, memo, note)
    if hasattr(value, "rollback_state"):  # `outlines_core.Guide`
        return note(copy.deepcopy(value))
    if not hasattr(value, "__dict__"):
        return note(value)
    copied = note(copy.copy(value))
    for name, item in vars(value).items() if copied is not value else ():
        vars(copied)[name] = _copy(item, memo)
    return copied


def _copy_container(value: Any, memo: dict[int, Any], note: _Note) -> Any:
    if isinstance(value, tuple):
        return note(tuple(_copy(item, memo) for item in value))
    copied = note(copy.copy(value))
    if not isinstance(value, set):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            copied[key] = _copy(item, memo)
    return copied


def _copy_function(value: Any, memo: dict[int, Any], note: _Note) -> Any:
    if isinstance(value, MethodType):
        return note(MethodType(value.__func__, _copy(value.__self__, memo)))
    if isinstance(value, partial):
        return note(partial(*_copy((value.func, *value.args), memo), **_copy(value.keywords, memo)))
    cells = tuple(CellType() for _ in value.__closure__ or ())
    copied = note(FunctionType(value.__code__, value.__globals__, value.__name__, None, cells))
    copied.__defaults__, copied.__kwdefaults__ = _copy(value.__defaults__, memo), _copy(value.__kwdefaults__, memo)
    for cell, own in zip(cells, value.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copy(own.cell_contents, memo)
        except ValueError:  # an empty cell
            continue
    copied.__dict__.update(_copy(vars(value), memo))
    return copied
