"""Drafter folders, damaged and hostile, each derived from a seed: configs, weights, and files that are none."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63, 10**40, -(10**40), 0.5, -1.0, 1e308, float("nan"),
    float("inf"), "", "64", "x" * 5000, "\x00", "../../etc/passwd", [], [1], [[]], [None] * 3, {}, {"a": 1}, {"": {}},
)  # fmt: skip


@dataclass(frozen=True)
class HostileFolder:
    """A drafter folder as bytes: a description for messages, and the contents by file name."""

    name: str
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        """Write the files into `folder`; returns it."""
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


def generate_folders(bases: dict[str, Path], seed: int, count: int) -> Iterator[tuple[str, HostileFolder]]:
    """`count` mutations of the folders in `bases`: (name of the base, mutated folder)."""
    for number in range(seed, seed + count):
        rng = random.Random(number)
        base = rng.choice(sorted(bases))
        config = (bases[base] / CONFIG).read_bytes()
        weights = (bases[base] / WEIGHTS).read_bytes()
        mutation = rng.choice(MUTATIONS)
        files = mutation(rng, config, weights)
        yield base, HostileFolder(f"{base} {mutation.__name__} (seed {number})", files)


def set_value(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """One to three keys of the config, at any level, get an odd value."""
    values = json.loads(config)
    for _ in range(rng.randint(1, 3)):
        target = rng.choice(_objects(values))
        key = rng.choice([*target, "rope_scaling", "rope_parameters", "draft_vocab_size", "target", "compressor"])
        target[key] = copy.deepcopy(rng.choice(ODD_VALUES))  # may be mutated in turn
    return {CONFIG: json.dumps(values).encode(), WEIGHTS: weights}


def scale_value(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """A number of the config becomes another number of the same type."""
    values = json.loads(config)
    target = rng.choice(_objects(values))
    keys = [key for key, value in target.items() if type(value) in (int, float)]
    for key in rng.sample(keys, min(len(keys), 2)):
        target[key] = rng.choice(
            (target[key] * 2, target[key] // 2, target[key] + 1, target[key] * 10**9, -target[key])
        )
    return {CONFIG: json.dumps(values).encode(), WEIGHTS: weights}


def drop_keys(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """Keys are missing."""
    values = json.loads(config)
    target = rng.choice(_objects(values))
    for key in rng.sample(sorted(target), min(len(target), rng.randint(1, 4))):
        del target[key]
    return {CONFIG: json.dumps(values).encode(), WEIGHTS: weights}


def nest(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """A value is nested deeply, more deeply than the stack of the parser in some."""
    depth = rng.choice((20, 40, 900, 5000, 100_000))
    pair = rng.choice((("[", "]"), ('{"a":', "}")))
    value = pair[0] * depth + "1" + pair[1] * depth
    key = rng.choice([*json.loads(config), "facts", "other"])
    text = config.decode().rstrip().removesuffix("}")
    return {CONFIG: f'{text}, "{key}": {value}}}'.encode(), WEIGHTS: weights}


def corrupt_config(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """Bytes of the config are other ones, or it is no JSON at all."""
    data = bytearray(config)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    whole = (b"", b"[]", b"null", b"3", b'"text"', b"\xff\xfe{", b"{" * 50_000, b"9" * 10_000, b"\x00" * 100)
    return {CONFIG: bytes(data) if rng.random() < 0.6 else rng.choice(whole), WEIGHTS: weights}


def truncate_weights(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """The weights are cut short, empty, or longer than they should be."""
    end = rng.choice((0, 1, 7, 8, 9, 100, len(weights) // 2, len(weights) - 1))
    return {CONFIG: config, WEIGHTS: weights[:end] if rng.random() < 0.8 else weights + b"x" * 100}


def corrupt_header(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """The header of the safetensors file names other types, shapes, offsets or tensors."""
    (size,) = struct.unpack("<Q", weights[:8])
    header, data = json.loads(weights[8 : 8 + size]), weights[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    for name in rng.sample(names, rng.randint(1, 2)):
        entry = header[name]
        change = rng.choice(("dtype", "shape", "offsets", "rename", "drop", "flat"))
        if change == "dtype":
            entry["dtype"] = rng.choice(("F16", "F64", "I64", "BOOL", "F8_E4M3", "X", 3))
        elif change == "shape":
            entry["shape"] = rng.choice(([], [0], [-1, 2], [2**62, 2], [1] * 100, entry["shape"][::-1]))
        elif change == "offsets":
            entry["data_offsets"] = rng.choice(([0, 0], [5, 2], [0, 2**63], [-1, 4]))
        elif change == "flat":
            entry["shape"] = [entry["data_offsets"][1] - entry["data_offsets"][0]]
            entry["dtype"] = "U8"
        else:
            del header[name]
            if change == "rename":
                header[rng.choice(("fc.weight", "draft_ids", "compressor.x", "d2t", "\x00", "a" * 3000))] = entry
    text = json.dumps(header).encode()
    size = rng.choice((len(text), len(text), len(text), 2**63, 2**31, 0))
    return {CONFIG: config, WEIGHTS: struct.pack("<Q", size) + text + data}


def corrupt_data(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """The tensors hold other bits: values that are not finite, ids out of range."""
    (size,) = struct.unpack("<Q", weights[:8])
    data = bytearray(weights)
    for _ in range(rng.randint(1, 50)):
        start = rng.randrange(8 + size, len(data) - 4)
        data[start : start + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\xff\x7f\xff\x7f"))
    return {CONFIG: config, WEIGHTS: bytes(data)}


def leave_out(rng: random.Random, config: bytes, weights: bytes) -> dict[str, bytes]:
    """A file is missing, or is a pickle."""
    pickle = b"cos\nsystem\n(S'touch EXECUTED'\ntR."
    options: tuple[dict[str, bytes], ...] = (
        {}, {CONFIG: config}, {WEIGHTS: weights}, {CONFIG: config, "pytorch_model.bin": pickle},
        {CONFIG: config, "pytorch_model.bin": os.urandom(100)}, {CONFIG: config, WEIGHTS: pickle},
    )  # fmt: skip
    return rng.choice(options)


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], dict[str, bytes]], ...] = (
    set_value, set_value, set_value, scale_value, scale_value, drop_keys, nest, corrupt_config, truncate_weights,
    corrupt_header, corrupt_header, corrupt_data, leave_out,
)  # fmt: skip


def _objects(value: dict[str, Any]) -> list[dict[str, Any]]:
    """A JSON object and all objects below it."""
    return [value, *(inner for child in value.values() if isinstance(child, dict) for inner in _objects(child))]
