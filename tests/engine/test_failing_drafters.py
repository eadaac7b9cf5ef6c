"""A drafter that raises in the middle of a call costs it the rest of its drafts: one warning, the tokens of plain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import adversarial as adversarial
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from parity import ALL_OUTPUTS, MODES, Kwargs, assert_parity, get_model, speculate

import mmspec
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.heads.base import c_draft
from mmspec.drafters.ngram.base import BestFirstDrafter
from mmspec.engine.tree import DraftTree
from mmspec.targets.hf import HFTarget

ERRORS: list[BaseException] = [
    adversarial.InjectedError("\x1b[2J" + "long " * 200),
    IndexError("index 10 is out of range"),
    StopIteration(),
    torch.OutOfMemoryError("out of memory"),
]


class Failing(adversarial.OracleDrafter):
    """Raises in one of its hooks, in the round of this number."""

    def __init__(self, references: Any, where: str, at: int, error: BaseException) -> None:
        super().__init__(1, references)
        self.where, self.at, self.error, self.num_asked = where, at, error, 0

    def _maybe_fail(self, where: str, rounds: int) -> None:
        self.num_asked += 1
        if where == self.where and rounds >= self.at:
            raise self.error

    def begin(self, prompt: Any) -> Any:
        self._maybe_fail("begin", self.at)
        return super().begin(prompt)

    def propose(self, state: Any, max_nodes: int, active: Any) -> Any:
        self._maybe_fail("propose", state.rounds)
        return super().propose(state, max_nodes, active)

    def observe(self, state: Any, result: Any, hidden_states: Any) -> None:
        self._maybe_fail("observe", state.rounds)
        super().observe(state, result, hidden_states)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize(
    ("where", "at"), [("begin", 0), ("propose", 0), ("propose", 1), ("observe", 0), ("observe", 1)]
)
def test_hooks_of_a_users_drafter(mode: Kwargs, where: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    model = get_model("llava")
    given = tiny.build_inputs(model, 14, 2)
    options = {**mode, "max_new_tokens": 20, "eos_token_id": None, **ALL_OUTPUTS}
    for error in ERRORS if at else ERRORS[:1]:

        def failing(plain: torch.Tensor, error: BaseException = error) -> Failing:
            return Failing([plain], where, at, error)

        stats = assert_parity(model, given, failing, **options)
        assert stats.num_draft_tokens if at and where == "propose" else stats.num_draft_tokens >= 0
        (line,) = warnings_of(caplog)
        assert "'oracle' failed (" in line and "\x1b" not in line and len(line) <= 300


def test_the_next_call_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    model = get_model("llama")
    given = tiny.build_inputs(model, 14, 1)
    options: Kwargs = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)
    drafter = Failing([plain] * 3, "propose", 1, ERRORS[0])
    with speculate(model, drafter):
        assert torch.equal(model.generate(**given, **options), plain)
        asked, drafter.where = drafter.num_asked, ""
        assert torch.equal(model.generate(**given, **options), plain)
        assert mmspec.stats(model, last=True).num_accepted_tokens and drafter.num_asked > asked
        drafter.where, drafter.num_asked = "begin", 0
        assert torch.equal(model.generate(**given, **options), plain)
        assert drafter.num_asked == 1, "not asked any more in this call"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_ends_the_call(error: type[BaseException]) -> None:
    model = get_model("llama")
    with speculate(model, Failing([], "propose", 1, error())), pytest.raises(error):
        model.generate(**tiny.build_inputs(model, 14, 1), max_new_tokens=14, do_sample=False, eos_token_id=None)


MALFORMED: list[Callable[[DraftTree], Any]] = [
    lambda tree: None,
    lambda tree: tree.tokens,
    lambda tree: DraftTree(tree.tokens[:1], tree.parents[:1], tree.node_mask[:1]),
    lambda tree: DraftTree(tree.tokens, tree.parents[:, :-1], tree.node_mask),
    lambda tree: DraftTree(tree.tokens[0], tree.parents[0], tree.node_mask[0]),
    lambda tree: DraftTree(tree.tokens.float(), tree.parents, tree.node_mask),
    lambda tree: DraftTree(tree.tokens, tree.parents, None),  # type: ignore[arg-type]
    lambda tree: DraftTree(tree.tokens.to(torch.uint8), tree.parents, tree.node_mask),
    lambda tree: DraftTree(tree.tokens.to(torch.complex64), tree.parents, tree.node_mask),
    lambda tree: DraftTree(tree.tokens.to("meta"), tree.parents, tree.node_mask),
    lambda tree: DraftTree(tree.tokens.to_sparse(), tree.parents, tree.node_mask),
    lambda tree: DraftTree(tree.tokens, tree.parents, tree.node_mask.long()),
    lambda tree: DraftTree(tree.tokens, tree.parents, tree.node_mask.float() * float("nan")),
    lambda tree: DraftTree(tree.tokens[:, :0], tree.parents[:, :0], tree.node_mask[:, :0]),
    lambda tree: DraftTree(tree.tokens.repeat(2, 1), tree.parents.repeat(2, 1), tree.node_mask.repeat(2, 1)),
]


@pytest.mark.parametrize("change", range(len(MALFORMED)))
def test_what_is_no_tree(change: int, caplog: pytest.LogCaptureFixture) -> None:
    class Malformed(adversarial.OracleDrafter):
        def propose(self, state: Any, max_nodes: int, active: Any) -> DraftTree:
            tree = super().propose(state, max_nodes, active)
            changed: DraftTree = MALFORMED[change](tree) if state.rounds > 1 else tree
            return changed

    model = get_model("llama")
    options: Kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert_parity(model, tiny.build_inputs(model, 14, 2), lambda plain: Malformed(1, [plain]), **options)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("token", [120, 10**6, -(10**6)])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_mask_token_outside_the_embeddings(token: int, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    model = get_model("llama")
    drafter: Any = heads.build_drafter("dspark", model.tiny_spec)
    drafter.mask_token_id = token
    given, options = tiny.build_inputs(model, 14, 2), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    stats = assert_parity(model, given, drafter, patch_options={"backend": backend}, **options)
    assert not stats.num_draft_tokens and len(warnings_of(caplog)) == 1


def test_drafts_in_c(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A head, a chain over the target's cache, and counts of n-grams."""
    if load_kernel() is None:
        pytest.skip("there is no C kernel")
    model = get_model("llama")
    given, options = tiny.build_inputs(model, 14, 2), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}

    def fail(original: Any) -> Any:
        calls = iter(range(2))

        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if next(calls, None) is None:
                raise adversarial.InjectedError("in C")
            return result

        return run

    places = [
        ("msd", heads.build_drafter("text_only", model.tiny_spec), c_draft.CDraft, "tree"),
        ("quantized", "quantized", HFTarget, "draft_chain"),
        ("hybrid", "hybrid", BestFirstDrafter, "propose"),
    ]
    for name, drafter, kind, method in places:
        with monkeypatch.context() as broken:
            broken.setattr(kind, method, fail(getattr(kind, method)))
            torch.manual_seed(0)
            assert_parity(model, given, drafter, **options)
        lines = warnings_of(caplog)
        assert len(lines) == 1 and "in C" in lines[0], name
