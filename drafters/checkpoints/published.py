"""Drafters published by the authors of a method, read from their own files: `config.json` and the weights.

Each method reads its own layouts (`HeadMethod.load_published`); every tensor and every setting is checked against the
target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.format import read_config
from mmspec.drafters.checkpoints.known_keys import check_keys
from mmspec.drafters.checkpoints.own_embeddings import own_embeddings
from mmspec.drafters.checkpoints.published_heads import hub_id_of, published_heads
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.registry import HeadMethod, methods
from mmspec.interfaces import TargetInfo
from mmspec.weight_files import load_weights, read_pickle

MASK_EMBEDDING_FILE, MASK_EMBEDDING = "mask_embedding.pt", "mask_embedding"
"""File of some block drafters with the embedding of their mask token, and the name of that tensor here."""


def detect_method(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> HeadMethod:
    """The method of a published drafter.

    Raises:
        ValueError: the weights are not a draft head's.
    """
    known, kind = methods(), values.get("speculators_model_type")
    if kind is not None:
        found = next((method for method in known.values() if kind in method.speculators_types), None)
        if found is None:
            types = [name for method in known.values() for name in method.speculators_types]
            raise ValueError(f"speculators_model_type {kind!r} is not supported; known are {', '.join(sorted(types))}.")
        return found
    best = max(known.values(), key=lambda method: method.recognise(values, weights))
    if not best.recognise(values, weights):
        raise ValueError("these are not the weights of a draft head: fc.weight is missing.")
    return best


def load_published(folder: str | os.PathLike[str], target: TargetInfo, name: str | None = None) -> HeadDrafter:
    """The drafter in a folder, in the layout in which it was published.

    Args:
        folder: with the files.
        target: facts about the target.
        name: of the drafter, such as its hub id; by default the folder's.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, does not fit the target, or the head is known to be unlike its layout.
    """
    folder = Path(folder)
    name = name or hub_id_of(folder) or folder.name
    if (known := published_heads().get(name)) is not None and known.refused is not None:
        raise ValueError(f"{name} is not read: {known.refused}.")
    values, weights = read_config(folder), load_weights(folder)
    try:
        _check_image_token(values, target)
        method = detect_method(values, weights)
        check_keys(values, method.published_keys)
        _add_mask_embedding(folder, weights, values)
        drafter = method.load_published(values, weights, target, name)
        drafter.own_embeddings = own_embeddings(weights, target, drafter.head.config.hidden_size)
        return drafter
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check_image_token(values: Mapping[str, Any], target: TargetInfo) -> None:
    """Refuse a drafter that was trained with another media token id, where both are known."""
    for name in ("image_token_id", "image_token_index"):
        token = values.get(name)
        if not isinstance(token, int) or token < 0:  # the original LLaVA code writes -200, which is not an id
            continue
        if target.media_token_ids and token not in target.media_token_ids:
            ids = ", ".join(map(str, target.media_token_ids))
            raise ValueError(f"this drafter was trained with {name} {token}; the target's media token ids are {ids}.")


def _add_mask_embedding(folder: Path, weights: dict[str, Tensor], values: Mapping[str, Any]) -> None:
    """Enter the tensor of `MASK_EMBEDDING_FILE`, alone or beside the id of the mask token, if there is one."""
    file = folder / MASK_EMBEDDING_FILE
    if not file.is_file():
        return
    found, named = read_pickle(file), values.get("dflash_config") or {}
    if isinstance(found, Mapping):
        own, expected = found.get("mask_token_id"), named.get("mask_token_id", values.get("mask_token_id"))
        if own not in (None, expected):
            raise ValueError(f"{MASK_EMBEDDING_FILE} is of mask_token_id {own!r:.40}; config.json says {expected}.")
        tensors = [value for value in found.values() if isinstance(value, Tensor)]
        found = tensors[0] if len(tensors) == 1 else None
    if not isinstance(found, Tensor):
        raise ValueError(f"{MASK_EMBEDDING_FILE} must hold one tensor, the embedding of the mask token.")
    weights[MASK_EMBEDDING] = found.detach().flatten()
