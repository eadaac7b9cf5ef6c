"""Calls whose model other threads use or change at the same time (`mmspec.live`)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn
from transformers.utils import output_capturing

import mmspec
from mmspec.live import MAX_READS, reread


@contextmanager
def other_threads(model: nn.Module, rng: random.Random) -> Iterator[list[int]]:
    """Context in which dicts of modules grow and shrink between any two lines, as threads of other calls would do it.

    Yields:
        [number of changes].
    """
    hook: Any = FunctionType((lambda *_: None).__code__, vars(output_capturing))
    modules, count = list(model.modules()), [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/mmspec/" not in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("/modules/module.py"):
            return None
        if event == "line" and rng.random() < 0.02:
            count[0] += 1
            module = rng.choice(modules)
            place: dict[Any, Any] = rng.choice((module.__dict__, module._forward_hooks))
            name, value = ("other", 1) if place is module.__dict__ else (10**9, hook)
            if place.pop(name, None) is None:
                place[name] = value
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        for module in modules:
            module.__dict__.pop("other", None)
            module._forward_hooks.pop(10**9, None)


def test_modules_that_change_while_they_are_read() -> None:
    model = tiny.build_model(tiny.ModelSpec("llava", seed=3, layers=2, mixed=True))
    given = tiny.build_inputs(model, 5, 1)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**given, **options)
    mmspec.patch(model, "self", reuse_prefix=True)
    with other_threads(model, random.Random(0)) as count:
        found = [model.generate(**given, **options) for _ in range(2)]
    assert count[0] > 100 and all(torch.equal(one, plain) for one in found)


def test_other_errors_pass() -> None:
    calls: list[str] = []

    @reread
    def fail(message: str) -> None:
        calls.append(message)
        raise RuntimeError(message)

    for message, number in (("another", 1), ("dictionary changed size during iteration", MAX_READS + 1)):
        with pytest.raises(RuntimeError, match=message):
            fail(message)
        assert calls.count(message) == number
