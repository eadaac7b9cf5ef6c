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
from mmspec.drafters.checkpoints.own_embeddings import own_embeddings
from mmspec.drafters.checkpoints.published_heads import hub_id_of, published_heads
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.registry import HeadMethod, methods
from mmspec.interfaces import TargetInfo
from mmspec.weight_files import load_weights


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
        drafter = detect_method(values, weights).load_published(values, weights, target, name)
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
