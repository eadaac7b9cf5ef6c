"""Export of the trained scenes model: a folder that transformers loads without mmspec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmspec.app.scenes import CHECKSUMS_FILE, compute_checksums
from mmspec.app.versions import version
from research.scenes.build_model import build_scenes_processor
from research.scenes.model_card import TRAINING_FILE, write_card
from research.scenes.stages import TrainingStage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DESCRIPTION = "a toy that knows drawn scenes; other questions get nonsense"
"""In the model's config: what the page of `mmspec demo` and `mmspec.stats` say of it."""


def export_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, seed: int, stages: Sequence[TrainingStage]
) -> None:
    """Write the model, its processor, training record, model card and checksums.

    The weights are bfloat16 on disk and float32 once loaded. The model's own weights are rounded likewise.

    Args:
        model: The trained LLaVA, in float32.
        tokenizer: Its tokenizer.
        folder: Target folder.
        seed: Seed of the initial weights.
        stages: Training stages of the run.
    """
    rounded = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in rounded.items()})
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["description"] = DESCRIPTION
    for section in (config, config["text_config"], config["vision_config"]):
        section["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    build_scenes_processor(tokenizer).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes with mode 0600
    training = {
        "command": "python -m research.scenes.train --out run",
        "seed": seed,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "stages": [asdict(stage) for stage in stages],
    }
    (folder / TRAINING_FILE).write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    write_card(folder, sum(weight.numel() for weight in model.parameters()))
    (folder / CHECKSUMS_FILE).write_text(json.dumps(compute_checksums(folder), indent=1) + "\n", encoding="utf-8")
