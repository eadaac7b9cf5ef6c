"""The bundled toy: a small vision-language model, the drawn scenes that it knows, and example images and clips."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
"""Folder of the bundled model."""
CHECKSUMS_FILE = "checksums.json"
"""JSON file in a model folder: file name -> SHA-256."""
CARD_FILE = "README.md"


class DamagedModelError(UsageError):
    """A file of the scenes model is missing, or its checksum differs."""


def compute_checksums(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256} for the files of a model folder, without the checksum file and the model card."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (CHECKSUMS_FILE, CARD_FILE))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def verify_checksums(folder: Path) -> None:
    """Compare the files of a model folder with their checksums.

    Raises:
        DamagedModelError: A file is missing or differs; the message names it and how to restore it.
    """
    remedy = "get it back with pip install --force-reinstall mmspec, or git checkout in a clone"
    if not (folder / CHECKSUMS_FILE).is_file():
        raise DamagedModelError(f"{folder / CHECKSUMS_FILE} is missing: {remedy}.")
    expected = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
    found = compute_checksums(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise DamagedModelError(f"{folder / name} is {'damaged' if name in found else 'missing'}: {remedy}.")


def load_scenes_model(folder: str | Path | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load the scenes model in float32, on the CPU and in eval mode.

    Args:
        folder: Folder of the model; None means the bundled one.

    Returns:
        (model, processor), stock classes of transformers.

    Raises:
        DamagedModelError: A file is missing or damaged.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = Path(folder or WEIGHTS_FOLDER)
    verify_checksums(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    return model.eval(), AutoProcessor.from_pretrained(folder, local_files_only=True, backend="pil")


__all__ = ["WEIGHTS_FOLDER", "DamagedModelError", "compute_checksums", "load_scenes_model", "verify_checksums"]
