"""The prompts of a call as `mmspec.engine.prefix` compares them: columns, and a hash of each row's pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.engine.prefix import PromptRows
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import TOKEN_TYPE_INPUTS

PIXEL_INPUTS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches", "mm_encoder_outputs")
"""What transformers encodes before the prompt's forward, and what it gives in place of that."""

UNSHARED = ("inputs_embeds", "position_ids", "cache_position", "cache", "past_key_values")
"""Arguments of `generate` with which a call shares nothing."""


def describe_rows(
    adapter: ModelAdapter, arguments: Mapping[str, Any], media: Mapping[str, Any], scope: str
) -> PromptRows | None:
    """The prompts of a call of `generate`; None if they cannot share a prefix: without a mask, or with a position id.

    Args:
        adapter: of the model.
        arguments: of `generate`, by name.
        media: those that describe pictures and clips.
        scope: see `PromptRows`.
    """
    ids, mask = arguments.get("input_ids", arguments.get("inputs")), arguments.get("attention_mask")
    if any(arguments.get(name) is not None for name in UNSHARED):
        return None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return None  # without a mask transformers infers one from the ids
    types = {name: value for name in TOKEN_TYPE_INPUTS if (value := arguments.get(name)) is not None}
    if any(not isinstance(value, Tensor) or value.shape != ids.shape for value in types.values()):
        return None
    mask = mask.detach().to("cpu")
    if not bool(((mask == 0) | (mask == 1)).all()):
        return None  # transformers sums the mask up to position ids
    if not bool((mask.long().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        return None  # padding is at the left, or there is none
    if adapter.attention == "eager" and not bool(mask.all()):
        return None  # padding attends to all columns alike there: its keys depend on the rest of the prompt
    tokens = torch.stack([part.detach().to("cpu", torch.long) for part in (ids, mask, *types.values())], dim=-1)
    next_token = torch.zeros_like(tokens[:, -1])
    next_token[:, 1] = 1
    if "token_type_ids" in types:  # transformers repeats the last one; of the others what is generated has type 0
        column = 2 + list(types).index("token_type_ids")
        next_token[:, column] = tokens[:, -1, column]
    is_media = torch.isin(tokens[..., 0], torch.tensor(adapter.media_token_ids, dtype=torch.long))
    digests = media_digests({name: value for name, value in media.items() if name not in types}, is_media)
    scope = "\n".join([scope, *types])
    return None if digests is None else PromptRows(tokens, is_media, digests, next_token, scope)


def media_digests(media: Mapping[str, Any], is_media: Tensor) -> list[bytes] | None:
    """SHA-256 of each row's pictures and clips; None if it is not known which row has which.

    Args:
        media: the arguments of `generate` that describe them.
        is_media: [B, L] bool, their placeholders.
    """
    batch = len(is_media)
    given = {name: value for name, value in sorted(media.items()) if value is not None}
    hashes = [hashlib.sha256() for _ in range(batch)]
    if not given:
        return [b""] * batch
    if batch > 1 and not bool(is_media.any(1).all()):
        return None  # as many pictures as rows, but not one for each
    for name, value in given.items():
        rows = [nested_tensors(value)] if batch == 1 else _split(name, value, given, batch)
        if rows is None:
            return None
        for found, tensors in zip(hashes, rows, strict=True):
            if tensors is None:
                return None
            for part in tensors:
                found.update(f"{name} {part.dtype} {tuple(part.shape)};".encode())
                found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return [found.digest() for found in hashes]


def nested_tensors(value: Any) -> list[Tensor] | None:
    """The tensors of an input, which may be an output of a vision tower; None if it holds anything else."""
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    if not isinstance(value, Mapping | list | tuple):
        return None
    found: list[Tensor] = []
    for one in value.values() if isinstance(value, Mapping) else value:
        tensors = nested_tensors(one)
        if tensors is None:
            return None
        found += tensors
    return found


def _split(name: str, value: Any, given: Mapping[str, Any], batch: int) -> Sequence[Sequence[Tensor]] | None:
    """The rows' parts of a media input that has one picture or clip for each row."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    grid = given.get({"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}.get(name, ""))
    if isinstance(grid, Tensor):  # patches of all pictures in one sequence
        counts = grid.detach().cpu().long().prod(1).tolist()
        parts = value.split(counts) if len(counts) == batch and sum(counts) == len(value) else ()
    else:
        parts = value.split(1) if len(value) == batch else ()
    return [[part] for part in parts] or None
