"""Prefix processors draft: what they allow filters drafts, and the output is that of `generate`, whatever they do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
from adversarial import InjectedError
from kernels import needs_kernel
from parity import ALL_OUTPUTS, GREEDY, MODES, SAMPLED, Kwargs, assert_parity, generate_plain, get_model, speculate
from torch import Tensor

import mmspec
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.model import chain
from mmspec.engine import constraints, sampler
from mmspec.engine.constrained_draft import constrain
from mmspec.engine.private_copy import MAX_OBJECTS, copied_if_small, private_copy
from mmspec.engine.tree import build_tree

VOCAB = tiny.ModelSpec().vocab
FAMILIES = ("llava", "qwen2_vl", "qwen3_vl", *fuzz.LATER_FAMILIES)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = set(constraints._REGISTERED)
    yield
    constraints._REGISTERED.clear()
    constraints._REGISTERED.update(before)


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


@pytest.mark.every(10)
@pytest.mark.parametrize("seed", [*range(300)])
def test_random_requests(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rules that depend on row and last id, or on the number of calls; the log of calls is that of plain `generate`."""
    family = FAMILIES[seed // 10 % len(FAMILIES)] if seed % 10 == 0 else FAMILIES[seed % len(FAMILIES)]
    case = fuzz.draw_case(7000 + seed, family if family in fuzz.LATER_FAMILIES else None)
    case = replace(case, prefix="impure" if seed // 10 % 4 == 3 else "pure", batch=1 + seed // 10 % 3, nodes=8)
    drafter = ("oracle", "bush", "chaos", case.drafter)[seed // 10 % 4]
    result = fuzz.run_case(replace(case, drafter=drafter, processor="" if seed % 3 else case.processor))
    assert not result.differences, result.report()


# --- classes that are declared ----------------------------------------------------------------------------------------


class Rule:
    """Forbids two thirds of the ids, by the last id; `fault` is what else it does at each call."""

    def __init__(self, fault: Callable[[Rule, Tensor, Tensor], None] | None = None, bias: float = 0.0) -> None:
        self.fault, self.bias, self.calls = fault, bias, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        turn = input_ids[:, -1:] + torch.arange(scores.shape[1])
        scores = scores + torch.where(turn % 5 == 2, self.bias, 0.0)
        scores = scores.masked_fill((turn % 3 != 0) & (torch.arange(scores.shape[1]) > 2), -torch.inf)
        if self.fault is not None:
            self.fault(self, input_ids, scores)
        return scores


class Counted(Rule):
    """A state: each call moves it on."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = super().__call__(input_ids, scores)
        scores[:, 3 + self.calls % 7 :: 7] = -torch.inf
        return scores

    def fork(self) -> Counted:
        copied = Counted(self.fault, self.bias)
        copied.calls = self.calls
        return copied


def compare(
    make: Callable[[], Any], drafter: Any = "oracle", seed: int = 21, batch: int = 3, **kwargs: Any
) -> mmspec.Stats:
    model = get_model(seed=seed)
    inputs = tiny.build_inputs(model, 18, batch)
    made: list[Any] = []

    def processors() -> list[Any]:
        made.append(make())
        return [made[-1]]

    stats = assert_parity(model, inputs, drafter, logits_processor=processors, **kwargs)
    if isinstance(made[0], Rule):
        assert made[0].calls == made[1].calls, "the user's object is called as transformers calls it"
    return stats


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("bias", [0.0, 2.5])
def test_a_registered_class_drafts(mode: Kwargs, bias: float) -> None:
    plain = compare(lambda: Rule(bias=bias), **mode, **ALL_OUTPUTS)
    assert plain.num_accepted_tokens == 0
    assert mmspec.register_prefix_processor(Rule) is Rule
    assert compare(lambda: Rule(bias=bias), **mode, **ALL_OUTPUTS).num_accepted_tokens > 10
    assert compare(lambda: Rule(bias=bias), "bush", **mode).num_draft_tokens > 0


@MODES
def test_a_processor_with_a_state_is_copied_by_node(mode: Kwargs) -> None:
    mmspec.register_prefix_processor(Counted)
    assert compare(Counted, **mode, **ALL_OUTPUTS).num_accepted_tokens > 10


def test_what_is_no_class_of_processors_is_refused() -> None:
    for wrong in (Rule(), object, "Rule", lambda ids, scores: scores):
        with pytest.raises(TypeError, match="must be a class with __call__"):
            mmspec.register_prefix_processor(wrong)  # type: ignore[type-var]


def test_forced_tokens_are_drafted_for_nothing() -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [3 + (int(ids[-1]) * 7 + 1) % 80] if int(ids[-1]) % 4 else list(range(3, VOCAB))

    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, 3)
    with fuzz.override_generation_config(model, None):
        for mode in (GREEDY, SAMPLED):
            stats = assert_parity(model, inputs, "hybrid", prefix_allowed_tokens_fn=lambda: allowed, **mode)
            assert stats.num_accepted_tokens > 10


def forcing_constraint() -> constraints.Constraint:
    """1 forces 2, 2 forces 3, 3 allows three ids, 8 the end, behind which nothing is drafted; 9 fails."""
    following = {1: [2], 2: [3], 3: [6, 7, 8], 8: [0]}

    def allow(ids: Tensor, scores: Tensor) -> Tensor:
        if (last := int(ids[0, -1])) == 9:
            raise InjectedError("9")
        allowed = following.get(last, range(scores.shape[1]))
        return scores.masked_fill(torch.tensor([n not in allowed for n in range(scores.shape[1])]), -torch.inf)

    constraint = constraints.Constraint(lambda row: allow, False, 1, 64)
    constraint.stop_ids = frozenset({0})
    return constraint


@pytest.mark.parametrize(
    ("history", "draft", "expected"),
    [
        ([9, 1], [], {(2,), (2, 3)}),  # 1 forces 2, 2 forces 3, of 3 nothing is known
        ([5], [(1, -1, 0.9)], {(1,), (1, 2), (1, 2, 3)}),  # also below a node of the drafter
        ([3, 7, 5, 3], [], {(7,)}),  # few tokens are allowed, one of them followed before
        ([3, 9, 6, 3], [(8, -1, 0.2)], {(6,), (8,)}),  # else the last other one; the drafter's is kept
        ([5, 4], [(8, -1, 0.9)], {(8,), (8, 0)}),
        ([1], [(2, -1, 0.1), (3, 0, 0.09)], {(2,), (2, 3)}),  # certain, whatever the drafter thinks
        ([2], [], {(3,)}),
        ([9, 8], [(1, -1, 0.8)], {(0,)}),  # behind an end nothing is drafted
    ],
)
def test_what_must_follow_is_added_anywhere(
    history: list[int], draft: list[tuple[int, int, float]], expected: set[tuple[int, ...]]
) -> None:
    """`draft` has (token, place of the parent in it or -1, probability)."""
    proposed = build_tree([[(token, parent + 1, prob) for token, parent, prob in draft]])
    tree = constrain(proposed, [forcing_constraint()], torch.tensor([history]), [len(history)], 8)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for index in range(1, tree.num_nodes):
        if tree.node_mask[0, index]:
            paths[index] = (*paths[int(tree.parents[0, index])], int(tree.tokens[0, index]))
    assert {path for path in paths.values() if path} == expected
    assert tree.scores is None or (tree.scores[0].diff() <= 0).all()


# --- processors that are not what they seem ---------------------------------------------------------------------------


def by_calls(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
    scores[:, rule.calls * 7 % scores.shape[1]] += 9.0


def by_draws(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
    scores += torch.randn_like(scores)


def by_scores(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
    scores *= 1.0 - 0.9 * (scores.argmax(-1, keepdim=True) % 2)
    scores += scores.roll(3, -1).nan_to_num(neginf=0.0)


def by_rows(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
    scores += 3.0 * (input_ids.sum() % 5 == torch.arange(scores.shape[1]) % 5)


def by_input(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
    if input_ids.shape[1] % 5 == 0:
        input_ids[:, -1] = 7


FAULTS = (by_calls, by_draws, by_scores, by_rows, by_input)


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("fault", FAULTS)
def test_a_processor_that_depends_on_more_is_found(fault: Any, mode: Kwargs, caplog: pytest.LogCaptureFixture) -> None:
    """At its first result that differs; the rest of the call is plain decoding, with its state and its draws."""
    mmspec.register_prefix_processor(Rule)
    for seed in (21, 22):
        compare(lambda: Rule(fault), seed=seed, **mode, **ALL_OUTPUTS)
        compare(lambda: Rule(fault), "bush", seed=seed, **mode)
    assert "the rest of this call is decoded without drafts" in caplog.text


@MODES
def test_a_function_that_counts_its_calls_is_found(mode: Kwargs) -> None:
    def make() -> Any:
        calls, total = [], 0

        def allowed(row: int, ids: Tensor) -> list[int]:
            nonlocal total
            total += 1
            calls.append(row)
            return [token for token in range(3, VOCAB) if (token + total + len(calls)) % 5 < 2]

        return allowed

    model = get_model(seed=21)
    assert_parity(model, tiny.build_inputs(model, 18, 3), prefix_allowed_tokens_fn=make, **mode, **ALL_OUTPUTS)


@MODES
@pytest.mark.parametrize("drafter", ["oracle", "bush", "chaos"])
def test_an_error_at_a_draft_drops_it(mode: Kwargs, drafter: str) -> None:
    """The processor fails after every text but the one that is generated."""
    mmspec.register_prefix_processor(Rule)
    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, 3)
    right = generate_plain(model, inputs, logits_processor=[Rule()], **mode)

    def fails(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
        for ids in input_ids:
            if not any(torch.equal(ids, row[: len(ids)]) for row in right):
                raise InjectedError("no such text")

    with speculate(model, drafter, right):
        assert torch.equal(generate_plain(model, inputs, logits_processor=[Rule(fails)], **mode), right)
        assert mmspec.stats(model).num_draft_tokens > 0 or drafter == "chaos"


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("drafter", ["hybrid", pytest.param("quantized", marks=needs_kernel)])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_an_error_comes_at_its_step(mode: Kwargs, drafter: str, length: int, request: pytest.FixtureRequest) -> None:
    mmspec.register_prefix_processor(Rule)
    model, copies = get_model(seed=21), drafter == "quantized"
    drafts = request.getfixturevalue("drafts") if copies else []
    inputs = tiny.build_inputs(model, 18, 1 if copies else 3)
    stop = inputs["input_ids"].shape[1] + length

    def fails(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
        if input_ids.shape[1] >= stop:
            raise InjectedError(f"at {input_ids.shape[1]}")

    states, calls = [], []
    for name, options in (("none", {}), (drafter, {"backend": "c"} if copies else {})):
        rule = Rule(fails)
        with speculate(model, name, **options), pytest.raises(InjectedError, match=f"at {stop}"):
            generate_plain(model, inputs, logits_processor=[rule], **mode)
        states.append(torch.get_rng_state())
        calls.append(rule.calls)
    assert calls[0] == calls[1] == length + 1 and torch.equal(*states)
    assert drafts or not (copies and length)


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_grammar_that_allows_nothing(mode: Kwargs, length: int, batch: int) -> None:
    """An empty list is an error at its step; scores that are all -inf are what plain decoding makes of them."""
    mmspec.register_prefix_processor(Rule)
    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, batch)
    stop = inputs["input_ids"].shape[1] + length

    def nothing(rule: Rule, input_ids: Tensor, scores: Tensor) -> None:
        if input_ids.shape[1] >= stop:
            scores.fill_(-torch.inf)

    def outcome(**options: Any) -> str:
        try:
            return str(generate_plain(model, inputs, **mode, **options).tolist())
        except (ValueError, RuntimeError) as error:
            return str(error)

    found = list[list[str]]()
    in_c = [("hybrid", "c"), ("quantized", "c")] if load_kernel() else []
    for drafter, backend in ((None, ""), ("none", "auto"), ("hybrid", "auto"), *in_c):
        with speculate(model, drafter, backend=backend) if drafter else nullcontext():
            listed = outcome(prefix_allowed_tokens_fn=lambda row, ids: [9] if len(ids) < stop else [])
            found.append([listed, outcome(logits_processor=[Rule(nothing)])])
    assert all(one == found[0] for one in found) and "empty list" in found[0][0]


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies_share_no_state() -> None:
    total, seen = 0, {"a": [1, {2}]}

    def count(step: int = 1, *, log: list[int] = []) -> int:  # noqa: B006
        nonlocal total
        total += step
        log.append(total)
        seen["a"].append(total)
        return total

    holder = Rule()
    holder.calls, holder.fault = 3, count  # type: ignore[assignment]
    holder.loop = holder  # type: ignore[attr-defined]
    copied = private_copy(holder)
    assert copied.loop is copied and copied.fault() == 1 and copied.fault(2) == 3
    assert total == 0 and seen == {"a": [1, {2}]} and count.__kwdefaults__ == {"log": []}
    bound, chosen = private_copy((holder.__call__, random.Random(3)))
    assert bound.__self__ is not holder and chosen.random() == random.Random(3).random()


def test_what_is_large_is_not_copied() -> None:
    model, large = torch.nn.Linear(2, 2), [[n] for n in range(MAX_OBJECTS)]
    assert private_copy([model])[0] is model and copied_if_small(large) is large


# --- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "ba"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TEXTS = [*'{}[]":, ', *"0123456789", "ab", "ba", *"abcdefghijklmnopqrstuvwxyz", '"name"', '": ', "name", '{"']


class Letters:
    """A tokenizer of single letters."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.texts.index(letter) for letter in text if letter in self.texts]


def grammar_call() -> tuple[Any, Any, list[str], int]:
    model = get_model(seed=21)
    texts = [TEXTS[n - 5] if 5 <= n < 5 + len(TEXTS) else f"\x00{n}" for n in range(VOCAB)]
    return model, tiny.build_inputs(model, 18, 3), texts, 2


def compiled_schema(texts: list[str], eos: int) -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[eos])
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))


@MODES
def test_xgrammar_drafts(mode: Kwargs, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    model, inputs, texts, eos = grammar_call()
    grammar = compiled_schema(texts, eos)
    mode = {**mode, "max_new_tokens": 40}
    with fuzz.override_generation_config(model, [eos]):
        for grammars in ([grammar], [grammar] * 3):
            stats = assert_parity(
                model, inputs, "oracle", logits_processor=lambda g=grammars: [LogitsProcessor(list(g))], **mode
            )
            assert stats.num_accepted_tokens > 10
        with speculate(model, "hybrid", processor=Letters(texts)):  # what the grammar forces is drafted as text
            assert torch.equal(
                generate_plain(model, inputs, logits_processor=[LogitsProcessor(grammar)], **mode),
                generate_plain(
                    model, inputs, logits_processor=[LogitsProcessor(grammar)], mmspec={"enabled": False}, **mode
                ),
            )
        with speculate(model, "bush"):
            rows = generate_plain(model, inputs, logits_processor=[LogitsProcessor(grammar)], **mode)
            used = LogitsProcessor(grammar)
            generate_plain(model, inputs, logits_processor=[used], **mode)
            with pytest.raises(AssertionError):
                generate_plain(model, inputs, logits_processor=[used], **mode)  # as plain `generate` does
    for row in rows[:, inputs["input_ids"].shape[1] :].tolist():
        if eos in row:
            json.loads("".join(texts[token] for token in row[: row.index(eos)]))


@MODES
@pytest.mark.parametrize("library", ["outlines_core", "xgrammar"])
def test_outlines_drafts(mode: Kwargs, library: str) -> None:
    pytest.importorskip("outlines")
    pytest.importorskip(library)
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines.backends.xgrammar import XGrammarLogitsProcessor

    model, inputs, texts, eos = grammar_call()
    if library == "xgrammar":
        grammar = compiled_schema(texts, eos)
        make = lambda: [XGrammarLogitsProcessor(grammar, "torch")]  # noqa: E731
    else:
        from outlines_core import Index, Vocabulary

        index = Index(
            r"\{(\"(ab|ba)\": [0-9]{1,3}, )+\}", Vocabulary(eos, {t: [n] for n, t in enumerate(texts) if n != eos})
        )
        make = lambda: [OutlinesCoreLogitsProcessor(index, "torch")]  # noqa: E731
    with fuzz.override_generation_config(model, [eos]):
        stats = assert_parity(model, inputs, "oracle", logits_processor=make, **{**mode, "max_new_tokens": 40})
    assert stats.num_accepted_tokens > 10
