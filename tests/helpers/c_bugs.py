"""Kernels built from C sources with a planted bug."""

from __future__ import annotations

import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from unittest import mock

from mmspec.cpu import c_library
from mmspec.cpu.c_kernel import CKernel


def faulty_sources(old: str, new: str, source: str | None = None) -> dict[str, bytes]:
    """The C sources with `new` in place of `old`.

    Args:
        old: text that must be there exactly once.
        new: what replaces it.
        source: name of the source that holds `old`; None for any.

    Raises:
        ValueError: the sources do not contain `old` exactly once, since they have changed.
    """
    texts = {name: text for name, text in c_library.SOURCES.items() if source in (None, name)}
    if sum(text.count(old.encode()) for text in texts.values()) != 1:
        raise ValueError(f"{source or 'the C sources'} must contain {old!r} once: plant the bug where it could be now.")
    return c_library.SOURCES | {name: text.replace(old.encode(), new.encode()) for name, text in texts.items()}


def faulty_kernel(old: str, new: str, source: str | None = None, optimized: bool = True) -> CKernel:
    """The kernel built from `faulty_sources(old, new, source)`, in a folder of its own, in seconds.

    `optimized=False` builds faster.
    """
    faulty = faulty_sources(old, new, source)
    flags = c_library.FLAGS if optimized else ("-O0", *c_library.FLAGS[1:])
    with TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"MMSPEC_CACHE": folder}))
        stack.enter_context(mock.patch.multiple(c_library, SOURCES=faulty, FLAGS=flags))
        return CKernel(c_library.chosen_level())
