"""Recorded rounds: drafter x batch x request x way x model give the text of plain `generate`, and the drafts of eager
rounds; planted bugs; random calls. What recordings cost, and when there are none: `test_recordings.py`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import fuzz
import pytest
import tiny_models as tiny
import torch
from forced_drafts import planned
from fuzz import patch_model
from recorded_rounds import (
    KINDS,
    CountingRecorder,
    build_drafter,
    build_inputs,
    build_model,
    drafts_only,
    generate,
    in_parts,
    recording,
    whole_only,
    without_compiled_code,
)
from recorders import record_nothing, record_trace
from torch import Tensor

import mmspec
from mmspec.drafters.heads.base.recorded import DraftFunction, RecordedDraft
from mmspec.drafters.heads.base.state import DraftState
from mmspec.economy.chooser import Chooser
from mmspec.engine import round as engine_round
from mmspec.engine.kv_cache import RecordedKVCache
from mmspec.engine.output import OutputBuffer
from mmspec.engine.recorded import RecordedRounds
from mmspec.engine.tree import DraftTree
from mmspec.targets import lanes
from mmspec.targets.hf import HFTarget

PENALTY = (("repetition_penalty", 1.5),)
_ = pytest.fixture(autouse=True)(without_compiled_code)


@dataclass(frozen=True)
class Row:
    """Calls of a model, of which the later ones replay what the first has recorded.

    Attributes:
        drafter: "none", "lookup", or the kind of a head that is often right.
        batch: rows of each prompt, of different lengths.
        sampled: whether tokens are sampled.
        way: "whole" rounds are recorded, drafts included, or "parts" of them.
        traced: without the Python that ran (a second for each recording), or as it is.
        options: of `generate`.
        family: of the model.
        recorded: whether anything is.
    """

    drafter: str
    batch: int = 1
    sampled: bool = False
    way: str = "whole"
    traced: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    family: str = "llava"
    recorded: bool = True

    @property
    def is_head(self) -> bool:
        """Whether a head drafts."""
        return self.drafter not in ("none", "lookup")

    def __str__(self) -> str:
        values = (self.drafter, self.batch, self.sampled, self.way, self.traced, self.family, *dict(self.options))
        return "-".join(str(value).lower() for value in values)


@cache
def plain_calls(family: str, batch: int, sampled: bool, options: tuple[tuple[str, Any], ...]) -> list[Any]:
    """(prompt, its ids by plain `generate`) of two prompts."""
    model = build_model(tiny.ModelSpec(family))
    prompts = [build_inputs(model, seed, batch) for seed in range(2)]
    return [(one, generate(model, one, sampled, max_new_tokens=24, **dict(options))) for one in prompts]


def run_calls(row: Row) -> list[int]:
    """Compare calls with plain `generate`. Returns accepted tokens, rounds and drafted tokens."""
    spec = tiny.ModelSpec(row.family)
    model, options = build_model(spec), dict(row.options)
    drafter = build_drafter(f"leaning-{row.drafter}" if row.is_head else row.drafter, spec)
    with patch_model(model, drafter, tree_size=8, backend="auto" if row.recorded else "torch"):
        for inputs, expected in plain_calls(row.family, row.batch, row.sampled, row.options):
            assert torch.equal(generate(model, inputs, row.sampled, max_new_tokens=24, **options), expected)
        stats = mmspec.stats(model)
    assert not stats.fallback_calls
    return [stats.num_accepted_tokens, stats.rounds, stats.num_draft_tokens]


@cache
def eager_counts(row: Row) -> list[int]:
    """`run_calls` without recordings."""
    return run_calls(row)


def check_row(row: Row) -> CountingRecorder:
    """A value that became a constant would be wrong in the other prompts, and a wrong draft be accepted less."""
    expected = eager_counts(replace(row, way="", traced=False, recorded=False))
    is_whole = row.way == "whole"
    traced = whole_only(record_trace) if row.is_head and is_whole else drafts_only(record_trace)
    recorder = (traced if row.is_head else record_trace) if row.traced else record_nothing
    with recording(recorder) as counting, nullcontext() if is_whole else in_parts():
        found = run_calls(row)
    assert found == expected and (found[0] > 0 or row.drafter in ("none", "lookup", "falcon"))
    return counting


def check_counts(row: Row, counting: CountingRecorder) -> None:
    """Of each function there is one recording, which is replayed from then on."""
    if row.is_head and row.way == "whole":
        assert counting.whole_recordings == 1 and counting.whole_replays > 10 and not counting.draft_recordings
    elif row.is_head:
        assert counting.recordings == counting.draft_recordings == 1 and counting.draft_replays > 10
    else:
        assert counting.recordings + counting.whole_recordings == 1
        assert counting.replays + counting.whole_replays > 10


ROWS = [
    *(Row("none", way=way, traced=True) for way in ("whole", "parts")),
    Row("lookup", 3, True, traced=True, options=PENALTY),
    Row("decoupled", 3, True, traced=True, options=PENALTY),
    *(Row("chained", 3, traced=True), Row("dspark:1", 1, True, traced=True)),
    *(Row("coupled", 3, True, "parts", traced=True), Row("falcon", 3, True, "parts", traced=True)),
    Row("decoupled", way="parts", traced=True),
    *(Row(kind, 3, True) for kind in ("eagle3", "vispec", "linked", "falcon")),
    *(Row(kind, 3, False, "parts") for kind in ("trimmed", "flash", "parallel")),
    *(Row("dspark", 3, True, "parts"), Row("dspark:2", 3)),
    Row("chained", 2, True, options=(("temperature", 0.8),)),
    Row("chained", 2, True, options=(("top_p", 0.9), ("top_k", 0))),
    Row("chained", 2, True, options=(("min_p", 0.1), ("top_k", 5))),
    Row("chained", 2, True, options=(("repetition_penalty", 1.3), ("temperature", 0.8))),
]
"""Each drafter, way and option once; all pairs are slow tests."""
ALL_ROWS = [
    Row(kind, batch, sampled, way, traced=True, options=PENALTY)
    for kind, batch, sampled, way in itertools.product((*KINDS, "lookup"), (1, 3), (False, True), ("whole", "parts"))
]
FAMILIES = ("qwen2_5_vl", "gemma3", "internvl", "paligemma", "mistral3", "smolvlm", "qwen3")
UNUSUAL = ("gemma4", "deepseek_v3", "lfm2", "qwen3_moe", "gpt_oss")
MODELS = [
    *(Row("coupled", 2, family=family, way="parts") for family in FAMILIES),
    *(Row("lookup", 1, family=family, traced=family == "gemma4") for family in UNUSUAL),
]
"""Several position axes, token types, windows; layers of several shapes or with a state, keys and values of different
size, experts chosen by value."""


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in ALL_ROWS)], ids=str)
def test_a_row(row: Row) -> None:
    check_counts(row, check_row(row))


@pytest.mark.every(2)
@pytest.mark.parametrize("row", MODELS, ids=str)
def test_a_row_of_another_model(row: Row) -> None:
    counting = check_row(row)
    assert counting.replays + counting.whole_replays > 5


# --- the same drafts --------------------------------------------------------------------------------------------------


def compare_drafts(kind: str, sampled: bool) -> None:
    """Compare every recorded draft of two calls, of three rows of different lengths, with the same unrecorded.

    In double precision, where two nodes have equal scores only if they are the same: sums of a recorded draft are taken
    in another order, and on some processors a near-tie of single precision falls otherwise.
    """
    model, drafter = build_model().double(), build_drafter(f"leaning-{kind}")
    drafter.head.double()
    found = 0
    differences: list[AssertionError] = []  # a drafter that raises is dropped, and the call goes on
    tree = RecordedDraft.tree

    def compare(self: RecordedDraft, state: DraftState, *args: int) -> DraftTree | None:
        nonlocal found
        before = copy.copy(state)
        before.kv_cache = copy.deepcopy(state.kv_cache)
        recorded = tree(self, state, *args)
        drafter.read_pending(before)
        plain = drafter.draft_tree(before, *args)
        try:
            assert recorded is not None and plain.scores is not None
            assert torch.equal(recorded.tokens, plain.tokens) and torch.equal(recorded.parents, plain.parents)
            torch.testing.assert_close(recorded.scores, plain.scores, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(state.last_hidden, before.last_hidden, rtol=1e-11, atol=1e-12)
            assert state.next_positions == before.next_positions and state.kv_cache.seq_lens == before.kv_cache.seq_lens
        except AssertionError as error:
            differences.append(error)
        found += 1
        return recorded

    with (
        recording(record_nothing),
        in_parts(),
        patch_model(model, drafter),
        mock.patch.object(RecordedDraft, "tree", compare),
        mock.patch.object(Chooser, "plan", planned()),  # whatever it costs
    ):
        for seed in range(2):
            generate(model, build_inputs(model, seed, 3), sampled, max_new_tokens=16)
    assert found > 5
    if differences:
        raise differences[0]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_unrecorded_ones(kind: str) -> None:
    compare_drafts(kind, sampled=KINDS.index(kind) % 2 == 0)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def _other_column(original: Any) -> Any:
    return lambda tensors, slots: original(tensors, slots.roll(1, 1))


def _stale_length(original: Any) -> Any:
    """Commits behind the shortest row, as if all rows had one length."""
    return lambda groups, lengths, *args: original(groups, lengths.clamp(max=int(lengths.min())), *args)


def _constant_length(original: Any) -> Any:
    """Attends to as many positions as there were in the first round."""
    first: list[list[int]] = []

    def faulty(self: HFTarget, *args: Any) -> Any:
        part = original(self, *args)
        first.append(part.lengths)
        return replace(part, lengths=first[0])

    return faulty


def _no_limit(original: Any) -> Any:
    return lambda self, num_nodes: [num_nodes for _ in original(self, num_nodes)]


def _no_ignored_pads(original: Any) -> Any:
    def faulty(self: RecordedRounds, *args: Any) -> None:
        original(self, *args)
        self._ignored = [0] * len(self._ignored)

    return faulty


def _other_row(original: Any) -> Any:
    def faulty(tree: Any, sampled_ids: Tensor, *args: Any) -> Any:
        path, counts, tokens = original(tree, sampled_ids, *args)
        return path.roll(1, 0), counts, tokens

    return faulty


def _stale_draft_lengths(original: Any) -> Any:
    def faulty(self: RecordedKVCache, layers: Any, lengths: Tensor, *args: Any) -> None:
        original(self, layers, lengths, *args)
        self._lengths = lengths.clamp(max=int(lengths.min()))  # a number of the host, here of the shortest row

    return faulty


def _noise_of_the_next_token(original: Any) -> Any:
    return lambda self, named, lengths, noise: original(
        self, named, lengths, None if noise is None else noise.roll(1, 1)
    )


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "noise of another column": (engine_round, "read_noise", _other_column),
    "commit behind the shortest row": (lanes, "commit_nodes", _stale_length),
    "lengths of the first round": (HFTarget, "score_part", _constant_length),
    "limits of rows ignored": (OutputBuffer, "max_emit", _no_limit),
    "penalty of the prompt's pads": (RecordedRounds, "__init__", _no_ignored_pads),
    "path of another row": (engine_round, "accept_path", _other_row),
    "draft: lengths of the shortest row": (RecordedKVCache, "__init__", _stale_draft_lengths),
    "draft: noise of the next token": (DraftFunction, "_state", _noise_of_the_next_token),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    """Recordings and plain runs have the same bug: the texts, or the drafts, show it."""
    owner, attribute, bug = BUGS[name]
    row = Row("decoupled", 3, True, options=PENALTY if name.startswith("penalty") else ())
    eager_counts(replace(row, way="", recorded=False))
    faulty = mock.patch.object(owner, attribute, bug(getattr(owner, attribute)))
    with faulty, pytest.raises((AssertionError, IndexError)):
        compare_drafts("decoupled", sampled=True) if name.startswith("draft") else check_row(row)


# --- random calls -----------------------------------------------------------------------------------------------------

FUSABLE_OPTIONS = {"repetition_penalty", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_return_sequences"}
"""Options of a random call that leave its rounds whole."""


def whole_case(seed: int) -> fuzz.Case:
    """A random call whose rounds are whole, user code at every step included."""
    case = fuzz.draw_case(seed)
    options = {name: value for name, value in case.options.items() if name in FUSABLE_OPTIONS}
    unusual = dict.fromkeys(("cache", "processor", "prefix", "turns", "override"), "")
    case = replace(case, drafter=f"head-{KINDS[seed % len(KINDS)].partition(':')[0]}", nodes=8, biased=(), **unusual)
    return replace(case, options=options | {"max_new_tokens": 16}, spec=replace(case.spec, window=0))


def part_case(seed: int) -> fuzz.Case:
    """A random call: compressed prompts, padding, processors, stopping rules, user code."""
    case = fuzz.draw_case(seed)
    return replace(case, drafter=f"head-{KINDS[seed % 11]}", nodes=case.nodes or 8, override="")


@pytest.mark.parametrize(
    ("make", "first", "count"),
    [
        *((whole_case, 60_000, 8), (part_case, 7_000, 11), (fuzz.draw_case, 0, 8)),
        pytest.param(fuzz.draw_case, 8, 32, marks=pytest.mark.slow),
    ],
)
def test_random_calls(make: Callable[[int], fuzz.Case], first: int, count: int) -> None:
    num_replays = 0
    for seed in range(first, first + count):
        with (
            recording(record_nothing) as counting,
            in_parts() if make is part_case else nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            result = fuzz.run_case(make(seed))
        assert not result.differences, result.report()
        num_replays += counting.replays + counting.draft_replays + counting.whole_replays
    assert num_replays > 30
