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


def _hybrid() -> Drafter:
    from mmspec.drafters.ngram.hybrid import hybrid

    return hybrid()


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "recycling": _recycling,
    "fused": _hybrid,
    "auto": _hybrid,  # unless one was trained for the target: see `_auto`
}
WEIGHTS_DIR = Path(__file__).parent / "weights"
"""Folders of trained drafters that come with the package, by their names."""
AUTO_ORDER = {"cpu": ("flash", "msd", "parallel", "falcon")}
"""Which of those `auto` prefers on which kind of device, as measured (docs/results); others count as a CPU."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def bundled_drafters(device: str = "cpu") -> dict[str, Path]:
    """Trained drafters that come with the package, the fastest on that kind of device first: name -> folder."""
    there = {file.parent.name: file.parent for file in sorted(WEIGHTS_DIR.glob("*/config.json"))}
    order = AUTO_ORDER.get(device, AUTO_ORDER["cpu"])
    return {name: there[name] for name in sorted(there, key=lambda name: (*order, name).index(name))}


def drafter_names() -> list[str]:
    """What may be chosen by name."""
    return [*DRAFTERS, *bundled_drafters()]


def _auto(target: TargetInfo | None) -> Drafter:
    """A drafter that was trained for this target, if one is at hand: shipped, or published and in the local cache."""
    if target is not None:
        from mmspec.drafters.checkpoints.format import TargetMismatch
        from mmspec.drafters.checkpoints.load import load_trained

        for name, folder in bundled_drafters(target.device).items():
            try:
                return load_trained(folder, target)
            except TargetMismatch:
                continue
            except (OSError, ValueError) as error:  # a drafter less costs speed alone
                first = str(error).splitlines()[0][:200]
                logger.warning("mmspec: %s cannot be read and is not used (install mmspec again): %s", name, first)
        if (hub := _published_for(target)) is not None:
            try:
                return load_trained(download_drafter(hub, local_files_only=True), target)
            except (OSError, ValueError) as error:
                first = str(error).splitlines()[0][:200]
                logger.info("mmspec: %s was published for this model, but is not used: %s", hub, first)
    return _hybrid()


def _published_for(target: TargetInfo) -> str | None:
    from mmspec.drafters.checkpoints.published import PUBLISHED_DRAFTERS

    return PUBLISHED_DRAFTERS.get(target.name)


def download_drafter(name: str, *, local_files_only: bool = False) -> str:
    """The local folder of a drafter on the hub, fetched if need be and allowed (`HF_HUB_OFFLINE=1` forbids it).

    Raises:
        OSError: it is not there and could not be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            name,
            allow_patterns=["config.json", "model.safetensors", "pytorch_model.bin"],
            local_files_only=local_files_only,
        )
    except Exception as error:  # the hub's own types change between versions
        raise OSError(f"drafter {name!r} is not in the local cache and cannot be fetched: {error}") from error


def resolve_folder(name: str) -> str | Path:
    """Where a trained drafter lies: one that ships (./NAME names a folder all the same), the user's, or the hub's."""
    return bundled_drafters().get(name) or (name if os.path.isdir(name) else download_drafter(name))


def is_known_drafter(name: str) -> bool:
    """Whether `make` can make something of a name."""
    return name in drafter_names() or os.path.isdir(name) or HUB_ID.fullmatch(name) is not None


def build_drafter(drafter: str | object, target: TargetInfo | None = None) -> Drafter:
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
        if is_known_drafter(drafter):
            from mmspec.drafters.checkpoints.load import load_trained

            return load_trained(resolve_folder(drafter), target)
        listed = ", ".join(map(repr, drafter_names()))
        raise ValueError(f"unknown drafter {drafter!r}; known are {listed}, a folder, or a hub id (owner/name)")
    if isinstance(drafter, type):
        raise TypeError(f"a drafter is an object, got the class {drafter.__name__}; pass {drafter.__name__}() instead")
    missing = next((member for member in MEMBERS if not hasattr(drafter, member)), None)
    if missing is not None:
        raise TypeError(
            f"a drafter is a name ({', '.join(map(repr, drafter_names()))}) or an object with {', '.join(MEMBERS)}; "
            f"got {type(drafter).__name__}, which has no {missing!r}"
        )
    return cast("Drafter", drafter)


__all__ = ["DRAFTERS", "is_known_drafter", "build_drafter", "drafter_names", "bundled_drafters"]
