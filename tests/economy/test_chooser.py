"""The economy in simulated worlds: close to the best fixed action, whichever it is and when it changes."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from statistics import mean

import pytest
from simulated_world import World, play, share, warm_up

from mmspec.economy.chooser import REMEASURE_EVERY, Chooser
from mmspec.economy.known import MAKE_ROUNDS, MAX_CREDIT, Economy, Offer, Source
from mmspec.economy.tables import STALE, WINDOW, Seconds, Yields, _log_clock_fault, cost_rows

NGRAMS, HEAD, COPY = Source("ngrams"), Source("head", None, 0.75, 0.1, 6), Source("copy", 0, 0.9, 0.25, 15)


# --- simulated worlds -------------------------------------------------------------------------------------------------


def shares(seeds: range, num_rounds: int) -> dict[str, list[float]]:
    """Of each world: rates over those of the best fixed action, and the least of windows over plain decoding."""
    found: dict[str, list[float]] = {"first": [], "known": [], "late": [], "changed": [], "plain": []}
    for seed in seeds:
        world, economy = World.draw(seed), Economy()
        before = list(play(world, economy, num_rounds))
        world.change()
        after = list(play(world, economy, 300))
        found["first"].append(share(before[:30]))
        found["known"].append(share(before[100:400]))
        found["late"].append(share(before[num_rounds // 2 :]))
        found["changed"].append(share(after[100:]))
        played = before + after
        found["plain"].append(min(share(played[i : i + 300], True) for i in range(0, len(played) - 299, 50)))
    return found


def test_twenty_worlds() -> None:
    found = shares(range(20), 400)
    assert mean(found["first"]) > 0.90 and mean(found["known"]) > 0.97 and mean(found["changed"]) > 0.95
    assert mean(found["plain"]) > 1 and min(found["plain"]) > 0.95


@pytest.mark.slow
def test_two_hundred_worlds() -> None:
    found = shares(range(200), 2000)
    assert mean(found["first"]) > 0.90 and mean(found["known"]) > 0.97 and mean(found["late"]) > 0.99
    assert mean(found["changed"]) > 0.97
    assert sorted(found["plain"])[4] > 0.97, "all but a few, where noise hides which of two actions is better"


def first_calls(seeds: range) -> Iterator[tuple[float, float, float]]:
    """After a warm-up whose drafts are rejected, on a machine whose first runs are slow by a factor of 2 to 10.

    Of each world: what the best fixed action brings over plain decoding in the first call, the share of its rounds that
    are drafted, and the least of 300 rounds over plain decoding.
    """
    for seed in seeds:
        world, economy = World.draw(seed), Economy()
        world.cold = random.Random(seed).uniform(2, 10)
        warm_up(world, economy)
        played = list(play(world, economy, 364))
        first = played[:64]
        least = min(share(played[i : i + 300], True) for i in range(0, 65, 16))
        yield (
            mean(one.best_rate / one.plain_rate for one in first),
            mean(one.source is not None for one in first),
            least,
        )


def check_first_calls(seeds: range) -> None:
    found = list(first_calls(seeds))
    drafted = sorted(drafted for pays, drafted, _ in found if pays > 1.3)
    assert len(drafted) > len(seeds) / 4 and mean(drafted) > 0.9
    assert drafted[len(drafted) // 25] > 0.25, "all but a few, whose first drafts of this text are rejected as well"
    assert sorted(least for *_, least in found)[len(seeds) // 50] > 0.97


def test_first_calls_of_a_cold_machine() -> None:
    check_first_calls(range(30))


@pytest.mark.slow
def test_two_hundred_first_calls_of_a_cold_machine() -> None:
    check_first_calls(range(200))


# --- one call ---------------------------------------------------------------------------------------------------------


def run(
    chooser: Chooser, accepted: int, draft_s: float = 0.1, slope: float = 0.02, rounds: int = 50, stall: float = 0.0
) -> int:
    """Rounds whose drafts bring so much; how many drafted."""
    rng, drafted = random.Random(0), 0
    for _ in range(rounds):
        drafts = chooser.plan()
        drafted += drafts
        nodes = chooser.choose_nodes([0.8 * node for node in range(8)], 1) if drafts else 1
        right = min(accepted, nodes - 1)
        slow = 20.0 if rng.random() < stall else 1.0
        chooser.record(
            nodes,
            draft_s=slow * draft_s * drafts,
            score_s=1 + slope * nodes,
            overhead_s=0.01,
            num_accepted=[right],
        )
    return drafted


def test_drafts_that_pay_go_on_and_others_end() -> None:
    assert run(Chooser(Economy(), 1, sources=[NGRAMS]), accepted=3) >= 45
    assert run(Chooser(Economy(), 1, sources=[NGRAMS]), accepted=0, rounds=400) < 60


def test_useless_drafts_take_two_percent_of_the_time() -> None:
    for draft_s in (0.05, 0.3, 2.0):
        drafted = run(Chooser(Economy(), 1, sources=[NGRAMS]), accepted=0, draft_s=draft_s, rounds=2000)
        assert drafted * draft_s < 0.02 * 2000 + MAX_CREDIT


@pytest.mark.parametrize("stall", [0.05, 0.15])
def test_stalls_do_not_end_drafts_that_pay(stall: float) -> None:
    """They are stalls, not expensive trials: also in the first rounds of a call."""
    economy = Economy()
    drafted = [run(Chooser(economy, 1, sources=[NGRAMS]), 3, rounds=20, stall=stall) for _ in range(20)]
    assert sum(drafted) > 340 and min(drafted) > 10


def test_a_new_call_tries_what_did_not_pay_in_the_last_one() -> None:
    economy = Economy()
    assert run(Chooser(economy, 1, sources=[NGRAMS]), accepted=0, rounds=100) < 20
    assert run(Chooser(economy, 1, sources=[NGRAMS]), accepted=3, rounds=100) > 50


@pytest.mark.parametrize(
    ("slope", "gains", "expected"),
    [(0.0, [0.9, 0.8, 0.7, 0.6], 4), (1.0, [0.9, 0.8, 0.7, 0.6], 1), (0.2, [0.9, 0.1, 0.1, 0.1], 2)],
)
def test_the_number_of_nodes(slope: float, gains: list[float], expected: int) -> None:
    economy = Economy()
    for nodes in (1, 2, 4) * 2:
        economy.rounds_s.add("score", 1, nodes, 1 + slope * (nodes - 1))
    chooser = Chooser(economy, 1, sources=[NGRAMS])
    chooser.source, chooser.rate = NGRAMS, 1.0
    assert chooser.choose_nodes([0.0, *(sum(gains[: i + 1]) for i in range(3))], 1) == expected
    assert chooser.choose_nodes([0.0, 0.9, 1.7, 2.4], 1, max_gain=0.0) == 1, "the answer ends here"


def test_levels_follow_acceptance_and_cost() -> None:
    def best(acceptance: float, step_s: float) -> int:
        economy = Economy()
        for nodes in (1, 2, 4, 8):
            economy.rounds_s.add("score", 1, nodes, 1 + 0.01 * nodes)
        for level in [*range(1, 7)] * 2:
            economy.drafts_s.add("head", 1, level, step_s * level)
        economy.yields.add([(("head", depth), 100 * acceptance, 100) for depth in range(6)])
        return economy.best_levels(HEAD, 1, 16)[0]

    assert best(0.95, 0.02) == 6 and best(0.1, 0.2) == 1 and 1 < best(0.7, 0.1) < 6
    assert best(0.9, 0.5) < best(0.9, 0.05)


def test_rows_that_end_cost_less() -> None:
    assert [cost_rows(rows, 5) for rows in (5, 4, 3, 2, 1)] == [5, 4, 4, 2, 1]
    economy = Economy()
    chooser = Chooser(economy, 4, sources=[NGRAMS])
    chooser.follow_rows(3)
    assert chooser.batch == 4
    chooser.follow_rows(2)
    assert run(chooser, 2) and economy.rounds_s.count("score", 2) and not economy.rounds_s.count("score", 4)


def test_a_fixed_size_drafts_in_each_round() -> None:
    chooser = Chooser(Economy(), 1, sources=[HEAD], fixed_tree_size=4)
    assert run(chooser, accepted=0) == 50 and chooser.choose_nodes([], 1) == 4
    assert run(Chooser(Economy(), 1, sources=[]), accepted=0) == 0


def test_plain_decoding_is_measured_again() -> None:
    chooser = Chooser(Economy(), 1, sources=[NGRAMS])
    run(chooser, accepted=1, draft_s=0.8, rounds=20)
    before = chooser.economy.rounds_s.count("score", 1, 1)
    run(chooser, accepted=1, draft_s=0.8, rounds=2 * REMEASURE_EVERY)
    assert before >= 2 and chooser.economy.rounds_s.count("score", 1, 1) > before


# --- what is made once ------------------------------------------------------------------------------------------------


def offered(make_s: float, rounds: int, accepted: int = 0) -> tuple[int | None, Chooser]:
    """Rounds of plain decoding until the copy is made; None if it is not."""
    made: list[int] = []
    chooser, number = Chooser(Economy(), 1, sources=[NGRAMS]), 0
    chooser.economy.rounds_s.add("make", 1, 1, make_s)
    chooser.offer = Offer(COPY, lambda: made.append(number) or [], "a copy")  # type: ignore[func-returns-value]
    for number in range(rounds):  # noqa: B007
        run(chooser, accepted, rounds=1)
    return (made or [None])[0], chooser


def test_a_copy_is_made_when_it_would_have_paid() -> None:
    at, _ = offered(50.0, 300)
    assert at is not None and 60 < at < 200, "rounds of 1 s, of which it saves some half"
    assert offered(25.0, 300)[0] < at  # type: ignore[operator]
    later, chooser = offered(50.0, 300, accepted=7)
    assert later is None, "n-grams that copy all leave little to be saved"
    assert "a copy: would have saved" in str(chooser.waits_for)
    assert offered(50.0, 32)[0] is None, "one short answer pays for nothing"


def test_no_copy_is_made_where_the_size_is_fixed() -> None:
    """Such rounds take the first source, whatever else there is."""
    economy, made = Economy(), list[int]()
    economy.rounds_s.add("make", 1, 1, 1e-6)
    economy.saved_s = 9.0
    chooser = Chooser(economy, 1, fixed_tree_size=4, sources=[NGRAMS])
    chooser.offer = Offer(COPY, lambda: made.append(1) or [], "a copy")  # type: ignore[func-returns-value]
    assert chooser.plan() and chooser.source is NGRAMS and not made


def test_what_making_took_is_remembered() -> None:
    _, chooser = offered(1e-6, 5)
    assert chooser.offer is None and chooser.waits_for is None
    assert chooser.economy.rounds_s.count("make", 1, 1) == 2


def test_what_an_unknown_copy_costs_is_known_in_rounds() -> None:
    economy = Economy()
    assert economy.make_s(1) == math.inf, "nothing is made before a round is known"
    economy.rounds_s.add("score", 1, 1, 0.1)
    assert economy.make_s(1) == pytest.approx(0.1 * MAKE_ROUNDS)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_seconds_are_not_moved_by_stalls() -> None:
    table, rng = Seconds(), random.Random(0)
    for _ in range(50):
        table.add("score", 1, 1, rng.uniform(1.0, 1.1) * (30 if rng.random() < 0.3 else 1))
        assert 1.0 <= (table.get("score", 1, 1) or 0) <= 33 and table.count("score", 1, 1) <= WINDOW
    assert (table.get("score", 1, 1) or 0) < 1.2
    for _ in range(WINDOW):
        table.add("score", 1, 1, 3.0)
    assert table.get("score", 1, 1) == 3.0, "a machine that stays slow is slow"


def test_a_clock_that_stands_or_goes_backwards_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mmspec")
    _log_clock_fault.cache_clear()
    table = Seconds()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        table.add("score", 1, 1, seconds)
    assert table.get("score", 1, 1) is None
    assert [one.levelname for one in caplog.records] == ["INFO"] and "a clock" in caplog.text, "said once"
    chooser = Chooser(Economy(), 1, sources=[HEAD])
    for _ in range(20):
        chooser.plan()
        chooser.record(1, draft_s=-1.0, score_s=0.0, overhead_s=-2.0, num_accepted=[0])
    assert chooser.economy.round_s(1, 1) is None


@pytest.mark.parametrize("wrong", [0.0, -3.0, math.nan, -math.inf])
def test_drafting_goes_on_while_the_clock_is_wrong_now_and_then(wrong: float) -> None:
    chooser, drafted = Chooser(Economy(), 1, sources=[NGRAMS]), 0
    for number in range(100):
        drafts = chooser.plan()
        drafted += drafts
        nodes = chooser.choose_nodes([0.8 * node for node in range(8)], 1) if drafts else 1
        times = [wrong if number % 3 == part else s for part, s in enumerate((0.1 * drafts, 1 + 0.02 * nodes, 0.01))]
        chooser.record(nodes, draft_s=times[0], score_s=times[1], overhead_s=times[2], num_accepted=[min(3, nodes - 1)])
    assert drafted > 85 and chooser.economy.round_s(1, 8) == pytest.approx(1.17, rel=0.05)
    assert math.isfinite(chooser.economy.credit)


def test_choosing_is_a_few_hundred_calls_of_functions() -> None:
    """That is some 30 microseconds of a round; sources that do not draft add little."""
    chooser, counts = Chooser(Economy(), 1, sources=[HEAD, COPY, NGRAMS, Source("others")]), [0]
    sys.setprofile(lambda frame, event, arg: counts.__setitem__(0, counts[0] + (event == "call")))
    try:
        run(chooser, accepted=2, rounds=500)
    finally:
        sys.setprofile(None)
    assert counts[0] < 200 * 500


def test_a_size_that_was_measured_while_the_machine_was_busy_is_predicted_again() -> None:
    """It is never chosen else, and so never measured; the smallest and the largest one have nothing to predict from."""
    table = Seconds()
    for size in (1, 2, 4, 8, 16) * 3:
        table.add("score", 1, size, 2 + 0.06 * size)
    assert table.get("score", 1, 4) == pytest.approx(2.24)
    for size in (2, 8) * STALE:
        table.add("score", 1, size, 1 + 0.03 * size)
    assert table.get("score", 1, 4) == pytest.approx(1.12) and not table.count("score", 1, 4)
    assert table.count("score", 1, 1) and table.count("score", 1, 16) and table.count("score", 1, 8) == WINDOW
    for _ in range(2):
        table.add("score", 1, 4, 1.2)
    assert table.get("score", 1, 4) == pytest.approx(1.2)


def test_sizes_that_were_not_measured() -> None:
    table = Seconds(0.1)
    table.add("score", 1, 1, 1.0)
    assert table.get("score", 1, 11) == pytest.approx(2.0), "as assumed"
    for _ in range(3):
        table.add("score", 1, 1, 1.0)
        table.add("score", 1, 8, 1.07)
    assert table.get("score", 1, 4) == pytest.approx(1.03)
    assert 1.07 < (table.get("score", 1, 16) or 0) < 1.4
    table.add("score", 1, 16, 9.0)
    assert (table.get("score", 1, 16) or 0) < 2.6, "nothing worse than assumed follows from a single run"
    assert (table.get("score", 4, 1) or 0) > 1.0, "of other rows"


def test_yields_forget() -> None:
    yields = Yields(decay=0.9)
    assert yields.rate(("head", 0), 0.7) == 0.7
    for _ in range(50):
        yields.add([(("head", 0), 0, 1)])
    assert yields.rate(("head", 0), 0.7) < 0.2
    for _ in range(50):
        yields.add([(("head", 0), 1, 1)])
    assert yields.rate(("head", 0), 0.7) > 0.9
    for _ in range(100):
        yields.add([(("head", 0), 0, 0)])
    assert yields.rate(("head", 0), 0.7) == pytest.approx(0.7, abs=0.01), "what was not seen for long is as assumed"
