"""The training-free drafters against slow references, on hand-written prompts and results. No model."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.drafters import registry
from mmspec.drafters.ngram import base
from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, PromptText
from mmspec.drafters.ngram.lookup import MAX_MATCH, NgramIndex, PromptLookup, lookup
from mmspec.drafters.ngram.recycling import TOP_K, SuccessorTable, hybrid, recycling
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.registry import DRAFTERS, build_drafter
from mmspec.economy.tables import Yields
from mmspec.engine.tree import DraftTree, bucket_size, root_only
from mmspec.interfaces import Drafter, Prompt, VerifyResult

VOCAB = 50
PAD, IMAGE = 48, 49
Ids = list[list[list[int]]] | None


def make_prompt(
    *rows: list[int],
    left: bool = True,
    reference: Sequence[list[int]] = (),
    vocab: int = VOCAB,
    banned: Iterable[int] = (),
) -> Prompt:
    """A batch of prompts; `PAD` and `IMAGE` ids become pads and visual tokens, rows are filled up with pads."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows])
    return Prompt(
        input_ids=ids,
        attention_mask=ids != PAD,
        visual_mask=ids == IMAGE,
        position_ids=torch.arange(width).expand_as(ids),
        vocab_size=vocab,
        banned_ids=frozenset(banned),
        reference_ids=reference,
    )


def make_verdict(tree: DraftTree, rows: list[list[int]], walked: list[list[int]], top_ids: Ids = None) -> VerifyResult:
    width = max(1, *(len(row) for row in rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    path = torch.tensor([nodes + [0] * (width - len(nodes)) for nodes in walked])
    nodes = None if top_ids is None else torch.where(tree.node_mask, tree.tokens, -1).tolist()
    return VerifyResult(tree, path, torch.tensor([len(row) for row in rows]), tokens, rows, walked, top_ids, nodes)


def emit(drafter: Drafter, state: Any, *rows: list[int], top_ids: Ids = None) -> None:
    """Rounds without a draft that emit `rows`, one token at a time."""
    for column in range(max(map(len, rows))):
        step = [row[column : column + 1] for row in rows]
        result = make_verdict(root_only(len(rows)), step, [[0] if row else [] for row in step], top_ids)
        drafter.observe(state, result, {})


def walk(tree: DraftTree, row: int, future: list[int]) -> tuple[list[int], list[int]]:
    """(tokens emitted, nodes walked) if the target goes on to say `future`."""
    tokens, parents, valid = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.node_mask[row].tolist()
    nodes = [0]
    for token in future:
        child = [i for i in range(tree.num_nodes) if valid[i] and parents[i] == nodes[-1] and tokens[i] == token]
        if not child:
            break
        nodes.append(child[0])
    return future[: len(nodes)], nodes[: len(future)]


def paths(tree: DraftTree, row: int = 0) -> set[tuple[int, ...]]:
    """The path from the root to each valid node of a row."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.num_nodes):
        if tree.node_mask[row, node]:
            found[node] = (*found[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    return set(found.values()) - {()}


def sure(drafter: BestFirstDrafter, rate: float = 0.9) -> BestFirstDrafter:
    """The drafter with every guess trusted, so that the floor hides nothing."""
    for key in drafter.calibration.rates:
        drafter.calibration.rates[key] = rate
    return drafter


def guesses(row: list[int], reference: list[int] | None = None, max_nodes: int = 32) -> set[tuple[int, ...]]:
    drafter = sure(lookup())
    state = drafter.begin(make_prompt(row, reference=(reference,) if reference else ()))
    return paths(drafter.propose(state, max_nodes, [True]))


# --- lookup ---------------------------------------------------------------------------------------------------------


def test_lookup_copies_what_followed() -> None:
    assert guesses([1, 2, 3, 4, 5, 9, 1, 2]) >= {(3,), (3, 4), (3, 4, 5), (3, 4, 5, 9)}


def test_one_token_is_no_match() -> None:
    assert guesses([1, 2, 3, 4, 2]) == set()


@pytest.mark.parametrize("barrier", [PAD, IMAGE])
def test_matches_do_not_touch_barriers(barrier: int) -> None:
    assert guesses([1, barrier, 2, 3, 1, barrier, 2]) == set()  # crosses one
    assert guesses([2, 1, barrier, 3, 2, 1]) == set()  # copies one
    assert guesses([barrier, barrier, 3, barrier, barrier]) == set()  # starts in one
    assert guesses([5, 2, 1, 4, barrier, 2, 1]) == {(4,)}  # stops at one
    assert not any(token == barrier for path in guesses([2, 1, 7, barrier, 8, 2, 1]) for token in path)


def test_padding_is_not_text() -> None:
    for left in (True, False):
        drafter = sure(lookup())
        state = drafter.begin(make_prompt([1, 2, 3, 1, 2], [7] * 9, left=left))
        assert (3, 1, 2) in paths(drafter.propose(state, 8, [True, False]), 0)
        emit(drafter, state, [3], [])
        assert (1, 2, 3) in paths(drafter.propose(state, 8, [True, False]), 0)


def test_a_match_may_overlap_its_own_continuation() -> None:
    assert (5,) * 7 in guesses([1, 5, 5, 5], max_nodes=8)
    assert (3, 4, 3, 4, 3, 4, 3) in guesses([3, 4, 3, 4], max_nodes=8)


def test_continuations_form_a_trie() -> None:
    row = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 1, 2]
    found = guesses(row, max_nodes=64)
    assert found >= {(6,), (3,), (3, 4), (3, 5)}
    assert {path[0] for path in guesses([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2], max_nodes=64)} == {4, 5, 6}


def reference_matches(text: list[int]) -> list[tuple[int, int]]:
    """[(end, matched)] by brute force: all positions that end like the text, longest first, then latest."""
    found = []
    for end in range(1, len(text)):
        matched = 0
        while matched < min(MAX_MATCH, end) and text[end - 1 - matched] == text[-1 - matched] != BARRIER:
            matched += 1
        if matched >= 2:
            found.append((end, matched))
    chosen: list[tuple[int, int]] = []
    counts: dict[int, int] = {}
    for end, matched in sorted(found, key=lambda item: (-item[1], -item[0])):
        token = text[end]
        if token == BARRIER or counts.get(token, 0) == 2 or (token not in counts and len(counts) == 3):
            continue
        counts[token] = counts.get(token, 0) + 1
        chosen.append((end, matched))
    return chosen


def test_the_incremental_index_equals_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(60):
        size = rng.choice((3, 5, 8))
        text = [BARRIER if rng.random() < 0.05 else rng.randrange(size) for _ in range(rng.randrange(30))]
        ngram_index = NgramIndex([], list(text))
        for _ in range(30):
            tokens = [rng.randrange(size) for _ in range(rng.randrange(1, 4))]
            ngram_index.extend(tokens)
            text += tokens
            assert ngram_index.tokens == text
            if len(text) < 40:  # so that no position is beyond the number that is searched
                assert [(p.position, p.length) for p in ngram_index.find_matches()] == reference_matches(text)


def test_long_matches_are_found_behind_many_short_ones() -> None:
    text = [1, 2, 3, 4, 9] + [8, 3, 4, 7] * 40 + [1, 2, 3, 4]
    assert NgramIndex([], text).find_matches()[0] == (4, 4, 4)


def test_a_reference_is_followed_and_realigned() -> None:
    drafter = sure(lookup())
    reference = [10, 11, 12, 13, 14, 15, 16]
    state = drafter.begin(make_prompt([1, 2], reference=(reference,)))

    def first() -> set[tuple[int, ...]]:
        return {path for path in paths(drafter.propose(state, 4, [True])) if len(path) == 1}

    assert tuple(reference[:3]) in paths(drafter.propose(state, 4, [True]))
    emit(drafter, state, [10])
    assert first() == {(11,)}
    emit(drafter, state, [30])  # as if one token was replaced
    assert first() == {(12,)}
    emit(drafter, state, [31])  # lost
    assert first() == set()
    emit(drafter, state, [14])  # found again by one token
    assert first() == {(15,)}
    emit(drafter, state, [15, 16])  # its end
    assert first() == set()
    emit(drafter, state, [12])  # behind us
    assert first() == {(13,)}


def test_references_belong_to_rows_and_may_hold_anything() -> None:
    drafter = sure(lookup())
    state = drafter.begin(make_prompt([1, 2], [1, 2], [1, 2], reference=([10, VOCAB + 3, 11], [20, -7, 21])))
    tree = drafter.propose(state, 8, [True] * 3)
    assert [paths(tree, row) for row in range(3)] == [{(10,)}, {(20,)}, set()]


def test_a_reference_does_not_run_into_the_prompt() -> None:
    assert guesses([3, 4], reference=[1, 2]) == {(1,), (1, 2)}
    assert guesses([2, 9, 1], reference=[1]) == {(1,)}


# --- recycling ------------------------------------------------------------------------------------------------------


def random_verdict(rng: random.Random, last: list[int]) -> VerifyResult:
    """A random tree with a random walk; tokens of walked nodes agree with what was emitted. A row may sit out."""
    batch, nodes = len(last), rng.choice((1, 4, 8))
    tree = root_only(batch) if nodes == 1 else None
    tokens = [[rng.randrange(VOCAB) for _ in range(nodes)] for _ in range(batch)]
    parents = [[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(batch)]
    valid = [[i == 0 or rng.random() < 0.8 for i in range(nodes)] for _ in range(batch)]
    top_ids = [[rng.sample(range(-1, VOCAB + 2), TOP_K) for _ in range(nodes)] for _ in range(batch)]
    rows: list[list[int]] = []
    walked: list[list[int]] = []
    for b in range(batch):
        path = [0]
        while rng.random() < 0.7:
            children = [i for i in range(1, nodes) if parents[b][i] == path[-1] and valid[b][i]]
            if not children:
                break
            path.append(rng.choice(children))
        out = rng.random() < 0.2
        rows.append([] if out else [*(tokens[b][i] for i in path[1:]), rng.randrange(VOCAB)])
        walked.append([] if out else path)
    tree = tree or DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))
    return make_verdict(tree, rows, walked, top_ids)


def test_the_table_equals_a_slow_reference_after_scripted_rounds() -> None:
    rng = random.Random(2)
    table = SuccessorTable()
    texts = [[1, 2, 3, 1, 4], [5, BARRIER, 6]]
    state = table.start(PromptText(texts, [[], []], VOCAB))
    slow: dict[int, list[int]] = {1: [4, 2], 2: [3], 3: [1]}
    last = [4, 6]
    for _ in range(200):
        result = random_verdict(rng, last)
        table.update(state, result)
        entries = []
        for b, emitted in enumerate(result.emitted_ids):
            for i in range(result.tree.num_nodes):
                if emitted and result.tree.node_mask[b, i]:
                    token = last[b] if i == 0 else int(result.tree.tokens[b, i])
                    order = (
                        i in result.accepted_nodes[b],
                        b,
                        result.accepted_nodes[b].index(i) if i in result.accepted_nodes[b] else i,
                    )
                    entries.append((order, token, result.top_ids[b][i]))  # type: ignore[index]
            last[b] = emitted[-1] if emitted else last[b]
        for _, token, ids in sorted(entries):
            slow[token] = [i for i in ids if 0 <= i < VOCAB]
        assert {token: list(table.successors(token)) for token in range(VOCAB)} == {
            token: slow.get(token, []) for token in range(VOCAB)
        }


def test_without_top_ids_emitted_tokens_update_the_table() -> None:
    drafter = recycling()
    state = drafter.begin(make_prompt([1]))
    emit(drafter, state, [2, 1, 3])
    drafter.catch_up(state)
    table = drafter.sources[0]
    assert isinstance(table, SuccessorTable)
    assert (table.successors(1), table.successors(2)) == ((3, 2), (1,))


@pytest.mark.parametrize("num_rounds", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize(("build", "batch"), [(hybrid, 1), (lookup, 3)])  # rows share a table, in the order of updates
def test_rounds_without_a_draft_are_followed_together(
    build: Callable[[], BestFirstDrafter], batch: int, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if every round were followed at once; a bounded number of rounds waits, and a row may be silent."""
    rng = random.Random(num_rounds)
    rounds = [
        [[rng.randrange(6) for _ in range(rng.choice((0, 1, 1, 2)))] for _ in range(batch)] for _ in range(num_rounds)
    ]
    found = []
    for max_pending in (base.MAX_PENDING_ROUNDS, 1):
        monkeypatch.setattr(base, "MAX_PENDING_ROUNDS", max_pending)
        drafter = sure(build())
        state = drafter.begin(make_prompt(*[[1, 2, 3], [2, IMAGE, 2, 1], [5]][:batch]))
        for emitted in rounds:
            drafter.observe(state, make_verdict(root_only(batch), emitted, [[0] * len(row) for row in emitted]), {})
            assert len(state.pending) < max_pending
        drafts = drafter.propose(state, 32, [True] * batch)
        assert not state.pending
        indices = [
            (one.tokens, one.run_length, [(chain.previous, chain.heads) for chain in one.chains])
            for one in state.source_states[0]
        ]
        table = drafter.sources[1]._entries if batch == 1 else None
        found.append(([paths(drafts, row) for row in range(batch)], indices, table))
    assert found[0] == found[1] and (num_rounds < 31 or any(found[0][0]))


def test_the_table_is_shared_across_calls_and_belongs_to_one_vocabulary() -> None:
    drafter = sure(recycling())
    assert drafter.vocab_size is None
    drafter.begin(make_prompt([1, 2, 3]))
    assert drafter.vocab_size == VOCAB
    state = drafter.begin(make_prompt([7, 1]))
    assert (2, 3) in paths(drafter.propose(state, 8, [True]))
    state = drafter.begin(make_prompt([7, 1], vocab=VOCAB + 1))  # the target was given a token more
    assert drafter.vocab_size == VOCAB + 1 and (2, 3) not in paths(drafter.propose(state, 8, [True]))


# --- the drafter over both ------------------------------------------------------------------------------------------


def loaded(drafter: BestFirstDrafter) -> tuple[BestFirstDrafter, Any]:
    """A drafter that has much to say after a prompt that repeats itself, and its state."""
    rng = random.Random(4)
    row = [rng.randrange(6) for _ in range(60)]
    state = drafter.begin(make_prompt(row, row[7:], [9, 10, 11]))
    for _ in range(20):
        drafter.observe(state, random_verdict(rng, [row[-1], row[-1], 11]), {})
    emit(drafter, state, row[20:30], row[30:40], [9])
    return drafter, state


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("max_nodes", [1, 2, 4, 6, 8, 32, 64, 100])
def test_every_tree_is_in_order_and_within_budget(name: str, max_nodes: int) -> None:
    drafter = build_drafter(name)
    if not isinstance(drafter, BestFirstDrafter):
        assert drafter.propose(drafter.begin(make_prompt([1])), max_nodes, [True]).num_nodes == 1
        return
    drafter, state = loaded(drafter)
    tree = drafter.propose(state, max_nodes, [True, True, False])
    assert int(tree.node_mask.sum(1).max()) <= min(max_nodes, 64) and tree.num_nodes <= bucket_size(min(max_nodes, 64))
    assert max_nodes == 1 or tree.num_nodes > 1
    assert tree.scores is not None
    for row in range(3):
        nodes = int(tree.node_mask[row].sum())
        assert tree.node_mask[row, :nodes].all()
        assert (tree.scores[row, : nodes - 1] >= tree.scores[row, 1:nodes]).all()
        assert tree.parents[row, 0] == -1
        assert (tree.parents[row, 1:nodes] < torch.arange(1, nodes)).all() and (tree.parents[row, 1:nodes] >= 0).all()
        assert len(paths(tree, row)) == nodes - 1, "siblings with the same token"
        for parent in range(nodes):
            children = tree.node_mask[row] & (tree.parents[row] == parent)
            assert float(tree.scores[row][children].sum()) <= float(tree.scores[row, parent]) * 0.981
    assert not tree.node_mask[2, 1:].any()


def test_hybrid_is_the_union_when_trees_are_large() -> None:
    table = SuccessorTable(VOCAB)
    row = [1, 2, 3, 20, 1, 2, 4, 21, 1, 2]

    def tree_of(drafter: BestFirstDrafter) -> set[tuple[int, ...]]:
        state = sure(drafter, 0.5).begin(make_prompt(row))
        found = paths(drafter.propose(state, 64, [True]))
        assert len(found) < 63, "the budget was not large"
        return found

    found = tree_of(BestFirstDrafter("hybrid", [PromptLookup(), table]))
    assert found >= tree_of(lookup()) | tree_of(BestFirstDrafter("recycling", [table]))
    # Nothing else than the table going on from any node, and copying on from paths that were copied.
    copied = tree_of(lookup())
    for path in found - copied:
        before = path[-2] if len(path) > 1 else row[-1]
        assert path[-1] in table.successors(before)


def test_the_most_trusted_source_decides_about_a_token() -> None:
    drafter = hybrid()
    rates = drafter.calibration.rates
    for key in rates:
        rates[key] = 0.3 if key[0] == "table" else 0.6  # type: ignore[index]
    state = drafter.begin(make_prompt([1, 2, 3, 1, 2]))
    tree = drafter.propose(state, 2, [True])
    assert tree.scores is not None
    assert (int(tree.tokens[0, 1]), round(float(tree.scores[0, 1]), 4)) == (3, 0.6)


@pytest.mark.parametrize("name", ["lookup", "recycling", "hybrid"])
def test_banned_ids_are_never_proposed(name: str) -> None:
    drafter = build_drafter(name)
    assert isinstance(drafter, BestFirstDrafter)
    sure(drafter, 0.5)
    banned = {3, 5}
    state = drafter.begin(make_prompt([1, 2, 3, 4, 1, 2, 6, 5, 1, 2, 7, 8, 1], reference=([5, 6],), banned=banned))
    emit(drafter, state, [2], top_ids=[[[2, 5, 3, 9, 6, 7, 8, 1]]])
    tree = drafter.propose(state, 64, [True])
    proposed = {token for path in paths(tree) for token in path}
    assert {6, 7} <= proposed
    assert not banned & proposed


def test_no_candidates_give_the_root_only() -> None:
    for name in DRAFTERS:
        drafter = build_drafter(name)
        state = drafter.begin(make_prompt([IMAGE, IMAGE], [IMAGE, 1]))
        assert drafter.propose(state, 8, [True, True]).num_nodes == 1
    drafter = sure(lookup(), 0.01)  # below the floor
    assert drafter.propose(drafter.begin(make_prompt([1, 2, 1, 2])), 8, [True]).num_nodes == 1


# --- calibration ----------------------------------------------------------------------------------------------------


def test_calibration_converges_and_adapts() -> None:
    rng = random.Random(5)
    calibration = Yields({"good": 0.1, "bad": 0.5})
    for _ in range(600):
        calibration.add(
            [("good", rng.random() < 0.8, 1), ("bad", rng.random() < 0.05, 1), ("new", rng.random() < 0.4, 1)]
        )
    assert abs(calibration.rates["good"] - 0.8) < 0.12
    assert abs(calibration.rates["bad"] - 0.05) < 0.07
    assert abs(calibration.rates["new"] - 0.4) < 0.15
    for _ in range(400):
        calibration.add([("good", 0, 1)])
    assert calibration.rates["good"] < 0.03


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_calibration_is_complete_for_trimmed_trees(nodes: int) -> None:
    drafter = lookup()
    row = [1, 2, 3, 4, 5, 1, 2]
    state = drafter.begin(make_prompt(row))
    tree = drafter.propose(state, 8, [True]).trim(nodes)
    emitted, walked = walk(tree, 0, [3, 4, 9])
    assert len(walked) == {1: 1, 2: 2, 8: 3}[nodes]
    before = dict(drafter.calibration.rates)
    drafter.observe(state, make_verdict(tree, [emitted], [walked]), {})
    changed = {key: rate > before[key] for key, rate in drafter.calibration.rates.items() if rate != before[key]}
    first, second, third = (("lookup", 0, bucket, False) for bucket in (2, 3, 4))  # 2, 3, 4 tokens matched, undisputed
    expected = {
        1: {first: True},
        2: {first: True, second: True},
        8: {first: True, second: True, third: False},
    }
    assert changed == expected[nodes]


def test_improbable_candidates_still_calibrate() -> None:
    drafter = sure(lookup(), 0.001)
    state = drafter.begin(make_prompt([1, 2] * 3))
    for token in [1, 2] * 40:
        assert drafter.propose(state, 1, [True]).num_nodes == 1  # the controller wants no draft
        emit(drafter, state, [token])
    assert drafter.propose(state, 8, [True]).num_nodes == 8


def test_rounds_without_a_proposal_do_not_calibrate() -> None:
    drafter = lookup()
    state = drafter.begin(make_prompt([1, 2] * 3))
    before = dict(drafter.calibration.rates)
    emit(drafter, state, [1, 2, 1])
    assert drafter.calibration.rates == before


# --- calls, threads, copies -----------------------------------------------------------------------------------------


def test_two_states_do_not_mix() -> None:
    drafter = sure(lookup())
    one, two = drafter.begin(make_prompt([1, 2, 3, 1])), drafter.begin(make_prompt([1, 2, 4, 1]))
    drafter.propose(one, 8, [True])
    emit(drafter, one, [2])
    assert drafter.propose(two, 8, [True]).num_nodes == 1
    emit(drafter, two, [2])
    assert int(drafter.propose(one, 8, [True]).tokens[0, 1]) == 3
    assert int(drafter.propose(two, 8, [True]).tokens[0, 1]) == 4


@pytest.mark.parametrize("name", ["lookup", "recycling", "hybrid"])
def test_a_deep_copy_is_independent(name: str) -> None:
    drafter = build_drafter(name)
    assert isinstance(drafter, BestFirstDrafter)
    drafter, _ = loaded(drafter)
    other = copy.deepcopy(drafter)
    assert other.calibration.rates == drafter.calibration.rates and other.vocab_size == drafter.vocab_size

    def knowledge(drafter: BestFirstDrafter) -> list[object]:
        tables = [guesser for guesser in drafter.sources if isinstance(guesser, SuccessorTable)]
        return [dict(drafter.calibration.rates), [[table.successors(t) for t in range(VOCAB)] for table in tables]]

    before = knowledge(drafter)
    assert knowledge(other) == before
    state = other.begin(make_prompt([40, 41, 42, 40, 41, 42]))
    for token in [40, 41, 42] * 5:
        other.propose(state, 8, [True])
        emit(other, state, [token])
    assert knowledge(drafter) == before != knowledge(other)


def test_threads_on_one_drafter_and_no_global_randomness() -> None:
    drafter = hybrid()
    before = torch.get_rng_state(), random.getstate()
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        rng = random.Random(seed)
        text = [rng.randrange(seed * 10, seed * 10 + 4) for _ in range(80)]
        try:
            state = drafter.begin(make_prompt(text[:20]))
            at = 20
            while at < len(text):
                tree = drafter.propose(state, 8, [True])
                emitted, walked = walk(tree, 0, text[at:])
                emitted = emitted or text[at : at + 1]
                drafter.observe(state, make_verdict(tree, [emitted], [walked], [[[text[at]]] * tree.num_nodes]), {})
                at += len(emitted)
            assert state.source_states[0][0].tokens == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


# --- names ----------------------------------------------------------------------------------------------------------


def test_drafters_by_name() -> None:
    assert {name: build_drafter(name).name for name in DRAFTERS} == {
        "none": "none",
        "lookup": "lookup",
        "recycling": "recycling",
        "hybrid": "hybrid",
        "arbitrated": "arbitrated",
        "self": "self",
        "quantized": "quantized",
        "auto": "hybrid",
    }
    assert all(isinstance(build_drafter(name), Drafter) for name in DRAFTERS)
    assert build_drafter("hybrid") is not build_drafter("hybrid")
    assert (
        build_drafter("recycling").requirements.top_k == build_drafter("auto").requirements.top_k == TOP_K
        and build_drafter("lookup").requirements.top_k == 0
    )
    drafter = NoDrafter()
    assert build_drafter(drafter) is drafter


def test_invalid_drafters_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"'medusa'.*'none', 'lookup', 'recycling', 'hybrid', 'arbitrated', 'self', 'quantized', 'auto'",
    ):
        build_drafter("medusa")
    with pytest.raises(TypeError, match=r"PromptLookup.*'name'"):
        build_drafter(PromptLookup())
    with pytest.raises(TypeError, match=r"NoDrafter\(\)"):
        build_drafter(NoDrafter)


def test_bundled_drafters_are_names(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("msd", "aardvark", "parallel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(registry, "WEIGHTS_DIR", tmp_path)
    assert list(registry.bundled_drafters()) == ["msd", "parallel", "aardvark"], "the fastest first"
    assert registry.is_known_drafter("msd") and not registry.is_known_drafter("empty")
    with pytest.raises(
        ValueError,
        match="'self', 'quantized', 'auto', 'mtp', 'assistant', 'msd', 'parallel', 'aardvark', a folder",
    ):
        build_drafter("nonsense")


def test_trees_in_batches_grow_with_what_is_scored() -> None:
    """Twice the size that was scored last at this batch size, also in later calls; single rows are not limited."""
    drafter = sure(lookup())
    text = [*range(1, 40), 1, 2, 3]
    prompt = make_prompt(text, text)

    def propose(scored: int, rounds: int) -> int:
        state = drafter.begin(prompt)
        for _ in range(rounds):
            tree = drafter.propose(state, 32, [True, True])
            drafter.observe(state, make_verdict(tree.trim(scored), [[], []], [[], []]), {})
        return drafter.propose(state, 32, [True, True]).num_nodes

    assert propose(16, 1) == 32, "at first nothing is known"
    assert propose(1, 40) == base.MIN_BATCH_NODES
    assert propose(4, 1) == 8 and propose(8, 1) == 16
    state = drafter.begin(make_prompt(text))
    assert drafter.propose(state, 32, [True]).num_nodes == 32
