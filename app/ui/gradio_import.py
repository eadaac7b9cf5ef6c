"""Gradio without the type stubs that it writes for editors.

At each import Gradio 6 parses the source of its components, some sixty, to write a stub beside each: 2.5 s of 5.5 on
two cores (docs/results). A demo needs none. It leaves out components whose source cannot be found, and that is what it
is told here, for as long as the import takes; should Gradio ask otherwise one day, the import is slower and as right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def skip_stub_generation() -> Iterator[None]:
    """Within this block the source of Gradio's classes is not found by whoever looks for their files."""
    find = inspect.getfile

    def unless_gradio(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError(f"{thing.__qualname__}: no stub is wanted")
        return find(thing)

    inspect.getfile = unless_gradio  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = find


__all__ = ["skip_stub_generation"]
