"""The draft heads that are known to be published, and which of them were published for a target.

The data are `published_heads.json`: a row for each head, in the order in which those of one target are preferred, and
the architectures and sizes of targets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mmspec.files import snapshot_id
from mmspec.interfaces import TargetInfo

DATA_FILE = Path(__file__).with_name("published_heads.json")


@dataclass(frozen=True)
class PublishedHead:
    """A row of the file.

    Attributes:
        id: on the hub, in its exact spelling.
        targets: hub ids of the models for which it was trained.
        method: "msd", "eagle", "vispec", "eagle3", "dspark", "dflash", or one that is not read.
        source: where it was found, or the code that made it.
        layout: whether the reader of its layout was compared with reference code, on random weights.
        code: that code, or None.
        weights: whether the published weights were run.
        refused: why it is not read; None if it is.
    """

    id: str
    targets: tuple[str, ...]
    method: str
    source: str
    layout: bool
    code: str | None
    weights: bool
    refused: str | None


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    return data


@cache
def published_heads() -> dict[str, PublishedHead]:
    """All rows by hub id, in order."""
    rows = (PublishedHead(**row | {"targets": tuple(row["targets"])}) for row in _data()["heads"])
    return {head.id: head for head in rows}


def _by_target() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for head in published_heads().values():
        for target in head.targets if head.refused is None else ():
            found[target] = (*found.get(target, ()), head.id)
    return found


PUBLISHED_DRAFTERS = _by_target()
"""Hub id of a target -> hub ids of the heads that are read, in the order in which `auto` tries them."""


def hub_id_of(name: str | os.PathLike[str]) -> str | None:
    """The hub id of a model by its name: an id, or a snapshot in the cache; None for another folder."""
    name = os.fspath(name)
    if (found := snapshot_id(name)) is not None:
        return found
    return name if name in published_heads() or name in PUBLISHED_DRAFTERS else None


def target_id(target: TargetInfo) -> str | None:
    """The hub id under which heads were published for a target, or None.

    That of its name; else, for another folder, the id whose last part the folder has, if architecture and sizes agree
    where they are known; else the only id of its architecture and sizes.
    """
    if (found := hub_id_of(target.name)) is not None:
        return found if found in PUBLISHED_DRAFTERS else None
    if not target.name or not os.path.isdir(target.name):
        return None
    own = {"model_type": target.model_type, "hidden_size": target.hidden_size, "num_layers": target.num_layers}
    shapes: dict[str, dict[str, Any]] = _data()["targets"]
    last = os.path.basename(os.path.normpath(target.name)).lower()
    named = [name for name in PUBLISHED_DRAFTERS if name.split("/")[-1].lower() == last]
    if named and shapes.get(named[0], own) == own:
        return named[0]
    alike = [name for name in PUBLISHED_DRAFTERS if shapes.get(name) == own]
    return alike[0] if len(alike) == 1 else None
