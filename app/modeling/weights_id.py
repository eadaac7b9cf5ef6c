"""What identifies the weights behind `--model`, so that a resumed job does not mix captions of two models.

Of a folder it is a hash of its content: a folder that was copied is the same, one that was trained on is not. Of large
files samples are read, some of every tensor: training changes nearly all values. Of a hub id it is the commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.scenes import WEIGHTS_FOLDER
from mmspec.drafters.hub import PROBE_TIMEOUT_S, is_offline, unreachable_reason

WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed in whole."""
SAMPLE_BYTES = 1024
SAMPLES = 4
"""Parts of a tensor that are hashed, its first and its last among them."""
FILE_SAMPLES = 4096
"""The same of a file whose tensors are not known."""
MAX_TENSOR_HEADER_BYTES = 100 << 20
"""Largest header of safetensors, as the library itself has it."""
_DECISIVE = re.compile(
    r"config\.json|generation_config\.json|.*processor_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template.*|vocab.*|merges.*|.*\.model|.*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?"
)
"""Files of a model that determine what it says."""


def weights_id(name: str) -> str | None:
    """Identifies weights, tokenizer and chat template of a model; None if that cannot be known.

    Args:
        name: a folder, a hub id, or the name of a bundled model.
    """
    if name in SIZES and not os.path.isdir(name):
        return None  # its weights are numbers of a fixed seed
    folder = WEIGHTS_FOLDER if name == SCENES_MODEL else Path(name)
    return _folder_id(folder) if folder.is_dir() else _commit(name)


def _folder_id(folder: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        for file in sorted(folder.iterdir()):
            if file.is_file() and _DECISIVE.fullmatch(file.name):
                with file.open("rb") as opened:
                    size = os.fstat(opened.fileno()).st_size
                    digest.update(f"{file.name}\0{size}\0".encode(errors="surrogateescape"))
                    for start, count in _samples(opened, file.suffix, size):
                        opened.seek(start)
                        digest.update(opened.read(count))
    except OSError:  # loading the model reports what is wrong
        return None
    return digest.hexdigest()[:16]


def _samples(file: BinaryIO, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of the parts of a file that are hashed."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    ranges = _tensor_ranges(file, size) if suffix == ".safetensors" else None
    if ranges is None:
        yield from _spread(0, size, FILE_SAMPLES)
        return
    yield 0, min((start for start, _ in ranges), default=size)
    for start, end in ranges:
        yield from _spread(start, end, SAMPLES)


def _spread(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    if end - start <= count * SAMPLE_BYTES:
        yield start, end - start
        return
    step = (end - start - SAMPLE_BYTES) / (count - 1)
    yield from ((start + round(number * step), SAMPLE_BYTES) for number in range(count))


def _tensor_ranges(file: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """Where the tensors of a file of safetensors lie, from its header; None if that is damaged."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, MAX_TENSOR_HEADER_BYTES):
        return None
    try:
        header = json.loads(file.read(length))
        found = [header[name]["data_offsets"] for name in sorted(header) if name != "__metadata__"]
        return [(8 + length + start, 8 + length + end) for start, end in found if 0 <= start <= end <= size]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _commit(name: str) -> str | None:
    """The commit of a hub id: of the hub if it answers, else of what is cached."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if not is_offline() and unreachable_reason() is None:
            found = get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=PROBE_TIMEOUT_S).commit_hash
            if found is not None:
                return str(found)
    except Exception:  # loading the model reports what is wrong
        pass
    try:
        file = try_to_load_from_cache(name, "config.json")
    except (HFValidationError, OSError):
        return None
    return Path(file).parent.name if isinstance(file, str) else None
