"""The drafters by name, and the check that an object is one. Loads no drafter before it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from mmspec.interfaces import Drafter, Facts

MEMBERS = ("name", "needs", "vocab_size", "begin", "propose", "observe")


def _none() -> Drafter:
    from mmspec.drafters.none import NoDrafter

    return NoDrafter()


def _lookup() -> Drafter:
    from mmspec.drafters.lookup import lookup

    return lookup()


def _recycling() -> Drafter:
    from mmspec.drafters.recycling import recycling

    return recycling()


def _fused() -> Drafter:
    from mmspec.drafters.fused import fused

    return fused()


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "recycling": _recycling,
    "fused": _fused,
    "auto": _fused,  # the best one known that needs no training
}


def known(name: str) -> bool:
    """Whether `make` can make something of a name."""
    return name in DRAFTERS or os.path.isdir(name)


def make(drafter: str | object, target: Facts | None = None) -> Drafter:
    """A new drafter of that name, the one that was trained into that folder, or the given object if it is a drafter.

    Raises:
        ValueError: an unknown name, or a trained drafter that does not fit the target. TypeError: not a drafter.
    """
    if isinstance(drafter, str):
        if drafter in DRAFTERS:
            return DRAFTERS[drafter]()
        if os.path.isdir(drafter):
            from mmspec.drafters.trained import trained

            return trained(drafter, target)
        raise ValueError(f"unknown drafter {drafter!r}; known are {', '.join(map(repr, DRAFTERS))}, or a folder")
    if isinstance(drafter, type):
        raise TypeError(f"a drafter is an object, got the class {drafter.__name__}; pass {drafter.__name__}() instead")
    missing = next((member for member in MEMBERS if not hasattr(drafter, member)), None)
    if missing is not None:
        raise TypeError(
            f"a drafter is a name ({', '.join(map(repr, DRAFTERS))}) or an object with {', '.join(MEMBERS)}; "
            f"got {type(drafter).__name__}, which has no {missing!r}"
        )
    return cast(Drafter, drafter)


__all__ = ["DRAFTERS", "known", "make"]
