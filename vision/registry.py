"""The compressors by name. `NAME:TOKENS` says how many visual tokens of a row a drafter is shown at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspec.interfaces import Compressor
from mmspec.vision.compressors import select as picking
from mmspec.vision.compressors.cost_based import Measured
from mmspec.vision.compressors.elastic import Elastic
from mmspec.vision.compressors.latent import LatentCompressor
from mmspec.vision.compressors.pooling import Conv, Pool
from mmspec.vision.compressors.resampler import Resampler

WHOLE: dict[str, Callable[[], object]] = {"identity": picking.Identity, "drop": picking.Drop, "measured": Measured}
"""Those that keep all or nothing, or what pays: no number is asked."""
FREE: dict[str, Callable[[int], object]] = {
    "stride": picking.Stride,
    "random": picking.Chance,
    "relevant": lambda tokens: picking.Prune(tokens, "relevant", picking.relevance),
    "salient": lambda tokens: picking.Prune(tokens, "salient", picking.distinctness, attends=True),
    "diverse": picking.Diverse,
    "pool": Pool,
}
"""Those without weights."""
TRAINED: dict[str, Callable[[int, int], nn.Module]] = {
    "conv": Conv,
    "elastic": Elastic,
    "latent": LatentCompressor,
    "resampler": Resampler,
}
"""Those that have weights, and so come with a drafter that was trained with them: (hidden size, tokens)."""


def parse(text: str) -> tuple[str, int]:
    """(name, tokens) of `NAME:TOKENS`; tokens is 0 for those that are asked for no number.

    Raises:
        ValueError: an unknown name, or no whole number of at least 1.
    """
    name, _, count = text.partition(":")
    if name in WHOLE and not count:
        return name, 0
    if name not in FREE and name not in TRAINED:
        listed = ", ".join((*WHOLE, *(f"{known}:N" for known in (*FREE, *TRAINED))))
        raise ValueError(f"no compressor is called {text!r}; known: {listed}.")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"say how many tokens are kept, as in {name}:64; got {text!r}.")
    return name, int(count)


def new(text: str, hidden_size: int) -> Compressor:
    """A compressor as it is before training, for a target of that width."""
    name, tokens = parse(text)
    made = TRAINED[name](hidden_size, tokens) if name in TRAINED else make(text)
    return cast(Compressor, made)


def make(compressor: str | object) -> Compressor:
    """The compressor of that name, or the given object if it is one.

    "elastic" alone goes by what looking costs, as `measured` does; `mmspec.config` takes the drafter's own if it came
    with one.

    Raises:
        ValueError: an unknown name, or one that needs weights. TypeError: not a compressor.
    """
    if compressor == Elastic.name:
        return Measured(Elastic.name)
    if isinstance(compressor, str):
        name, tokens = parse(compressor)
        if name in TRAINED:
            free = " Or say 'elastic', which needs no weights." if name == Elastic.name else ""
            raise ValueError(
                f"compressor {name!r} has weights: name the folder of a drafter that was trained with it.{free}"
            )
        return cast(Compressor, WHOLE[name]() if name in WHOLE else FREE[name](tokens))
    if not isinstance(compressor, Compressor):
        raise TypeError(f"a compressor needs `name`, `tokens` and `compress(...)`; got {type(compressor).__name__}.")
    if isinstance(compressor, nn.Module):
        compressor.eval()  # in training some draw what they keep
    return compressor


def restored(facts: Mapping[str, Any], weights: Mapping[str, Tensor], hidden_size: int) -> Compressor:
    """One that came with a drafter. facts: its `name` and `tokens`.

    Raises:
        ValueError: the weights are not those of such a compressor.
    """
    name = facts["name"]
    with torch.device("meta"):  # fresh weights would be drawn from the user's generator
        made = new(name if name in WHOLE else f"{name}:{facts['tokens']}", hidden_size)
    if isinstance(made, nn.Module):
        try:
            made.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"compressor {name}: {str(error).splitlines()[-1].strip()}") from error
        made.eval()
    return made


__all__ = ["FREE", "TRAINED", "WHOLE", "make", "new", "parse", "restored"]
