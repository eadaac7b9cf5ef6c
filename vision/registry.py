"""The compressors by name. `NAME:TOKENS` says how many visual tokens of a row a drafter is shown at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from mmspec.interfaces import Compressor

TRAINED = ("latent",)
"""Those that have weights, and so come with a drafter that was trained with them."""


def parse(text: str) -> tuple[str, int]:
    """(name, tokens) of `NAME:TOKENS`.

    Raises:
        ValueError: an unknown name, or no whole number of at least 1.
    """
    name, _, count = text.partition(":")
    if name not in TRAINED:
        raise ValueError(f"no compressor is called {name!r}; known: {', '.join(TRAINED)}.")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"say how many tokens are kept, as in {name}:64; got {text!r}.")
    return name, int(count)


def new(text: str, hidden_size: int) -> Compressor:
    """A compressor as it is before training: `NAME:TOKENS`, for a target of that width."""
    from mmspec.vision.latent import LatentCompressor

    _, tokens = parse(text)
    return cast(Compressor, LatentCompressor(hidden_size, tokens))


def make(compressor: str | object) -> Compressor:
    """The compressor of that name, or the given object if it is one.

    Raises:
        ValueError: an unknown name, or one that needs weights. TypeError: not a compressor.
    """
    if isinstance(compressor, str):
        name, _ = parse(compressor)
        raise ValueError(f"compressor {name!r} has weights: name the folder of a drafter that was trained with it.")
    if not isinstance(compressor, Compressor):
        raise TypeError(f"a compressor needs `name`, `tokens` and `compress(...)`; got {type(compressor).__name__}.")
    return compressor


def restored(facts: Mapping[str, Any], weights: Mapping[str, Tensor], hidden_size: int) -> Compressor:
    """One that came with a drafter. facts: its `name` and `tokens`.

    Raises:
        ValueError: the weights are not those of such a compressor.
    """
    made = new(f"{facts['name']}:{facts['tokens']}", hidden_size)
    assert isinstance(made, nn.Module)
    try:
        made.load_state_dict({name: value.float() for name, value in weights.items()})
    except RuntimeError as error:
        raise ValueError(f"compressor {facts['name']}: {str(error).splitlines()[-1].strip()}") from error
    made.eval()
    return made


__all__ = ["TRAINED", "make", "new", "parse", "restored"]
