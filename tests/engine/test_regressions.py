"""Typical failures of speculative decode loops, one test each, compared with the plain model.

Random cases cover many of them too (`test_exactness.py`); here each one is certain to occur.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import numpy as np
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import (
    ALL_OUTPUTS,
    FAMILIES,
    GREEDY,
    MODES,
    SAMPLED,
    Kwargs,
    assert_parity,
    build_cached_model,
    count_vision_calls,
    generate_plain,
    generate_tokens,
    get_model,
    speculate,
)
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

import mmspec
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT

# --- the table --------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Request:
    """A call that is compared with plain `generate`, greedy and sampled.

    Attributes:
        batch: its rows.
        model: changes of `tiny.ModelSpec`.
        inputs: of `tiny.build_inputs`.
        options: of `generate`, or a function of the rows that the model generates without an end, and of the inputs.
        drafters: names, or functions from the plain output to a drafter, each of which is one call.
        accepts: whether drafts must be accepted; None where either may be.
        tree_size: of the patch.
        returned: what is returned, each of which is one call.
    """

    batch: int = 2
    model: Kwargs = field(default_factory=dict)
    inputs: Kwargs = field(default_factory=dict)
    options: Kwargs | Callable[[list[list[int]], tiny.Inputs], Kwargs] = field(default_factory=dict)
    drafters: Sequence[Any] = ("bush",)
    accepts: bool | None = True
    tree_size: int | None = 8
    returned: Sequence[Kwargs] = (ALL_OUTPUTS,)


def _ends(*places: tuple[int, int]) -> Callable[[list[list[int]], tiny.Inputs], Kwargs]:
    """End tokens: those that rows generate at these (row, step)."""
    return lambda rows, inputs: {"eos_token_id": [rows[row][step] for row, step in places]}


def _far_positions(shift: int) -> Callable[[list[list[int]], tiny.Inputs], Kwargs]:
    return lambda rows, inputs: {"position_ids": torch.arange(inputs["input_ids"].shape[1]).expand(2, -1) + shift}


def _lengths(rows: list[list[int]], inputs: tiny.Inputs) -> Kwargs:
    """Rows that a criterion stops emit until the whole batch stops."""
    criterion = lambda: [adversarial.Lengths(adversarial.CallLog(), inputs["input_ids"].shape[1], 5)]  # noqa: E731
    return {"eos_token_id": None, "stopping_criteria": criterion}


def _masked_row(rows: list[list[int]], inputs: tiny.Inputs) -> Kwargs:
    inputs["attention_mask"][1] = 0
    return {}


BOTH = ({}, ALL_OUTPUTS)
FINISHED = {"model": {"family": "qwen2_5_vl"}, "batch": 4, "drafters": ("bush", "oracle"), "accepts": None}
CALM = {"model": {"family": "llava_onevision", "calm": True}, "batch": 3, "inputs": {"num_distinct_ids": 4}}
WINDOWS: dict[str, Kwargs] = {
    "mistral": {"family": "llava_next", "window": 16},
    "qwen2, mixed": {"family": "llava_onevision", "window": 12, "mixed": True},
    "qwen2, eager": {"family": "llava_onevision", "window": 12, "attention": "eager"},
    "m-rope, mixed": {"family": "qwen2_5_vl", "window": 12, "mixed": True, "layers": 3},
}
MALFORMED = [lambda plain, seed=seed: adversarial.MalformedDrafter(seed, [plain]) for seed in range(3)]
REQUESTS: dict[str, Request] = {
    **{f"end at step {n}": Request(options=_ends((0, n)), drafters=("oracle",)) for n in (1, 2, 3, 4, 6)},
    **{
        f"{n} tokens": Request(model={"family": "llava_next"}, options={"eos_token_id": None, "max_new_tokens": n},
                               drafters=("oracle",), accepts=None)
        for n in (1, 2, 3, 5, 8)
    },
    **{
        f"at least {n} tokens": Request(
            options=lambda rows, inputs, n=n: _ends((0, 2), (0, 4))(rows, inputs) | {"min_new_tokens": n},
            drafters=("oracle", "bush"), accepts=None)
        for n in (3, 9)
    },
    "all rows end at the first step": Request(options=_ends((0, 0), (1, 0)), accepts=None),
    "rows end one by one": Request(**FINISHED, options=_ends((0, 2), (1, 7), (2, 11)), returned=BOTH),
    "padding that the model generates": Request(
        4, {"family": "llava_onevision"}, {"padding": "none"}, drafters=("bush", "oracle"), accepts=None,
        options=lambda rows, inputs: _ends((0, 2), (1, 7))(rows, inputs) | {"pad_token_id": rows[2][4]}),
    "rows that finish early without an end": Request(
        3, {"family": "llava_next"}, drafters=("bush", "oracle"), accepts=None, returned=BOTH, options=_lengths),
    **{
        f"ends as {type(ids).__name__} {ids!s}": Request(3, options={"eos_token_id": ids}, accepts=None)
        for ids in (np.int64(2), np.array([2, 9]), torch.tensor(2), torch.tensor([2, 9]))
    },
    **{
        f"nothing accepted, {family}": Request(3, {"family": family}, options={"eos_token_id": None},
                                               drafters=("wrong",), accepts=False)
        for family in tiny.FAMILIES
    },
    "empty trees": Request(model={"family": "llava_onevision"}, drafters=("empty",), accepts=False),
    "duplicate children": Request(options={"eos_token_id": 2}, drafters=(lambda plain: Twins(0, [plain]),)),
    **{
        f"malformed trees of {size}, {family}": Request(2, {"family": family}, drafters=MALFORMED, accepts=None,
                                                         tree_size=size)
        for family, size in zip(tiny.FAMILIES, (None, 3, 64) * 4, strict=False)
    },
    **{
        f"{side} padding, {mask}, {family}": Request(3, {"family": family}, {"padding": side, "mask": mask})
        for (side, mask), family in zip(
            itertools.product(("left", "right", "none"), (True, False)), (*tiny.FAMILIES, *tiny.FAMILIES), strict=False)
    },
    **{
        f"four axes of positions, {side}": Request(
            3, {"family": "qwen2_5_vl"}, {"images": [2, 1, 0], "videos": [0, 1, 1], "padding": side})
        for side in ("left", "right", "none")
    },
    "a mask that becomes none": Request(model={"family": "llava_next"}, inputs={"padding": "none"}),
    **{f"eager, {family}": Request(3, {"family": family, "attention": "eager"}) for family in tiny.FAMILIES},
    **{
        f"window of {name}, {side}": Request(model=model, inputs={"padding": side}, options={"max_new_tokens": 40})
        for (name, model), side in zip(WINDOWS.items(), ("left", "right", "left", "right"), strict=True)
    },
    "a window that fills up": Request(model={"family": "llava_next", "window": 30}, inputs={"images": [0, 0]},
                                      options={"max_new_tokens": 60, "eos_token_id": None}, accepts=None),
    **{
        f"{' and '.join(rules)} within a tree": Request(**CALM, options=rules, tree_size=16)
        for rules in (
            {"repetition_penalty": 1.4},
            {"no_repeat_ngram_size": 2},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        )
    },
    "a prefix function": Request(3, accepts=None, options={
        "prefix_allowed_tokens_fn": lambda: adversarial.PrefixConstraint(adversarial.CallLog(), 120, True)}),
    **{
        f"a row of padding, {kind}": Request(
            3, inputs={"images": [1, 1, 1]}, options=_masked_row, accepts=None, returned=({},),
            drafters=(lambda plain, kind=kind: heads.build_drafter(kind, tiny.ModelSpec("llava", seed=3)),))
        for kind in ("decoupled", "chained")
    },
    **{
        f"positions from {shift}": Request(inputs={"images": [1, 1]}, options=_far_positions(shift), accepts=None)
        for shift in (-500, 700, 3_000_000_000)
    },
}  # fmt: skip
"""What typically goes wrong: ends inside a path, how much is accepted, malformed drafts, who is in the batch, what the
model is fed, rules that read the path to a node."""


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("name", list(REQUESTS))
def test_a_request(name: str, mode: Kwargs) -> None:
    request = REQUESTS[name]
    model = get_model(**{"seed": 3} | request.model)
    inputs = tiny.build_inputs(model, 5, request.batch, **request.inputs)
    options = request.options
    if callable(options):
        options = options(generate_tokens(model, inputs, **mode), inputs)
    for drafter in request.drafters:
        for returned in request.returned:
            patch_options = {"tree_size": request.tree_size}
            stats = assert_parity(model, inputs, drafter, patch_options=patch_options, **mode | options, **returned)
            assert request.accepts is None or (stats.num_accepted_tokens > 0) == request.accepts
            assert request.accepts is not False or stats.tau == 1


@MODES
def test_a_default_device_that_is_not_the_models(mode: Kwargs) -> None:
    model = get_model(seed=71)
    inputs = tiny.build_inputs(model, 72, 2, images=[1, 1])
    torch.set_default_device("meta")
    try:
        assert_parity(model, inputs, "hybrid", **mode)
    finally:
        torch.set_default_device(None)


# --- how much is accepted ---------------------------------------------------------------------------------------------


@pytest.mark.every(2)
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


# --- malformed drafts -------------------------------------------------------------------------------------------------


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


@FAMILIES
def test_the_vision_tower_runs_once_per_call(family: str) -> None:
    model = get_model(family, seed=16)
    inputs = tiny.build_inputs(model, 13, 2, images=[1, 1])
    with count_vision_calls(model) as calls, speculate(model):
        generate_plain(model, inputs, **GREEDY)
    assert len(calls) == 1


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
    with patch_model(model, "lookup"), pytest.raises((ValueError, RuntimeError), match=r"size|shape"):
        model.generate(**inputs, stopping_criteria=criteria, **GREEDY)


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
