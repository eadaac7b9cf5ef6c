"""Imports Gradio without generating its type stubs.

At each import Gradio 6 parses the source of about sixty components to write a stub beside each: 2.5 s of 5.5 s on two
cores. It skips components whose source file is not found, so `inspect.getfile` reports none during the
import. Should a version of Gradio use another function, the import is slower and otherwise the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def skip_stub_generation() -> Iterator[None]:
    """Within this block `inspect.getfile` raises OSError for classes of Gradio."""
    getfile = inspect.getfile

    def getfile_except_gradio(obj: Any) -> str:
        if isinstance(obj, type) and obj.__module__.startswith("gradio."):
            raise OSError(f"{obj.__qualname__}: no stub is wanted")
        return getfile(obj)

    inspect.getfile = getfile_except_gradio  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = getfile
