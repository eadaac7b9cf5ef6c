"""Scenes: a small world with a truth, and the vision-language model that was trained on it and ships with mmspec."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mmspec.app.scenes.model_card import CARD

FOLDER = Path(__file__).parent / "weights"
SUMS = "checksums.json"
"""File name -> sha256, beside the files of a model."""


class DamagedModelError(RuntimeError):
    """A file of the shipped model is missing or is not what it was."""


def sums_of(folder: Path) -> dict[str, str]:
    """sha256 of every file of a model's folder but the list itself and the model card."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (SUMS, CARD))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check(folder: Path) -> None:
    """Compare a model's files with their checksums.

    Raises:
        DamagedModelError: names the first file that is missing or has changed, and how to get it back.
    """
    remedy = "get it back with pip install --force-reinstall mmspec, or git checkout in a clone"
    if not (folder / SUMS).is_file():
        raise DamagedModelError(f"{folder / SUMS} is missing: {remedy}.")
    expected, found = json.loads((folder / SUMS).read_text(encoding="utf-8")), sums_of(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise DamagedModelError(f"{folder / name} is {'damaged' if name in found else 'missing'}: {remedy}.")


def load(folder: str | Path | None = None) -> tuple[Any, Any]:
    """(model, processor) of the scenes model, in float32; of another folder than the shipped one if named.

    Raises:
        DamagedModelError: a file is missing or damaged.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    place = Path(folder or FOLDER)
    check(place)
    model = AutoModelForImageTextToText.from_pretrained(place, local_files_only=True)
    return model.eval(), AutoProcessor.from_pretrained(place, local_files_only=True, backend="pil")


__all__ = ["FOLDER", "DamagedModelError", "check", "load", "sums_of"]
