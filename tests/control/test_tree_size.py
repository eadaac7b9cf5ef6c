"""The tree-size controller on simulated costs: chosen sizes, calibration, and the cost of a useless drafter."""

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

from mmspec.control.round_cost import MAX_BACKOFF, MAX_NET_COST, RoundCostModel
from mmspec.control.tree_size import BUCKETS, DEFAULT_TREE_SIZE, TreeSizeController
from mmspec.engine.tree import DraftTree, root_only

OVERHEAD_S = 0.02


def tree_of(scores: Sequence[float], batch: int = 1) -> DraftTree:
    """A draft whose nodes have these scores, in every row; the root alone if there are none."""
    if not scores:
        return root_only(batch)
    nodes = len(scores) + 1
    node_scores = torch.tensor([[1.0, *scores]] * batch)
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    return DraftTree(torch.zeros_like(parents), parents, torch.ones(batch, nodes, dtype=torch.bool), node_scores)


def linear(slope: float) -> Callable[[int], float]:
    """Seconds of a forward over n nodes."""
    return lambda nodes: 1 + slope * (nodes - 1)


def measured_costs(forward_s: Callable[[int], float], batch: int = 1) -> RoundCostModel:
    """Costs after every size was measured."""
    costs = RoundCostModel()
    for nodes in BUCKETS:
        costs.update(costs.score_s, (batch, nodes), forward_s(nodes))
        costs.update(costs.overhead_s, (batch, nodes), OVERHEAD_S)
    return costs


@dataclass
class Simulation:
    """Totals of a number of simulated rounds.

    Attributes:
        total_s: seconds of all rounds.
        draft_s: seconds of the drafts.
        tokens: emitted tokens per row.
        draft_rounds: numbers of the rounds with a call of the drafter.
        sizes: {tree size: rounds}.
    """

    total_s: float = 0.0
    draft_s: float = 0.0
    tokens: float = 0.0
    draft_rounds: list[int] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)

    @property
    def draft_fraction(self) -> float:
        """Drafting as a fraction of the time."""
        return self.draft_s / self.total_s

    def speedup(self, forward_s: Callable[[int], float]) -> float:
        """Speed-up over plain decoding without a controller."""
        return self.tokens * (forward_s(1) + OVERHEAD_S) / self.total_s


def simulate(
    costs: RoundCostModel,
    rounds: int,
    *,
    draft: float,
    forward_s: Callable[[int], float],
    scores: Sequence[float],
    accept_probs: Sequence[float],
    calls: int = 1,
    batch: int = 1,
) -> Simulation:
    """Simulate rounds in which node i is accepted with frequency `accept_probs[i]`, whatever its score."""
    run = Simulation()
    for _ in range(calls):
        controller = TreeSizeController(costs, batch, drafts=True)
        for number in range(rounds // calls):
            drafts, nodes = controller.should_draft, 1
            if drafts:
                run.draft_rounds.append(number)
                nodes = controller.choose_size(tree_of(scores, batch), batch)
            else:
                controller.skip_draft()
            num_accepted = batch * sum(accept_probs[: nodes - 1])
            draft_s = draft if drafts else 0.0
            controller.record(
                nodes, draft_s=draft_s, score_s=forward_s(nodes), overhead_s=OVERHEAD_S, num_accepted=num_accepted
            )
            run.sizes[nodes] += 1
            run.draft_s += draft_s
            run.total_s += draft_s + forward_s(nodes) + OVERHEAD_S
            run.tokens += 1 + num_accepted / batch
    return run


GOOD = [0.8**i for i in range(1, 16)]
NEVER = [0.0] * 15


# --- chosen sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.05, 0.11, 0.3, 1.0])
@pytest.mark.parametrize("scores", [GOOD, [0.4**i for i in range(1, 16)], [0.9] * 15, [0.1] * 15], ids=str)
def test_the_best_size_under_known_costs(slope: float, scores: list[float]) -> None:
    forward_s = linear(slope)
    controller = TreeSizeController(measured_costs(forward_s), 1, drafts=True)
    rate = 1.05 / (forward_s(1) + OVERHEAD_S)  # tokens that a second of plain decoding yields, with a margin
    values = {nodes: sum(scores[: nodes - 1]) - rate * (forward_s(nodes) - forward_s(1)) for nodes in (1, 2, 4, 8, 16)}
    assert controller.choose_size(tree_of(scores), 1) == max(values, key=lambda nodes: values[nodes])


def test_sizes_are_optimal_over_rounds_of_different_scores() -> None:
    """An expensive draft has high and low scores in turn. The reference tries all pairs of sizes."""
    forward_s, draft = linear(0.05), 0.9
    kinds = ([0.9] * 15, [0.5, 0.3, 0.2, *[0.02] * 12])
    pairs = itertools.product((1, 2, 4, 8, 16), repeat=2)
    rates = {
        pair: sum(1 + sum(kind[: n - 1]) for kind, n in zip(kinds, pair, strict=True))
        / sum(draft + forward_s(n) + OVERHEAD_S for n in pair)
        for pair in pairs
    }
    best = max(rates, key=lambda pair: rates[pair])
    costs, run = measured_costs(forward_s), list[int]()
    controller = TreeSizeController(costs, 1, drafts=True)
    for number in range(200):
        kind = kinds[number % 2]
        nodes = controller.choose_size(tree_of(kind), 1)
        run.append(nodes)
        num_accepted = sum(kind[: nodes - 1])
        controller.record(
            nodes, draft_s=draft, score_s=forward_s(nodes), overhead_s=OVERHEAD_S, num_accepted=num_accepted
        )
    assert tuple(run[-2:]) == best and best[1] > 1


def test_trees_are_not_larger_than_drafted() -> None:
    controller = TreeSizeController(measured_costs(linear(0.0)), 1, drafts=True)
    for nodes, size in ((2, 2), (4, 4), (5, 4), (8, 8), (16, 16)):
        assert controller.choose_size(tree_of(GOOD[: nodes - 1]), 1) == size


@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_gains_what_its_rows_gain(batch: int) -> None:
    """Inactive rows cost as much as active ones and gain nothing."""
    costs = measured_costs(linear(0.11), batch=batch)
    controller = TreeSizeController(costs, batch, drafts=True)
    assert controller.choose_size(tree_of(GOOD, batch), batch) == 8
    tree = tree_of(GOOD, batch)
    tree.node_mask[1:, 1:] = False
    if batch > 1:
        assert controller.choose_size(tree, batch) == 1
        assert controller.choose_size(tree, 1) == 8, "one active row: the others cost the same either way"


def test_padding_nodes_are_expected_to_gain_nothing() -> None:
    tree = tree_of([0.9] * 15)
    tree.node_mask[:, 4:] = False
    assert TreeSizeController(measured_costs(linear(0.01)), 1, drafts=True).choose_size(tree, 1) == 4


@pytest.mark.parametrize("scores", [[], [0.0] * 15, [1e-6] * 15, [float("nan")] * 15, [-1.0] * 15], ids=str)
def test_plain_decoding_without_expected_gain(scores: list[float]) -> None:
    assert TreeSizeController(measured_costs(linear(0.11)), 1, drafts=True).choose_size(tree_of(scores), 1) == 1


def test_scores_are_not_needed() -> None:
    tree = tree_of(GOOD)
    tree.scores = None
    assert TreeSizeController(measured_costs(linear(0.01)), 1, drafts=True).choose_size(tree, 1) > 1
    costs = measured_costs(linear(0.11))
    costs.calibration = 0.05
    assert TreeSizeController(costs, 1, drafts=True).choose_size(tree, 1) == 1


def test_unmeasured_costs_are_extrapolated_from_smaller_sizes() -> None:
    costs = RoundCostModel("cpu", score_s={(2, 1): 1.0, (2, 4): 1.5, (1, 8): 99.0})
    assert costs.forward_s(2, 1) == 1.0 and costs.forward_s(2, 4) == 1.5
    assert costs.forward_s(2, 2) == pytest.approx(1.11)
    assert costs.forward_s(2, 8) == pytest.approx(1.5 + 4 * 0.5 / 3), "extrapolated from the measured ones"
    assert costs.forward_s(1, 16) == pytest.approx(99.0 * 2.65 / 1.77), "from the only measured size"
    assert RoundCostModel("cpu", score_s={(1, 1): 2.0, (1, 8): 1.0}).forward_s(1, 16) == 1.0, (
        "more nodes are never cheaper"
    )
    assert costs.forward_s(3, 4) == 0.0
    costs.score_s[2, 2] = 9.0
    assert costs.forward_s(2, 2) == 1.5, "at most the cost of a larger size: the first use of a size is slow"
    assert RoundCostModel("other", score_s={(1, 1): 1.0}).forward_s(1, 64) == pytest.approx(1.63)


def test_without_measurements_a_default_size_is_tried() -> None:
    assert TreeSizeController(RoundCostModel(), 1, drafts=True).choose_size(tree_of(GOOD), 1) == DEFAULT_TREE_SIZE


def test_gain_is_limited_by_the_remaining_length() -> None:
    """Rows that may emit one more token gain at most one, whatever the tree; the scores are not blamed for it."""
    costs = measured_costs(linear(0.3))
    controller = TreeSizeController(costs, 1, drafts=True)
    assert controller.choose_size(tree_of(GOOD), 1) == 4 and controller.choose_size(tree_of(GOOD), 1, max_gain=1) == 2
    controller.record(2, draft_s=0.0, score_s=linear(0.3)(2), overhead_s=OVERHEAD_S, num_accepted=1)
    assert costs.calibration >= 1.0


def test_inactive_rows_are_expected_to_gain_nothing_without_scores() -> None:
    tree = tree_of(GOOD, batch=8)
    tree.scores = None
    costs = measured_costs(linear(0.5), batch=8)
    assert TreeSizeController(costs, 8, drafts=True).choose_size(tree, 1) == TreeSizeController(
        measured_costs(linear(0.5)), 1, drafts=True
    ).choose_size(tree, 1)


@pytest.mark.parametrize("calls", [1, 200])
def test_plain_decoding_is_measured_again_while_drafting(calls: int) -> None:
    """Plain decoding was measured on a busy machine; unless it is measured again, drafting seems to save time."""
    costs, forward_s = measured_costs(linear(0.11)), linear(0.11)
    costs.score_s[1, 1] = 9.0
    run = simulate(costs, 4000, draft=3.0, forward_s=forward_s, scores=GOOD[:3], accept_probs=GOOD[:3], calls=calls)
    assert costs.score_s[1, 1] < 1.5 and run.speedup(forward_s) >= 0.85


@pytest.mark.parametrize("fixed", [1, 3, DEFAULT_TREE_SIZE, 64])
def test_a_fixed_size_is_not_chosen(fixed: int) -> None:
    costs = measured_costs(linear(1.0))
    controller = TreeSizeController(costs, 1, drafts=True, fixed_tree_size=fixed)
    assert controller.max_tree_size == fixed
    for scores in ([], NEVER, GOOD):
        for _ in range(5):
            assert controller.should_draft and controller.choose_size(tree_of(scores), 1) == fixed
            controller.record(fixed, draft_s=9.0, score_s=99.0, overhead_s=9.0, num_accepted=0)
    assert costs.calibration == 1.0


def test_a_drafter_that_never_proposes_is_never_called() -> None:
    costs = RoundCostModel()
    controller = TreeSizeController(costs, 1, drafts=False)
    for _ in range(3):
        assert not controller.should_draft
        controller.skip_draft()
        controller.record(1, draft_s=0.0, score_s=1.0, overhead_s=0.1, num_accepted=0)
    assert costs == RoundCostModel() or (not costs.score_s and costs.calibration == 1.0)


# --- cost of useless drafts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [0.001, 0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("scores", [[], [0.01] * 15], ids=["no nodes", "low scores"])
def test_useless_drafts_take_one_percent_of_the_time(draft: float, scores: list[float]) -> None:
    run = simulate(RoundCostModel(), 4000, draft=draft, forward_s=linear(0.11), scores=scores, accept_probs=NEVER)
    assert run.draft_fraction <= 1.1 * MAX_NET_COST
    assert run.speedup(linear(0.11)) >= 0.98
    gaps = [b - a for a, b in itertools.pairwise(run.draft_rounds)]
    assert max(gaps) <= MAX_BACKOFF + 1, "the drafter is never called again"


@pytest.mark.parametrize("draft", [1.0, 3.0])
def test_expensive_useless_drafts_take_little_of_the_time(draft: float) -> None:
    run = simulate(RoundCostModel(), 8000, draft=draft, forward_s=linear(0.11), scores=[], accept_probs=NEVER)
    assert run.draft_fraction <= 1.5 * MAX_NET_COST


@pytest.mark.parametrize("slope", [0.01, 0.03, 0.11, 0.5])
@pytest.mark.parametrize("node_score", [0.3, 0.5, 1.0])
def test_wrong_scores_cost_little(slope: float, node_score: float) -> None:
    """Whatever scores a drafter gives, a run without acceptance is hardly slower than plain decoding."""
    costs, forward_s = RoundCostModel("other"), linear(slope)
    run = simulate(costs, 4000, draft=0.01, forward_s=forward_s, scores=[node_score] * 15, accept_probs=NEVER)
    assert run.speedup(forward_s) >= 0.97, run.sizes


def test_many_short_calls_share_measurements() -> None:
    costs = RoundCostModel()
    run = simulate(costs, 4000, draft=0.05, forward_s=linear(0.11), scores=GOOD, accept_probs=NEVER, calls=200)
    assert run.speedup(linear(0.11)) >= 0.96
    assert costs.calibration < 0.7


@pytest.mark.parametrize("draft", [0.02, 0.05, 0.2])
def test_a_drafter_that_seldom_proposes_is_still_called(draft: float) -> None:
    """It proposes in three of ten rounds, at random, with correct scores: one empty draft is no reason to back off."""
    rng, forward_s, costs = random.Random(0), linear(0.11), RoundCostModel()
    controller = TreeSizeController(costs, 1, drafts=True)
    total_s = tokens = always_s = always_tokens = 0.0
    for _ in range(2000):
        proposes = rng.random() < 0.3
        drafts, nodes = controller.should_draft, 1
        if drafts:
            nodes = controller.choose_size(tree_of(GOOD if proposes else []), 1)
        else:
            controller.skip_draft()
        num_accepted = sum(GOOD[: nodes - 1]) if proposes else 0.0
        draft_s = draft if drafts else 0.0
        controller.record(
            nodes, draft_s=draft_s, score_s=forward_s(nodes), overhead_s=OVERHEAD_S, num_accepted=num_accepted
        )
        total_s += draft_s + forward_s(nodes) + OVERHEAD_S
        tokens += 1 + num_accepted
        always_s += draft + forward_s(8 if proposes else 1) + OVERHEAD_S
        always_tokens += 1 + proposes * sum(GOOD[:7])
    assert tokens / total_s >= 0.85 * always_tokens / always_s


def test_correct_scores_give_a_speedup() -> None:
    run = simulate(RoundCostModel(), 500, draft=0.05, forward_s=linear(0.11), scores=GOOD, accept_probs=GOOD)
    assert run.speedup(linear(0.11)) > 1.9 and run.sizes[8] > 450


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slowdown", [1.0, 5.0, 40.0], ids=str)
def test_slow_first_uses_do_not_disable_a_good_drafter(slowdown: float, seed: int) -> None:
    """In a new process the first draft and the first forward of every size take `slowdown` times as long; each of five
    tokens is accepted with probability 3/4 after the one before. Drafting must begin within the first 100 tokens."""
    rng, forward_s, costs, used = random.Random(seed), linear(0.05), RoundCostModel(), set[object]()
    controller = TreeSizeController(costs, 1, drafts=True)
    num_drafts = tokens = 0

    def first(what: object) -> float:
        new = what not in used
        used.add(what)
        return slowdown if new else 1.0

    rounds = 0
    while tokens < 100:
        rounds += 1
        drafts = controller.should_draft
        nodes, num_accepted = 1, 0
        if drafts:
            num_drafts += 1
            nodes = controller.choose_size(tree_of([0.75**i for i in range(1, 6)]), 1)
            while num_accepted < min(5, nodes - 1) and rng.random() < 0.75:
                num_accepted += 1
        else:
            controller.skip_draft()
        draft = 0.3 * first("draft") if drafts else 0.0
        controller.record(
            nodes,
            draft_s=draft,
            score_s=forward_s(nodes) * first(nodes),
            overhead_s=OVERHEAD_S,
            num_accepted=num_accepted,
        )
        tokens += 1 + num_accepted
    assert num_drafts >= 0.8 * rounds, f"called in {num_drafts} of {rounds} rounds"


# --- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_falls_with_wrong_scores_and_recovers() -> None:
    costs, forward_s = measured_costs(linear(0.11)), linear(0.11)
    simulate(costs, 300, draft=0.01, forward_s=forward_s, scores=GOOD, accept_probs=NEVER)
    lowest = costs.calibration
    assert 0.05 <= lowest < 0.6
    run = simulate(costs, 600, draft=0.01, forward_s=forward_s, scores=GOOD, accept_probs=GOOD)
    assert costs.calibration > 0.9 and run.sizes[8] > 400


def test_calibration_stays_within_bounds() -> None:
    costs = measured_costs(linear(0.0))
    simulate(costs, 300, draft=0.0, forward_s=linear(0.0), scores=[0.1] * 15, accept_probs=[1.0] * 15)
    assert costs.calibration == pytest.approx(1.5)
    costs.calibration = 0.05
    controller = TreeSizeController(costs, 1, drafts=True)
    controller.choose_size(tree_of([1.0] * 15), 1)
    controller.record(16, draft_s=0.0, score_s=1.0, overhead_s=OVERHEAD_S, num_accepted=0)
    assert costs.calibration >= 0.05


def test_empty_drafts_do_not_change_the_calibration() -> None:
    costs = measured_costs(linear(0.11))
    controller = TreeSizeController(costs, 1, drafts=True)
    for _ in range(5):
        controller.choose_size(tree_of([]), 1)
        controller.record(1, draft_s=0.01, score_s=1.0, overhead_s=OVERHEAD_S, num_accepted=0)
    assert costs.calibration == 1.0


def test_calibration_recovers_without_drafts() -> None:
    costs = RoundCostModel(calibration=0.1)
    controller = TreeSizeController(costs, 1, drafts=True)
    before = costs.calibration
    for _ in range(MAX_BACKOFF):
        controller.skip_draft()
    assert before < costs.calibration < 1.0


# --- measurements -----------------------------------------------------------------------------------------------------


def test_means_follow_slow_changes_and_ignore_outliers() -> None:
    costs = RoundCostModel()
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


def test_updates_wait_for_the_lock() -> None:
    costs = RoundCostModel()
    thread = threading.Thread(target=costs.update, args=(costs.score_s, (1, 1), 1.0))
    with costs.lock:
        thread.start()
        thread.join(0.05)
        assert not costs.score_s
    thread.join()
    assert costs.score_s == {(1, 1): 1.0}


def test_threads_may_read_while_others_update() -> None:
    costs, errors, done = measured_costs(linear(0.11)), list[Exception](), threading.Event()

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


def test_a_copy_is_independent() -> None:
    costs = measured_costs(linear(0.11))
    costs.calibration = 0.4
    twin = copy.deepcopy(costs)
    assert twin.score_s == costs.score_s and twin.calibration == 0.4 and twin.lock is not costs.lock
    twin.update(twin.score_s, (9, 9), 1.0)
    twin.calibration = 1.0
    assert (9, 9) not in costs.score_s and costs.calibration == 0.4


def test_no_random_numbers_are_drawn() -> None:
    state = torch.get_rng_state()
    simulate(
        RoundCostModel(), 300, draft=0.05, forward_s=linear(0.11), scores=GOOD, accept_probs=[0.5 * p for p in GOOD]
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_as_rows_end_costs_are_those_of_a_smaller_batch() -> None:
    """Where drafts do not pay in a full batch they do for its last rows; each size keeps what was measured of it."""
    costs = measured_costs(linear(1.0), 6)
    for nodes in BUCKETS:
        costs.update(costs.score_s, (1, nodes), linear(0.0)(nodes))
    controller = TreeSizeController(costs, 6, drafts=True)
    draft = tree_of([0.5] * 7)
    assert controller.choose_size(tree_of([0.5] * 7, 6), 6) == 1
    costs.draft_net_cost[6].backoff = 3
    sizes = []
    for num_rows in (6, 5, 4, 3, 2, 1):
        controller.follow_rows(num_rows)
        sizes.append(controller.batch)
    assert sizes == [6, 6, 4, 4, 2, 1] and controller.should_draft
    assert controller.choose_size(draft, 1) == 8
    controller.record(8, draft_s=0.0, score_s=1.0, overhead_s=OVERHEAD_S, num_accepted=3)
    assert costs.draft_net_cost[1].measured_sizes == {8} and costs.draft_net_cost[6].backoff == 3
