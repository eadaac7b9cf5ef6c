"""Learning in batches: what a round without a draft leaves for later, and a budget that follows what drafts save."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor

import mmspec
from mmspec.control.arbiter import MIN_KNOWN_ROUNDS, WARM_UP_ROUNDS, DraftArbiter
from mmspec.control.round_cost import RoundCostModel
from mmspec.control.tree_size import TreeSizeController
from mmspec.drafters.heads.instant import online
from mmspec.drafters.heads.instant.collector import CallCollector
from mmspec.drafters.heads.instant.online import HeadsState, OnlineHeads
from mmspec.engine.tree import root_only
from mmspec.interfaces import SharedEmbeddings, VerifyResult
from mmspec.learning.budget import MIN_SHARE_FACTOR, LearningBudget
from mmspec.learning.learner import EAGER_EXAMPLES
from mmspec.patching import patch_state

SIZE = 5


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))


def accepted_path(counts: list[int], width: int, rng: random.Random) -> VerifyResult:
    """The result of a round in which the rows emit so many tokens."""
    path = torch.tensor([[rng.randrange(width) for _ in range(width)] for _ in counts])
    ids = [[rng.randrange(9) for _ in range(count)] for count in counts]
    return VerifyResult(root_only(len(counts)), path, torch.tensor(counts), path, ids, path.tolist(), [])


# --- rounds that are followed later ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("max_unread", [1, 4, 32])
def test_the_last_two_states_of_each_row(batch: int, max_unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "MAX_UNREAD", max_unread)
    rng, noise = random.Random(batch), torch.Generator().manual_seed(batch)
    heads = OnlineHeads(SIZE, 9, 2)
    texts = [[torch.randn(SIZE, generator=noise) for _ in range(2)] for _ in range(batch)]
    state = HeadsState(
        SharedEmbeddings(torch.nn.Embedding(9, SIZE), torch.nn.Linear(SIZE, 9)),
        last=torch.stack([text[1] for text in texts]),
        previous=torch.stack([text[0] for text in texts]),
        has_begun=True,
    )
    for number in range(20):
        counts = [rng.choice((0, 1, 1, 3)) for _ in range(batch)]
        states = torch.randn(batch, 3, SIZE, generator=noise)
        result = accepted_path(counts, 3, rng)
        heads.observe(state, result, {2: states})
        for row, count in enumerate(counts):
            texts[row] += [states[row, result.path[row, place]] for place in range(count)]
        assert len(state.unread) <= max_unread
        if number % 3 == 0:
            online._catch_up(state)
            assert torch.equal(state.last, torch.stack([text[-1] for text in texts]))
            assert torch.equal(state.previous, torch.stack([text[-2] for text in texts]))


@pytest.mark.parametrize("num_next", [1, 3])
def test_recorded_examples_row_by_row(num_next: int) -> None:
    """Each example is what was read before its token, with the tokens behind it, in the order of the text."""
    rng, noise = random.Random(num_next), torch.Generator().manual_seed(0)
    recorder = CallCollector(3)
    expected: list[list[Tensor]] = [[], [], []]
    for _ in range(8):
        counts = [rng.choice((0, 1, 2)) for _ in range(3)]
        states = torch.randn(3, 2, SIZE, generator=noise)
        recorder.add(states, counts)
        for row, count in enumerate(counts):
            expected[row] += list(states[row, :count])
            recorder.tokens[row] += [rng.randrange(9) for _ in range(count)]
    found = recorder.examples(num_next)
    assert found is not None
    tokens = recorder.tokens
    assert torch.equal(found.inputs, torch.stack(list(itertools.chain(*expected))))
    assert found.root_ids.tolist() == list(itertools.chain(*tokens))
    padded = [row + [-1] * num_next for row in tokens]
    following = [padded[row][i + 1 : i + 1 + num_next] for row in range(3) for i in range(len(tokens[row]))]
    assert found.next_ids.tolist() == following
    assert CallCollector(2).examples(1) is None


# --- the budget -----------------------------------------------------------------------------------------------------


def test_learning_costs_little_where_drafts_save_nothing() -> None:
    budget = LearningBudget(0.04)
    assert budget.current_share == 0.04, "at first nothing is known"
    for _ in range(30):
        budget.add_savings(-1.0, 10.0)
    assert budget.current_share == pytest.approx(0.04 * MIN_SHARE_FACTOR)
    for _ in range(30):
        budget.add_savings(0.6, 10.0)  # half of what the whole share needs
    assert budget.current_share == pytest.approx(0.02, rel=0.05)
    for _ in range(30):
        budget.add_savings(5.0, 10.0)
    assert budget.current_share == 0.04
    budget.factor = 0.5
    assert budget.current_share == 0.02, "the loss limits it as well"
    assert not budget.is_overdrawn
    budget.spend(1.0)
    assert budget.is_overdrawn


def generate(model: Any, seed: int, batch: int = 4) -> Tensor:
    ids = torch.randint(5, 36, (batch, 6), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        output: Tensor = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=None, do_sample=False
        )
    return output


def test_no_examples_are_recorded_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-grams go on counting, also in a call in which nothing is drafted."""
    model = tiny.build_model(tiny.ModelSpec(vocab=40, calm=True))
    expected = [generate(model, seed) for seed in range(3)]
    mmspec.patch(model, drafter="arbitrated", learn=True)
    learner = patch_state(model).learner
    assert learner is not None and learner.is_eager and learner.wants_examples
    assert torch.equal(generate(model, 0), expected[0])
    assert learner._fit is not None
    learner._fit.num_examples = EAGER_EXAMPLES
    learner._waiting.clear()
    learner.budget.earned_s, learner.budget.spent_s = 0.0, 100.0
    assert not learner.wants_examples
    counts: Any = learner.drafter._outputs.counts  # type: ignore[attr-defined]
    before = counts.num_contexts
    with monkeypatch.context() as patched:
        patched.setattr(TreeSizeController, "should_draft", False)
        assert torch.equal(generate(model, 1), expected[1])
    assert not learner._waiting and counts.num_contexts > before
    learner.budget.earned_s = 200.0
    assert learner.wants_examples
    assert torch.equal(generate(model, 2), expected[2])
    assert learner._fit.num_examples > EAGER_EXAMPLES
    mmspec.unpatch(model)


# --- a better drafter is tried soon ---------------------------------------------------------------------------------


def test_what_drafts_saved() -> None:
    costs = RoundCostModel()
    assert costs.saved_s(16, 5) is None, "nothing was measured"
    controller = TreeSizeController(costs, 16, drafts=True)
    controller._net_cost.add(-0.5, 2.0, 1.0)
    assert costs.saved_s(16, 5) == pytest.approx(2.5) and costs.saved_s(1, 5) is None


def test_a_drafter_that_has_become_better_is_tried_where_it_did_not_pay() -> None:
    costs = RoundCostModel()
    failed, good = TreeSizeController(costs, 16, drafts=True), TreeSizeController(costs, 1, drafts=True)
    for _ in range(9):
        failed._net_cost.add(1.0, 1.0, 1.0)
        good._net_cost.add(-1.0, 2.0, 1.0)
    failed._net_cost.credit_s, costs.calibration = -9.0, 0.1
    assert not TreeSizeController(costs, 16, drafts=True).should_draft and good.should_draft
    costs.calibration = 0.1
    costs.retry()
    failed = TreeSizeController(costs, 16, drafts=True)
    assert failed.should_draft and costs.calibration == 1.0
    failed._net_cost.add(-1.0, 2.0, 1.0)
    assert failed._net_cost.mean_s == -1.0 and good._net_cost.num_drafts == 9


def test_arms_are_tried_sooner_in_batches_and_new_weights_first() -> None:
    arbiter = DraftArbiter(4, first=1)
    call = arbiter.start(16)
    available = [True, True, False, True]
    chosen = []
    for number in range(MIN_KNOWN_ROUNDS + 1):
        if number == 4:
            arbiter.retry(3)
        chosen.append(arbiter.choose(call, available))
        arbiter.record(call, chosen[-1], 1.0, 1.0, available)
    assert chosen == [1] * MIN_KNOWN_ROUNDS + [3]
    for _ in range(2 * (WARM_UP_ROUNDS + MIN_KNOWN_ROUNDS)):
        chosen.append(arbiter.choose(call, available))
        arbiter.record(call, chosen[-1], 1.0, 1.0, available)
    tried = [arm for arm, _ in itertools.groupby(chosen)]
    assert tried[:3] == [1, 3, 0], "then the other new ones"
