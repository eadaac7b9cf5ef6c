"""Several prompts about the same pictures: the image processor runs once for them.

Processors of transformers give pictures to their `image_processor`, clips to their `video_processor`, and then write
the prompt from what these return. Only that step is shared, and only between calls with equal arguments: where the text
changes how a picture is prepared, it is an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

KINDS = ("image_processor", "video_processor")
"""Parts of a processor whose last output is kept."""


class SharedMedia:
    """The last output of each of `KINDS`, with the arguments that it belongs to. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def attached(self, processor: Any) -> Iterator[None]:
        """While the block runs, a processor that is called as the last time returns the same tensors."""
        with ExitStack() as stack:
            for kind in KINDS:
                part = getattr(processor, kind, None)
                if hasattr(part, "preprocess"):
                    stack.enter_context(self._replaced(kind, part))
            yield

    @contextmanager
    def _replaced(self, kind: str, part: Any) -> Iterator[None]:
        compute = part.preprocess

        def preprocess(*args: Any, **kwargs: Any) -> Any:
            arguments = (args, kwargs)
            last, output = self._last.get(kind, (None, None))
            if last is None or not equal_arguments(last, arguments):
                last = output = None
                self._last.pop(kind, None)  # before the next is computed: both may not fit
                output = compute(*args, **kwargs)
                self._last[kind] = _copied(arguments), output
            return _copied(output)

        part.preprocess = preprocess
        try:
            yield
        finally:
            del part.preprocess


def _copied(value: Any) -> Any:
    """Containers of its own around the same tensors and pictures: processors take out of what they are given."""
    if isinstance(value, list | tuple):
        return type(value)([_copied(one) for one in value])
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if hasattr(value, "data") and isinstance(value.data, dict):  # BatchFeature
        found = copy.copy(value)
        found.data = _copied(value.data)
        return found
    return value


def equal_arguments(one: Any, other: Any) -> bool:
    """Whether two values are the same for a processor; False where that cannot be known."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_arguments, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_arguments(one[name], other[name]) for name in one)
    try:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        return one is other or bool(one == other)
    except Exception:  # of foreign types
        return False
