"""State of modules under test: a fingerprint, a copy, and its restoration, with Python's random generators."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.live import reread

DRAWS_RANDOM_NUMBERS = "a forward that draws random numbers"


@contextmanager
def restore_state(modules: Sequence[nn.Module]) -> Iterator[Callable[[], str | None]]:
    """Restore attributes and buffers of modules afterwards, and the generators of Python and NumPy if they moved.

    Without modules nothing is restored: those generators belong to the whole process, and only users' own modules draw
    from them.

    Yields:
        A function that describes what has changed since, or returns None.
    """
    if not modules:
        yield lambda: None
        return
    saved = [(module, _copy_state(module)) for module in modules]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()

    def state_change() -> str | None:
        numpy_changed = numpy is not None and repr(numpy.random.get_state()) != repr(numpy_state)
        if random.getstate() != python_state or numpy_changed:
            return DRAWS_RANDOM_NUMBERS
        stateful = any(not _equal(before, _copy_state(module)) for module, before in saved)
        return "a forward that keeps state for the next one" if stateful else None

    try:
        yield state_change
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, before in saved:
            _restore_module(module, before)


@contextmanager
def restore_call_state(model: nn.Module) -> Iterator[None]:
    """Restore the tensors that modules keep of the last prompt, such as `rope_deltas`.

    A call that continues the cache of an earlier call reads them.
    """
    saved = _tensor_attributes(model)
    try:
        yield
    finally:
        for attributes, before in saved:
            for name, value in before.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


@reread
def _tensor_attributes(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Tensor | None]]]:
    """The dict of each module, and its attributes that hold a tensor or None, without parameters and buffers."""
    dicts = [vars(module) for module in model.modules()]
    return [
        (own, {name: value for name, value in own.items() if value is None or isinstance(value, Tensor)})
        for own in dicts
    ]


@reread
def _copy_state(module: nn.Module) -> dict[str, Any]:
    """A copy of a module's data attributes and buffers, without parameters and submodules."""
    describe_skipped = ("_modules", "_parameters", "_buffers")
    own = {name: value for name, value in module.__dict__.items() if name not in describe_skipped and _is_data(value)}
    state: dict[str, Any] = copy.deepcopy(own)
    state |= {f"_buffers.{name}": None if part is None else part.clone() for name, part in module._buffers.items()}
    return state


def _restore_module(module: nn.Module, before: Mapping[str, Any]) -> None:
    now = _copy_state(module)
    for name in set(now) - set(before):
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        container.pop(name.removeprefix("_buffers."), None)
    for name, value in before.items():
        if name in now and _equal(now[name], value):
            continue
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        name = name.removeprefix("_buffers.")
        if not _restore_in_place(container.get(name), value):
            container[name] = value


def _restore_in_place(current: Any, value: Any) -> bool:
    """Restore a value in the same object, which may be shared; False where that is not possible."""
    if type(current) is not type(value):
        return False
    if isinstance(value, Tensor) and current.shape == value.shape and current.dtype == value.dtype:
        with torch.no_grad():
            current.copy_(value)
        return True
    if isinstance(value, (list, deque)):
        current.clear()
        current.extend(value)
        return True
    if isinstance(value, (dict, set)):
        current.clear()
        current.update(value)
        return True
    return False


def is_opaque(value: Any) -> bool:
    """Whether using a value changes it irreversibly."""
    return hasattr(value, "__next__") or isinstance(value, (torch.Generator, random.Random))


def _is_data(value: Any) -> bool:
    """Whether a value consists of plain data, without functions or objects of other classes."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_data(part) for part in value)
    if isinstance(value, Mapping):
        return all(_is_data(part) for part in value.values())
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Tensor))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one == other or one != one)
