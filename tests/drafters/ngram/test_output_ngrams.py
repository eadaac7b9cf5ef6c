"""N-grams of all prompts and outputs; in Python and compiled."""

from __future__ import annotations

import copy
import ctypes
import threading

import pytest
import torch
from c_bugs import faulty_kernel, faulty_sources

from mmspec.cpu import ngrams
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.ngrams import CNgrams
from mmspec.drafters.ngram import output_ngrams
from mmspec.drafters.ngram.base import PromptText
from mmspec.drafters.ngram.output_ngrams import (
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


def compare_counts() -> None:
    """The counts in C, and a copy, with those in Python."""
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


@needs_kernel
def test_compiled_counts_equal_those_in_python() -> None:
    compare_counts()


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
def test_prompts_and_outputs_are_counted(counts_class: type) -> None:
    source = OutputNgrams()
    state = source.start(PromptText([[3, 4], [4]], [[], []], VOCAB))
    source.update(state, result([5, 6], [7]))
    assert state.contexts == [(3, 4, 5, 6)[-3:], (4, 7)]
    assert source.counts.probs((4,), MIN_UNSEEN_PROB)[0].keys() == {5, 7}
    source.update(state, result([8], []))
    state = source.start(PromptText([[5, 6], [4]], [[], []], VOCAB))
    found = source.expand(source.cursor(state, 0))
    assert [candidate[0] for candidate in found] == [8]
    assert not source.expand(found[0][2]), "nothing followed it"


# --- the C code -------------------------------------------------------------------------------------------------------


@needs_kernel
def test_structs_are_as_large_as_in_the_library_of_ngrams() -> None:
    library = load_kernel().library
    library.few_rows_ngrams_struct_bytes.restype = ctypes.c_int64
    structs = (
        ngrams.TableStruct,
        ngrams.ContextStruct,
        ngrams.SuccessorStruct,
    )
    sizes = [ctypes.sizeof(struct) for struct in structs]
    assert [library.few_rows_ngrams_struct_bytes(number) for number in range(len(structs))] == sizes


BUGS = {
    "shorter contexts": ("found->prob[j] += scale * s.count;", "found->prob[j] = scale * s.count;"),
    "the rarest successor goes": ("s[i].count < s[rarest].count", "s[i].count > s[rarest].count"),
    "what is left for other tokens": ("found->rest = scale * c->distinct;", "found->rest = scale;"),
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
    with pytest.raises(AssertionError):
        compare_counts()
