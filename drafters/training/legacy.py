"""Settings in checkpoints of earlier releases: former names, and options that they did not have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.drafters.checkpoints.head_config import convert_legacy

LEGACY_CONFIG_KEYS = {
    "steps": "max_steps",
    "batch": "batch_size",
    "rate": "learning_rate",
    "warmup": "warmup_steps",
    "clip": "max_grad_norm",
    "noise": "hidden_noise",
}
"""Key of `TrainConfig` in checkpoints of the first release -> current key; read for one release."""
LEGACY_WEIGHT_KEYS = {"states": "hidden", "words": "logits", "rollout": "ttt_steps", "decay": "step_decay"}
"""As `LEGACY_CONFIG_KEYS`, of `LossWeights`."""


CHECKPOINT_VERSION = 2
"""In version 1, `ttt_steps` (and `rollout` before it) did not count the first step."""


NEW_HEAD_DEFAULTS: dict[str, Any] = {
    "draft_vocab_size": 0,
    "hidden_state_layers": [],
    "num_hidden_layers": 1,
    "layer_mixture": False,
    "confidence_head": False,
    "sample_from_anchor": True,
}
NEW_WEIGHT_DEFAULTS: dict[str, Any] = {"loss": "ce"}
"""Options that are newer than some runs -> their default. Left out where they have it: such runs can be resumed."""


def without_new_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run (JSON values) without the newer options that have their default."""

    def drop(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}

    config = settings["config"]
    models = {name: drop(values, NEW_HEAD_DEFAULTS) for name, values in settings["draft_models"].items()}
    weights = drop(config["weights"], NEW_WEIGHT_DEFAULTS)
    return {**settings, "config": {**config, "weights": weights}, "draft_models": models}


def upgrade_settings(settings: Mapping[str, Any], file: Path, version: int) -> dict[str, Any]:
    """Settings of a checkpoint with current keys and values; one FutureWarning if they are of the first release.

    Args:
        settings: as stored.
        file: the checkpoint, for the warning.
        version: of the checkpoint.
    """
    upgraded = _upgrade_names(settings, file) if "plan" in settings else dict(settings)
    if version < CHECKPOINT_VERSION:
        weights = dict(upgraded["config"]["weights"])
        weights["ttt_steps"] += 1
        upgraded["config"] = {**upgraded["config"], "weights": weights}
    return upgraded


def _upgrade_names(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings of the first release with current keys."""
    upgraded = {key: value for key, value in settings.items() if key not in ("plan", "pupils")}
    config = {LEGACY_CONFIG_KEYS.get(key, key): value for key, value in settings["plan"].items()}
    config["weights"] = {LEGACY_WEIGHT_KEYS.get(key, key): value for key, value in config["weights"].items()}
    upgraded["config"] = config
    upgraded["draft_models"] = {name: convert_legacy(values)[0] for name, values in settings["pupils"].items()}
    warnings.warn(
        f"{file} is a checkpoint of an earlier release, which the next one will not read; finish the run before.",
        FutureWarning,
        stacklevel=3,
    )
    return upgraded


__all__ = [
    "CHECKPOINT_VERSION",
    "LEGACY_CONFIG_KEYS",
    "LEGACY_WEIGHT_KEYS",
    "upgrade_settings",
    "without_new_defaults",
]
