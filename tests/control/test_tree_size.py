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

from mmspec.control.tree_size import BUCKETS, FIXED, IDLE_SHARE, LONGEST_NAP, Budget, Costs
from mmspec.engine.tree import DraftTree, bare

REST = 0.02


def tree_of(promises: Sequence[float], batch: int = 1) -> DraftTree:
    """A draft whose nodes come with these scores, in every row; bare if there are none."""
    if not promises:
        return bare(batch)
    nodes = len(promises) + 1
    scores = torch.tensor([[1.0, *promises]] * batch)
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    return DraftTree(torch.zeros_like(parents), parents, torch.ones(batch, nodes, dtype=torch.bool), scores)


def linear(slope: float) -> Callable[[int], float]:
    """Seconds of a forward over n nodes."""
    return lambda nodes: 1 + slope * (nodes - 1)


def learned(score: Callable[[int], float], batch: int = 1) -> Costs:
    """Costs after every size has been seen."""
    costs = Costs()
    for nodes in BUCKETS:
        costs.learn(costs.score, (batch, nodes), score(nodes))
        costs.learn(costs.rest, (batch, nodes), REST)
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
    costs: Costs,
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
        budget = Budget(costs, batch, drafts=True)
        for number in range(rounds // calls):
            awake, nodes = budget.awake, 1
            if awake:
                seen.asked.append(number)
                nodes = budget.choose(tree_of(promises, batch), batch)
            else:
                budget.skip()
            gained = batch * sum(truth[: nodes - 1])
            spent = draft if awake else 0.0
            budget.record(nodes, draft_s=spent, score_s=score(nodes), rest_s=REST, gained=gained)  # type: ignore[arg-type]
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
    budget = Budget(learned(score), 1, drafts=True)
    worth = 1.05 / (score(1) + REST)  # what a second brings otherwise, and a margin
    values = {nodes: sum(promises[: nodes - 1]) - worth * (score(nodes) - score(1)) for nodes in (1, 2, 4, 8, 16)}
    assert budget.choose(tree_of(promises), 1) == max(values, key=lambda nodes: values[nodes])


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
    budget = Budget(costs, 1, drafts=True)
    for number in range(200):
        kind = kinds[number % 2]
        nodes = budget.choose(tree_of(kind), 1)
        seen.append(nodes)
        gained = sum(kind[: nodes - 1])
        budget.record(nodes, draft_s=draft, score_s=score(nodes), rest_s=REST, gained=gained)  # type: ignore[arg-type]
    assert tuple(seen[-2:]) == best and best[1] > 1


def test_trees_are_not_larger_than_drafted() -> None:
    budget = Budget(learned(linear(0.0)), 1, drafts=True)
    for nodes, size in ((2, 2), (4, 4), (5, 4), (8, 8), (16, 16)):
        assert budget.choose(tree_of(GOOD[: nodes - 1]), 1) == size


@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_gains_what_its_rows_gain(batch: int) -> None:
    """Dead rows cost as much as live ones and gain nothing."""
    costs = learned(linear(0.11), batch=batch)
    budget = Budget(costs, batch, drafts=True)
    assert budget.choose(tree_of(GOOD, batch), batch) == 8
    tree = tree_of(GOOD, batch)
    tree.valid[1:, 1:] = False
    if batch > 1:
        assert budget.choose(tree, batch) == 1
        assert budget.choose(tree, 1) == 8, "one live row: the others cost the same either way"


def test_invalid_nodes_promise_nothing() -> None:
    tree = tree_of([0.9] * 15)
    tree.valid[:, 4:] = False
    assert Budget(learned(linear(0.01)), 1, drafts=True).choose(tree, 1) == 4


@pytest.mark.parametrize("promises", [[], [0.0] * 15, [1e-6] * 15, [float("nan")] * 15, [-1.0] * 15], ids=str)
def test_plain_when_nothing_is_promised(promises: list[float]) -> None:
    assert Budget(learned(linear(0.11)), 1, drafts=True).choose(tree_of(promises), 1) == 1


def test_scores_are_not_needed() -> None:
    tree = tree_of(GOOD)
    tree.scores = None
    assert Budget(learned(linear(0.01)), 1, drafts=True).choose(tree, 1) > 1
    costs = learned(linear(0.11))
    costs.trust = 0.05
    assert Budget(costs, 1, drafts=True).choose(tree, 1) == 1


def test_costs_that_were_never_measured_are_guessed_from_smaller_ones() -> None:
    costs = Costs("cpu", score={(2, 1): 1.0, (2, 4): 1.5, (1, 8): 99.0})
    assert costs.of_score(2, 1) == 1.0 and costs.of_score(2, 4) == 1.5
    assert costs.of_score(2, 2) == pytest.approx(1.11)
    assert costs.of_score(2, 8) == pytest.approx(1.5 + 4 * 0.5 / 3), "as those that were measured go on"
    assert costs.of_score(1, 16) == pytest.approx(99.0 * 2.65 / 1.77), "there is but one"
    assert Costs("cpu", score={(1, 1): 2.0, (1, 8): 1.0}).of_score(1, 16) == 1.0, "more never cost less"
    assert costs.of_score(3, 4) == 0.0
    costs.score[2, 2] = 9.0
    assert costs.of_score(2, 2) == 1.5, "one that was dear when it was first used is not dearer than a larger one"
    assert Costs("other", score={(1, 1): 1.0}).of_score(1, 64) == pytest.approx(1.63)


def test_without_any_measurement_it_tries() -> None:
    assert Budget(Costs(), 1, drafts=True).choose(tree_of(GOOD), 1) == FIXED


def test_nothing_is_promised_beyond_the_end() -> None:
    """Rows that may emit one more token gain one at most, whatever the tree; and that is no lie of its drafter."""
    costs = learned(linear(0.3))
    budget = Budget(costs, 1, drafts=True)
    assert budget.choose(tree_of(GOOD), 1) == 4 and budget.choose(tree_of(GOOD), 1, room=1) == 2
    budget.record(2, draft_s=0.0, score_s=linear(0.3)(2), rest_s=REST, gained=1)
    assert costs.trust >= 1.0


def test_dead_rows_promise_nothing_where_scores_are_not_known() -> None:
    tree = tree_of(GOOD, batch=8)
    tree.scores = None
    costs = learned(linear(0.5), batch=8)
    assert Budget(costs, 8, drafts=True).choose(tree, 1) == Budget(learned(linear(0.5)), 1, drafts=True).choose(tree, 1)


@pytest.mark.parametrize("calls", [1, 200])
def test_plain_decoding_is_measured_again_while_drafts_pay(calls: int) -> None:
    """Plain was measured while the machine was busy; without another look a drafter that is a loss seems to pay."""
    costs, score = learned(linear(0.11)), linear(0.11)
    costs.score[1, 1] = 9.0
    seen = play(costs, 4000, draft=3.0, score=score, promises=GOOD[:3], truth=GOOD[:3], calls=calls)
    assert costs.score[1, 1] < 1.5 and seen.speed(score) >= 0.85


@pytest.mark.parametrize("fixed", [1, 3, FIXED, 64])
def test_a_fixed_size_is_not_chosen(fixed: int) -> None:
    costs = learned(linear(1.0))
    budget = Budget(costs, 1, drafts=True, fixed=fixed)
    assert budget.most == fixed
    for promises in ([], NOTHING, GOOD):
        for _ in range(5):
            assert budget.awake and budget.choose(tree_of(promises), 1) == fixed
            budget.record(fixed, draft_s=9.0, score_s=99.0, rest_s=9.0, gained=0)
    assert costs.trust == 1.0


def test_a_drafter_that_never_proposes_is_never_asked() -> None:
    costs = Costs()
    budget = Budget(costs, 1, drafts=False)
    for _ in range(3):
        assert not budget.awake
        budget.skip()
        budget.record(1, draft_s=0.0, score_s=1.0, rest_s=0.1, gained=0)
    assert costs == Costs() or (not costs.score and costs.trust == 1.0)


# --- what uselessness costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [0.001, 0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("promises", [[], [0.01] * 15], ids=["silent", "modest"])
def test_asking_in_vain_takes_one_percent_of_the_time(draft: float, promises: list[float]) -> None:
    seen = play(Costs(), 4000, draft=draft, score=linear(0.11), promises=promises, truth=NOTHING)
    assert seen.share <= 1.1 * IDLE_SHARE
    assert seen.speed(linear(0.11)) >= 0.98
    naps = [b - a for a, b in itertools.pairwise(seen.asked)]
    assert max(naps) <= LONGEST_NAP + 1, "never asked again"


@pytest.mark.parametrize("draft", [1.0, 3.0])
def test_even_an_expensive_draft_takes_little_of_the_time(draft: float) -> None:
    seen = play(Costs(), 8000, draft=draft, score=linear(0.11), promises=[], truth=NOTHING)
    assert seen.share <= 1.5 * IDLE_SHARE


@pytest.mark.parametrize("slope", [0.01, 0.03, 0.11, 0.5])
@pytest.mark.parametrize("promise", [0.3, 0.5, 1.0])
def test_lies_cost_little(slope: float, promise: float) -> None:
    """Whatever a drafter promises, a run where nothing comes true is hardly slower than plain decoding."""
    costs, score = Costs("other"), linear(slope)
    seen = play(costs, 4000, draft=0.01, score=score, promises=[promise] * 15, truth=NOTHING)
    assert seen.speed(score) >= 0.97, seen.sizes


def test_many_short_calls_share_what_was_learnt() -> None:
    costs = Costs()
    seen = play(costs, 4000, draft=0.05, score=linear(0.11), promises=GOOD, truth=NOTHING, calls=200)
    assert seen.speed(linear(0.11)) >= 0.96
    assert costs.trust < 0.7


@pytest.mark.parametrize("draft", [0.02, 0.05, 0.2])
def test_a_drafter_that_is_often_silent_is_worth_asking(draft: float) -> None:
    """It speaks in three of ten rounds, at random, and then truly: one silence is no reason to sleep."""
    dice, score, costs = random.Random(0), linear(0.11), Costs()
    budget, spent, tokens, always, ideal = Budget(costs, 1, drafts=True), 0.0, 0.0, 0.0, 0.0
    for _ in range(2000):
        speaks, awake, nodes = dice.random() < 0.3, budget.awake, 1
        if awake:
            nodes = budget.choose(tree_of(GOOD if speaks else []), 1)
        else:
            budget.skip()
        gained = sum(GOOD[: nodes - 1]) if speaks else 0.0
        asking = draft if awake else 0.0
        budget.record(nodes, draft_s=asking, score_s=score(nodes), rest_s=REST, gained=gained)  # type: ignore[arg-type]
        spent, tokens = spent + asking + score(nodes) + REST, tokens + 1 + gained
        always, ideal = always + draft + score(8 if speaks else 1) + REST, ideal + 1 + speaks * sum(GOOD[:7])
    assert tokens / spent >= 0.85 * ideal / always


def test_truth_pays() -> None:
    seen = play(Costs(), 500, draft=0.05, score=linear(0.11), promises=GOOD, truth=GOOD)
    assert seen.speed(linear(0.11)) > 1.9 and seen.sizes[8] > 450


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dear", [1.0, 5.0, 40.0], ids=str)
def test_a_good_drafter_is_not_put_to_sleep_by_first_uses(dear: float, seed: int) -> None:
    """In a new process the first draft and the first forward of every size take `dear` times as long; each of five
    tokens follows the one before in three of four rounds. It must be at work within the first answer."""
    dice, score, costs, used = random.Random(seed), linear(0.05), Costs(), set[object]()
    budget, asked, tokens = Budget(costs, 1, drafts=True), 0, 0

    def first(what: object) -> float:
        new = what not in used
        used.add(what)
        return dear if new else 1.0

    rounds = 0
    while tokens < 100:
        rounds, awake, nodes, kept = rounds + 1, budget.awake, 1, 0
        if awake:
            asked += 1
            nodes = budget.choose(tree_of([0.75**i for i in range(1, 6)]), 1)
            while kept < min(5, nodes - 1) and dice.random() < 0.75:
                kept += 1
        else:
            budget.skip()
        draft = 0.3 * first("draft") if awake else 0.0
        budget.record(nodes, draft_s=draft, score_s=score(nodes) * first(nodes), rest_s=REST, gained=kept)
        tokens += 1 + kept
    assert asked >= 0.8 * rounds, f"asked in {asked} of {rounds} rounds"


# --- trust ------------------------------------------------------------------------------------------------------------


def test_trust_falls_with_lies_and_comes_back() -> None:
    costs, score = learned(linear(0.11)), linear(0.11)
    play(costs, 300, draft=0.01, score=score, promises=GOOD, truth=NOTHING)
    doubt = costs.trust
    assert 0.05 <= doubt < 0.6
    seen = play(costs, 600, draft=0.01, score=score, promises=GOOD, truth=GOOD)
    assert costs.trust > 0.9 and seen.sizes[8] > 400


def test_trust_stays_within_bounds() -> None:
    costs = learned(linear(0.0))
    play(costs, 300, draft=0.0, score=linear(0.0), promises=[0.1] * 15, truth=[1.0] * 15)
    assert costs.trust == pytest.approx(1.5)
    costs.trust = 0.05
    budget = Budget(costs, 1, drafts=True)
    budget.choose(tree_of([1.0] * 15), 1)
    budget.record(16, draft_s=0.0, score_s=1.0, rest_s=REST, gained=0)
    assert costs.trust >= 0.05


def test_rounds_without_a_promise_teach_nothing_about_trust() -> None:
    costs = learned(linear(0.11))
    budget = Budget(costs, 1, drafts=True)
    for _ in range(5):
        budget.choose(tree_of([]), 1)
        budget.record(1, draft_s=0.01, score_s=1.0, rest_s=REST, gained=0)
    assert costs.trust == 1.0


def test_doubts_fade_while_asleep() -> None:
    costs = Costs(trust=0.1)
    budget = Budget(costs, 1, drafts=True)
    before = costs.trust
    for _ in range(LONGEST_NAP):
        budget.skip()
    assert before < costs.trust < 1.0


# --- learning ---------------------------------------------------------------------------------------------------------


def test_means_follow_slow_changes_and_shrug_off_outliers() -> None:
    costs = Costs()
    costs.learn(costs.score, (1, 1), 1.0)
    assert costs.score[1, 1] == 1.0
    costs.learn(costs.score, (1, 1), 1e6)
    assert costs.score[1, 1] <= 1.2
    for _ in range(60):
        costs.learn(costs.score, (1, 1), 3.0)
    assert costs.score[1, 1] == pytest.approx(3.0, rel=0.01)
    for _ in range(60):
        costs.learn(costs.score, (1, 1), 0.5)
    assert costs.score[1, 1] == pytest.approx(0.5, rel=0.01)


def test_learning_waits_for_the_lock() -> None:
    costs = Costs()
    thread = threading.Thread(target=costs.learn, args=(costs.score, (1, 1), 1.0))
    with costs.lock:
        thread.start()
        thread.join(0.05)
        assert not costs.score
    thread.join()
    assert costs.score == {(1, 1): 1.0}


def test_threads_may_ask_while_others_learn() -> None:
    costs, errors, done = learned(linear(0.11)), list[Exception](), threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                costs.of_score(1, 1000)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for batch in range(2, 10000):
            costs.learn(costs.score, (batch, 1), 1.0)
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
    costs.trust = 0.4
    twin = copy.deepcopy(costs)
    assert twin.score == costs.score and twin.trust == 0.4 and twin.lock is not costs.lock
    twin.learn(twin.score, (9, 9), 1.0)
    twin.trust = 1.0
    assert (9, 9) not in costs.score and costs.trust == 0.4


def test_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    play(Costs(), 300, draft=0.05, score=linear(0.11), promises=GOOD, truth=[0.5 * p for p in GOOD])
    assert torch.equal(torch.get_rng_state(), state)
