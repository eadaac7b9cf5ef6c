"""The way of one call through the files of the core: a path, no star around one of them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
from parity import GREEDY, SAMPLED, Kwargs, generate_plain, get_model, speculate
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.backend import use_kernels
from mmspec.call import Call, CallPlan
from mmspec.interfaces import Prompt
from mmspec.interfaces.drafter import as_drafter, modules_of

CORE = Path(mmspec.__file__).parent


class CallWalk:
    """Context that follows a `Call` from function to function.

    Attributes:
        stays: the file of each function that has the call, in order; one entry while the file stays the same.
    """

    def __init__(self) -> None:
        self.stays: list[str] = []

    def __enter__(self) -> CallWalk:
        sys.setprofile(self._follow)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _follow(self, frame: FrameType, event: str, argument: Any) -> None:
        at = frame.f_back if event == "return" else frame
        while event == "return" and at is not None and not _has_call(at):
            at = at.f_back
        if event not in ("call", "return") or at is None or not _has_call(at):
            return
        name = Path(at.f_code.co_filename).relative_to(CORE).as_posix()
        if not self.stays or self.stays[-1] != name:
            self.stays.append(name)


def _has_call(frame: FrameType) -> bool:
    in_core = frame.f_code.co_filename.startswith(str(CORE))
    return in_core and any(isinstance(value, (Call, CallPlan)) for value in frame.f_locals.values())


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_call_passes_decode_once(mode: Kwargs) -> None:
    """Entered by `generate`, and again after the prefill and after the kernels are chosen, which the loop does once its
    first tokens are out."""
    model = get_model()
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    with speculate(model, "oracle", generate_plain(model, inputs, **mode)), CallWalk() as walk:
        generate_plain(model, inputs, **mode)
    assert 1 <= walk.stays.count("decode.py") <= 3, " -> ".join(walk.stays)
    assert len(walk.stays) <= 13, " -> ".join(walk.stays)


def test_first_tokens_do_not_wait_for_what_the_rounds_need(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Streamer(BaseStreamer):
        def put(self, value: Tensor) -> None:
            seen.append("tokens")

        def end(self) -> None:
            seen.append("end")

    def kernels(*args: Any) -> AbstractContextManager[None]:
        seen.append("kernels")
        return use_kernels(*args)

    monkeypatch.setattr("mmspec.decode.use_kernels", kernels)
    model = get_model()
    with speculate(model, "none"):
        generate_plain(model, tiny.build_inputs(model, 27, 1), **GREEDY, streamer=Streamer())
    assert seen[:4] == ["tokens", "tokens", "kernels", "tokens"]  # the prompt is first


class HeadedDrafter(adversarial.BranchingDrafter):
    """Holds two modules, of which it declares one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.declared, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.declared,)


def test_a_drafter_declares_its_modules() -> None:
    """Nobody searches a drafter for them; one that is a module is its own."""
    drafter = HeadedDrafter()
    assert modules_of(as_drafter(drafter)) == (drafter.declared,)
    assert modules_of(as_drafter(adversarial.BranchingDrafter(1))) == ()
    assert not {"recordings", "recorder"} & set(Prompt.__dataclass_fields__), "a prompt is data"
