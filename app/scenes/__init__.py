"""Scenes: a small world with a truth, and the vision-language model that was trained on it and ships with mmspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "weights"


def load(folder: str | Path | None = None) -> tuple[Any, Any]:
    """(model, processor) of the scenes model, in float32; another folder than the shipped one if named."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    place = Path(folder or FOLDER)
    if not (place / "config.json").exists():
        raise FileNotFoundError(f"no scenes model in {place}; reinstall mmspec, or name a folder")
    model = AutoModelForImageTextToText.from_pretrained(place, local_files_only=True)
    return model.eval(), AutoProcessor.from_pretrained(place, local_files_only=True, backend="pil")


__all__ = ["FOLDER", "load"]
