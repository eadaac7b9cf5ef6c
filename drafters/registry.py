"""The drafters by name, and the check that an object is one. Loads no drafter before it is asked for."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mmspec.interfaces import Drafter, TargetInfo

logger = logging.getLogger("mmspec")

MEMBERS = ("name", "requirements", "vocab_size", "begin", "propose", "observe")


def _none() -> Drafter:
    from mmspec.drafters.none import NoDrafter

    return NoDrafter()


def _lookup() -> Drafter:
    from mmspec.drafters.ngram.lookup import lookup

    return lookup()


def _recycling() -> Drafter:
    from mmspec.drafters.ngram.recycling import recycling

    return recycling()


def _fused() -> Drafter:
    from mmspec.drafters.ngram.hybrid import fused

    return fused()


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "recycling": _recycling,
    "fused": _fused,
    "auto": _fused,  # unless one was trained for the target: see `_auto`
}
SHIPPED = Path(__file__).parent / "weights"
"""Folders of trained drafters that come with the package, by their names."""
FASTEST = {"cpu": ("flash", "msd", "parallel", "falcon")}
"""Which of those `auto` prefers on which kind of device, as measured (docs/results); others count as a CPU."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def shipped(device: str = "cpu") -> dict[str, Path]:
    """Trained drafters that come with the package, the fastest on that kind of device first: name -> folder."""
    there = {file.parent.name: file.parent for file in sorted(SHIPPED.glob("*/config.json"))}
    order = FASTEST.get(device, FASTEST["cpu"])
    return {name: there[name] for name in sorted(there, key=lambda name: (*order, name).index(name))}


def names() -> list[str]:
    """What may be chosen by name."""
    return [*DRAFTERS, *shipped()]


def _auto(target: TargetInfo | None) -> Drafter:
    """A drafter that was trained for this target, if one is at hand: shipped, or published and in the local cache."""
    if target is not None:
        from mmspec.drafters.checkpoints.format import OtherTarget
        from mmspec.drafters.checkpoints.load import trained

        for name, folder in shipped(target.device).items():
            try:
                return trained(folder, target)
            except OtherTarget:
                continue
            except (OSError, ValueError) as error:  # a drafter less costs speed alone
                first = str(error).splitlines()[0][:200]
                logger.warning("mmspec: %s cannot be read and is not used (install mmspec again): %s", name, first)
        if (hub := _published_for(target)) is not None:
            try:
                return trained(cached(hub, local_files_only=True), target)
            except (OSError, ValueError) as error:
                first = str(error).splitlines()[0][:200]
                logger.info("mmspec: %s was published for this model, but is not used: %s", hub, first)
    return _fused()


def _published_for(target: TargetInfo) -> str | None:
    from mmspec.drafters.checkpoints.published import KNOWN

    return KNOWN.get(target.name)


def cached(name: str, *, local_files_only: bool = False) -> str:
    """The local folder of a drafter on the hub, fetched if need be and allowed (`HF_HUB_OFFLINE=1` forbids it).

    Raises:
        OSError: it is not there and could not be fetched.
    """
    from huggingface_hub import snapshot_download

    from mmspec.drafters.hub import unreachable_reason

    problem = None if local_files_only else unreachable_reason()
    local_files_only = local_files_only or problem is not None
    try:
        return snapshot_download(
            name,
            allow_patterns=["config.json", "model.safetensors", "pytorch_model.bin"],
            local_files_only=local_files_only,
        )
    except Exception as error:  # the hub's own types change between versions
        raise OSError(
            f"drafter {name!r} is not in the local cache and cannot be fetched: {problem or error}"
        ) from error


def folder_of(name: str) -> str | Path:
    """Where a trained drafter lies: one that ships (./NAME names a folder all the same), the user's, or the hub's."""
    return shipped().get(name) or (name if os.path.isdir(name) else cached(name))


def known(name: str) -> bool:
    """Whether `make` can make something of a name."""
    return name in names() or os.path.isdir(name) or HUB_ID.fullmatch(name) is not None


def make(drafter: str | object, target: TargetInfo | None = None) -> Drafter:
    """A new drafter of that name, the trained one in that folder or hub repository, or the given object if it is one.

    Raises:
        ValueError: an unknown name, or a trained drafter that does not fit the target. TypeError: not a drafter.
        OSError: a file is missing, or the hub cannot be asked.
    """
    if isinstance(drafter, str):
        if drafter == "auto":
            return _auto(target)
        if drafter in DRAFTERS:
            return DRAFTERS[drafter]()
        if known(drafter):
            from mmspec.drafters.checkpoints.load import trained

            return trained(folder_of(drafter), target)
        listed = ", ".join(map(repr, names()))
        raise ValueError(f"unknown drafter {drafter!r}; known are {listed}, a folder, or a hub id (owner/name)")
    if isinstance(drafter, type):
        raise TypeError(f"a drafter is an object, got the class {drafter.__name__}; pass {drafter.__name__}() instead")
    missing = next((member for member in MEMBERS if not hasattr(drafter, member)), None)
    if missing is not None:
        raise TypeError(
            f"a drafter is a name ({', '.join(map(repr, names()))}) or an object with {', '.join(MEMBERS)}; "
            f"got {type(drafter).__name__}, which has no {missing!r}"
        )
    return cast("Drafter", drafter)


__all__ = ["DRAFTERS", "known", "make", "names", "shipped"]
