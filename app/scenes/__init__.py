"""Scenes: a small world with a truth, and the vision-language model that was trained on it and ships with mmspec."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mmspec.app.scenes.model_card import CARD_FILE

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
CHECKSUMS_FILE = "checksums.json"
"""File name -> sha256, beside the files of a model."""


class DamagedModelError(RuntimeError):
    """A file of the shipped model is missing or is not what it was."""


def compute_checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file of a model's folder but the list itself and the model card."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (CHECKSUMS_FILE, CARD_FILE))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def verify_checksums(folder: Path) -> None:
    """Compare a model's files with their checksums.

    Raises:
        DamagedModelError: names the first file that is missing or has changed, and how to get it back.
    """
    remedy = "get it back with pip install --force-reinstall mmspec, or git checkout in a clone"
    if not (folder / CHECKSUMS_FILE).is_file():
        raise DamagedModelError(f"{folder / CHECKSUMS_FILE} is missing: {remedy}.")
    expected, found = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8")), compute_checksums(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise DamagedModelError(f"{folder / name} is {'damaged' if name in found else 'missing'}: {remedy}.")


def load_scenes_model(folder: str | Path | None = None) -> tuple[Any, Any]:
    """(model, processor) of the scenes model, in float32; of another folder than the shipped one if named.

    Raises:
        DamagedModelError: a file is missing or damaged.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    place = Path(folder or WEIGHTS_FOLDER)
    verify_checksums(place)
    model = AutoModelForImageTextToText.from_pretrained(place, local_files_only=True)
    return model.eval(), AutoProcessor.from_pretrained(place, local_files_only=True, backend="pil")


__all__ = ["WEIGHTS_FOLDER", "DamagedModelError", "compute_checksums", "load_scenes_model", "verify_checksums"]
