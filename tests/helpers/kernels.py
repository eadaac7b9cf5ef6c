"""The C kernel for each instruction set that this processor has; those that it lacks are one skipped test."""

from __future__ import annotations

from functools import cache

import pytest

from mmspec.cpu import c_library
from mmspec.cpu.c_kernel import INSTRUCTION_SETS, CKernel, load_kernel

needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")


def levels_here() -> list[int]:
    """Keys of `INSTRUCTION_SETS`; the first one where there is no kernel, so that its tests are skipped one by one."""
    try:
        return [level for level in sorted(INSTRUCTION_SETS) if level <= c_library.processor_level()]
    except c_library.KernelUnavailableError:
        return [1]


LEVELS = levels_here()
NAMES = [INSTRUCTION_SETS[level] for level in LEVELS]


@cache
def kernel_of(level: int) -> CKernel:
    """Bound once."""
    return CKernel(level)


@pytest.fixture(params=LEVELS, ids=NAMES)
def kernel(request: pytest.FixtureRequest) -> CKernel:
    """The kernel for each instruction set that this processor has."""
    return kernel_of(request.param)
