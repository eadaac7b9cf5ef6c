"""The tensors of a folder of weights: their names without reading them, and the tensors themselves.

One file or shards with an index, as safetensors or as a pickle, which is read with `weights_only=True`: names and bytes
of tensors, never code. Whether a folder holds a draft head or a whole model is told by these names: configs of
published heads name the class of a whole model. Knows nothing of either beyond that.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

SAFETENSORS_NAME, PICKLE_NAME = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (SAFETENSORS_NAME, f"{SAFETENSORS_NAME}.index.json", PICKLE_NAME, f"{PICKLE_NAME}.index.json")
"""In the order in which they are looked for."""
MAX_INDEX_BYTES = 1 << 24
MAX_SHARDS = 1024
SHARD_NAME = re.compile(r"[\w-][\w.-]*\.(safetensors|bin)")
MODEL_PREFIX = "model."
"""Some heads are published with it (NVIDIA's), as part of the names of whole models."""
HEAD_TENSOR, ENCODER_TENSOR = "fc.weight", "encoder.fc.weight"
"""A tensor of every published draft head (the second: Muse Glimmer's), and of no language model of transformers."""


def weights_file(folder: str | os.PathLike[str]) -> Path:
    """The file or index with the weights of a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in WEIGHT_FILES:
        if (file := Path(folder) / name).is_file():
            return file
    raise FileNotFoundError(f"{os.fspath(folder)} holds neither {SAFETENSORS_NAME} nor {PICKLE_NAME}, nor an index.")


def tensor_names(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the tensors in a folder, from the header of its file or from its index.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: the file is damaged, or a pickle that holds more than tensors.
    """
    file = weights_file(folder)
    if file.suffix == ".json":
        return list(_read_index(file))
    if file.name == PICKLE_NAME:
        return list(_read_pickle(file))
    with _explain(file), safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def holds_head(folder: str | os.PathLike[str]) -> bool:
    """Whether the weights of a folder are a draft head's, whatever class its config names.

    Raises: as `tensor_names`.
    """
    names = tensor_names(folder)
    return not {HEAD_TENSOR, f"{MODEL_PREFIX}{HEAD_TENSOR}", ENCODER_TENSOR}.isdisjoint(names)


def missing_shards(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files that a folder's index names and that are not there; [] without an index.

    Raises: as `load_weights`.
    """
    file = weights_file(folder)
    names = _shards(file, _read_index(file)) if file.suffix == ".json" else []
    return [name for name in names if not file.with_name(name).is_file()]


def load_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a folder, on the CPU, of a file or of all shards, without `MODEL_PREFIX`.

    Raises:
        FileNotFoundError: no file, or a shard is missing.
        ValueError: a file is damaged, a pickle holds more than tensors, or an index leads out of the folder.
    """
    file = weights_file(folder)
    if file.suffix != ".json":
        return _without_prefix(read_tensors(file))
    index, weights = _read_index(file), dict[str, Tensor]()
    for shard in _shards(file, index):
        tensors = read_tensors(file.with_name(shard))
        weights |= {name: value for name, value in tensors.items() if index.get(name) == shard}
    if missing := sorted(set(index) - set(weights)):
        raise ValueError(f"{file} names {missing[0]}, which {index[missing[0]]} does not hold.")
    return _without_prefix(weights)


class TensorFiles:
    """The tensors of a folder by name, in safetensors alone: shapes from the headers, each tensor when it is read.

    Attributes:
        names: of all tensors.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """
        Raises:
            FileNotFoundError: the folder has no safetensors.
            ValueError: an index is damaged or leads out of the folder, or a file is damaged.
        """
        self._folder = Path(folder)
        self._handles: dict[str, Any] = {}
        self._files = self._find()
        self.names = frozenset(self._files)

    def _find(self) -> dict[str, str]:
        """Name of a tensor -> name of its file: as the index says, else as the headers of all files do."""
        index = self._folder / f"{SAFETENSORS_NAME}.index.json"
        if index.is_file():
            found = _read_index(index)
            _shards(index, found)
            return {name: shard for name, shard in found.items() if shard.endswith(".safetensors")}
        shards = sorted(self._folder.glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(f"{self._folder} holds no safetensors.")
        if len(shards) > MAX_SHARDS:
            raise ValueError(f"{self._folder} must hold at most {MAX_SHARDS} files of weights; got {len(shards)}.")
        files: dict[str, str] = {}
        for shard in shards:
            with _explain(shard):
                files |= dict.fromkeys(self._open(shard.name).keys(), shard.name)
        return files

    def _open(self, shard: str) -> Any:
        """A file, mapped into memory once."""
        if shard not in self._handles:
            file = self._folder / shard
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing.")
            self._handles[shard] = safe_open(file, "pt").__enter__()
        return self._handles[shard]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header of its file.

        Raises:
            FileNotFoundError: its file is missing.
            ValueError: its file is damaged.
        """
        shard = self._files[name]
        with _explain(self._folder / shard):
            return tuple(self._open(shard).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU.

        Raises: as `shape`.
        """
        shard = self._files[name]
        with _explain(self._folder / shard):
            tensor: Tensor = self._open(shard).get_tensor(name)
            return tensor


@contextmanager
def _explain(file: Path) -> Iterator[None]:
    """Context in which what the reader of safetensors raises becomes a `ValueError` that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is damaged, or a pickle that holds more than tensors.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing.")
    if file.suffix != ".safetensors":
        return _read_pickle(file)
    with _explain(file):
        return load_file(file)


def read_pickle(file: Path) -> Any:
    """What a pickle holds: tensors, numbers, strings and containers of them. Tensors of today's format are mapped.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6, which cannot be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not loaded: it is damaged, or holds more than tensors.") from error
    except (AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {' '.join(str(error).split())[:200]}") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle.

    Raises:
        ValueError: it is damaged, or holds more than tensors.
    """
    weights = read_pickle(file)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{file} must hold a dict of tensors.")
    return weights


def _read_index(file: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file.

    Raises:
        ValueError: it is no index, or too large.
    """
    if file.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{file} must have at most {MAX_INDEX_BYTES} bytes; got {file.stat().st_size}.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        names = values["weight_map"]
        if not all(isinstance(shard, str) for shard in names.values()):
            raise TypeError("a file's name must be a string")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not an index of weights: {type(error).__name__}: {str(error)[:100]}") from error
    return dict(names)


def _shards(file: Path, index: Mapping[str, str]) -> list[str]:
    """The files that an index names, all of its own folder."""
    shards = sorted(set(index.values()))
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"{file} must name at most {MAX_SHARDS} files; got {len(shards)}.")
    for shard in shards:
        if not SHARD_NAME.fullmatch(shard):
            raise ValueError(f"{file} must name files of its own folder, .safetensors or .bin; got {shard[:100]!r}.")
    return shards


def _without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without `MODEL_PREFIX`, where the weights are a head's with it."""
    if f"{MODEL_PREFIX}{HEAD_TENSOR}" not in weights:
        return dict(weights)
    if both := [name for name in weights if MODEL_PREFIX + name in weights]:
        raise ValueError(f"the weights hold both {both[0]} and {MODEL_PREFIX}{both[0]}.")
    return {name.removeprefix(MODEL_PREFIX): value for name, value in weights.items()}
