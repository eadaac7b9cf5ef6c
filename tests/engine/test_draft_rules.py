"""Drafts of a model's own copy under prefix processors: no token that they forbid, exact whatever they do."""

from __future__ import annotations

from functools import partial
from typing import Any

import fuzz
import pytest
import torch
from kernels import needs_kernel
from parity import ALL_OUTPUTS, MODES, Kwargs
from test_prefix_processors import (
    FAULTS,
    Rule,
    _registered,
    by_rows,
    compare,
    compiled_schema,
    drafts,
    forcing_constraint,
    grammar_call,
)

import mmspec
from mmspec.engine.constrained_draft import DraftRules

__all__ = ["_registered", "drafts"]
pytestmark = needs_kernel

compare_row = partial(compare, batch=1, patch_options={"tree_size": 8, "backend": "c"})


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("drafter", ["self", "quantized"])
def test_a_copy_drafts_what_is_allowed(mode: Kwargs, drafter: str, drafts: list[Any]) -> None:
    mmspec.register_prefix_processor(Rule)
    for bias in (0.0, 2.5):
        stats = compare_row(lambda bias=bias: Rule(bias=bias), drafter, **mode, **ALL_OUTPUTS)
        assert stats.num_accepted_tokens > 2
    assert len(drafts) > 5 and None not in drafts


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault is not by_rows])
def test_a_processor_that_depends_on_more_is_found(
    fault: Any, mode: Kwargs, drafts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One that changes its input among them: the call goes on as plain decoding does."""
    mmspec.register_prefix_processor(Rule)
    compare_row(lambda: Rule(fault), "quantized", **mode, **ALL_OUTPUTS)
    assert "the rest of this call is decoded without drafts" in caplog.text


@MODES
def test_a_schema_is_drafted_with_what_it_forces(mode: Kwargs, drafts: list[Any]) -> None:
    pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    model, _, texts, eos = grammar_call()
    grammar = compiled_schema(texts, eos)
    with fuzz.override_generation_config(model, [eos]):
        stats = compare_row(lambda: LogitsProcessor(grammar), "quantized", **{**mode, "max_new_tokens": 40})
    assert stats.num_accepted_tokens > 10 and len(drafts) > 2
    assert any(tree.num_nodes - 1 > 2 * steps for tree, steps in drafts), "no token was free"


def test_what_follows_a_path() -> None:
    """See `forcing_constraint`."""
    constraint = forcing_constraint()
    rules: Any = DraftRules([constraint], lambda: (torch.tensor([[5, 4]]), 2))
    ids, bias = rules([])
    assert ids == [] and bool((bias == 0).all())
    ids, bias = rules([1])
    assert ids == [2, 3] and bias.isfinite().nonzero().flatten().tolist() == [6, 7, 8]
    assert rules([3, 8]) == ([0], None) and rules([9]) == ([], None)
    constraint.is_ended = lambda row: True
    assert rules([1]) == ([], None)
