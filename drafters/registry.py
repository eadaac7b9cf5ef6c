"""The drafters by name, and the check that an object is one. Loads no drafter before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mmspec.interfaces import Drafter

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


def make(drafter: str | object) -> Drafter:
    """A new drafter of that name, or the given object if it has what a drafter must have."""
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(f"unknown drafter {drafter!r}; known are {', '.join(map(repr, DRAFTERS))}")
        return DRAFTERS[drafter]()
    if isinstance(drafter, type):
        raise TypeError(f"a drafter is an object, got the class {drafter.__name__}; pass {drafter.__name__}() instead")
    missing = next((member for member in MEMBERS if not hasattr(drafter, member)), None)
    if missing is not None:
        raise TypeError(
            f"a drafter is a name ({', '.join(map(repr, DRAFTERS))}) or an object with {', '.join(MEMBERS)}; "
            f"got {type(drafter).__name__}, which has no {missing!r}"
        )
    return cast(Drafter, drafter)


__all__ = ["DRAFTERS", "make"]
