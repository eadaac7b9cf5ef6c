"""Drafters that come with their target, by name. Importing this module imports no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.interfaces import Drafter, TargetInfo

OWN_NAMES = ("mtp", "assistant")
"""The head in the target's own checkpoint, and the assistant published beside it; they need a target. Behind a colon
may stand how many ids their LM head is reduced to, or a file of ids; behind `mtp:` also the folder or hub id (in the
local cache) of another checkpoint with a head, such as that of the base model of a fine-tune."""


def own_drafter(given: str, target: TargetInfo, is_asked_for: bool = True) -> Drafter | None:
    """The drafter that comes with the target; None if there is none that can be used, which one line says.

    Args:
        given: one of `OWN_NAMES`, with or without an option.
        target: facts about the target.
        is_asked_for: whether the user has named it; else models that are not expected to have one are not mentioned.

    Raises:
        ValueError: a number or a file of ids that cannot be used.
        OSError: such a file cannot be read.
    """
    from mmspec.drafters.mtp.assistant import AssistantDrafter
    from mmspec.drafters.mtp.drafter import MTPDrafter
    from mmspec.drafters.registry import warn_once
    from mmspec.interfaces import OwnHeadError

    if target.read_own_head is None or target.find_assistant is None:
        return None
    name, _, option = given.partition(":")
    ids = _reduced_head(option, target.vocab_size)
    folder = option if option and not ids else None
    try:
        if folder is not None and not os.path.isdir(folder):
            folder = _cached(folder)
        if name == "mtp":
            return MTPDrafter(target.read_own_head(folder), **ids)
        return AssistantDrafter(target.find_assistant(), **ids)
    except (OwnHeadError, OSError) as error:
        if is_asked_for or not isinstance(error, OwnHeadError) or error.is_expected:
            whose = (target.name or target.model_type)[-80:]
            instead = "hybrid drafts instead" if is_asked_for else "another drafter is used"
            warn_once(f"drafter {name!r} of {whose} is not used", f"{error}; {instead}")
        return None


def _cached(hub_id: str) -> str:
    """The folder of a checkpoint in the local cache.

    Raises:
        OwnHeadError: it is not there.
    """
    from mmspec.drafters.registry import MODEL_FILES, download_drafter
    from mmspec.interfaces import OwnHeadError

    try:
        return str(download_drafter(hub_id, local_files_only=True, patterns=MODEL_FILES))
    except OSError as error:
        raise OwnHeadError(f"{hub_id[-80:]} is no folder and not in the local cache", is_expected=True) from error


def _reduced_head(option: str, vocab_size: int) -> dict[str, Any]:
    """What an option says about the ids of the LM head, as arguments of a drafter; {} if it is none of these.

    Raises:
        ValueError: a number or a file that cannot be used.
        OSError: a file that cannot be read.
    """
    from mmspec.drafters.mtp.vocabulary import FrequentIds, read_ids

    if option.isdecimal():
        return {"frequent_ids": FrequentIds(int(option[:18]))}
    if not option or not os.path.isfile(option):
        return {}
    ids = read_ids(Path(option))
    if int(ids[-1]) >= vocab_size:
        raise ValueError(f"{option} must hold ids below {vocab_size}, the target's vocabulary; got {int(ids[-1])}.")
    return {"draft_ids": ids}


def is_own_drafter(name: str) -> bool:
    """Whether a name is one of `OWN_NAMES`, with an option that may be used."""
    from mmspec.drafters.registry import is_hub_id

    own, colon, option = name.partition(":")
    if own not in OWN_NAMES or not colon:
        return own in OWN_NAMES
    is_head = own == "mtp" and (os.path.isdir(option) or is_hub_id(option))
    return option.isdecimal() or os.path.isfile(option) or is_head
