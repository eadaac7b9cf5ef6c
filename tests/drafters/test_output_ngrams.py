"""N-grams of all outputs, alone and combined with the distributions of instant heads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from mmspec.drafters.ngram import output_ngrams
from mmspec.drafters.ngram.base import PromptText
from mmspec.drafters.ngram.output_ngrams import MIN_CANDIDATE_PROB, NgramCounts, OutputNgrams
from mmspec.engine.tree import root_only
from mmspec.interfaces import VerifyResult


def result(*rows: list[int]) -> VerifyResult:
    unused = torch.zeros(len(rows), 1, dtype=torch.long)
    accepted = [[0] * len(row) for row in rows]
    return VerifyResult(root_only(len(rows)), unused, unused[:, 0], unused, list(rows), accepted)


def test_longer_contexts_count_more() -> None:
    counts = NgramCounts()
    counts.add((), [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 5])
    probs, rest = counts.probs((1, 2, 3))
    assert probs[4] > probs[5] > 0, "5 is more frequent after 3, 4 followed 1 2 3"
    assert sum(probs.values()) + rest == pytest.approx(1.0)
    assert counts.probs((7,)) == ({}, 1.0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_ngrams, "MAX_CONTEXTS", 100)
    counts = NgramCounts()
    counts.add((), [1, 2] * 20)
    counts.add((), list(range(10, 400)))
    assert counts.num_contexts <= 100 + 3
    assert 2 in counts.probs((1,))[0], "what occurs often stays"
    counts.add((5,), [0])
    for token in range(100):
        counts.add((5,), [0, token])
    probs, _ = counts.probs((5,))
    assert len(probs) <= output_ngrams.MAX_SUCCESSORS and max(probs, key=probs.__getitem__) == 0


def test_only_calls_that_are_learned_from_are_counted() -> None:
    source = OutputNgrams()
    text = PromptText([[3, 4], [4]], [[], []], 40)
    state = source.start(text)
    source.update(state, result([5, 6], [7]))
    assert not source.counts.num_contexts and state.contexts == [(4, 5, 6), (4, 7)]
    state.records = True
    source.update(state, result([8], []))
    assert source.counts.probs((6,))[0].keys() == {8}
    state = source.start(text)
    state.contexts[0] = (5, 6)
    assert [candidate[0] for candidate in source.expand(source.cursor(state, 0))] == [8]


def test_the_heads_choose_among_what_the_ngrams_know() -> None:
    source = OutputNgrams()
    source.counts.add((), [1, 2, 9, 1, 3, 9, 1, 2, 9, 1, 3])
    state = source.start(PromptText([[1]], [[]], 40))

    def probs(cursor: tuple) -> dict[int, int]:  # type: ignore[type-arg]
        return {token: key[-1] for token, key, _ in source.expand(cursor)}  # type: ignore[index]

    alone = probs(source.cursor(state, 0))
    assert abs(alone[2] - alone[3]) <= 1, "both followed equally often"
    state.slots = [[{2: (0.05, 0.02), 3: (0.9, 0.4), 7: (0.04, 0.001)}]]
    root = source.cursor(state, 0)
    combined = probs(root)
    assert combined[3] > alone[3] > combined.get(2, 0)
    (child,) = (child for token, _, child in source.expand(root) if token == 3)
    assert probs(child).keys() == {9}, "behind the last position of the heads the n-grams go on alone"


def test_values_that_are_not_finite_draft_nothing_wrong() -> None:
    source = OutputNgrams()
    state = source.start(PromptText([[1]], [[]], 40))
    state.slots = [[{2: (0.0, 0.0), 3: (3e38, 3e38)}]]
    assert [token for token, _, _ in source.expand(source.cursor(state, 0))] == [3]
    state.slots = [[{2: (0.0, 0.0)}]]
    assert source.expand(source.cursor(state, 0)) == [] and MIN_CANDIDATE_PROB > 0


def test_threads_and_copies() -> None:
    counts = NgramCounts()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(300):
                counts.add((seed,), [number % 7, number % 5])
                counts.probs((number % 7,))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copied = copy.deepcopy(counts)
    copied.add((), [38, 39])
    assert not failures and copied.num_contexts == counts.num_contexts + 1
