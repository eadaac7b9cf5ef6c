"""Drafts of a model's own copy under prefix processors: no token that they forbid, exact whatever they do."""

from __future__ import annotations

import json
from typing import Any

import fuzz
import pytest
import tiny_models as tiny
import torch
from adversarial import InjectedError
from kernels import needs_kernel
from parity import ALL_OUTPUTS, MODES, Kwargs, assert_parity, generate_plain, get_model, speculate
from test_prefix_processors import FAULTS, SCHEMA, Rule, _registered, by_rows, grammar_call
from torch import Tensor

import mmspec
from mmspec.drafters.model import chain
from mmspec.engine import constraints, sampler
from mmspec.engine.constrained_draft import DraftRules

__all__ = ["_registered"]
pytestmark = needs_kernel


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trees that were drafted under rules; each is checked: the processors forbid no node of it."""
    found, draft, constrain = list[Any](), chain.draft_under_rules, sampler.constrain

    def spy(*args: Any) -> Any:
        found.append(draft(*args))
        return found[-1]

    def check(tree: Any, *args: Any) -> Any:
        allowed = constrain(tree, *args)
        assert allowed.tokens is not tree.tokens or torch.equal(allowed.node_mask, tree.node_mask)
        return allowed

    monkeypatch.setattr(chain, "draft_under_rules", spy)
    monkeypatch.setattr(sampler, "constrain", check)
    return found


def compare(drafter: str, make: Any, **mode: Any) -> mmspec.Stats:
    """Plain and patched calls of one row."""
    model = get_model(seed=21)
    options = {"patch_options": {"tree_size": 8, "backend": "c"}} | mode
    return assert_parity(model, tiny.build_inputs(model, 18, 1), drafter, logits_processor=lambda: [make()], **options)


@MODES
@pytest.mark.parametrize("drafter", ["self", "quantized"])
def test_a_copy_drafts_what_is_allowed(mode: Kwargs, drafter: str, drafts: list[Any]) -> None:
    mmspec.register_prefix_processor(Rule)
    for bias in (0.0, 2.5):
        stats = compare(drafter, lambda bias=bias: Rule(bias=bias), **mode, **ALL_OUTPUTS)
        assert stats.num_accepted_tokens > 2
    assert len(drafts) > 5 and None not in drafts


@MODES
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault is not by_rows])
def test_a_processor_that_depends_on_more_is_found(
    fault: Any, mode: Kwargs, drafts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One that changes its input among them: the call goes on as plain decoding does."""
    mmspec.register_prefix_processor(Rule)
    compare("quantized", lambda: Rule(fault), **mode, **ALL_OUTPUTS)
    assert "the rest of this call is decoded without drafts" in caplog.text


@MODES
@pytest.mark.parametrize("length", [1, 4])
def test_an_error_comes_at_its_step_and_at_no_draft(mode: Kwargs, length: int, drafts: list[Any]) -> None:
    mmspec.register_prefix_processor(Rule)
    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, 1)
    stop, calls = inputs["input_ids"].shape[1] + length, list[int]()

    def fails(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
        if input_ids.shape[1] >= stop:
            raise InjectedError(f"at {input_ids.shape[1]}")

    for drafter in ("none", "quantized"):
        rule = Rule(fails)
        with speculate(model, drafter, backend="c"), pytest.raises(InjectedError, match=f"at {stop}"):
            generate_plain(model, inputs, logits_processor=[rule], **mode)
        calls.append(rule.calls)
    assert calls == [length + 1] * 2 and drafts


@MODES
def test_a_schema_is_drafted_with_what_it_forces(mode: Kwargs, drafts: list[Any]) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    model, _, texts, eos = grammar_call()
    info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[eos])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    with fuzz.override_generation_config(model, [eos]):
        stats = compare("quantized", lambda: LogitsProcessor(grammar), **{**mode, "max_new_tokens": 40})
    assert stats.num_accepted_tokens > 10 and len(drafts) > 2
    assert any(tree.num_nodes - 1 > 2 * steps for tree, steps in drafts), "no token was free"


def test_what_follows_a_path() -> None:
    """1 forces 2, 2 forces 3, 3 allows three ids, 8 the end, behind which nothing is drafted; 9 fails."""
    following = {1: [2], 2: [3], 3: [6, 7, 8], 8: [0]}

    def allow(ids: Tensor, scores: Tensor) -> Tensor:
        if (last := int(ids[0, -1])) == 9:
            raise InjectedError("9")
        allowed = following.get(last, range(scores.shape[1]))
        return scores.masked_fill(torch.tensor([n not in allowed for n in range(scores.shape[1])]), -torch.inf)

    constraint = constraints.Constraint(lambda row: allow, False, 1, 64)
    constraint.stop_ids = frozenset({0})
    rules: Any = DraftRules([constraint], lambda: (torch.tensor([[5, 4]]), 2))
    ids, bias = rules([])
    assert ids == [] and bool((bias == 0).all())
    ids, bias = rules([1])
    assert ids == [2, 3] and bias.isfinite().nonzero().flatten().tolist() == [6, 7, 8]
    assert rules([3, 8]) == ([0], None) and rules([9]) == ([], None)
    constraint.is_ended = lambda row: True
    assert rules([1]) == ([], None)


@MODES
@pytest.mark.parametrize("drafter", ["hybrid", "quantized"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_grammar_that_allows_nothing(mode: Kwargs, drafter: str, batch: int) -> None:
    """From one token on: the text, or the error, of plain `generate`."""
    mmspec.register_prefix_processor(Rule)
    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, batch)
    stop, found = inputs["input_ids"].shape[1] + 3, list[Any]()

    def nothing(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
        if input_ids.shape[1] >= stop:
            scores.fill_(-torch.inf)

    for options in ({"enabled": False}, {}):
        with speculate(model, drafter, backend="c"):
            try:
                found.append(generate_plain(model, inputs, logits_processor=[Rule(nothing)], mmspec=options, **mode))
            except RuntimeError as error:
                found.append(str(error))
    assert found[0] == found[1] if isinstance(found[0], str) else torch.equal(*found)
