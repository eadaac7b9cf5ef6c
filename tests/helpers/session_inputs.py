"""What the calls of a session are given besides a prompt: odd masks, positions, caches, code of the user."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tiny_models as tiny
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

TYPES = ("attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs with a value for each token."""


class EndedByUserError(Exception):
    """Raised by user code."""


def padded(given: tiny.Inputs, widths: tuple[int, int], pad: int) -> tiny.Inputs:
    """Columns of padding on the left and on the right."""
    fills = {"input_ids": pad, **dict.fromkeys(TYPES, 0)}
    return given | {
        name: nn.functional.pad(given[name], widths, value=fill) for name, fill in fills.items() if name in given
    }


def lengthened(given: tiny.Inputs, ids: Tensor) -> tiny.Inputs:
    """The next turn: longer ids, seen by the mask."""
    turn = {**given, "input_ids": ids}
    for name in TYPES:
        if name in given:
            width = ids.shape[1] - given[name].shape[1]
            turn[name] = nn.functional.pad(given[name], (0, width), value=int(name == "attention_mask"))
    return turn


def a_hole(given: tiny.Inputs, rng: random.Random) -> tiny.Inputs:
    """Tokens in the middle are not seen."""
    mask = given["attention_mask"].clone()
    start = rng.randrange(mask.shape[1] - 2)
    mask[:, start : start + 2] = 0
    return given | {"attention_mask": mask}


def positions(given: tiny.Inputs, rng: random.Random) -> tiny.Inputs:
    """Position ids that are counted from another number."""
    return given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None] + rng.choice((0, 3))}


VARIANTS: dict[str, Callable[[tiny.Inputs, random.Random], tiny.Inputs]] = {
    "a hole": a_hole,
    "fractions": lambda given, _: given | {"attention_mask": given["attention_mask"].float()},
    "booleans": lambda given, _: given | {"attention_mask": given["attention_mask"].bool()},
    "twos": lambda given, _: given | {"attention_mask": given["attention_mask"] * 2},
    "nothing seen": lambda given, _: given | {"attention_mask": given["attention_mask"] * 0},
    "short": lambda given, _: given | {"attention_mask": given["attention_mask"][:, 1:]},
    "int32": lambda given, _: given | {"input_ids": given["input_ids"].int()},
    "positions": positions,
}


# --- caches -----------------------------------------------------------------------------------------------------------


@dataclass
class KeptCache:
    """Equal caches that the models have filled, and the prompt with its answer that they hold.

    Attributes:
        given: inputs with all ids.
        caches: of the plain model, of the patched one.
    """

    given: tiny.Inputs
    caches: list[Any]

    def next_call(self, text_ids: list[int], rng: random.Random) -> tuple[tiny.Inputs, list[Any]]:
        """Inputs that go on, and the cache for each model: itself, a copy, a shorter one, or one of all ids."""
        kind, ids = rng.choice(("itself", "copy", "copy", "cropped", "full")), self.given["input_ids"]
        caches = self.caches if kind == "itself" else copy.deepcopy(self.caches)
        if kind == "cropped":
            for cache in caches:
                with suppress(ValueError, RuntimeError):  # a full sliding window, in the middle of the layers
                    cache.crop(-3)
        elif kind == "full":
            ids = ids[:, : caches[0].get_seq_length()]
        if kind != "full":
            more = [rng.choice(text_ids) for _ in range(rng.randrange(1, 4))]
            ids = torch.cat([ids, torch.tensor([more] * len(ids))], 1)
        return lengthened(self.given, ids), caches


def new_caches(model: PreTrainedModel, rng: random.Random) -> list[Any]:
    """An empty cache for each of two models."""
    config = model.config.get_text_config()
    kind = rng.choice(("config", "config", "bare", "static"))
    if kind == "static":
        return [StaticCache(config=config, max_cache_len=120) for _ in range(2)]
    return [DynamicCache() if kind == "bare" else DynamicCache(config=config) for _ in range(2)]


# --- code of the user -------------------------------------------------------------------------------------------------


class Stopping(BaseStreamer):
    """A streamer that collects values, and raises at its nth."""

    def __init__(self, number: int) -> None:
        self.number, self.values = number, list[list[int]]()

    def put(self, value: Tensor) -> None:
        if len(self.values) == self.number:
            raise EndedByUserError
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])


class Bias(LogitsProcessor):
    """A processor with state: it counts its calls, and writes into the scores or not."""

    def __init__(self, in_place: bool, fails_at: int) -> None:
        self.in_place, self.fails_at, self.calls = in_place, fails_at, 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise EndedByUserError
        found = scores if self.in_place else scores.clone()
        found[:, (int(input_ids[:, -1].sum()) + self.calls) % scores.shape[1]] += 4
        return found


class RowStop(StoppingCriteria):
    """Ends rows by their last token."""

    def __init__(self, rest: int) -> None:
        self.rest = rest

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> Any:
        return input_ids[:, -1] % 7 == self.rest


@dataclass
class UserCode:
    """Arguments with code of the user, equal ones for each model."""

    arguments: list[dict[str, Any]] = field(default_factory=lambda: [{}, {}])

    def add(self, make: Callable[[], dict[str, Any]]) -> None:
        for one in self.arguments:
            one.update(make())


def user_code(rng: random.Random, vocab_size: int) -> UserCode:
    """A processor, a criterion or a rule."""
    found, kind = UserCode(), rng.choice(("processor", "criterion", "rule", "both"))
    if kind in ("processor", "both"):
        settings = rng.random() < 0.5, rng.choice((-1, -1, -1, 3))
        found.add(lambda: {"logits_processor": [Bias(*settings)]})
    if kind in ("criterion", "both"):
        rest = rng.randrange(7)
        found.add(lambda: {"stopping_criteria": [RowStop(rest)]})
    if kind == "rule":
        found.add(
            lambda: {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) * 3 + n) % vocab_size for n in range(9)]}
        )
    return found
