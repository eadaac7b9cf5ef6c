"""Draft heads on disk, laid out like transformers models: `config.json` and `model.safetensors`.

The config records the target of a head; `HeadMetadata.check_target` compares it with the target at hand. The tensor
names are those of the EAGLE and MSD code (`state_dict`), the config's keys those of `head_config`. The module knows
nothing of transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.checkpoints.head_config import parse_head_config
from mmspec.drafters.checkpoints.state_dict import read_head, to_stored
from mmspec.drafters.checkpoints.validate import check_config, check_head_shape, parse_json
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.visual_inputs import resolve_visual_mode
from mmspec.drafters.heads.registry import find_method
from mmspec.files import atomic_write
from mmspec.interfaces import TargetInfo
from mmspec.weight_files import read_tensors

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
MODEL_TYPE = "mmspec_eagle"
MAX_CONFIG_BYTES = 1 << 20
COMPRESSOR_PREFIX = "compressor."
"""Prefix of the names of a compressor's tensors."""


class TargetMismatch(ValueError):
    """A valid draft head that was trained for another target."""


@dataclass(frozen=True)
class HeadMetadata:
    """A head's config and the facts about its target.

    Attributes:
        config: shape of the head.
        visual_mode: a key of `VISUAL_MODES`.
        num_layers: decoder layers of the target.
        model_type: of the target.
        tokenizer: fingerprint of the target's tokenizer, or None.
        draft_ids: [V'] int64, the ids that it may draft, increasing; None for all.
        facts: further JSON values about the training.
        architecture: name of its method (`mmspec.drafters.heads.registry`).
        compressor: (settings, weights) of the compressor that was trained with it, or None. The settings are its
            `name` and `tokens`.
    """

    config: HeadConfig
    visual_mode: str
    num_layers: int
    model_type: str = ""
    tokenizer: str | None = None
    draft_ids: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = "eagle"
    compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None

    def check_target(self, target: TargetInfo) -> None:
        """Compare with the target at hand.

        Raises:
            TargetMismatch: names what differs.
        """
        pairs: dict[str, tuple[object, object]] = {
            "hidden_size": (self.config.hidden_size, target.hidden_size),
            "vocab_size": (self.config.vocab_size, target.vocab_size),
            "num_layers": (self.num_layers, target.num_layers),
        }
        if self.tokenizer is not None and target.tokenizer is not None:
            pairs["tokenizer"] = (self.tokenizer, tokenizer_fingerprint(target.tokenizer))
        wrong = [f"{name} {own} (the target: {other})" for name, (own, other) in pairs.items() if own != other]
        if wrong:
            raise TargetMismatch(f"this draft head was trained for another target: {', '.join(wrong)}.")


def save_head(
    folder: str | os.PathLike[str], head: DraftHead, metadata: HeadMetadata, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head, rounded to `dtype`; the folder never holds an incomplete one."""
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in to_stored(head).items()}
    if metadata.draft_ids is not None:
        weights["draft_ids"] = metadata.draft_ids.cpu()
    if metadata.compressor is not None:
        for name, value in metadata.compressor[1].items():
            weights[f"{COMPRESSOR_PREFIX}{name}"] = value.detach().to("cpu", dtype)
    values: dict[str, Any] = {"model_type": MODEL_TYPE, "architecture": metadata.architecture}
    values |= {**asdict(metadata.config), "visual_mode": metadata.visual_mode}
    values["target"] = {
        "model_type": metadata.model_type,
        "num_layers": metadata.num_layers,
        "tokenizer": metadata.tokenizer,
    }
    if metadata.facts:
        values["facts"] = dict(metadata.facts)
    if metadata.compressor is not None:
        values["compressor"] = dict(metadata.compressor[0])
    write_checkpoint(Path(folder), weights, values)


def compact(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in bfloat16 if that loses nothing of any of them (trained heads are stored so), else as they are."""
    floats = [value for value in weights.values() if value.is_floating_point()]
    if not all(torch.equal(value, value.bfloat16().to(value.dtype)) for value in floats):
        return dict(weights)
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}


def write_checkpoint(folder: Path, weights: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write both files of a head under temporary names, then rename them, the config last: a head is found by it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Left in reverse order: the weights get their name first, the config last.
    with atomic_write(folder / CONFIG_NAME) as config_part, atomic_write(folder / WEIGHTS_NAME) as weights_part:
        save_file(dict(weights), weights_part, metadata={"format": "pt"})
        weights_part.chmod(0o644)
        config_part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_metadata(folder: str | os.PathLike[str]) -> HeadMetadata:
    """Metadata from a folder's config, without reading the weights: no draft ids, no weights of a compressor.

    Raises:
        FileNotFoundError: there is no config.
        ValueError: it is not of a draft head, or a value is invalid.
    """
    file = Path(folder) / CONFIG_NAME
    values = read_config(Path(folder))
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{file} has model_type {values.get('model_type')!r}, not {MODEL_TYPE!r}.")
    try:
        visual_mode, architecture = resolve_visual_mode(values.get("visual_mode")), values.get("architecture", "eagle")
        config = parse_head_config(values, find_method(architecture).classes().config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    target = values.get("target") or {}
    return HeadMetadata(
        config,
        visual_mode,
        int(target.get("num_layers") or 0),
        str(target.get("model_type", "")),
        target.get("tokenizer"),
        facts=values.get("facts") or {},
        architecture=architecture,
        compressor=(values["compressor"], {}) if isinstance(values.get("compressor"), dict) else None,
    )


def load_head(folder: str | os.PathLike[str], metadata: HeadMetadata | None = None) -> tuple[DraftHead, HeadMetadata]:
    """Read a head in float32.

    Args:
        folder: of the head.
        metadata: what `read_metadata` returned for the folder, if it was called before.

    Returns:
        The head in eval mode, and its metadata with draft ids and weights of its compressor.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files are not a draft head's, or damaged.
    """
    metadata = read_metadata(folder) if metadata is None else metadata
    file = Path(folder) / WEIGHTS_NAME
    weights = read_tensors(file)
    draft_ids = weights.pop("draft_ids", None)
    names = [name for name in weights if name.startswith(COMPRESSOR_PREFIX)]
    compressor_weights = {name.removeprefix(COMPRESSOR_PREFIX): weights.pop(name) for name in names}
    build = find_method(metadata.architecture).classes().head
    try:
        head = read_head(lambda: build(metadata.config), weights)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if draft_ids is not None:
        _check_draft_ids(draft_ids, metadata.config.vocab_size, file)
    compressor = None if metadata.compressor is None else (metadata.compressor[0], compressor_weights)
    return head.eval(), replace(metadata, draft_ids=draft_ids, compressor=compressor)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short hash of a tokenizer's vocabulary, of anything with `get_vocab`."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _check_draft_ids(ids: Tensor, vocab_size: int, file: Path) -> None:
    is_valid = ids.dim() == 1 and ids.dtype == torch.int64 and len(ids) > 0
    if not is_valid or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or not bool((ids.diff() > 0).all()):
        raise ValueError(f"{file}: draft_ids must be increasing ids below {vocab_size}.")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is not a JSON object, or too large.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: a draft head is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}.")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} must have at most {MAX_CONFIG_BYTES} bytes; got {file.stat().st_size}.")
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object.")
    try:
        check_config(values)
        check_head_shape(values)
    except ValueError as error:
        raise ValueError(f"{file} of a drafter: {error}") from error
    return values
