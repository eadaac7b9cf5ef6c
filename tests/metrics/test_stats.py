"""Counters: sums, JSON, and consistency of the metrics of real calls."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from dataclasses import fields
from functools import lru_cache
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import mmspec
from mmspec.interfaces import VisualGrid
from mmspec.metrics.compression_stats import CompressionRecord
from mmspec.metrics.stats import Stats


def filled(scale: int = 1) -> Stats:
    """A call with every field set."""
    return Stats(
        calls=scale,
        fallback_calls=0,
        fallback_reason=None,
        tokens=30 * scale,
        rounds=10 * scale,
        row_rounds=14 * scale,
        num_draft_tokens=50 * scale,
        num_accepted_tokens=14 * scale,
        accept_length_hist=Counter({1: 7 * scale, 3: 7 * scale}),
        tree_size_hist=Counter({1: 2 * scale, 8: 8 * scale}),
        prefill_s=0.5 * scale,
        draft_s=0.25 * scale,
        score_s=1.0 * scale,
        overhead_s=0.125 * scale,
        ttft_s=0.75 * scale,
        decode_s=2.0 * scale,
        total_s=3.0 * scale,
        first_tokens=2 * scale,
        row_tokens=[10 * scale, 20 * scale],
        row_forwards=[5 * scale, 9 * scale],
        num_visual_tokens=18 * scale,
        num_compressed_tokens=5 * scale,
        compressor_choices=Counter({"pool:4": scale, "stride:4": scale}),
        compression=[
            CompressionRecord("pool:4", 9 * scale, 2),
            CompressionRecord("stride:4", 9 * scale, 2, (1, 4), (VisualGrid(1, 0, 3, 3, 1),)),
        ],
    )


# --- the class --------------------------------------------------------------------------------------------------------


def test_empty_stats() -> None:
    stats = Stats()
    assert (stats.tau, stats.acceptance_rate, stats.round_s, stats.tokens_per_s) == (1.0, 0.0, 0.0, 0.0)
    assert json.loads(json.dumps(stats.as_dict()))["tau"] == 1.0
    assert str(stats).startswith("0 calls (0 decoded by transformers), 0 tokens, tau 1.00")


def test_derived_metrics() -> None:
    stats = filled()
    assert stats.tau == (30 - 2) / 14 and stats.acceptance_rate == 14 / 50
    assert stats.round_s == 0.2 and stats.tokens_per_s == 14.0


def test_adding_up_and_lists_of_the_last_call() -> None:
    total, first, second = Stats(), filled(), filled(3)
    total.add(first)
    total.add(second)
    for item in fields(Stats):
        value = getattr(total, item.name)
        if item.name in ("row_tokens", "row_forwards", "compression"):
            assert value == getattr(second, item.name)
        elif item.name != "fallback_reason":
            assert value == getattr(filled(4), item.name), item.name
    assert total.tau == first.tau
    total.row_tokens.append(9)
    total.accept_length_hist[1] += 1
    assert second == filled(3) and first == filled(), "the calls' own figures were changed"


def test_the_last_fallback_reason_is_stored() -> None:
    total = Stats()
    for reason in (None, "num_beams=2", None):
        total.add(Stats(calls=1, fallback_calls=int(reason is not None), fallback_reason=reason))
    assert total.fallback_reason == "num_beams=2" and total.fallback_calls == 1
    assert "visual" not in str(total) and "drafter read 5/18 visual tokens" in str(filled())
    assert "(1 decoded by transformers, last reason: num_beams=2)" in str(total)


def test_as_dict_has_everything_for_json() -> None:
    values = filled().as_dict()
    assert json.loads(json.dumps(values)) == values
    derived = {"tau", "acceptance_rate", "acceptance_by_depth", "round_s", "tokens_per_s"}
    assert set(values) == {item.name for item in fields(Stats)} | derived
    assert values["acceptance_by_depth"] == [0.5, 1.0], "of 14 rounds 7 emitted one token, 7 three"
    assert values["accept_length_hist"] == {"1": 7, "3": 7} and values["tree_size_hist"] == {"1": 2, "8": 8}
    assert values["compressor_choices"] == {"pool:4": 1, "stride:4": 1}
    first, second = values["compression"]
    assert first["choice"] == "pool:4" and first["kept_indices"] is None
    assert second["kept_indices"] == [1, 4] and second["grids"][0]["height"] == 3
    assert (second["num_visual_tokens"], second["num_compressed_tokens"]) == (9, 2)
    unsorted = Stats(tree_size_hist=Counter({16: 1, 8: 1, 1: 1}))
    assert list(unsorted.as_dict()["tree_size_hist"]) == ["1", "8", "16"], "sorted by size"


def test_unknown_attributes_are_an_error_and_copies_work() -> None:
    with pytest.raises(AttributeError, match="'Stats' object has no attribute 'speed'"):
        _ = Stats().speed
    assert copy.deepcopy(filled()) == filled() == pickle.loads(pickle.dumps(filled()))


# --- real calls -------------------------------------------------------------------------------------------------------


@lru_cache
def _model() -> PreTrainedModel:
    return tiny.build_model(tiny.ModelSpec("llava", calm=True, seed=3))


@pytest.fixture
def model() -> Any:
    """A plain model that tests share."""
    model = _model()
    own, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    yield model
    mmspec.unpatch(model)
    model.generation_config.eos_token_id = own


def check(stats: Stats, batch: int) -> None:
    """Assert what holds for any single call that the loop decodes."""
    assert stats.calls == 1 and not stats.fallback_calls and stats.fallback_reason is None
    assert len(stats.row_tokens) == len(stats.row_forwards) == stats.first_tokens == batch
    assert stats.tokens == sum(stats.row_tokens)
    assert stats.rounds == sum(stats.tree_size_hist.values())
    assert stats.row_rounds == sum(stats.row_forwards) == sum(stats.accept_length_hist.values())
    assert stats.rounds <= stats.row_rounds <= batch * stats.rounds
    emitted = sum(length * count for length, count in stats.accept_length_hist.items())
    assert emitted + stats.first_tokens >= stats.tokens  # what rows emitted ahead may be cut
    assert all(length >= 1 for length in stats.accept_length_hist)
    assert stats.num_accepted_tokens == emitted - stats.row_rounds
    assert (
        stats.num_accepted_tokens
        <= stats.num_draft_tokens
        <= (max(stats.tree_size_hist, default=1) - 1) * stats.row_rounds
    )
    if stats.row_rounds:
        assert stats.tau == (stats.tokens - batch) / stats.row_rounds
    times = [stats.draft_s, stats.score_s, stats.overhead_s, stats.decode_s, stats.prefill_s, stats.ttft_s]
    assert all(seconds >= 0 for seconds in times) and 0 < stats.prefill_s <= stats.ttft_s
    assert stats.draft_s + stats.score_s + stats.overhead_s <= stats.decode_s
    assert stats.ttft_s + stats.decode_s <= stats.total_s


@pytest.mark.every(2)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafter", ["none", "oracle", "bush", "wrong"])
def test_metrics_are_consistent(model: PreTrainedModel, drafter: str, batch: int, sample: bool) -> None:
    given = tiny.build_inputs(model, 5, batch)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sample}
    torch.manual_seed(0)
    plain = model.generate(**given, **options)
    liar = drafter if drafter == "none" else adversarial.DRAFTERS[drafter](1, [plain])
    mmspec.patch(model, drafter=liar, tree_size=None if drafter == "none" else 8)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**given, **options), plain)
    stats = mmspec.stats(model, last=True)
    check(stats, batch)
    assert stats.row_tokens == [24] * batch
    emitted = sum(length * count for length, count in stats.accept_length_hist.items())
    assert emitted + batch == stats.tokens, "nothing was cut"
    if drafter == "none":
        assert (
            stats.tau == 1.0
            and not stats.num_draft_tokens
            and set(stats.tree_size_hist) == set(stats.accept_length_hist) == {1}
        )
        assert stats.row_rounds == 23 * batch and stats.rounds == 23
    elif drafter == "wrong":
        assert stats.tau == 1.0 and stats.acceptance_rate == 0.0
        assert 0.7 < stats.num_draft_tokens / (7 * 23 * batch) < 1, "placeholders are not drafted"
    elif drafter == "oracle":
        # Chains of 7 make rounds of 8 + 8 + 7 tokens; where a placeholder was sampled, which is never drafted, more.
        assert min(stats.row_forwards) == 3 and stats.tau > 5
        assert sample or stats.tau == 23 / 3


@pytest.mark.parametrize("returned", [{}, {"return_dict_in_generate": True}])
def test_rows_that_finish_early(model: PreTrainedModel, returned: dict[str, Any]) -> None:
    """Padding after a row's end counts neither as a token nor as a forward of that row."""
    given = tiny.build_inputs(model, 6, 3)
    free = model.generate(**given, max_new_tokens=24, do_sample=False)[:, given["input_ids"].shape[1] :]
    model.generation_config.eos_token_id = int(free[1, 4])
    plain = model.generate(**given, max_new_tokens=24, do_sample=False)[:, given["input_ids"].shape[1] :]
    pad, ends = model.generation_config.pad_token_id, []
    for row, end in zip(plain.tolist(), (plain == model.generation_config.eos_token_id).tolist(), strict=True):
        ends.append(end.index(True) + 1 if any(end) else len(row))
        assert set(row[ends[-1] :]) <= {pad}
    assert ends[1] <= 5 < max(ends)
    for drafter, nodes in (("none", None), (adversarial.BranchingDrafter(1), 8), ("auto", 8)):
        mmspec.patch(model, drafter=drafter, tree_size=nodes)
        model.generate(**given, max_new_tokens=24, do_sample=False, **returned)
        stats = mmspec.stats(model, last=True)
        check(stats, 3)
        assert stats.row_tokens == ends
        if drafter == "none":
            assert stats.row_forwards == [end - 1 for end in ends] and stats.tau == 1.0
        mmspec.unpatch(model)


def test_tokens_that_a_criterion_cut_are_not_counted(model: PreTrainedModel) -> None:
    given = tiny.build_inputs(model, 7, 2)
    plain = model.generate(**given, max_new_tokens=24, do_sample=False)
    stop = StoppingCriteriaList(
        [adversarial.Plain(adversarial.CallLog(), given["input_ids"].shape[1], 0)]
    )  # after five columns
    mmspec.patch(model, drafter=adversarial.OracleDrafter(1, [plain]), tree_size=8)
    short = model.generate(**given, max_new_tokens=24, do_sample=False, stopping_criteria=stop)
    stats = mmspec.stats(model, last=True)
    check(stats, 2)
    assert short.shape[1] - given["input_ids"].shape[1] == 5 and stats.tokens == 10
    assert sum(length * count for length, count in stats.accept_length_hist.items()) + 2 > stats.tokens
    assert stats.tau == 4.0, "what was cut was not emitted"


def test_one_token_needs_no_round(model: PreTrainedModel) -> None:
    mmspec.patch(model)
    model.generate(**tiny.build_inputs(model, 8, 2), max_new_tokens=1, do_sample=False)
    stats = mmspec.stats(model, last=True)
    check(stats, 2)
    assert stats.tokens == 2 and stats.rounds == 0 and stats.tau == 1.0 and stats.tokens_per_s == 0.0


def test_calls_are_summed_and_fallbacks_counted(model: PreTrainedModel) -> None:
    given, other = tiny.build_inputs(model, 9, 1), tiny.build_inputs(model, 10, 2)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=4)
    assert mmspec.stats(model) == mmspec.stats(model, last=True) == Stats()
    calls = []
    for inputs in (given, other, given):
        model.generate(**inputs, **options)
        calls.append(mmspec.stats(model, last=True))
    total = mmspec.stats(model)
    assert total.calls == 3 and total.tokens == 8 + 16 + 8 and total.first_tokens == 4
    assert total.row_rounds == sum(stats.row_rounds for stats in calls)
    assert (
        total.accept_length_hist
        == calls[0].accept_length_hist + calls[1].accept_length_hist + calls[2].accept_length_hist
    )
    assert total.row_tokens == [8]
    with mmspec.disabled():
        model.generate(**given, **options)
    model.generate(**given, **options, mmspec={"enabled": False})
    assert mmspec.stats(model) == total, "calls that mmspec had no part in"
    model.generate(**given, **options, num_beams=2)
    plain = mmspec.stats(model, last=True)
    assert (
        plain.fallback_calls == 1 and plain.fallback_reason == "num_beams=2" and plain.tau == 1.0 and plain.total_s > 0
    )
    assert mmspec.stats(model).fallback_calls == 1 and mmspec.stats(model).fallback_reason == "num_beams=2"
    model.generate(**given, **options)
    assert (
        mmspec.stats(model, last=True).fallback_reason is None and mmspec.stats(model).fallback_reason == "num_beams=2"
    )


def test_returned_stats_are_a_copy(model: PreTrainedModel) -> None:
    mmspec.patch(model, drafter="none")
    model.generate(**tiny.build_inputs(model, 11, 1), max_new_tokens=4, do_sample=False)
    stats = mmspec.stats(model)
    stats.tokens, stats.accept_length_hist[1] = 99, 99
    stats.row_tokens.append(99)
    assert mmspec.stats(model).tokens == 4 and mmspec.stats(model).accept_length_hist[1] == 3
    assert mmspec.stats(model).row_tokens == [4]
