"""The drafters by name. Building one imports its module; listing the names imports none."""

from __future__ import annotations

import logging
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.drafters.mtp.build import OWN_NAMES, is_own_drafter, own_drafter
from mmspec.hints import did_you_mean, looks_like_path

if TYPE_CHECKING:
    from mmspec.interfaces import Drafter, TargetInfo

logger = logging.getLogger("mmspec")

MEMBERS = ("name", "requirements", "vocab_size", "begin", "propose", "observe")
"""Members of `Drafter`, checked on objects of the user."""


DRAFTERS = ("none", "lookup", "recycling", "hybrid", "arbitrated", "self", "quantized", "auto")
"""Drafters without weights, and the choice among all."""


def _untrained(name: str, target: TargetInfo | None = None) -> Drafter:
    """One of `DRAFTERS` but "auto"; a copy of the target may be made on a CPU."""
    from mmspec.drafters.arbitrated import ArbitratedDrafter
    from mmspec.drafters.model.self_drafter import QuantizedDrafter, SelfDrafter
    from mmspec.drafters.ngram.lookup import lookup
    from mmspec.drafters.ngram.output_ngrams import text_ngrams
    from mmspec.drafters.ngram.recycling import hybrid, recycling
    from mmspec.drafters.none import NoDrafter

    builders: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": lookup,
        "recycling": recycling,
        "hybrid": hybrid,
        "arbitrated": lambda: ArbitratedDrafter(may_copy=target is not None and target.device == "cpu"),
        "self": SelfDrafter,
        "quantized": lambda: QuantizedDrafter(guide=text_ngrams()),
    }
    return builders[name]()


REMOVED_NAMES = {"instant": "arbitrated"}
"""{drafter of earlier versions: its successor}."""
WEIGHTS_DIR = Path(__file__).parent / "weights"
"""Folders of the trained drafters that are part of the package, by name."""
AUTO_ORDER = ("flash", "msd", "parallel", "falcon")
"""Order in which `auto` prefers them, as measured on a CPU (research/results)."""
HEAD_FILES = (
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Files of a draft head; an index names further ones."""
MODEL_FILES = (*HEAD_FILES, "*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Files of a model of transformers with its tokenizer."""
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?")
"""OWNER/NAME of a repository, and the folder in it that holds the head, if it is not the repository's own."""


def bundled_drafters() -> dict[str, Path]:
    """Name -> folder of the trained drafters that are part of the package, the fastest first."""
    folders = {file.parent.name: file.parent for file in sorted(WEIGHTS_DIR.glob("*/config.json"))}
    return {name: folders[name] for name in sorted(folders, key=lambda name: (*AUTO_ORDER, name).index(name))}


def drafter_names() -> list[str]:
    """The names that `build_drafter` accepts, without folders and hub ids."""
    return [*DRAFTERS, *OWN_NAMES, *bundled_drafters()]


def _auto(target: TargetInfo | None) -> Drafter:
    """A drafter trained for this target: in its checkpoint, bundled, or published and in the cache; else another."""
    if target is not None:
        for name in OWN_NAMES:
            if (own := own_drafter(name, target, is_asked_for=False)) is not None:
                return own
        from mmspec.drafters.checkpoints.format import TargetMismatch
        from mmspec.drafters.checkpoints.load import load_trained

        for name, folder in bundled_drafters().items():
            try:
                return load_trained(folder, target)
            except TargetMismatch:
                continue
            except (OSError, ValueError) as error:  # without this drafter only speed is lost
                reason = str(error).splitlines()[0][:200]
                logger.warning("mmspec: %s cannot be read and is not used (install mmspec again): %s", name, reason)
        if (published := _published_drafter(target)) is not None:
            return published
    if target is None or target.device != "cpu":
        return _untrained("hybrid")
    from mmspec.drafters.arbitrated import ArbitratedDrafter

    return ArbitratedDrafter(kinds=("outputs",), may_copy=True)


def _published_drafter(target: TargetInfo) -> Drafter | None:
    """The first head in the local cache that was published for this target and is read; None if there is none.

    A head that is there and cannot be used is a warning, once; one that could be fetched is one line of information.
    """
    from mmspec.drafters.checkpoints.load import load_trained
    from mmspec.drafters.checkpoints.published_heads import PUBLISHED_DRAFTERS, target_id

    name, missing = target_id(target), []
    for hub_id in PUBLISHED_DRAFTERS.get(name or "", ()):
        try:
            folder = download_drafter(hub_id, local_files_only=True)
        except OSError:
            missing.append(hub_id)
            continue
        try:
            return load_trained(folder, target, hub_id)
        except (OSError, ValueError) as error:
            warn_once(f"{hub_id} was published for this model, but is not used", str(error).splitlines()[0][:300])
    if missing:
        logger.info(
            "mmspec: a draft head is published for %s: %s; fetch it with `hf download %s`, then patch again",
            name,
            missing[0],
            missing[0],
        )
    return None


@cache
def warn_once(what: str, reason: str) -> None:
    """A warning, once in a process."""
    logger.warning("mmspec: %s: %s", what, reason)


def download_drafter(name: str, *, local_files_only: bool = False, patterns: Sequence[str] = HEAD_FILES) -> str:
    """The local folder of a drafter on the hub, downloaded if needed and allowed (`HF_HUB_OFFLINE=1` forbids it).

    Raises:
        OSError: it is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    from mmspec.drafters.hub import unreachable_reason

    problem = None if local_files_only else unreachable_reason()
    local_files_only = local_files_only or problem is not None
    parts = HUB_ID.fullmatch(name)
    repository, subfolder = (parts[1], parts[2] or "") if parts else (name, "")
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        folder = snapshot_download(repository, allow_patterns=wanted, local_files_only=local_files_only)
        if not os.path.isdir(found := os.path.join(folder, subfolder) if subfolder else folder):
            raise FileNotFoundError(f"{repository} has no folder {subfolder}")
        return found
    except Exception as error:  # the hub's exception types change between versions
        raise OSError(
            f"drafter {name!r} is not in the local cache and cannot be downloaded: {problem or error}"
            f" (and there is no folder {name} here)"
        ) from error


def resolve_folder(name: str) -> str | Path:
    """Folder of a trained drafter: bundled (`./NAME` is the folder of that name), the user's, or the hub's."""
    return bundled_drafters().get(name) or (name if os.path.isdir(name) else _download_head(name))


def _download_head(name: str) -> str:
    """As `download_drafter`, with the shards that an index names."""
    from mmspec.weight_files import missing_shards

    folder = download_drafter(name)
    try:
        shards = missing_shards(folder)
    except (OSError, ValueError):  # whoever loads the folder reports it
        return folder
    return download_drafter(name, patterns=(*HEAD_FILES, *shards)) if shards else folder


def model_folder(name: str) -> str | None:
    """The folder that a drafter's name stands for, if it may hold a whole model; None for names of this registry.

    Raises:
        OSError: a hub id that is not in the cache and cannot be downloaded.
    """
    if name in drafter_names() or is_own_drafter(name):
        return None
    if os.path.isdir(name):
        return name
    return download_drafter(name) if is_hub_id(name) else None


def is_hub_id(name: str) -> bool:
    """Whether a name has the form OWNER/NAME and cannot be a path, or is OWNER/NAME/FOLDER of a known repository.

    Known are those of the list of published heads and those in the cache: other names of three parts are paths.
    """
    parts = HUB_ID.fullmatch(name)
    if parts is None or looks_like_path(parts[1]) or (parts[2] or "_").strip(".") == "":
        return False
    return parts[2] is None or _is_known_repository(parts[1])


def _is_known_repository(name: str) -> bool:
    from huggingface_hub import constants

    from mmspec.drafters.checkpoints.published_heads import published_heads

    in_cache = os.path.isdir(os.path.join(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}"))
    return in_cache or any(head_id == name or head_id.startswith(f"{name}/") for head_id in published_heads())


def is_known_drafter(name: str) -> bool:
    """Whether `build_drafter` accepts a name."""
    return name in (*drafter_names(), *REMOVED_NAMES) or os.path.isdir(name) or is_hub_id(name) or is_own_drafter(name)


def explain_unknown(name: str, show: Callable[[str], str] = str) -> str:
    """Why `is_known_drafter` refuses a name: a folder that is not there, or a name that may have been misspelt.

    Args:
        show: writes each known name.
    """
    if looks_like_path(name):
        return (
            f"drafter {name!r}: no such folder; it holds a trained head or a model, with its config.json. A folder of "
            "a repository (owner/name/folder) is found once the repository is in the cache"
        )
    listed = ", ".join(map(show, drafter_names()))
    return f"unknown drafter {name!r}; known are {listed}, a folder, or a hub id (owner/name)" + did_you_mean(
        name, drafter_names()
    )


def check_contract(drafter: object) -> None:
    """Refuse an object that is no drafter, as far as its members and annotations tell.

    Raises:
        TypeError: it is none; the message states what a drafter is.
    """
    from mmspec.interfaces.drafter import DRAFTER_CONTRACT, DrafterRequirements

    if isinstance(drafter, type):
        raise TypeError(f"a drafter is an object; got the class {drafter.__name__}. Pass {drafter.__name__}().")
    missing = next((member for member in MEMBERS if not hasattr(drafter, member)), None)
    if missing is not None:
        raise TypeError(f"{DRAFTER_CONTRACT}; got {type(drafter).__name__}, which has no {missing!r}.")
    wrong = next((member for member in MEMBERS[3:] if not callable(getattr(drafter, member))), None)
    for member, types in (("name", str), ("requirements", DrafterRequirements), ("vocab_size", (int, type(None)))):
        if not isinstance(getattr(drafter, member), types):
            wrong = wrong or member
    if wrong is not None:
        value = reprlib.repr(getattr(drafter, wrong))
        raise TypeError(f"{DRAFTER_CONTRACT}; got {type(drafter).__name__}, whose {wrong} is {value}.")


def build_drafter(drafter: str | object, target: TargetInfo | None = None) -> Drafter:
    """A new drafter by name, folder or hub id; an object with its methods (`as_drafter`).

    Args:
        drafter: name, folder, hub id or object.
        target: facts about the target, with which a trained drafter is compared.

    Raises:
        ValueError: an unknown name, or a trained drafter that does not fit the target.
        TypeError: the object is not a drafter.
        OSError: a file is missing, or cannot be downloaded.
    """
    if isinstance(drafter, str):
        if drafter in REMOVED_NAMES:
            logger.warning("mmspec: the drafter %r is gone; %r drafts", drafter, REMOVED_NAMES[drafter])
            drafter = REMOVED_NAMES[drafter]
        if drafter == "auto":
            return _auto(target)
        if is_own_drafter(drafter):
            if target is None:
                raise ValueError(f"drafter {drafter!r} comes with the checkpoint of a target: target=; got None.")
            return own_drafter(drafter, target) or _untrained("hybrid")
        if drafter in DRAFTERS:
            return _untrained(drafter, target)
        if is_known_drafter(drafter):
            from mmspec.drafters.checkpoints.load import load_trained

            is_on_hub = drafter not in bundled_drafters() and not os.path.isdir(drafter)
            return load_trained(resolve_folder(drafter), target, drafter if is_on_hub else None)
        raise ValueError(f"{explain_unknown(drafter, repr)}.")
    from mmspec.interfaces.drafter import as_drafter

    check_contract(drafter)
    return as_drafter(drafter)
