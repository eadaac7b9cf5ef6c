"""What is noted of calls of the code under test, and user code that acts at one of its own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


def spy_on(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = lambda result, *args, **kw: result
) -> list[Any]:
    """A list that gets `note(result, *arguments)` of each call of a function or method."""
    original, noted = getattr(owner, name), list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        noted.append(note(result, *args, **kwargs))
        return result

    patch.setattr(owner, name, call)
    return noted


class UserCode(BaseStreamer):
    """A criterion that ends nothing, a processor that changes nothing, or a streamer.

    Attributes:
        act: called with the number of the call, from 1 on, and the ids that the user code is given. The prompt that a
            streamer gets is number 0, the end of the stream -1.
        where: "criterion", "processor" or "streamer".
        calls: how often it was called.
    """

    def __init__(self, act: Callable[[int, Any], Any], where: str = "streamer") -> None:
        self.act, self.where, self.calls = act, where, -(where == "streamer")

    @property
    def argument(self) -> dict[str, Any]:
        """That of `generate`."""
        if self.where == "streamer":
            return {"streamer": self}
        if self.where == "criterion":
            return {"stopping_criteria": [self]}
        return {"logits_processor": [self.process]}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As a processor, which gets no further arguments."""
        self.put(input_ids)
        return scores

    def put(self, value: Tensor) -> None:
        self.calls += 1
        self.act(self.calls, value)

    def end(self) -> None:
        self.act(-1, None)


def at(number: int, act: Callable[[], Any]) -> Callable[[int, Any], None]:
    """An action at one call of `UserCode`."""

    def run(call: int, ids: Any) -> None:
        if call == number:
            act()

    return run


def raising(error: BaseException) -> Callable[[], None]:
    """An action."""

    def fail() -> None:
        raise error

    return fail
