"""N-grams of all outputs, alone and combined with the distributions of instant heads; in Python and compiled."""

from __future__ import annotations

import copy
import ctypes
import threading
from typing import Any

import pytest
import torch
from c_bugs import faulty_kernel, faulty_sources

from mmspec.cpu import c_library, ngram_types, ngrams
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.ngram_types import HeadDistributions, HeadTokens
from mmspec.cpu.ngrams import CNgrams
from mmspec.drafters.ngram import output_ngrams
from mmspec.drafters.ngram.base import BestFirstDrafter, Calibration, PromptText
from mmspec.drafters.ngram.output_ngrams import (
    MIN_CANDIDATE_PROB,
    MIN_UNSEEN_PROB,
    NgramCounts,
    OutputNgrams,
    new_counts,
)
from mmspec.engine.tree import root_only
from mmspec.interfaces import VerifyResult

VOCAB = 40
needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
BOTH = pytest.mark.parametrize("counts_class", [NgramCounts, pytest.param(CNgrams, marks=needs_kernel)])


@pytest.fixture(autouse=True)
def _counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the class that a test is for."""
    if "counts_class" in request.fixturenames and request.getfixturevalue("counts_class") is NgramCounts:
        monkeypatch.setattr(output_ngrams, "load_kernel", lambda: None)


def result(*rows: list[int]) -> VerifyResult:
    unused = torch.zeros(len(rows), 1, dtype=torch.long)
    accepted = [[0] * len(row) for row in rows]
    return VerifyResult(root_only(len(rows)), unused, unused[:, 0], unused, list(rows), accepted)


def distributions(*slots: dict[int, float], batch: int = 1) -> HeadDistributions:
    """Heads that give these powers to some tokens; all tokens are equally frequent."""
    ids = torch.tensor(sorted({token for slot in slots for token in slot}))
    powers = torch.tensor([[slot.get(int(token), 0.0) for token in ids] for slot in slots]).expand(batch, -1, -1)
    index = torch.full((VOCAB,), -1, dtype=torch.int32)
    index[ids] = torch.arange(len(ids), dtype=torch.int32)
    weights = (powers * 0.1).contiguous()
    floors = torch.full((batch, len(slots)), 1e-3, dtype=torch.float64)
    return HeadDistributions(powers.contiguous(), weights, weights.double().sum(-1), floors, ids, index)


def random_heads(rng: torch.Generator, batch: int, slots: int) -> HeadDistributions:
    ids = torch.randperm(VOCAB, generator=rng)[:25].sort().values
    powers = (torch.randn(batch, slots, 25, generator=rng) * 3).softmax(-1) ** 0.6
    weights = powers * torch.rand(25, generator=rng)
    index = torch.full((VOCAB,), -1, dtype=torch.int32)
    index[ids] = torch.arange(25, dtype=torch.int32)
    floors = powers.topk(5).values[..., -1].double()
    return HeadDistributions(powers, weights, weights.sum(-1).double(), floors, ids, index)


# --- counts -----------------------------------------------------------------------------------------------------------


@BOTH
def test_longer_contexts_count_more(counts_class: type) -> None:
    counts = new_counts()
    assert type(counts) is counts_class
    counts.add((), [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 5])
    probs, rest = counts.probs((1, 2, 3), MIN_UNSEEN_PROB)
    assert probs[4] > probs[5] > 0, "5 is more frequent after 3, 4 followed 1 2 3"
    assert sum(probs.values()) + rest == pytest.approx(1.0)
    assert counts.probs((7,), MIN_UNSEEN_PROB) == ({}, 1.0)


@BOTH
def test_memory_is_bounded(counts_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_ngrams, "MAX_CONTEXTS", 128)
    counts = new_counts()
    counts.add((), [1, 2] * 20)
    for first in range(10, 400, 13):
        counts.add((), [1, 2] * 4)
        counts.add((), list(range(first, first + 13)))
    assert counts.num_contexts <= 128 + 13 * 3
    assert 2 in counts.probs((1,), MIN_UNSEEN_PROB)[0], "what occurs often stays"
    counts.add((5,), [0])
    for token in range(100):
        counts.add((5,), [0, token])
    probs, _ = counts.probs((5,), MIN_UNSEEN_PROB)
    assert len(probs) <= output_ngrams.MAX_SUCCESSORS and max(probs, key=probs.__getitem__) == 0


@needs_kernel
def test_compiled_counts_equal_those_in_python() -> None:
    rng = torch.Generator().manual_seed(1)
    mine, want = new_counts(), NgramCounts()
    for _ in range(40):
        text = (torch.rand(200, generator=rng) ** 3 * 60).long().tolist()
        for counts in (mine, want):
            counts.add((-1, 5, 7), text)
    assert mine.num_contexts == want.num_contexts > ngrams.MIN_CONTEXT_PLACES
    for counts in (mine, copy.deepcopy(mine)):
        for context in want._successors:
            assert list(counts.probs(context, 0.0)[0].items()) == list(want.probs(context, 0.0)[0].items())
            assert counts.probs(context, 0.3) == want.probs(context, 0.3)


@BOTH
def test_threads_and_copies(counts_class: type) -> None:
    counts = new_counts()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(300):
                counts.add((seed,), [number % 7, number % 5, number])
                counts.probs((number % 7,), MIN_UNSEEN_PROB)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copied = copy.deepcopy(counts)
    copied.add((), [338, 339])
    assert not failures and copied.num_contexts == counts.num_contexts + 1


@needs_kernel
def test_sizes_that_the_kernel_cannot_count() -> None:
    kernel = load_kernel()
    assert kernel is not None
    with pytest.raises(ValueError, match="1 to 8 tokens and 1 to 64 successors; got 9 and 3"):
        CNgrams(kernel, 9, 3, 100)


# --- drafts -----------------------------------------------------------------------------------------------------------


@BOTH
def test_only_calls_that_are_learned_from_are_counted(counts_class: type) -> None:
    source = OutputNgrams()
    text = PromptText([[3, 4], [4]], [[], []], VOCAB)
    state = source.start(text)
    source.update(state, result([5, 6], [7]))
    assert not source.counts.num_contexts and state.contexts == [(3, 4, 5, 6)[-3:], (4, 7)]
    state.records = True
    source.update(state, result([8], []))
    assert source.counts.probs((6,), MIN_UNSEEN_PROB)[0].keys() == {8}
    state = source.start(text)
    state.contexts[0] = (5, 6)
    assert [candidate[0] for candidate in source.expand(source.cursor(state, 0))] == [8]


@BOTH
def test_the_heads_choose_among_what_the_ngrams_know(counts_class: type) -> None:
    source = OutputNgrams()
    source.counts.add((), [1, 2, 9, 1, 3, 9, 1, 2, 9, 1, 3])
    state = source.start(PromptText([[1]], [[]], VOCAB))

    def probs(cursor: Any) -> dict[int, int]:
        return {token: key[-1] for token, key, _ in source.expand(cursor)}  # type: ignore[index]

    alone = probs(source.cursor(state, 0))
    assert abs(alone[2] - alone[3]) <= 1, "both followed equally often"
    state.heads = distributions({2: 0.05, 3: 0.9, 7: 0.04})
    root = source.cursor(state, 0)
    combined = probs(root)
    assert combined[3] > alone[3] > combined.get(2, 0)
    (child,) = (child for token, _, child in source.expand(root) if token == 3)
    assert probs(child).keys() == {9}, "behind the last position of the heads the n-grams go on alone"


@BOTH
def test_values_that_are_not_finite_draft_nothing_wrong(counts_class: type) -> None:
    source = OutputNgrams()
    state = source.start(PromptText([[1]], [[]], VOCAB))
    calibration = Calibration(source.priors)
    drafter = BestFirstDrafter("outputs", [source])
    for power in (0.0, float("inf"), float("nan"), 3e38):
        state.heads, state.slots = distributions({2: 0.0, 3: power}), []
        compiled = source.draft(state, 8, [True], calibration)
        tree = compiled[0] if compiled else best_first_tree(drafter, state, 8)
        assert {int(token) for token in tree.tokens[tree.node_mask]} <= {0, 3}
    assert MIN_CANDIDATE_PROB > 0


def best_first_tree(drafter: BestFirstDrafter, state: Any, max_nodes: int) -> Any:
    best_first = drafter.begin(FakePrompt())  # type: ignore[arg-type]
    best_first.source_states = [state]
    return drafter.propose(best_first, max_nodes, [True] * len(state.contexts))


class FakePrompt:
    """What `BestFirstDrafter.begin` reads."""

    input_ids = torch.tensor([[1]])
    visual_mask = torch.tensor([[False]])
    attention_mask = torch.tensor([[True]])
    vocab_size = VOCAB
    reference_ids = ()
    banned_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()


def both_trees(
    mine: OutputNgrams, want: OutputNgrams, heads: HeadDistributions | None, contexts: list[tuple[int, ...]], nodes: int
) -> tuple[Any, Any]:
    """(tokens, parents, scores) of all nodes and the candidates at all nodes, of every row: compiled, in Python."""
    banned, stop = frozenset((3,)), frozenset((6,))
    calibration = Calibration(mine.priors)
    calibration.update([(key, number % 3 == 0) for number, key in enumerate(mine.priors)])
    found = []
    for source in (mine, want):
        state = source.start(PromptText([list(context) for context in contexts], [[]] * len(contexts), VOCAB))
        state.flag(banned, stop)
        state.heads = heads
        drafter = BestFirstDrafter("outputs", [source], calibration)
        best_first = drafter.begin(FakePrompt())  # type: ignore[arg-type]
        best_first.batch_size = len(contexts)
        best_first.source_states, best_first.banned_ids, best_first.stop_ids = [state], banned, stop
        active = [number != 1 for number in range(len(contexts))]
        compiled = source.draft(state, nodes, active, calibration)
        if compiled is not None:
            tree, best_first.candidates = compiled
        else:
            tree = drafter.propose(best_first, nodes, active)
        assert (compiled is not None) == (source is mine)
        rows = []
        for row, mask in enumerate(tree.node_mask):
            parts = (tree.tokens[row, mask], tree.parents[row, mask], tree.scores[row, mask])
            candidates = best_first.candidates[row]
            at_nodes = [[one[:2] for one in candidates[node]] for node in range(min(len(candidates), int(mask.sum())))]
            rows.append(([part.tolist() for part in parts], [one for one in at_nodes if one]))
        found.append(rows)
    return found[0], found[1]


def random_trees(seed: int) -> tuple[Any, Any]:
    """Trees of three rows from random counts and heads; row 1 is not active."""
    rng = torch.Generator().manual_seed(seed)
    mine, want = OutputNgrams(), OutputNgrams()
    want.counts = NgramCounts()
    for _ in range(seed % 4):
        text = (torch.rand(60, generator=rng) ** 2 * VOCAB).long().tolist()
        for source in (mine, want):
            source.counts.add((1,), text)
    heads = random_heads(rng, 3, 1 + seed % 4) if seed % 5 else None
    contexts = [tuple(torch.randint(0, 9, (seed % 4,), generator=rng).tolist()) for _ in range(3)]
    return both_trees(mine, want, heads, contexts, (1, 2, 8, 16, 64)[seed % 5])


def are_equal(mine: Any, want: Any) -> bool:
    """Whether trees are the same up to rounding, and the candidates the same."""
    return all(
        nodes[:2] == expected[:2] and nodes[2] == pytest.approx(expected[2], rel=1e-5) and candidates == others
        for (nodes, candidates), (expected, others) in zip(mine, want, strict=True)
    )


@needs_kernel
@pytest.mark.parametrize("seed", range(40))
def test_compiled_trees_equal_those_in_python(seed: int) -> None:
    mine, want = random_trees(seed)
    assert are_equal(mine, want), (mine, want)


@needs_kernel
def test_trees_are_not_all_trivial() -> None:
    sizes = [len(row[0][0]) for seed in range(40) for row in random_trees(seed)[0]]
    assert max(sizes) > 16 and sum(size > 4 for size in sizes) > 20


@needs_kernel
def test_positions_without_calibration_are_refused() -> None:
    source = OutputNgrams()
    state = source.start(PromptText([[1]], [[]], VOCAB))
    state.heads = distributions(*[{2: 0.5}] * (output_ngrams.MAX_HEAD_SLOTS + 1))
    with pytest.raises(ValueError, match="6 tables"):
        source.draft(state, 8, [True], Calibration(source.priors))


@needs_kernel
def test_compiled_head_distributions_equal_those_in_torch() -> None:
    rng = torch.Generator().manual_seed(3)
    ids = torch.arange(1, 28)
    index = torch.full((VOCAB,), -1, dtype=torch.int32)
    priors, frequencies = torch.rand(2, 27, generator=rng)
    tokens = HeadTokens(ids, index, priors, frequencies)
    logits = torch.randn(3, 4, 27, generator=rng) * 9
    logits[1, 2, 5], logits[2, 0] = float("-inf"), float("nan")
    mine, want = tokens.weigh(logits, 0.6), tokens._weigh_in_torch(logits, 0.6)
    for name in ("powers", "weights", "totals"):
        torch.testing.assert_close(getattr(mine, name), getattr(want, name), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(mine.floors[:2], want.floors[:2], rtol=1e-5, atol=1e-9)
    assert not mine.powers[2, 0].any()


# --- the C code -------------------------------------------------------------------------------------------------------


@needs_kernel
def test_structs_are_as_large_as_in_the_library_of_ngrams() -> None:
    library = c_library.load_library()
    library.few_rows_ngrams_struct_bytes.restype = ctypes.c_int64
    structs = (
        ngram_types.TableStruct,
        ngram_types.NgramDraftStruct,
        ngram_types.ContextStruct,
        ngram_types.SuccessorStruct,
    )
    sizes = [ctypes.sizeof(struct) for struct in structs]
    assert [library.few_rows_ngrams_struct_bytes(number) for number in range(4)] == sizes


BUGS = {
    "the head's part of what no n-gram names": ("others -= weights[place];", ";"),
    "the likeliest tokens of heads": ("found->prob[found->n++] = weights[place] * unseen;", ";"),
    "shorter contexts": ("found->prob[j] += scale * s.count;", "found->prob[j] = scale * s.count;"),
    "what ends a row": ("g->flags[token] & 2", "g->flags[token] & 4"),
    "what is never drafted": ("g->flags[token] & 1", "g->flags[token] & 4"),
    "siblings exclude each other": ("total > g->max_siblings ?", "0 ?"),
    "the context of a node": ("t->contexts[n][C - 1] = token;", "t->contexts[n][C - 1] = t->contexts[0][C - 1];"),
    "calibration by position": ("(1 + depth) * (g->num_classes + 1)", "1 * (g->num_classes + 1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_can_be_planted(bug: str) -> None:
    assert faulty_sources(*BUGS[bug], "ngrams.h")


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_c_code_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = faulty_kernel(*BUGS[bug], "ngrams.h")
    monkeypatch.setattr(output_ngrams, "load_kernel", lambda: kernel)

    assert not all(are_equal(*random_trees(seed)) for seed in range(40))
