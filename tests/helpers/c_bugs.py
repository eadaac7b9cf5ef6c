"""Kernels built from C sources with a planted bug."""

from __future__ import annotations

import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from unittest import mock

from mmspec.cpu import native
from mmspec.cpu.native import FewRowsKernel


def faulty_kernel(old: str, new: str, source: str | None = None, optimized: bool = True) -> FewRowsKernel:
    """The kernel with `new` in place of `old`, built in a folder of its own.

    Args:
        source: name of the source that holds `old`; None for any.
        optimized: False builds faster.

    Raises:
        ValueError: the sources do not contain `old` exactly once, since they have changed.
    """
    texts = {name: text for name, text in native.SOURCES.items() if source in (None, name)}
    if sum(text.count(old.encode()) for text in texts.values()) != 1:
        raise ValueError(f"{source or 'the C sources'} must contain {old!r} once: plant the bug where it could be now.")
    faulty = native.SOURCES | {name: text.replace(old.encode(), new.encode()) for name, text in texts.items()}
    flags = native.FLAGS if optimized else ("-O0", *native.FLAGS[1:])
    with TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"MMSPEC_CACHE": folder}))
        stack.enter_context(mock.patch.multiple(native, SOURCES=faulty, FLAGS=flags))
        return FewRowsKernel(native._load_library())
