"""Models with recurrent layers: chains, roll-back of the states, and what goes to transformers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
import zoo
from parity import ALL_OUTPUTS, MODES, assert_parity, build_cached_model, speculate
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import mmspec
from mmspec.engine.tree import DraftTree, first_chain
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets import recurrent
from mmspec.targets.registry import find_adapter

FAMILIES = [name for name, row in zoo.ROWS.items() if "recurrent" in row.traits]
FAMILY = pytest.mark.parametrize("family", [name for name in ("qwen3_5", "lfm2_vl") if name in FAMILIES])


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec(family, **{"seed": 3, "layers": 3, **changes}))


def one_row(model: PreTrainedModel, seed: int = 5) -> tiny.Inputs:
    return tiny.build_inputs(model, seed, 1, images=[2], padding="none")


@FAMILY
@MODES
@pytest.mark.parametrize("drafter", ["oracle", "bush", "wrong", "chaos"])
def test_one_row_is_identical(family: str, mode: dict[str, Any], drafter: str) -> None:
    """Tokens and generator."""
    model = model_of(family)
    options = {**mode, "max_new_tokens": 40}
    stats = assert_parity(model, one_row(model), drafter, patch_options={"tree_size": 8}, **options)
    assert not stats.fallback_reason and stats.num_draft_tokens > 0
    if drafter in ("oracle", "bush"):
        assert stats.num_accepted_tokens > 0


@FAMILY
def test_logits_and_returned_states(family: str) -> None:
    """Within what transformers' chunked and recurrent kernels differ in float32, far below any other error."""
    model = model_of(family)
    options: dict[str, Any] = {**ALL_OUTPUTS, "max_new_tokens": 25, "do_sample": False}
    plain = model.generate(**one_row(model), **options)
    with speculate(model, "bush", plain):
        mine = model.generate(**one_row(model), **options)
        assert not mmspec.stats(model, last=True).fallback_reason
    pairs = [*zip(plain.logits, mine.logits, strict=True), *zip(plain.scores, mine.scores, strict=True)]
    caches = (plain.past_key_values, mine.past_key_values)
    pairs += zip(*map(fuzz.clone_cache_tensors, caches), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]


@FAMILY
def test_a_returned_cache_can_be_continued(family: str) -> None:
    """By transformers, outside inference mode; the states belong to the caller."""
    model = model_of(family)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    first = one_row(model)
    texts = []
    for patched in (False, True):
        with speculate(model, "bush", None) if patched else nullcontext():
            turn = model.generate(**first, **options, return_dict_in_generate=True)
            following = tiny.build_next_turn(first, turn.sequences, 2, model.tiny_spec)
            texts.append(model.generate(**following, **options, **{CACHE_ARGUMENT: turn.past_key_values}))
    assert torch.equal(*texts)


class HalfRight(adversarial.AdversarialDrafter):
    """Drafts chains of which the first tokens are right: every round is rolled back, and tokens stay pending."""

    def __init__(self, sequences: Tensor) -> None:
        super().__init__()
        self.text = sequences[0].tolist()
        self.position = 0

    def begin(self, prompt: Any) -> Any:
        self.position = prompt.input_ids.shape[1]
        return None

    def observe(self, state: Any, result: Any, hidden_states: Any) -> None:
        self.position += len(result.emitted_ids[0])

    def propose(self, state: Any, max_nodes: int, active: Any) -> DraftTree:
        right = self.text[self.position : self.position + 1]
        tokens = torch.tensor([[0, *right, *[8] * (max_nodes - 1 - len(right))]])[:, :max_nodes]
        parents = torch.arange(-1, tokens.shape[1] - 1)[None]
        return DraftTree(tokens, parents, torch.ones_like(parents, dtype=torch.bool))


@FAMILY
def test_tokens_stay_pending_until_they_are_fed_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    feed = recurrent.RecurrentTarget._feed_pending

    def counted(self: recurrent.RecurrentTarget) -> None:
        pending.append(len(self.tokens) - self.state_length)
        feed(self)

    monkeypatch.setattr(recurrent.RecurrentTarget, "_feed_pending", counted)
    model = model_of(family)
    stats = assert_parity(model, one_row(model), HalfRight, max_new_tokens=60, do_sample=False, eos_token_id=None)
    assert stats.num_accepted_tokens > 0 and pending and max(pending) > recurrent.MAX_PENDING


class FailsAtDrafts(LogitsProcessor):
    """A processor that only drafts make fail: it never sees the token 8 in plain decoding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((input_ids[:, -1] == 8).any()):
            raise ValueError("an unexpected token")
        scores = scores.clone()
        scores[:, 8] = -torch.inf
        return scores


@FAMILY
def test_an_error_at_a_draft_restarts_from_the_prompt(family: str) -> None:
    model = model_of(family)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "suppress_tokens": [8]}
    assert_parity(model, one_row(model), HalfRight, **options)
    processors = {"logits_processor": lambda: LogitsProcessorList([FailsAtDrafts()])}
    assert_parity(model, one_row(model), HalfRight, **options, **processors)


@FAMILY
def test_rows_padding_and_caches_go_to_transformers(family: str) -> None:
    model = model_of(family)
    several = tiny.build_inputs(model, 5, 2, images=[1, 1])
    padded = tiny.build_inputs(model, 5, 1, images=[1], padding="left")
    padded = {**padded, "attention_mask": padded["attention_mask"].clone()}
    padded["attention_mask"][0, 0] = 0
    for given, reason in ((several, "several rows"), (padded, "padding")):
        stats = assert_parity(model, given, "bush", max_new_tokens=12, do_sample=False)
        assert reason in str(stats.fallback_reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapter_names_the_trait(family: str) -> None:
    adapter = find_adapter(model_of(family))
    assert adapter.is_recurrent and adapter.unsupported_reason() is None
    assert {"conv", "linear_attention"} & adapter.layer_types
    assert recurrent.target_class(adapter) is recurrent.RecurrentTarget


def test_the_chain_of_first_children() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]])
    parents = torch.tensor([[-1, 0, 0, 2, 1, 4], [-1, 0, 1, 1, 3, 0]])
    mask = torch.tensor([[True] * 6, [True, True, False, True, True, True]])
    scores = torch.arange(6, 0, -1).float().expand(2, -1)
    chain = first_chain(DraftTree(tokens, parents, mask, scores))
    assert chain.tokens[0, :4].tolist() == [9, 1, 4, 5] and chain.node_mask[0].tolist() == [True] * 4 + [False] * 2
    assert chain.tokens[1, :4].tolist() == [9, 1, 3, 4] and chain.node_mask[1].sum() == 4
    assert chain.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2
    assert chain.scores is not None and chain.scores[0, :4].tolist() == [6, 5, 2, 1]


def test_a_chain_stays_as_it_is() -> None:
    parents = torch.arange(-1, 4)[None]
    tree = DraftTree(torch.arange(5)[None], parents, torch.ones(1, 5, dtype=torch.bool))
    assert torch.equal(first_chain(tree).tokens, tree.tokens) and bool(first_chain(tree).node_mask.all())


def test_drafters_without_weights() -> None:
    model = model_of("qwen3_5")
    for drafter in ("none", "lookup", "recycling", "hybrid"):
        mmspec.patch(model, drafter)
        try:
            text = model.generate(**one_row(model), max_new_tokens=20, do_sample=False)
            assert not mmspec.stats(model).fallback_reason
        finally:
            mmspec.unpatch(model)
        assert torch.equal(text, model.generate(**one_row(model), max_new_tokens=20, do_sample=False))
