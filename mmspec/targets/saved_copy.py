"""Quantised copies in the user's cache folder, for drafters that ask for it: reading one is faster than making it.

One safetensors file for each copy, named by a hash of all weights that it depends on and of how; a file that cannot be
read, or has other sizes, is ignored. What a copy computes decides how much is accepted, never a token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.cpu.quantise import empty_weight
from mmspec.cpu.weights import QuantisedWeight
from mmspec.files import atomic_write, cache_folder, make_private_folder

logger = logging.getLogger("mmspec")

COPY_FORMAT = "mmspec-copy-1"
"""Changes with the layout of the weights and with how scales are chosen."""
COPY_FILE = re.compile(r"[0-9a-f]{64}\.safetensors|\.[0-9a-f]{64}\.safetensors\.[0-9a-f]+\.part")
MAX_FILES = 8
"""Copies that are kept; those that were used longest ago go."""


def copy_folder() -> Path:
    """The folder of all copies."""
    return cache_folder() / "copies"


def copy_files() -> list[Path]:
    """The files of all copies, those of interrupted writes included; those of other programs are not listed."""
    return [path for path in sorted(copy_folder().glob("*")) if COPY_FILE.fullmatch(path.name)]


class SavedCopy:
    """The file of one copy."""

    def __init__(self, bits: Mapping[str, int], layers: Mapping[str, nn.Linear], tensors: Iterable[Tensor]) -> None:
        """
        Args:
            bits: {name of a linear layer: bits of its copy}.
            layers: {name: the layer}.
            tensors: all that the copy depends on; their bytes are hashed.
        """
        self._bits, self._layers = dict(bits), dict(layers)
        digest = hashlib.sha256(json.dumps([COPY_FORMAT, sorted(self._bits.items())]).encode())
        for tensor in tensors:
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.path = copy_folder() / f"{digest.hexdigest()}.safetensors"

    def load(self) -> dict[str, QuantisedWeight]:
        """{name: quantised weight}; empty if there is no such file."""
        try:
            tensors = load_file(self.path)
            found = {name: self._read(name, tensors) for name in self._bits}
            os.utime(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            logger.info("mmspec: %s is ignored: %s", self.path, error)
            return {}
        return found

    def save(self, weights: Mapping[str, QuantisedWeight]) -> None:
        """Write the file, for this user only. Does nothing where it cannot be written."""
        tensors: dict[str, Tensor] = {}
        for name, one in weights.items():
            tensors |= {f"{name}.data": one.data, f"{name}.scales": one.scales}
        try:
            make_private_folder(self.path.parent)
            with atomic_write(self.path) as part:
                part.touch(mode=0o600)
                save_file(tensors, part)
                part.chmod(0o600)
            files = sorted(self.path.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            for path in files[:-MAX_FILES]:
                path.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            logger.info("mmspec: %s cannot be written: %s", self.path, error)

    def _read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantisedWeight:
        """A weight of the sizes that it must have.

        Raises:
            KeyError: it is not in the file.
            ValueError: it has other sizes.
        """
        rows, cols = self._layers[name].weight.shape
        expected = empty_weight(rows, cols, self._bits[name], "meta")
        data, scales = tensors[f"{name}.data"], tensors[f"{name}.scales"]
        for found, one in ((data, expected.data), (scales, expected.scales)):
            if found.shape != one.shape or found.dtype != one.dtype:
                raise ValueError(
                    f"{name} has {list(found.shape)} of {found.dtype}, not {list(one.shape)} of {one.dtype}"
                )
        return QuantisedWeight(data, scales, rows, cols, expected.bits)
