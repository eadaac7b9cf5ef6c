"""Reading a model that other threads use meanwhile.

A call puts a `forward` into the dicts of linear layers for a while, and transformers installs hooks in a first call
that returns hidden states. Whoever iterates over such a dict at that moment gets a `RuntimeError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

MAX_READS = 1000
"""A dict that changes in each of so many reads is changed by the reader."""


def reread(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a function that only reads is run again where a dict has changed while it iterated over it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(MAX_READS):
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if "during iteration" not in str(error):
                    raise
        return function(*args, **kwargs)

    return run


def all_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules and all their parts, each once. `Module.modules`, which builds the names too, takes ten times as long."""
    found = list(dict.fromkeys(roots))
    seen = set(map(id, found))
    for module in found:  # it grows meanwhile
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found
