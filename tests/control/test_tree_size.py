"""The budget controller on made-up costs: what it picks, how it doubts, and what a useless drafter may cost."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from mmspec.control.tree_size import (
    BUCKETS,
    DEFAULT_TREE_SIZE,
    MAX_BACKOFF,
    MAX_OVERHEAD,
    CostModel,
    TreeSizeController,
)
from mmspec.engine.tree import DraftTree, root_only

REST = 0.02


def tree_of(promises: Sequence[float], batch: int = 1) -> DraftTree:
    """A draft whose nodes come with these scores, in every row; bare if there are none."""
    if not promises:
        return root_only(batch)
    nodes = len(promises) + 1
    scores = torch.tensor([[1.0, *promises]] * batch)
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    return DraftTree(torch.zeros_like(parents), parents, torch.ones(batch, nodes, dtype=torch.bool), scores)


def linear(slope: float) -> Callable[[int], float]:
    """Seconds of a forward over n nodes."""
    return lambda nodes: 1 + slope * (nodes - 1)


def learned(score: Callable[[int], float], batch: int = 1) -> CostModel:
    """Costs after every size has been seen."""
    costs = CostModel()
    for nodes in BUCKETS:
        costs.update(costs.score_s, (batch, nodes), score(nodes))
        costs.update(costs.overhead_s, (batch, nodes), REST)
    return costs


@dataclass
class Play:
    """What came of a number of rounds on a clock of our own."""

    total_s: float = 0.0
    draft_s: float = 0.0
    tokens: float = 0.0
    asked: list[int] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of the time, how much went into drafts."""
        return self.draft_s / self.total_s

    def speed(self, score: Callable[[int], float]) -> float:
        """Against plain decoding without a controller."""
        return self.tokens * (score(1) + REST) / self.total_s


def play(
    costs: CostModel,
    rounds: int,
    *,
    draft: float,
    score: Callable[[int], float],
    promises: Sequence[float],
    truth: Sequence[float],
    calls: int = 1,
    batch: int = 1,
) -> Play:
    """Rounds in which node i is kept with frequency `truth[i]`, whatever its drafter promises."""
    seen = Play()
    for _ in range(calls):
        budget = TreeSizeController(costs, batch, drafts=True)
        for number in range(rounds // calls):
            awake, nodes = budget.should_draft, 1
            if awake:
                seen.asked.append(number)
                nodes = budget.choose_size(tree_of(promises, batch), batch)
            else:
                budget.skip_draft()
            gained = batch * sum(truth[: nodes - 1])
            spent = draft if awake else 0.0
            budget.record(nodes, draft_s=spent, score_s=score(nodes), overhead_s=REST, num_accepted=gained)  # type: ignore[arg-type]
            seen.sizes[nodes] += 1
            seen.draft_s += spent
            seen.total_s += spent + score(nodes) + REST
            seen.tokens += 1 + gained / batch
    return seen


GOOD = [0.8**i for i in range(1, 16)]
NOTHING = [0.0] * 15


# --- what it picks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.05, 0.11, 0.3, 1.0])
@pytest.mark.parametrize("promises", [GOOD, [0.4**i for i in range(1, 16)], [0.9] * 15, [0.1] * 15], ids=str)
def test_the_best_size_under_known_costs(slope: float, promises: list[float]) -> None:
    score = linear(slope)
    budget = TreeSizeController(learned(score), 1, drafts=True)
    worth = 1.05 / (score(1) + REST)  # what a second brings otherwise, and a margin
    values = {nodes: sum(promises[: nodes - 1]) - worth * (score(nodes) - score(1)) for nodes in (1, 2, 4, 8, 16)}
    assert budget.choose_size(tree_of(promises), 1) == max(values, key=lambda nodes: values[nodes])


def test_sizes_make_the_most_of_the_time_when_promises_vary() -> None:
    """A dear draft promises much in one round and little in the next. The reference tries all pairs of sizes."""
    score, draft = linear(0.05), 0.9
    kinds = ([0.9] * 15, [0.5, 0.3, 0.2, *[0.02] * 12])
    pairs = itertools.product((1, 2, 4, 8, 16), repeat=2)
    rates = {
        pair: sum(1 + sum(kind[: n - 1]) for kind, n in zip(kinds, pair, strict=True))
        / sum(draft + score(n) + REST for n in pair)
        for pair in pairs
    }
    best = max(rates, key=lambda pair: rates[pair])
    costs, seen = learned(score), list[int]()
    budget = TreeSizeController(costs, 1, drafts=True)
    for number in range(200):
        kind = kinds[number % 2]
        nodes = budget.choose_size(tree_of(kind), 1)
        seen.append(nodes)
        gained = sum(kind[: nodes - 1])
        budget.record(nodes, draft_s=draft, score_s=score(nodes), overhead_s=REST, num_accepted=gained)  # type: ignore[arg-type]
    assert tuple(seen[-2:]) == best and best[1] > 1


def test_trees_are_not_larger_than_drafted() -> None:
    budget = TreeSizeController(learned(linear(0.0)), 1, drafts=True)
    for nodes, size in ((2, 2), (4, 4), (5, 4), (8, 8), (16, 16)):
        assert budget.choose_size(tree_of(GOOD[: nodes - 1]), 1) == size


@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_gains_what_its_rows_gain(batch: int) -> None:
    """Dead rows cost as much as live ones and gain nothing."""
    costs = learned(linear(0.11), batch=batch)
    budget = TreeSizeController(costs, batch, drafts=True)
    assert budget.choose_size(tree_of(GOOD, batch), batch) == 8
    tree = tree_of(GOOD, batch)
    tree.node_mask[1:, 1:] = False
    if batch > 1:
        assert budget.choose_size(tree, batch) == 1
        assert budget.choose_size(tree, 1) == 8, "one live row: the others cost the same either way"


def test_invalid_nodes_promise_nothing() -> None:
    tree = tree_of([0.9] * 15)
    tree.node_mask[:, 4:] = False
    assert TreeSizeController(learned(linear(0.01)), 1, drafts=True).choose_size(tree, 1) == 4


@pytest.mark.parametrize("promises", [[], [0.0] * 15, [1e-6] * 15, [float("nan")] * 15, [-1.0] * 15], ids=str)
def test_plain_when_nothing_is_promised(promises: list[float]) -> None:
    assert TreeSizeController(learned(linear(0.11)), 1, drafts=True).choose_size(tree_of(promises), 1) == 1


def test_scores_are_not_needed() -> None:
    tree = tree_of(GOOD)
    tree.scores = None
    assert TreeSizeController(learned(linear(0.01)), 1, drafts=True).choose_size(tree, 1) > 1
    costs = learned(linear(0.11))
    costs.calibration = 0.05
    assert TreeSizeController(costs, 1, drafts=True).choose_size(tree, 1) == 1


def test_costs_that_were_never_measured_are_guessed_from_smaller_ones() -> None:
    costs = CostModel("cpu", score_s={(2, 1): 1.0, (2, 4): 1.5, (1, 8): 99.0})
    assert costs.forward_s(2, 1) == 1.0 and costs.forward_s(2, 4) == 1.5
    assert costs.forward_s(2, 2) == pytest.approx(1.11)
    assert costs.forward_s(2, 8) == pytest.approx(1.5 + 4 * 0.5 / 3), "as those that were measured go on"
    assert costs.forward_s(1, 16) == pytest.approx(99.0 * 2.65 / 1.77), "there is but one"
    assert CostModel("cpu", score_s={(1, 1): 2.0, (1, 8): 1.0}).forward_s(1, 16) == 1.0, "more never cost less"
    assert costs.forward_s(3, 4) == 0.0
    costs.score_s[2, 2] = 9.0
    assert costs.forward_s(2, 2) == 1.5, "one that was dear when it was first used is not dearer than a larger one"
    assert CostModel("other", score_s={(1, 1): 1.0}).forward_s(1, 64) == pytest.approx(1.63)


def test_without_any_measurement_it_tries() -> None:
    assert TreeSizeController(CostModel(), 1, drafts=True).choose_size(tree_of(GOOD), 1) == DEFAULT_TREE_SIZE


def test_nothing_is_promised_beyond_the_end() -> None:
    """Rows that may emit one more token gain one at most, whatever the tree; and that is no lie of its drafter."""
    costs = learned(linear(0.3))
    budget = TreeSizeController(costs, 1, drafts=True)
    assert budget.choose_size(tree_of(GOOD), 1) == 4 and budget.choose_size(tree_of(GOOD), 1, max_gain=1) == 2
    budget.record(2, draft_s=0.0, score_s=linear(0.3)(2), overhead_s=REST, num_accepted=1)
    assert costs.calibration >= 1.0


def test_dead_rows_promise_nothing_where_scores_are_not_known() -> None:
    tree = tree_of(GOOD, batch=8)
    tree.scores = None
    costs = learned(linear(0.5), batch=8)
    assert TreeSizeController(costs, 8, drafts=True).choose_size(tree, 1) == TreeSizeController(
        learned(linear(0.5)), 1, drafts=True
    ).choose_size(tree, 1)


@pytest.mark.parametrize("calls", [1, 200])
def test_plain_decoding_is_measured_again_while_drafts_pay(calls: int) -> None:
    """Plain was measured while the machine was busy; without another look a drafter that is a loss seems to pay."""
    costs, score = learned(linear(0.11)), linear(0.11)
    costs.score_s[1, 1] = 9.0
    seen = play(costs, 4000, draft=3.0, score=score, promises=GOOD[:3], truth=GOOD[:3], calls=calls)
    assert costs.score_s[1, 1] < 1.5 and seen.speed(score) >= 0.85


@pytest.mark.parametrize("fixed", [1, 3, DEFAULT_TREE_SIZE, 64])
def test_a_fixed_size_is_not_chosen(fixed: int) -> None:
    costs = learned(linear(1.0))
    budget = TreeSizeController(costs, 1, drafts=True, fixed_tree_size=fixed)
    assert budget.max_tree_size == fixed
    for promises in ([], NOTHING, GOOD):
        for _ in range(5):
            assert budget.should_draft and budget.choose_size(tree_of(promises), 1) == fixed
            budget.record(fixed, draft_s=9.0, score_s=99.0, overhead_s=9.0, num_accepted=0)
    assert costs.calibration == 1.0


def test_a_drafter_that_never_proposes_is_never_asked() -> None:
    costs = CostModel()
    budget = TreeSizeController(costs, 1, drafts=False)
    for _ in range(3):
        assert not budget.should_draft
        budget.skip_draft()
        budget.record(1, draft_s=0.0, score_s=1.0, overhead_s=0.1, num_accepted=0)
    assert costs == CostModel() or (not costs.score_s and costs.calibration == 1.0)


# --- what uselessness costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [0.001, 0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("promises", [[], [0.01] * 15], ids=["silent", "modest"])
def test_asking_in_vain_takes_one_percent_of_the_time(draft: float, promises: list[float]) -> None:
    seen = play(CostModel(), 4000, draft=draft, score=linear(0.11), promises=promises, truth=NOTHING)
    assert seen.share <= 1.1 * MAX_OVERHEAD
    assert seen.speed(linear(0.11)) >= 0.98
    naps = [b - a for a, b in itertools.pairwise(seen.asked)]
    assert max(naps) <= MAX_BACKOFF + 1, "never asked again"


@pytest.mark.parametrize("draft", [1.0, 3.0])
def test_even_an_expensive_draft_takes_little_of_the_time(draft: float) -> None:
    seen = play(CostModel(), 8000, draft=draft, score=linear(0.11), promises=[], truth=NOTHING)
    assert seen.share <= 1.5 * MAX_OVERHEAD


@pytest.mark.parametrize("slope", [0.01, 0.03, 0.11, 0.5])
@pytest.mark.parametrize("promise", [0.3, 0.5, 1.0])
def test_lies_cost_little(slope: float, promise: float) -> None:
    """Whatever a drafter promises, a run where nothing comes true is hardly slower than plain decoding."""
    costs, score = CostModel("other"), linear(slope)
    seen = play(costs, 4000, draft=0.01, score=score, promises=[promise] * 15, truth=NOTHING)
    assert seen.speed(score) >= 0.97, seen.sizes


def test_many_short_calls_share_what_was_learnt() -> None:
    costs = CostModel()
    seen = play(costs, 4000, draft=0.05, score=linear(0.11), promises=GOOD, truth=NOTHING, calls=200)
    assert seen.speed(linear(0.11)) >= 0.96
    assert costs.calibration < 0.7


@pytest.mark.parametrize("draft", [0.02, 0.05, 0.2])
def test_a_drafter_that_is_often_silent_is_worth_asking(draft: float) -> None:
    """It speaks in three of ten rounds, at random, and then truly: one silence is no reason to sleep."""
    rng, score, costs = random.Random(0), linear(0.11), CostModel()
    budget, spent, tokens, always, ideal = TreeSizeController(costs, 1, drafts=True), 0.0, 0.0, 0.0, 0.0
    for _ in range(2000):
        speaks, awake, nodes = rng.random() < 0.3, budget.should_draft, 1
        if awake:
            nodes = budget.choose_size(tree_of(GOOD if speaks else []), 1)
        else:
            budget.skip_draft()
        gained = sum(GOOD[: nodes - 1]) if speaks else 0.0
        asking = draft if awake else 0.0
        budget.record(nodes, draft_s=asking, score_s=score(nodes), overhead_s=REST, num_accepted=gained)  # type: ignore[arg-type]
        spent, tokens = spent + asking + score(nodes) + REST, tokens + 1 + gained
        always, ideal = always + draft + score(8 if speaks else 1) + REST, ideal + 1 + speaks * sum(GOOD[:7])
    assert tokens / spent >= 0.85 * ideal / always


def test_truth_pays() -> None:
    seen = play(CostModel(), 500, draft=0.05, score=linear(0.11), promises=GOOD, truth=GOOD)
    assert seen.speed(linear(0.11)) > 1.9 and seen.sizes[8] > 450


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dear", [1.0, 5.0, 40.0], ids=str)
def test_a_good_drafter_is_not_put_to_sleep_by_first_uses(dear: float, seed: int) -> None:
    """In a new process the first draft and the first forward of every size take `dear` times as long; each of five
    tokens follows the one before in three of four rounds. It must be at work within the first answer."""
    rng, score, costs, used = random.Random(seed), linear(0.05), CostModel(), set[object]()
    budget, asked, tokens = TreeSizeController(costs, 1, drafts=True), 0, 0

    def first(what: object) -> float:
        new = what not in used
        used.add(what)
        return dear if new else 1.0

    rounds = 0
    while tokens < 100:
        rounds, awake, nodes, kept = rounds + 1, budget.should_draft, 1, 0
        if awake:
            asked += 1
            nodes = budget.choose_size(tree_of([0.75**i for i in range(1, 6)]), 1)
            while kept < min(5, nodes - 1) and rng.random() < 0.75:
                kept += 1
        else:
            budget.skip_draft()
        draft = 0.3 * first("draft") if awake else 0.0
        budget.record(nodes, draft_s=draft, score_s=score(nodes) * first(nodes), overhead_s=REST, num_accepted=kept)
        tokens += 1 + kept
    assert asked >= 0.8 * rounds, f"asked in {asked} of {rounds} rounds"


# --- trust ------------------------------------------------------------------------------------------------------------


def test_trust_falls_with_lies_and_comes_back() -> None:
    costs, score = learned(linear(0.11)), linear(0.11)
    play(costs, 300, draft=0.01, score=score, promises=GOOD, truth=NOTHING)
    doubt = costs.calibration
    assert 0.05 <= doubt < 0.6
    seen = play(costs, 600, draft=0.01, score=score, promises=GOOD, truth=GOOD)
    assert costs.calibration > 0.9 and seen.sizes[8] > 400


def test_trust_stays_within_bounds() -> None:
    costs = learned(linear(0.0))
    play(costs, 300, draft=0.0, score=linear(0.0), promises=[0.1] * 15, truth=[1.0] * 15)
    assert costs.calibration == pytest.approx(1.5)
    costs.calibration = 0.05
    budget = TreeSizeController(costs, 1, drafts=True)
    budget.choose_size(tree_of([1.0] * 15), 1)
    budget.record(16, draft_s=0.0, score_s=1.0, overhead_s=REST, num_accepted=0)
    assert costs.calibration >= 0.05


def test_rounds_without_a_promise_teach_nothing_about_trust() -> None:
    costs = learned(linear(0.11))
    budget = TreeSizeController(costs, 1, drafts=True)
    for _ in range(5):
        budget.choose_size(tree_of([]), 1)
        budget.record(1, draft_s=0.01, score_s=1.0, overhead_s=REST, num_accepted=0)
    assert costs.calibration == 1.0


def test_doubts_fade_while_asleep() -> None:
    costs = CostModel(calibration=0.1)
    budget = TreeSizeController(costs, 1, drafts=True)
    before = costs.calibration
    for _ in range(MAX_BACKOFF):
        budget.skip_draft()
    assert before < costs.calibration < 1.0


# --- learning ---------------------------------------------------------------------------------------------------------


def test_means_follow_slow_changes_and_shrug_off_outliers() -> None:
    costs = CostModel()
    costs.update(costs.score_s, (1, 1), 1.0)
    assert costs.score_s[1, 1] == 1.0
    costs.update(costs.score_s, (1, 1), 1e6)
    assert costs.score_s[1, 1] <= 1.2
    for _ in range(60):
        costs.update(costs.score_s, (1, 1), 3.0)
    assert costs.score_s[1, 1] == pytest.approx(3.0, rel=0.01)
    for _ in range(60):
        costs.update(costs.score_s, (1, 1), 0.5)
    assert costs.score_s[1, 1] == pytest.approx(0.5, rel=0.01)


def test_learning_waits_for_the_lock() -> None:
    costs = CostModel()
    thread = threading.Thread(target=costs.update, args=(costs.score_s, (1, 1), 1.0))
    with costs.lock:
        thread.start()
        thread.join(0.05)
        assert not costs.score_s
    thread.join()
    assert costs.score_s == {(1, 1): 1.0}


def test_threads_may_ask_while_others_learn() -> None:
    costs, errors, done = learned(linear(0.11)), list[Exception](), threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                costs.forward_s(1, 1000)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for batch in range(2, 10000):
            costs.update(costs.score_s, (batch, 1), 1.0)
            if errors:
                break
        done.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_a_copy_learns_for_itself() -> None:
    costs = learned(linear(0.11))
    costs.calibration = 0.4
    twin = copy.deepcopy(costs)
    assert twin.score_s == costs.score_s and twin.calibration == 0.4 and twin.lock is not costs.lock
    twin.update(twin.score_s, (9, 9), 1.0)
    twin.calibration = 1.0
    assert (9, 9) not in costs.score_s and costs.calibration == 0.4


def test_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    play(CostModel(), 300, draft=0.05, score=linear(0.11), promises=GOOD, truth=[0.5 * p for p in GOOD])
    assert torch.equal(torch.get_rng_state(), state)
