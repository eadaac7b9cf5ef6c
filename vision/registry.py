"""Registry of compressors. A compressor is named `NAME:N`, where N is the maximum number of visual tokens per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspec.interfaces import Compressor
from mmspec.vision.compressors.elastic import Elastic
from mmspec.vision.compressors.latent import LatentCompressor
from mmspec.vision.compressors.pooling import Conv, Pool
from mmspec.vision.compressors.resampler import Resampler
from mmspec.vision.compressors.select import Drop, Identity, Relevant, Stride

TRAINED_GATE = Elastic.name
"""Without a size: the elastic compressor that a drafter was trained with."""
UNSIZED: dict[str, Callable[[], object]] = {"identity": Identity, "drop": Drop}
"""Compressors without a size: all tokens, or none."""
UNTRAINED: dict[str, Callable[[int], object]] = {
    "stride": Stride,
    "relevant": Relevant,
    "pool": Pool,
}
"""Compressors with a size and without weights: `max_tokens` -> compressor."""
TRAINED: dict[str, Callable[[int, int], nn.Module]] = {
    "conv": Conv,
    "elastic": Elastic,
    "latent": LatentCompressor,
    "resampler": Resampler,
}
"""Compressors with weights, stored with the drafter they were trained with: (`hidden_size`, `max_tokens`) -> module."""


def parse_compressor(text: str) -> tuple[str, int]:
    """Split `NAME:N` into name and number of tokens.

    Returns:
        (name, max_tokens); max_tokens is 0 for compressors without a size.

    Raises:
        ValueError: The name is unknown, or N is not an integer of at least 1.
    """
    name, _, size = text.partition(":")
    if name in UNSIZED and not size:
        return name, 0
    if name not in UNTRAINED and name not in TRAINED:
        available = ", ".join((*UNSIZED, *(f"{sized}:N" for sized in (*UNTRAINED, *TRAINED))))
        raise ValueError(f"unknown compressor {text!r}; available: {available}.")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"compressor {name!r} needs a maximum number of tokens, as in {name}:64; got {text!r}.")
    return name, int(size)


def init_compressor(text: str, hidden_size: int) -> Compressor:
    """Build the compressor `NAME:N`; trainable ones with freshly initialised weights for states of `hidden_size`."""
    name, max_tokens = parse_compressor(text)
    compressor = TRAINED[name](hidden_size, max_tokens) if max_tokens and name in TRAINED else build_compressor(text)
    return cast(Compressor, compressor)


def build_compressor(compressor: str | object) -> Compressor:
    """Build a compressor from its name; a compressor object is returned as it is, in eval mode.

    Raises:
        ValueError: The name is unknown, or the compressor needs trained weights.
        TypeError: The object does not implement `Compressor`.
    """
    if isinstance(compressor, str):
        name, max_tokens = parse_compressor(compressor)
        if max_tokens and name in TRAINED:
            raise ValueError(f"compressor {name!r} has weights: pass the folder of a drafter that was trained with it.")
        return cast(Compressor, UNTRAINED[name](max_tokens) if max_tokens else UNSIZED[name]())
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"a compressor needs `name`, `max_tokens` and `compress(...)`; got {type(compressor).__name__}."
        )
    if isinstance(compressor, nn.Module):
        compressor.eval()  # in training mode some compressors sample the tokens they keep
    return compressor


def compressor_config(compressor: Compressor) -> dict[str, Any]:
    """The entry `compressor` of a drafter's config: what `load_compressor` needs besides the weights."""
    return {"name": compressor.name, "max_tokens": compressor.max_tokens}


def load_compressor(config: Mapping[str, Any], state_dict: Mapping[str, Tensor], hidden_size: int) -> Compressor:
    """Load a compressor that is stored with a drafter.

    Args:
        config: `name` and `max_tokens` (see `compressor_config`).
        state_dict: Its weights; converted to float32.
        hidden_size: Width D of the states it compresses.

    Raises:
        ValueError: `state_dict` does not fit the compressor.
    """
    name = config["name"]
    with torch.device("meta"):  # initialising real weights would advance the user's random generator
        compressor = init_compressor(name if name in UNSIZED else f"{name}:{config['max_tokens']}", hidden_size)
    if isinstance(compressor, nn.Module):
        try:
            compressor.load_state_dict({key: value.float() for key, value in state_dict.items()}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"compressor {name}: {str(error).splitlines()[-1].strip()}") from error
        compressor.eval()
    return compressor
