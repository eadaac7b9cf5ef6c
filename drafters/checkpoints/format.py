"""Draft heads on disk, as transformers lays models out: `config.json` and `model.safetensors`.

The config says for which target a head was made; `Made.check` compares that with the target at hand. The weights have
the names of the EAGLE and MSD code, so others can read them. Knows nothing of transformers.
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.drafters.architectures import ARCHITECTURES
from mmspec.drafters.checkpoints.validate import check_config, check_head_shape, parse_json
from mmspec.drafters.eagle.head import (
    EagleHead,
    HeadConfig,
    from_eagle_state_dict,
    parse_head_config,
    to_eagle_state_dict,
)
from mmspec.drafters.eagle.visual_inputs import VISUAL_MODES
from mmspec.files import atomic_write

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
MODEL_TYPE = "mmspec_eagle"
MAX_CONFIG_BYTES = 1 << 20
COMPRESSOR_PREFIX = "compressor."
"""Begins the names of a compressor's weights."""


class TargetMismatch(ValueError):
    """A draft head, in good order for all we know, that was made for another target."""


@dataclass(frozen=True)
class HeadMetadata:
    """A head, and what it was made for.

    Attributes:
        rule: of `drafters.rules`. kind: of `drafters.kinds`. layers, model_type, tokenizer: of the target; the
            tokenizer as a fingerprint or None.
        draft_ids: [V'] int64, the ids that it may draft, rising; None for all.
        compressor: what was trained with it, if anything: its `name` and `tokens`, and its weights.
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

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int, tokenizer: str | None) -> None:
        """Compare with the target at hand.

        Raises:
            OtherTarget: says what differs.
        """
        pairs: dict[str, tuple[object, object]] = {
            "hidden_size": (self.config.hidden_size, hidden_size),
            "vocab_size": (self.config.vocab_size, vocab_size),
            "layers": (self.num_layers, num_layers),
        }
        if self.tokenizer is not None and tokenizer is not None:
            pairs["tokenizer"] = (self.tokenizer, tokenizer)
        wrong = [f"{name} {mine} (the target: {its})" for name, (mine, its) in pairs.items() if mine != its]
        if wrong:
            raise TargetMismatch(f"this draft head was made for another target: {', '.join(wrong)}.")


def save_head(
    folder: str | os.PathLike[str], head: EagleHead, metadata: HeadMetadata, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head, rounded to `dtype`; a folder never holds half of it."""
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in to_eagle_state_dict(head).items()}
    if metadata.draft_ids is not None:
        weights["draft_ids"] = metadata.draft_ids.cpu()
    if metadata.compressor is not None:
        weights |= {
            f"{COMPRESSOR_PREFIX}{name}": value.detach().to("cpu", dtype)
            for name, value in metadata.compressor[1].items()
        }
    values = {
        "model_type": MODEL_TYPE,
        "kind": metadata.architecture,
        **asdict(metadata.config),
        "rule": metadata.visual_mode,
    }
    values["target"] = {
        "model_type": metadata.model_type,
        "layers": metadata.num_layers,
        "tokenizer": metadata.tokenizer,
    }
    values |= {"facts": dict(metadata.facts)} if metadata.facts else {}
    values |= {"compressor": dict(metadata.compressor[0])} if metadata.compressor is not None else {}
    write_checkpoint(Path(folder), weights, values)


def write_checkpoint(folder: Path, weights: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Both files of a head: whole before they get their names, and the config last, since a head is found by it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Left in reverse order: the weights get their name first, the config last.
    with atomic_write(folder / CONFIG_NAME) as config_part, atomic_write(folder / WEIGHTS_NAME) as weights_part:
        save_file(dict(weights), weights_part, metadata={"format": "pt"})
        weights_part.chmod(0o644)
        config_part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_metadata(folder: str | os.PathLike[str]) -> HeadMetadata:
    """What a folder's config says of its head, without a look at the weights: no draft ids, no compressor's weights.

    Raises:
        FileNotFoundError: there is no config. ValueError: it is of no draft head, or of one that cannot be.
    """
    place = Path(folder)
    values = read_config(place)
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{place / CONFIG_NAME} is of model_type {values.get('model_type')!r}, not {MODEL_TYPE!r}.")
    target = values.get("target") or {}
    rule = values.get("rule")
    if rule not in VISUAL_MODES:
        raise ValueError(f"{place / CONFIG_NAME}: rule must be one of {', '.join(VISUAL_MODES)}; got {rule!r}.")
    kind = values.get("kind") or "eagle"
    if kind not in ARCHITECTURES:
        raise ValueError(f"{place / CONFIG_NAME}: kind must be one of {', '.join(ARCHITECTURES)}; got {kind!r}.")
    try:
        config = parse_head_config(values)
    except ValueError as error:
        raise ValueError(f"{place / CONFIG_NAME}: {error}") from error
    return HeadMetadata(
        config,
        rule,
        int(target.get("layers") or 0),
        str(target.get("model_type") or ""),
        target.get("tokenizer"),
        facts=values.get("facts") or {},
        architecture=kind,
        compressor=(values["compressor"], {}) if isinstance(values.get("compressor"), dict) else None,
    )


def load_head(folder: str | os.PathLike[str]) -> tuple[EagleHead, HeadMetadata]:
    """Read a head, in float32.

    Raises:
        FileNotFoundError: a file is missing. ValueError: what is there is no draft head, or a damaged one.
    """
    made, file = read_metadata(folder), Path(folder) / WEIGHTS_NAME
    weights = read_weights(file)
    draft_ids = weights.pop("draft_ids", None)
    extra = {
        name.removeprefix(COMPRESSOR_PREFIX): weights.pop(name)
        for name in list(weights)
        if name.startswith(COMPRESSOR_PREFIX)
    }
    try:
        state = from_eagle_state_dict(made.config, weights, ARCHITECTURES[made.architecture].head)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    with torch.device("meta"):  # fresh weights would be drawn from the user's generator
        head = ARCHITECTURES[made.architecture].head(made.config)
    head.load_state_dict({name: value.float() for name, value in state.items()}, assign=True)
    if draft_ids is not None:
        _check_ids(draft_ids, made.config.vocab_size, file)
    compressor = None if made.compressor is None else (made.compressor[0], extra)
    return head.eval(), replace(made, draft_ids=draft_ids, compressor=compressor)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short name of a tokenizer's vocabulary, for anything with `get_vocab`."""
    listed = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _check_ids(ids: Tensor, vocab: int, where: Path) -> None:
    good = ids.dim() == 1 and ids.dtype == torch.int64 and len(ids) > 0
    if not good or int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids.diff() > 0).all()):
        raise ValueError(f"{where}: draft_ids must be rising ids below {vocab}.")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder.

    Raises:
        FileNotFoundError, ValueError: it is not there, or no JSON object.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: a draft head is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}.")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} is no config: it has {file.stat().st_size} bytes.")
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} of a drafter is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object: a drafter's config is one.")
    try:
        check_config(values)
        check_head_shape(values)
    except ValueError as error:
        raise ValueError(f"{file} of a drafter: {error}") from error
    return values


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        FileNotFoundError, ValueError: it is not there, or cut short or damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing.")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


__all__ = [
    "CONFIG_NAME",
    "MODEL_TYPE",
    "WEIGHTS_NAME",
    "HeadMetadata",
    "OtherTarget",
    "load_head",
    "read_config",
    "read_metadata",
    "read_weights",
    "save_head",
    "tokenizer_fingerprint",
    "write_checkpoint",
]
