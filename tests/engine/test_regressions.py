"""Typical failures of speculative decode loops, one test each, compared with the plain model.

Random cases cover many of them too (`test_exactness.py`); here each one is certain to occur.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import numpy as np
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from parity import (
    ALL_OUTPUTS,
    FAMILIES,
    GREEDY,
    MODES,
    SAMPLED,
    Kwargs,
    assert_parity,
    build_cached_model,
    build_outcome,
    count_vision_calls,
    generate_plain,
    generate_tokens,
    get_model,
    speculate,
)
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    DynamicCache,
    GenerationConfig,
    LlavaProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import mmspec
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.hf import HFTarget

# --- stops inside a path ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_stop_token_in_mid_path(mode: Kwargs, step: int) -> None:
    model = get_model(seed=3)
    inputs = tiny.build_inputs(model, 1, 2)
    eos = generate_tokens(model, inputs, **mode)[0][step]
    stats = assert_parity(model, inputs, eos_token_id=[eos], **mode, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0


@MODES
def test_stop_string_across_a_path(mode: Kwargs) -> None:
    spec = tiny.ModelSpec(seed=3)
    model, spelled = get_model(seed=3), tiny.token_texts(spec)
    inputs = tiny.build_inputs(model, 1, 2)
    text = [spelled[token] for token in generate_tokens(model, inputs, **mode)[0]]
    for i in range(2, 8):
        stop = text[i][-1] + text[i + 1][:1] + (text[i + 1] + text[i + 2])[1:3]  # begins in one token, ends in another
        for where in ({"stop_strings": [stop]}, {"generation_config": GenerationConfig(stop_strings=stop, **mode)}):
            rest = {} if "generation_config" in where else mode
            stats = assert_parity(
                model,
                inputs,
                tokenizer=tiny.build_tokenizer(spec),
                **where,
                **rest,
                **({} if not rest else ALL_OUTPUTS),
            )
            assert stats.num_accepted_tokens > 0


def test_stop_string_of_the_models_own_config() -> None:
    model = get_model(seed=3)
    inputs = tiny.build_inputs(model, 1, 1)
    tokens = generate_tokens(model, inputs, **GREEDY)[0]
    spelled = tiny.token_texts(tiny.ModelSpec())
    with fuzz.override_generation_config(model, None, {"stop_strings": [spelled[tokens[4]] + spelled[tokens[5]]]}):
        assert_parity(model, inputs, tokenizer=tiny.build_tokenizer(tiny.ModelSpec()), **GREEDY)


@MODES
@pytest.mark.parametrize("length", range(1, 10))
def test_max_new_tokens_in_mid_path(mode: Kwargs, length: int) -> None:
    model = get_model("llava_next", seed=4)
    inputs = tiny.build_inputs(model, 2, 2)
    assert_parity(model, inputs, eos_token_id=None, **{**mode, "max_new_tokens": length}, **ALL_OUTPUTS)


@MODES
def test_min_new_tokens(mode: Kwargs) -> None:
    model = get_model(seed=3)
    inputs = tiny.build_inputs(model, 1, 2)
    tokens = generate_tokens(model, inputs, **mode)[0]
    for least in (3, 5, 9):
        assert_parity(model, inputs, eos_token_id=[tokens[2], tokens[4]], min_new_tokens=least, **mode, **ALL_OUTPUTS)
        assert_parity(
            model, inputs, "bush", eos_token_id=[tokens[2], tokens[4]], min_new_tokens=least, **mode, **ALL_OUTPUTS
        )


# --- how much is accepted ---------------------------------------------------------------------------------------------


@MODES
@FAMILIES
def test_nothing_accepted(mode: Kwargs, family: str) -> None:
    model = get_model(family, seed=5)
    stats = assert_parity(model, tiny.build_inputs(model, 3, 3), "wrong", eos_token_id=None, **mode)
    assert stats.num_accepted_tokens == 0 and stats.num_draft_tokens > 0 and stats.tau == 1


@MODES
def test_an_empty_tree_is_plain_decoding(mode: Kwargs) -> None:
    model = get_model("llava_onevision", seed=5)
    stats = assert_parity(model, tiny.build_inputs(model, 3, 2), "empty", eos_token_id=None, **mode, **ALL_OUTPUTS)
    assert stats.rounds == mode["max_new_tokens"] - 1 and stats.tau == 1


@MODES
@FAMILIES
def test_everything_accepted(mode: Kwargs, family: str) -> None:
    """The last emitted token is not in the cache: a drafter with its own cache must handle that."""
    model = get_model(family, seed=6)
    inputs = tiny.build_inputs(model, 4, 2)
    mode = {**mode, "eos_token_id": None, "suppress_tokens": [0, 3, 4]}  # pads and placeholders are not drafted
    plain = generate_plain(model, inputs, **mode)
    with speculate(model, Full(1, [plain])) as drafter:
        mine = generate_plain(model, inputs, **mode)
        stats = mmspec.stats(model, last=True)
    assert torch.equal(plain, mine)
    assert stats.rounds == 3 and stats.tau > 6 and not drafter.faults, (stats, drafter.faults)


class Full(adversarial.HiddenStateDrafter):
    """The checks of `HiddenStateDrafter`, and the longest correct chain."""

    propose_tree = adversarial.OracleDrafter.propose_tree


# --- who is in the batch ----------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@MODES
@FAMILIES
@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_padded_batches(mode: Kwargs, family: str, padding: str) -> None:
    model = get_model(family, seed=7)
    for mask in (True, False):
        inputs = tiny.build_inputs(model, 5, 3, padding=padding, mask=mask)
        stats = assert_parity(model, inputs, "bush", **mode, **ALL_OUTPUTS)
        assert stats.num_accepted_tokens > 0


@MODES
@pytest.mark.parametrize("returned", [{}, ALL_OUTPUTS], ids=["ids", "dict"])
def test_rows_that_finish_early_with_eos(mode: Kwargs, returned: Kwargs) -> None:
    model = get_model("qwen2_5_vl", seed=8)
    inputs = tiny.build_inputs(model, 6, 4)
    rows = generate_tokens(model, inputs, **mode)
    assert_parity(model, inputs, "bush", eos_token_id=[rows[0][2], rows[1][7], rows[2][11]], **mode, **returned)
    assert_parity(model, inputs, "oracle", eos_token_id=[rows[0][2], rows[1][7], rows[2][11]], **mode, **returned)


@MODES
@pytest.mark.parametrize("returned", [{}, ALL_OUTPUTS], ids=["ids", "dict"])
def test_rows_that_finish_early_without_eos(mode: Kwargs, returned: Kwargs) -> None:
    """Without an eos criterion a stopped row emits until the whole batch stops."""
    model = get_model("llava_next", seed=8)
    inputs = tiny.build_inputs(model, 6, 3)
    length = inputs["input_ids"].shape[1]
    make = lambda: StoppingCriteriaList([adversarial.Lengths(adversarial.CallLog(), length, 5)])  # noqa: E731
    with fuzz.override_generation_config(model, None):
        assert_parity(model, inputs, "bush", stopping_criteria=make, **mode, **returned)
        assert_parity(model, inputs, "oracle", stopping_criteria=make, **mode, **returned)


class Favouring(adversarial.OracleDrafter):
    """Correct for row 0, no draft for the others."""

    def upcoming_tokens(self, state: adversarial.DrafterState, row: int, count: int) -> list[int]:
        return super().upcoming_tokens(state, row, count) if row == 0 else []


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("returned", [{}, ALL_OUTPUTS], ids=["ids", "dict"])
def test_a_row_far_ahead_waits(mode: Kwargs, returned: Kwargs) -> None:
    """One row is always accepted, the other never: more steps in flight than the noise window."""
    model = get_model("llava_next", seed=30)
    inputs = tiny.build_inputs(model, 28, 2, num_text_tokens=(3, 5))
    mode = {**mode, "max_new_tokens": 300, "suppress_tokens": [0, 3], "eos_token_id": None}
    stats = assert_parity(
        model, inputs, lambda plain: Favouring(1, [plain]), patch_options={"tree_size": 64}, **mode, **returned
    )
    assert stats.num_accepted_tokens > (100 if mode["do_sample"] else 250) and stats.rounds < 320


@MODES
@pytest.mark.parametrize("pad", ["eos", "none", "generated"])
def test_pad_tokens_of_all_kinds(mode: Kwargs, pad: str) -> None:
    """Padding may be the eos token, unset, or a token that the model generates."""
    model = get_model("llava_onevision", seed=8)
    inputs = tiny.build_inputs(model, 6, 4, padding="none")
    rows = generate_tokens(model, inputs, **mode)
    eos = [rows[0][2], rows[1][7]]
    own = {"eos": eos[0], "none": None, "generated": rows[2][4]}[pad]
    with fuzz.override_generation_config(model, eos, {"pad_token_id": own}):
        for drafter in ("bush", "oracle"):
            assert_parity(model, inputs, drafter, **mode)
            assert_parity(model, inputs, drafter, **mode, **ALL_OUTPUTS)


def test_all_rows_finish_at_the_first_step() -> None:
    model = get_model(seed=3)
    inputs = tiny.build_inputs(model, 1, 2)
    eos = [row[0] for row in generate_tokens(model, inputs, **GREEDY)]
    assert_parity(model, inputs, eos_token_id=eos, **GREEDY, **ALL_OUTPUTS)


# --- malformed drafts -------------------------------------------------------------------------------------------------


class Twins(adversarial.AdversarialDrafter):
    """Every node several times, with the correct continuation below a different duplicate each time."""

    def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        rows = []
        for row in range(len(active)):
            path = self.upcoming_tokens(state, row, 3)
            twins = [(path[0], 0), (path[0], 0), (path[0], 0)] if path else []
            below = [(path[1], 1 + i % 3) for i in range(3)] if len(path) > 1 else []
            rows.append(twins + below + ([(path[2], 5), (path[2], 6)] if len(path) > 2 else []))
        return adversarial.build_raw_tree(rows)


@MODES
def test_duplicate_children(mode: Kwargs) -> None:
    model = get_model(seed=9)
    inputs = tiny.build_inputs(model, 7, 2)
    stats = assert_parity(model, inputs, lambda plain: Twins(0, [plain]), eos_token_id=2, **mode, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0


@pytest.mark.every(2)
@MODES
@FAMILIES
@pytest.mark.parametrize("nodes", [None, 3, 64])
def test_malformed_trees(mode: Kwargs, family: str, nodes: int | None) -> None:
    model = get_model(family, seed=10)
    for seed in range(3):
        inputs = tiny.build_inputs(model, seed, 1 + seed)
        assert_parity(
            model,
            inputs,
            lambda plain, seed=seed: adversarial.MalformedDrafter(seed, [plain]),
            patch_options={"tree_size": nodes},
            **mode,
            **ALL_OUTPUTS,
        )


class Placeholders(adversarial.AdversarialDrafter):
    """Only ids that must never be drafted."""

    def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        banned = sorted(state.prompt.banned_ids)
        row = [(token, i) for token in banned for i in (0, 1)][: max_nodes - 1]
        return adversarial.build_raw_tree([row] * len(active))


@FAMILIES
def test_placeholder_ids_are_never_drafted(family: str) -> None:
    """Not even if the model generates them, as random models do."""
    spec = tiny.ModelSpec(family, seed=11)
    model, special = build_cached_model(spec), tiny.special_ids(spec)
    inputs = tiny.build_inputs(model, 8, 2)
    loud = [[[special.image], 7.0], [[special.pad], 5.0]]
    plain = generate_plain(model, inputs, sequence_bias=loud, **GREEDY)
    assert (plain[:, inputs["input_ids"].shape[1] :] == special.image).any()
    assert (
        assert_parity(model, inputs, Placeholders(), sequence_bias=loud, **GREEDY, **ALL_OUTPUTS).num_accepted_tokens
        == 0
    )
    assert_parity(model, inputs, "oracle", sequence_bias=loud, **GREEDY, **ALL_OUTPUTS)


def test_ids_beyond_the_tokenizer_are_banned() -> None:
    """Ids beyond the tokenizer are banned if `processor=` provides one."""
    spec = tiny.ModelSpec(seed=9, vocab=100)
    model, small = build_cached_model(spec), tiny.build_tokenizer(tiny.ModelSpec(vocab=90))
    inputs = tiny.build_inputs(model, 7, 1, num_distinct_ids=20)
    plain = generate_plain(model, inputs, **GREEDY)
    with speculate(model, "tapper", plain, processor=small) as drafter:
        mine = generate_plain(model, inputs, **GREEDY)
    assert torch.equal(plain, mine)
    assert set(range(90, 100)) <= drafter.prompts[0].banned_ids


# --- what the model is fed --------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_position_ids_of_four_axes(mode: Kwargs, padding: str) -> None:
    """M-RoPE: text positions and three visual axes, which differ after an image. Positions are not lengths."""
    model = get_model("qwen2_5_vl", seed=12)
    inputs = tiny.build_inputs(model, 9, 3, images=[2, 1, 0], videos=[0, 1, 1], padding=padding)
    stats = assert_parity(model, inputs, "bush", **mode, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0
    assert model.model.rope_deltas.unique().numel() > 1


@MODES
def test_an_attention_mask_that_hf_replaced_by_none(mode: Kwargs) -> None:
    model = get_model("llava_next", seed=13)
    inputs = tiny.build_inputs(model, 10, 2, padding="none")
    assert bool(inputs["attention_mask"].all())
    assert assert_parity(model, inputs, "bush", **mode, **ALL_OUTPUTS).num_accepted_tokens > 0
    del inputs["attention_mask"]
    assert assert_parity(model, inputs, "bush", **mode, **ALL_OUTPUTS).num_accepted_tokens > 0


@MODES
@FAMILIES
def test_eager_attention_adds_its_mask(mode: Kwargs, family: str) -> None:
    """A bool mask would be added as 0 and 1, silently."""
    model = get_model(family, seed=14, attention="eager")
    stats = assert_parity(model, tiny.build_inputs(model, 11, 3), "bush", **mode, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0


WINDOWS = {
    "mistral": {"family": "llava_next", "window": 16},
    "qwen2, mixed": {"family": "llava_onevision", "window": 12, "mixed": True},
    "qwen2, eager": {"family": "llava_onevision", "window": 12, "attention": "eager"},
    "m-rope, mixed": {"family": "qwen2_5_vl", "window": 12, "mixed": True, "layers": 3},
}


@MODES
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_sliding_windows(mode: Kwargs, name: str, padding: str) -> None:
    model = get_model(**{"seed": 15, **WINDOWS[name]})
    inputs = tiny.build_inputs(model, 12, 2, padding=padding)
    stats = assert_parity(model, inputs, "bush", **{**mode, "max_new_tokens": 40}, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0


def test_windows_of_a_short_prompt_fill_up_while_decoding() -> None:
    model = get_model("llava_next", seed=15, window=30)
    inputs = tiny.build_inputs(model, 12, 2, images=[0, 0])
    assert inputs["input_ids"].shape[1] < 20
    assert_parity(model, inputs, "bush", **{**GREEDY, "max_new_tokens": 60}, eos_token_id=None, **ALL_OUTPUTS)


@FAMILIES
def test_the_vision_tower_runs_once_per_call(family: str) -> None:
    model = get_model(family, seed=16)
    inputs = tiny.build_inputs(model, 13, 2, images=[1, 1])
    with count_vision_calls(model) as calls, speculate(model):
        generate_plain(model, inputs, **GREEDY)
    assert len(calls) == 1


# --- exceptions -------------------------------------------------------------------------------------------------------


@contextmanager
def failing_forward(model: PreTrainedModel, name: str, at: int) -> Iterator[None]:
    """The `at`-th prefill or score raises in the loop, after the layers have written their keys and values."""
    calls: list[int] = []
    forward = getattr(HFTarget, name)

    def fail(target: HFTarget, *args: Any) -> Any:
        result = forward(target, *args)
        if target.model is model:
            calls.append(1)
            if len(calls) == at:
                raise adversarial.InjectedError("the forward failed")
        return result

    with pytest.MonkeyPatch.context() as broken:  # not a hook, which would cause a fallback
        broken.setattr(HFTarget, name, fail)
        yield


@pytest.mark.every(3)
@MODES
@FAMILIES
@pytest.mark.parametrize("where", ["forward", "prefill", "processor", "criterion", "streamer"])
def test_an_exception_leaves_the_next_call_clean(mode: Kwargs, family: str, where: str) -> None:
    model = get_model(family, seed=17)
    inputs = tiny.build_inputs(model, 14, 2)
    plain = generate_plain(model, inputs, **mode, **ALL_OUTPUTS)
    more: Kwargs = {
        "processor": {"logits_processor": LogitsProcessorList([adversarial.Failing(adversarial.CallLog())])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([adversarial.Tripping(adversarial.CallLog(), 0, 0)])},
        "streamer": {"streamer": adversarial.FailingStreamer(adversarial.CallLog())},
    }.get(where, {})
    with speculate(model, "bush", plain):
        with (
            pytest.raises(adversarial.InjectedError),
            failing_forward(
                model, "prefill" if where == "prefill" else "score", {"forward": 2, "prefill": 1}.get(where, 0)
            ),
        ):
            model.generate(**inputs, **mode, **more)
        mine = generate_plain(model, inputs, **mode, **ALL_OUTPUTS)
    assert not fuzz.compare_outcomes(*[build_outcome(result, torch.zeros(1)) for result in (plain, mine)], turn=0)


# --- processors and criteria ------------------------------------------------------------------------------------------


@MODES
def test_repetition_penalty_and_no_repeat_ngram_inside_a_tree(mode: Kwargs) -> None:
    model = get_model("llava_onevision", seed=18, calm=True)
    inputs = tiny.build_inputs(model, 15, 3, num_distinct_ids=4)
    for rules in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    ):
        stats = assert_parity(model, inputs, "bush", patch_options={"tree_size": 16}, **rules, **mode, **ALL_OUTPUTS)
        assert stats.num_accepted_tokens > 0


@MODES
@pytest.mark.parametrize("name", [name for name in adversarial.PROCESSORS if name != "failing"])
def test_a_processor_that_counts_its_calls(mode: Kwargs, name: str) -> None:
    model = get_model(seed=19)
    inputs = tiny.build_inputs(model, 16, 2)
    logs: list[adversarial.CallLog] = []

    def make() -> LogitsProcessorList:
        logs.append(adversarial.CallLog())
        return LogitsProcessorList([adversarial.PROCESSORS[name](logs[-1])])

    assert_parity(model, inputs, "bush", logits_processor=make, **mode, **ALL_OUTPUTS)
    assert logs[0].calls and logs[0].calls == logs[1].calls


@pytest.mark.every(3)
@MODES
@pytest.mark.parametrize("name", [name for name in adversarial.CRITERIA if name != "tripping"])
@pytest.mark.parametrize("eos", [True, False])
def test_a_criterion_that_looks_at_other_rows(mode: Kwargs, name: str, eos: bool) -> None:
    model = get_model("llava_next", seed=20)
    inputs = tiny.build_inputs(model, 17, 3)
    tokens = generate_tokens(model, inputs, **mode)[1][6]
    logs: list[adversarial.CallLog] = []

    def make() -> StoppingCriteriaList:
        logs.append(adversarial.CallLog())
        return StoppingCriteriaList([adversarial.CRITERIA[name](logs[-1], inputs["input_ids"].shape[1], 3)])

    with fuzz.override_generation_config(model, [tokens] if eos else None):
        assert_parity(model, inputs, "oracle", stopping_criteria=make, **mode, **ALL_OUTPUTS)
        assert_parity(model, inputs, "bush", stopping_criteria=make, **mode)
    assert logs[0].calls and logs[0].calls == logs[1].calls and logs[2].calls == logs[3].calls


@MODES
def test_a_prefix_function_gets_its_own_row(mode: Kwargs) -> None:
    model = get_model(seed=21)
    inputs = tiny.build_inputs(model, 18, 3)
    make = lambda: adversarial.PrefixConstraint(adversarial.CallLog(), 120, True)  # noqa: E731
    assert_parity(model, inputs, "bush", prefix_allowed_tokens_fn=lambda: make(), **mode, **ALL_OUTPUTS)


# --- sampling ---------------------------------------------------------------------------------------------------------


@FAMILIES
def test_num_return_sequences(family: str) -> None:
    model = get_model(family, seed=22)
    inputs = tiny.build_inputs(model, 19, 2)
    stats = assert_parity(model, inputs, "bush", num_return_sequences=3, **SAMPLED, **ALL_OUTPUTS)
    assert stats.num_accepted_tokens > 0
    with speculate(model, "tapper") as drafter:
        generate_plain(model, inputs, num_return_sequences=3, **SAMPLED)
    assert drafter.prompts[0].input_ids.shape[0] == 6
    for fault in fuzz._prompt_faults(_Staged(model), drafter.prompts[0], fuzz.CallOutcome()):
        raise AssertionError(fault)


class _Staged:
    """The fields of `fuzz.PreparedCase` that `_prompt_faults` reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.case = replace(fuzz.draw_case(0), spec=model.tiny_spec, pad="")
        self.eos_token_ids: list[int] = []


@FAMILIES
def test_prompt_fields_match_the_inputs(family: str) -> None:
    """Grids, visual mask, attention mask and banned ids, for several images per row and for videos."""
    model = get_model(family, seed=22)
    for seed in range(4):
        clips = [1, 0, 1] if family in ("llava_onevision", "qwen2_5_vl") and seed % 2 else None
        inputs = tiny.build_inputs(model, seed, 3, images=[2, 1, 0], videos=clips, padding=("left", "right")[seed // 2])
        with speculate(model, "tapper") as drafter:
            generate_plain(model, inputs, **GREEDY)
        prompt = drafter.prompts[0]
        assert list(fuzz._prompt_faults(_Staged(model), prompt, fuzz.CallOutcome())) == []
        assert torch.equal(prompt.attention_mask, inputs["attention_mask"].bool())
        if _pictures_apart(inputs, tiny.special_ids(model.tiny_spec), 3 + sum(clips or ())):
            assert prompt.grids and {grid.media_index for grid in prompt.grids} == set(range(3 + sum(clips or ())))


def _pictures_apart(inputs: tiny.Inputs, special: tiny.SpecialIds, pictures: int) -> bool:
    """Whether text stands between all pictures; adjacent ones may have no grids."""
    visual = torch.isin(inputs["input_ids"], torch.tensor([special.image, special.video]))
    begins = visual & ~torch.nn.functional.pad(visual, (1, 0))[:, :-1]
    return int(begins.sum()) == pictures


def test_seeding_before_patch() -> None:
    """Neither `patch` nor a drafter may draw from torch's generator."""
    model = get_model(seed=23)
    inputs = tiny.build_inputs(model, 20, 2)
    plain = generate_plain(model, inputs, 5, **SAMPLED)
    for drafter in ("none", "lookup", "recycling", "hybrid", "auto"):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        with fuzz.patch_model(model, drafter, tree_size=8):
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(model.generate(**inputs, **SAMPLED), plain), drafter


def test_prompt_noise_is_the_noise_of_the_next_steps() -> None:
    model = get_model(seed=23)
    inputs = tiny.build_inputs(model, 20, 2)
    plain = generate_plain(model, inputs, 77, **SAMPLED)
    observed: list[tuple[int, int, Tensor]] = []

    class Asking(adversarial.OracleDrafter):
        def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
            assert state.prompt.noise is not None
            noise = state.prompt.noise(3)
            ahead = [
                (b, len(state.generated[b]) + d, noise[b, d].clone()) for b in range(2) for d in range(3) if active[b]
            ]
            observed.extend(entry for entry in ahead if entry[1] < 20)
            return super().propose_tree(state, max_nodes, active)

    with speculate(model, Asking(1, [plain])):
        assert torch.equal(generate_plain(model, inputs, 77, **SAMPLED), plain)
    torch.manual_seed(77)
    drawn = [torch.empty(2, 120).exponential_(1) for _ in range(20)]
    assert observed
    wrong = [(b, c) for b, c, noise in observed if not torch.equal(noise, drawn[c][b])]
    assert not wrong, "not the noise that transformers draws"


def test_a_second_call_on_the_same_model() -> None:
    model = get_model("llava_next", seed=24)
    first, second = tiny.build_inputs(model, 21, 3), tiny.build_inputs(model, 22, 1)
    runs = [(first, SAMPLED), (first, SAMPLED), (second, GREEDY), (first, GREEDY), (second, SAMPLED)]
    torch.manual_seed(1)
    plain = [model.generate(**inputs, **mode) for inputs, mode in runs]
    for drafter in ("recycling", "auto", adversarial.MalformedDrafter(3, plain)):
        with fuzz.patch_model(model, drafter, tree_size=8):
            torch.manual_seed(1)
            for (inputs, mode), wanted in zip(runs, plain, strict=True):
                assert torch.equal(model.generate(**inputs, **mode), wanted)


@FAMILIES
@pytest.mark.parametrize("cache", ["returned", "bare", "config"])
def test_a_conversation_continues_from_its_cache(family: str, cache: str) -> None:
    model = get_model(family, seed=25)
    inputs = tiny.build_inputs(model, 23, 2)
    text = model.config.get_text_config()

    def talk() -> list[Any]:
        cache_argument = {"returned": None, "bare": DynamicCache(), "config": DynamicCache(config=text)}[cache]
        first = generate_plain(model, inputs, **{CACHE_ARGUMENT: cache_argument}, **SAMPLED, **ALL_OUTPUTS)
        assert cache_argument is None or first.past_key_values is cache_argument
        results = [first]
        for turn in range(2):
            more = tiny.build_next_turn(inputs, results[-1].sequences, turn, model.tiny_spec)
            results.append(
                model.generate(**more, **{CACHE_ARGUMENT: results[-1].past_key_values}, **SAMPLED, **ALL_OUTPUTS)
            )
        return results

    plain = talk()
    with speculate(model, adversarial.BranchingDrafter(1, [result.sequences for result in plain])):
        mine = talk()
    for a, b in zip(plain, mine, strict=True):
        assert torch.equal(a.sequences, b.sequences)
    last = [build_outcome(results[-1], torch.zeros(1)) for results in (plain, mine)]
    assert not fuzz.compare_outcomes(*last, turn=2)


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_a_later_turn_brings_another_image(family: str) -> None:
    model = get_model(family, seed=25)
    inputs, more = (tiny.build_inputs(model, seed, 1, images=[1], padding="none") for seed in (23, 24))

    def talk() -> list[Any]:
        first = generate_plain(model, inputs, **SAMPLED, **ALL_OUTPUTS)
        ids = torch.cat([first.sequences, more["input_ids"]], dim=1)
        second = {**more, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return [first, model.generate(**second, **{CACHE_ARGUMENT: first.past_key_values}, **SAMPLED, **ALL_OUTPUTS)]

    plain = talk()
    with speculate(model, adversarial.BranchingDrafter(1, [result.sequences for result in plain])):
        mine = talk()
        assert mmspec.stats(model, last=True).num_accepted_tokens > 0
    pairs = zip(plain, mine, strict=True)
    assert all(torch.equal(a.sequences, b.sequences) for a, b in pairs)


# --- threads, copies, streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
def test_two_threads(family: str) -> None:
    model = get_model(family, seed=26)
    inputs = [tiny.build_inputs(model, 24 + i, 1 + i) for i in range(2)]
    plain = [generate_plain(model, x, **GREEDY) for x in inputs]
    wrong: list[str] = []

    def work(i: int) -> None:
        torch.set_num_threads(1)
        for _ in range(6):
            if not torch.equal(model.generate(**inputs[i], **GREEDY), plain[i]):
                wrong.append(f"thread {i}")

    for drafter in ("auto", adversarial.BranchingDrafter(1)):
        with fuzz.patch_model(model, drafter, tree_size=8):
            threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert mmspec.stats(model).calls == 12
    assert not wrong


def test_disabled_in_one_thread_only() -> None:
    model = get_model(seed=26)
    inputs = tiny.build_inputs(model, 24, 1)
    with speculate(model, adversarial.AdversarialDrafter()) as drafter:
        begun: list[int] = []
        drafter.begin = lambda prompt: begun.append(1) or adversarial.AdversarialDrafter.begin(drafter, prompt)
        with mmspec.disabled():
            model.generate(**inputs, **GREEDY)
            assert not begun
            thread = threading.Thread(target=lambda: model.generate(**inputs, **GREEDY))
            thread.start()
            thread.join()
            assert len(begun) == 1
        with mmspec.disabled(model):
            model.generate(**inputs, **GREEDY)
        model.generate(**inputs, **GREEDY, mmspec={"enabled": False})
        assert len(begun) == 1
        model.generate(**inputs, **GREEDY)
        assert len(begun) == 2


@FAMILIES
def test_deepcopy_of_a_patched_model(family: str) -> None:
    model = get_model(family, seed=27)
    inputs = tiny.build_inputs(model, 25, 2)
    plain = generate_plain(model, inputs, **GREEDY)
    with speculate(model, "bush", plain):
        twin = copy.deepcopy(model)
        twin.get_output_embeddings().weight.data.neg_()
        other = generate_plain(twin, inputs, **GREEDY)
        assert torch.equal(generate_plain(model, inputs, **GREEDY), plain)
        assert not torch.equal(other, plain), "the copy generates with the weights of the original"
    assert torch.equal(generate_plain(twin, inputs, **GREEDY), other)
    if mmspec.is_patched(twin):
        assert mmspec.stats(twin).calls > 0
        mmspec.unpatch(twin)
    assert torch.equal(generate_plain(twin, inputs, **GREEDY), other)


def test_save_pretrained_of_a_patched_model(tmp_path: Path) -> None:
    model = get_model(seed=27)
    inputs = tiny.build_inputs(model, 25, 2)
    plain = generate_plain(model, inputs, **GREEDY)
    keys = set(model.state_dict())
    with speculate(model, "bush", plain):
        assert set(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
    assert "mmspec" not in (tmp_path / "config.json").read_text() + (tmp_path / "generation_config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not mmspec.is_patched(loaded)
    assert torch.equal(generate_plain(loaded, inputs, **GREEDY), plain)


@MODES
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafter", ["bush", "oracle", "auto"])
def test_streaming(mode: Kwargs, batch: int, drafter: str) -> None:
    model = get_model("qwen2_5_vl", seed=28)
    inputs = tiny.build_inputs(model, 26, batch)
    logs = [adversarial.CallLog(), adversarial.CallLog()]
    plain = generate_plain(model, inputs, streamer=adversarial.RecordingStreamer(logs[0]), **mode)
    with speculate(model, drafter, plain):
        mine = generate_plain(model, inputs, streamer=adversarial.RecordingStreamer(logs[1]), **mode)
    assert torch.equal(plain, mine) and logs[0].calls[-1] == "end"
    assert logs[0].calls == logs[1].calls


def test_text_streamers(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = get_model(seed=28), tiny.build_tokenizer(tiny.ModelSpec())
    inputs = tiny.build_inputs(model, 26, 1)
    plain = generate_plain(model, inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    text = capsys.readouterr().out
    with speculate(model, "bush", plain):
        generate_plain(model, inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
        assert capsys.readouterr().out == text and text.strip()
        pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=lambda: model.generate(**inputs, streamer=pieces, **GREEDY))
        thread.start()
        assert "".join(pieces).strip() == text.strip()
        thread.join()


@FAMILIES
def test_ways_to_pass_the_prompt(family: str) -> None:
    """Positionally, as `inputs=`, with a config as the second argument, or with images encoded beforehand."""
    model = get_model(family, seed=28)
    inputs = tiny.build_inputs(model, 26, 2, images=[1, 1])
    rest = {k: v for k, v in inputs.items() if k != "input_ids"}
    config = GenerationConfig(**SAMPLED)
    pixels = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_sizes", "image_grid_thw")}
    without_pixels = {k: v for k, v in inputs.items() if k not in ("pixel_values", "image_sizes")}

    def calls() -> Iterator[Tensor]:
        yield generate_plain(model, rest, inputs=inputs["input_ids"], **SAMPLED)
        torch.manual_seed(0)
        yield model.generate(inputs["input_ids"], config, **rest)
        with torch.no_grad():
            observed = model.model.get_image_features(**pixels, return_dict=True)
        yield generate_plain(model, without_pixels, mm_encoder_outputs={"image": observed}, **SAMPLED)

    wanted = list(calls())
    with speculate(model, adversarial.BranchingDrafter(1, wanted)):
        for mine, plain in zip(calls(), wanted, strict=True):
            assert torch.equal(mine, plain)
            assert mmspec.stats(model, last=True).num_accepted_tokens > 0


def test_user_arguments_are_not_changed() -> None:
    """Configs, processor lists and the attributes of the model do not change."""
    model = get_model(seed=28)
    inputs = tiny.build_inputs(model, 26, 2)
    config = GenerationConfig(stop_strings=["ab"], do_sample=False, max_new_tokens=6)
    before, own = config.to_dict(), model.generation_config.to_dict()
    processors, criteria = LogitsProcessorList(), StoppingCriteriaList()
    with speculate(model, "bush"):
        attributes = set(model.__dict__)
        arguments = {"logits_processor": processors, "stopping_criteria": criteria, "generation_config": config}
        model.generate(**inputs, **arguments, tokenizer=tiny.build_tokenizer(tiny.ModelSpec()))
        assert set(model.__dict__) == attributes
    assert config.to_dict() == before and model.generation_config.to_dict() == own
    assert not processors and not criteria


@pytest.mark.parametrize("shape", [(3, 1), (7,)])
def test_a_criterion_with_a_result_of_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    model = get_model(seed=61)
    inputs = tiny.build_inputs(model, 62, 3, images=[1, 1, 1])
    criteria = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.zeros(shape, dtype=torch.bool)])
    mmspec.patch(model, "lookup")
    try:
        with pytest.raises((ValueError, RuntimeError), match=r"size|shape"):
            model.generate(**inputs, stopping_criteria=criteria, **GREEDY)
    finally:
        mmspec.unpatch(model)


@pytest.mark.parametrize("eos", [np.int64(2), np.array([2, 9]), torch.tensor(2), torch.tensor([2, 9])], ids=repr)
def test_stop_ids_of_any_integer_type(eos: Any) -> None:
    model = get_model(seed=63)
    assert_parity(model, tiny.build_inputs(model, 64, 3, images=[1, 1, 1]), eos_token_id=eos, **GREEDY)


@MODES
@pytest.mark.parametrize("kind", ["decoupled", "chained"])
def test_rows_that_are_nothing_but_padding(mode: Kwargs, kind: str) -> None:
    spec = tiny.ModelSpec("llava", seed=67)
    model = tiny.build_model(spec)
    inputs = tiny.build_inputs(model, 68, 3, images=[1, 1, 1])
    inputs["attention_mask"][1] = 0
    assert_parity(model, inputs, lambda plain: heads.build_drafter(kind, spec), **mode)


@pytest.mark.parametrize("shift", [-500, 700, 3_000_000_000])
def test_position_ids_far_from_those_of_text(shift: int) -> None:
    model = get_model(seed=69)
    inputs = tiny.build_inputs(model, 70, 2, images=[1, 1])
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand(2, -1) + shift
    assert_parity(model, inputs, "oracle", **GREEDY)


@MODES
def test_a_default_device_that_is_not_the_models(mode: Kwargs) -> None:
    model = get_model(seed=71)
    inputs = tiny.build_inputs(model, 72, 2, images=[1, 1])
    torch.set_default_device("meta")
    try:
        assert_parity(model, inputs, "hybrid", **mode)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("drafter", ["hybrid", "self", "head"])
def test_layers_cut_after_patch(drafter: str) -> None:
    spec = tiny.ModelSpec("llava", layers=3, seed=65)
    model = tiny.build_model(spec)
    inputs = tiny.build_inputs(model, 66, 1)
    mmspec.patch(model, heads.build_drafter("chained", spec) if drafter == "head" else drafter)
    model.config.text_config.num_hidden_layers = 2
    with mmspec.disabled():
        plain = generate_plain(model, inputs, **GREEDY)
    assert torch.equal(generate_plain(model, inputs, **GREEDY), plain)


def test_pipeline() -> None:
    spec = tiny.ModelSpec(seed=28)
    model, tokenizer = build_cached_model(spec), tiny.build_tokenizer(spec)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    crop = {"height": 12, "width": 12}
    shape = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    images = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size=crop)
    processor = LlavaProcessor(image_processor=images, tokenizer=tokenizer, **shape)
    picture = Image.new("RGB", (20, 16), (200, 30, 60))
    texts = []
    for patched in (False, True):
        with fuzz.patch_model(model, "auto", processor=processor, tree_size=8) if patched else nullcontext():
            speak = pipeline("image-text-to-text", model=model, processor=processor)
            for more in ({}, {"stop_sequence": "fe"}):
                torch.manual_seed(1)
                outputs = speak(images=[picture], text="abc<image>de", max_new_tokens=12, **more)
                texts.append(outputs[0]["generated_text"])
            assert not patched or mmspec.stats(model).calls == 2
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


def test_an_error_at_the_padding_of_a_row_that_has_ended() -> None:
    """A forbidden end token has the lowest score, whose length penalty overflows: transformers raises."""
    model = get_model(seed=73)
    inputs = tiny.build_inputs(model, 74, 2, images=[1, 1])
    options: Kwargs = {**SAMPLED, "no_repeat_ngram_size": 1}
    rows = generate_plain(model, inputs, **options, eos_token_id=None)[:, inputs["input_ids"].shape[1] :].tolist()
    options["eos_token_id"] = next(token for token in rows[1][4:] if token not in rows[0])
    options |= {"exponential_decay_length_penalty": (8, 2.0), "remove_invalid_values": True}
    for patched in (False, True):
        with (
            speculate(model, "hybrid") if patched else nullcontext(),
            pytest.raises(RuntimeError, match="probability tensor"),
        ):
            generate_plain(model, inputs, **options)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_model_that_takes_one_mask_gets_no_others(seed: int) -> None:
    """PaliGemma prepares a mask for each type of layer for a compiled forward, which its forward does not read."""
    result = fuzz.run_case(fuzz.draw_case(seed, "paligemma"))
    assert not result.differences
