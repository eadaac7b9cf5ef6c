"""Settings in checkpoints of the first release; read for one release."""

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


def upgrade_settings(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings of a checkpoint with current keys; one FutureWarning if they are of the first release."""
    if "plan" not in settings:
        return dict(settings)
    upgraded = {key: value for key, value in settings.items() if key not in ("plan", "pupils")}
    config = {LEGACY_CONFIG_KEYS.get(key, key): value for key, value in settings["plan"].items()}
    config["weights"] = {LEGACY_WEIGHT_KEYS.get(key, key): value for key, value in config["weights"].items()}
    upgraded["config"] = config
    upgraded["draft_models"] = {name: convert_legacy(values)[0] for name, values in settings["pupils"].items()}
    warnings.warn(
        f"{file} is a checkpoint of an earlier release, which the next one will not read; finish the run before.",
        FutureWarning,
        stacklevel=2,
    )
    return upgraded


__all__ = ["LEGACY_CONFIG_KEYS", "LEGACY_WEIGHT_KEYS", "upgrade_settings"]
