"""Errors raised at chosen moments, as a signal handler or `PyThreadState_SetAsyncExc` raises them.

CPython looks for both where it enters a function (or goes on in a generator) and behind a call of C. A profile function
is called at the same points, and may raise there.
"""

import sys
from collections.abc import Callable, Collection
from functools import cache
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """Raised at a point; no code of the project knows it."""


def run_interrupted(
    function: Callable[[], Any], point: int | None = None, second: int | None = None, files: Collection[str] = ()
) -> int:
    """Run a function, and raise `Interrupt` in it. Returns how many points were passed.

    Args:
        function: what is run. An `Interrupt` that it lets through is caught.
        point: where it is raised, counted from 0; None for nowhere.
        second: raise another one so many entered functions later; None for none.
        files: parts of the names of files in whose code points are counted; () for all code.
    """
    num_points, num_left = 0, second
    is_counted = cache(lambda file: not files or any(part in file for part in files))

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_points
        if event not in ("call", "c_return") or argument is sys.setprofile:
            return
        if not is_counted(frame.f_code.co_filename):
            return
        num_points += 1
        if num_points - 1 == point:
            if second is not None:
                sys.settrace(trace)
            raise Interrupt  # which ends the profile function

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_left
        assert num_left is not None
        num_left -= 1
        if num_left < 0:
            raise Interrupt  # which ends the trace function

    sys.setprofile(profile)
    try:
        function()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return num_points
