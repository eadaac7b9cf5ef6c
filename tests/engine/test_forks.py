"""A child that is forked after calls with several threads decodes, whatever other threads were doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import tiny_models as tiny
import torch
from parity import get_model

import mmspec
from mmspec import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks with OpenMP threads")


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forks._HERE, "has_team", False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_child(check: Callable[[], bool]) -> bool:
    """Whether a check holds in a forked child, within a minute."""
    pid = os.fork()
    if pid == 0:
        is_right = False
        signal.alarm(60)
        try:
            is_right = check()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("drafter", ["hybrid", "quantized"])
def test_calls_of_a_child(drafter: str, two_threads: None) -> None:
    """Also while another thread holds all locks."""
    model = get_model("llama", hidden=64)
    given = tiny.build_inputs(model, 3, 2)

    def generate() -> torch.Tensor:
        found: torch.Tensor = model.generate(**given, max_new_tokens=8, do_sample=True, eos_token_id=None)
        return found

    def generates_the_same() -> bool:
        torch.manual_seed(1)
        return torch.equal(generate(), plain) and torch.get_num_threads() == 1

    torch.manual_seed(1)
    plain = generate()
    mmspec.patch(model, drafter)
    holds, release = threading.Event(), threading.Event()

    def hold_all() -> None:
        held = [lock for lock in list(forks._LOCKS) if lock.acquire(blocking=False)]
        holds.set()
        release.wait()
        for lock in held:
            lock.release()

    try:
        generate()
        thread = threading.Thread(target=hold_all)
        thread.start()
        holds.wait()
        try:
            assert in_child(generates_the_same)
        finally:
            release.set()
            thread.join()
        assert torch.get_num_threads() == 2
        assert in_child(lambda: mmspec.stats(model).calls == 1 and not mmspec.is_patched(mmspec.unpatch(model)))
    finally:
        mmspec.unpatch(model)


def test_a_child_keeps_its_threads_where_nothing_was_computed(two_threads: None) -> None:
    assert in_child(lambda: torch.get_num_threads() == 2)
    forks.note_threads()
    assert in_child(lambda: torch.get_num_threads() == 1)
    torch.set_num_threads(1)
    forks._HERE.has_team = False
    forks.note_threads()
    assert not forks._HERE.has_team
