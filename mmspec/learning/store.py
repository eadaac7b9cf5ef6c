"""Learned weights on disk: one safetensors file per target and head, in the user's cache folder.

Nothing but weights is written: no text, no ids, no hidden states. A file that cannot be used (of another target,
truncated, foreign) is ignored with one warning; learning then starts anew and replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmspec.files import atomic_write, cache_folder, make_private_folder
from mmspec.forks import new_lock

logger = logging.getLogger("mmspec")

_WRITE_LOCK = new_lock()
"""Threads of a process share the temporary name of a file; processes do not."""
LEARNED_FORMAT = "mmspec-learned-1"
SUFFIX = ".safetensors"
VALUES_PER_WEIGHT = 8
"""Values of every parameter that enter the fingerprint of a target."""
UNSTABLE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Keys of a config that do not change what the model computes, or not much."""


def learned_folder() -> Path:
    """The folder of all learned weights."""
    return cache_folder() / "learned"


@torch.no_grad()
def target_fingerprint(config: Mapping[str, object], weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash over a target's config and some values of every weight.

    Weights without data on a device (offloaded ones) enter by name and shape.
    """
    digest = hashlib.sha256()
    stable = {key: value for key, value in config.items() if key not in UNSTABLE_KEYS}
    digest.update(json.dumps(stable, sort_keys=True, default=str).encode())
    samples: dict[torch.device, list[Tensor]] = {}
    for name, weight in weights:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if weight.device.type == "meta" or not weight.numel():
            continue
        values = weight.detach().reshape(-1)[:: max(1, weight.numel() // VALUES_PER_WEIGHT)][:VALUES_PER_WEIGHT]
        samples.setdefault(weight.device, []).append(values.to(torch.float32))
    for device in sorted(samples, key=str):
        digest.update(torch.cat(samples[device]).cpu().numpy().tobytes())
    return digest.hexdigest()[:24]


def model_fingerprint(model: nn.Module) -> str:
    """`target_fingerprint` of a model of transformers."""
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    return target_fingerprint(config, model.named_parameters())


@dataclass(frozen=True)
class LearnedFile:
    """One file of learned weights.

    Attributes:
        path: of the file.
        target: fingerprint of the target.
        key: of the head (`LearnableDrafter.learning_key`).
        num_bytes: its size.
        modified: seconds since the epoch.
    """

    path: Path
    target: str
    key: str
    num_bytes: int
    modified: float


class LearnedStore:
    """Reads and writes the learned weights of one target."""

    def __init__(self, target: str, folder: Path | None = None) -> None:
        """
        Args:
            target: fingerprint of the target.
            folder: of all learned weights; None for that of the user.
        """
        self.target = target
        self.folder = (learned_folder() if folder is None else folder) / target

    def path(self, key: str) -> Path:
        """The file of a head."""
        return self.folder / f"{key}{SUFFIX}"

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The stored weights of a head on the CPU; None, with a warning where there is a file, if there are none."""
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                expected = {"format": LEARNED_FORMAT, "target": self.target, "key": key}
                if {name: found.get(name) for name in expected} != expected:
                    raise ValueError("it was written for another target or by another program")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            logger.warning("mmspec: %s is ignored, learning starts anew: %s", path, str(error).splitlines()[0][:200])
            return None

    def save(self, key: str, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of a head. The file is replaced whole: other processes find the old or the new one.

        Raises:
            OSError: it cannot be written.
        """
        make_private_folder(self.folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        metadata = {"format": LEARNED_FORMAT, "target": self.target, "key": key}
        try:
            with _WRITE_LOCK, atomic_write(self.path(key)) as part:
                save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:  # its writer reports a full disk by this
            raise OSError(str(error)) from error


def learned_files(folder: Path | None = None) -> Iterator[LearnedFile]:
    """All files of learned weights, by target and key; files of other programs are not listed."""
    for path in sorted((learned_folder() if folder is None else folder).glob(f"*/*{SUFFIX}")):
        try:
            with safe_open(path, framework="pt") as file:
                is_own = (file.metadata() or {}).get("format") == LEARNED_FORMAT
            status = path.stat()
        except (SafetensorError, OSError, RuntimeError):
            continue
        if is_own:
            yield LearnedFile(path, path.parent.name, path.stem, status.st_size, status.st_mtime)


def clear_learned(folder: Path | None = None) -> int:
    """Delete all learned weights, damaged files and those of interrupted writes included. Returns how many files.

    Raises:
        OSError: a file cannot be deleted.
    """
    folder = learned_folder() if folder is None else folder
    paths = [*folder.glob(f"*/*{SUFFIX}"), *folder.glob(f"*/.*{SUFFIX}.*.part")]
    for path in paths:
        path.unlink(missing_ok=True)
    for target in {path.parent for path in paths}:
        if not any(target.iterdir()):
            target.rmdir()
    return len(paths)
