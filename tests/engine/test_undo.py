"""What a call changes for a while outside itself is undone, at whatever moment it is interrupted."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from interrupts import run_interrupted
from parity import get_model
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mmspec
from mmspec.cpu.linear import ACTIVE_CONTEXT
from mmspec.engine import rng, undo
from mmspec.engine.draws import ForbidDraws, PrivateDraws
from mmspec.engine.undo import Replaced, VariableSet, undo_lost, undone
from mmspec.targets import selftest
from mmspec.targets.patched_class import plain_class
from mmspec.vision.compressors.select import Identity

VARIABLE: ContextVar[Any] = ContextVar("variable", default=None)
OF_CONTEXTS = ("mmspec/generate.py", "mmspec/decode.py", "undo.py", "draws.py", "state_log.py")
OF_CONTEXTS += ("contextlib.py", "grad_mode.py")
"""Code that enters and leaves contexts."""
POINTS = 24
"""Interrupted calls of each model."""


def replacement(index: int, value: Any) -> tuple[Any, ...]:
    return "new", index, value


def state_of(model: torch.nn.Module | None = None) -> list[Any]:
    """All that a call changes for a while."""
    modules = [] if model is None else list(model.modules())
    return [
        *(ACTIVE_CONTEXT.get(), VARIABLE.get(), dict(undo._REPLACED), dict(undo._USERS), undo._HERE.call),
        *(_get_current_dispatch_mode_stack(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        list(rng._LIVE),
        *(module.__dict__.get("forward") for module in modules),
        *(
            len(hooks)
            for module in modules
            for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        ),
        None if model is None else {*model.__dict__},
    ]


@undone
def nested(names: dict[str, Any]) -> None:
    """Two calls, one within the other, that replace the same name."""
    with Replaced([(names, "a"), (names, "b")], replacement), VariableSet(VARIABLE, 7), PrivateDraws():
        assert names == {"a": ("new", 0, 1), "b": ("new", 1, None)} and VARIABLE.get() == 7
        with Replaced([(names, "a")], replacement), VariableSet(VARIABLE, 8), ForbidDraws(), torch.no_grad():
            assert names["a"] == ("new", 0, 1) and VARIABLE.get() == 8
        assert names["a"] == ("new", 0, 1) and VARIABLE.get() == 7 and len(_get_current_dispatch_mode_stack()) == 1


@pytest.mark.parametrize("second", [None, 0, 1, 2, 3, 5, 8])
def test_every_point(second: int | None) -> None:
    names, before = {"a": 1}, state_of()
    num_points = run_interrupted(lambda: nested(names))
    assert num_points > 100
    for point in range(0, num_points, 1 if second is None else 3):
        run_interrupted(lambda: nested(names), point, second)
        undo_lost()
        assert names == {"a": 1} and state_of() == before, point


def test_what_is_lost_is_undone_by_the_next_call() -> None:
    names: dict[str, Any] = {"a": 1}
    lost = Replaced([(names, "a")], replacement)
    lost._make()
    with Replaced([(names, "a"), (names, "b")], replacement):
        del lost
        with Replaced([(names, "c")], replacement):
            assert names["a"] == ("new", 0, 1), "another context still needs it"
    assert names == {"a": 1} and not undo._REPLACED
    lost = Replaced([(names, "a")], replacement)
    lost._make()
    del lost
    mmspec.unpatch(torch.nn.Linear(1, 1))
    assert names == {"a": 1} and not undo._REPLACED and not undo._USERS


def test_values_that_user_code_replaces_meanwhile_stay() -> None:
    names: dict[str, Any] = {"a": 1, "b": 2}
    with Replaced([(names, "a"), (names, "b")], replacement):
        names["a"] = "mine"
        del names["b"]
        with Replaced([(names, "a")], replacement):
            assert names["a"] == ("new", 0, "mine")
    assert names == {"a": "mine"}


def test_threads_that_replace_one_name() -> None:
    names: dict[str, Any] = {"a": 1}

    def replace() -> None:
        for _ in range(200):
            with Replaced([(names, "a")], replacement):
                assert names["a"] == ("new", 0, 1)

    threads = [threading.Thread(target=replace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == {"a": 1} and not undo._REPLACED and not undo._USERS


def test_a_child_forgets_the_other_threads() -> None:
    names: dict[str, Any] = {"a": 1, "b": 2}
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with Replaced([(names, "a")], replacement):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with Replaced([(names, "b")], replacement):
        undo._forget_other_threads()  # what a fork calls
        assert names == {"a": 1, "b": ("new", 0, 2)}
    leave.set()
    thread.join()
    assert names == {"a": 1, "b": 2} and not undo._REPLACED


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "llava", "llama with a rule"])
def test_calls_that_are_interrupted(family: str) -> None:
    """Nothing of the model or the thread stays changed, and the next call gives the tokens of plain `generate`."""
    model = get_model(family.partition(" ")[0])
    given = tiny.build_inputs(model, 3, 2)
    if "rule" in family:  # a prefix processor: draws are forbidden while it is called
        given["prefix_allowed_tokens_fn"] = lambda row, ids: list(range(5, 60))

    def generate() -> torch.Tensor:
        torch.manual_seed(1)
        found: torch.Tensor = model.generate(**given, max_new_tokens=4, do_sample=True, eos_token_id=None)
        return found

    plain = generate()
    if family == "llava":
        mmspec.patch(model, adversarial.PromptRecorder(), Identity())
    else:
        mmspec.patch(model, "hybrid")
    try:
        assert torch.equal(generate(), plain)
        before, num_points = state_of(model), run_interrupted(generate, files=OF_CONTEXTS)
        step = max(1, num_points // POINTS)
        for point in range(len(family) % step, num_points, step):
            run_interrupted(generate, point, files=OF_CONTEXTS)
            assert state_of(model) == before, point
        assert torch.equal(generate(), plain)
    finally:
        mmspec.unpatch(model)


def test_patch_and_unpatch_that_are_interrupted() -> None:
    """The model is patched or it is not; both can be called again."""
    model = get_model("llama")
    model.generate = model.generate  # as PEFT leaves it
    before = state_of(model)
    files = ("mmspec/patching.py", "patched_class.py", "undo.py", "selftest.py", "module_state.py", "grad_mode.py")

    def patch() -> None:
        selftest._VERDICTS.clear()
        mmspec.patch(model, "lookup")

    num_points = run_interrupted(patch, files=files)
    mmspec.unpatch(model)
    del before[-1]
    for point in range(0, num_points, max(1, 2 * num_points // POINTS)):
        run_interrupted(patch, point, files=files)
        assert ("_mmspec" in model.__dict__) == (type(model) is not plain_class(model)) == mmspec.is_patched(model)
        assert state_of(model)[:-1] == before, point
        mmspec.patch(model, "lookup")
        assert mmspec.is_patched(model) and type(model) is not plain_class(model)
        run_interrupted(lambda: mmspec.unpatch(model), point % 12, files=files)
        mmspec.unpatch(model)
        assert (
            type(model) is plain_class(model)
            and not {*model.__dict__} & {"_mmspec", "generate"}
            and state_of(model)[:-1] == before
        )
