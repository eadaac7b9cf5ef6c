"""Calls with autocast, interruptions, and user code that writes into ids or caches, compared with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
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
    generate_plain,
    generate_tokens,
    get_model,
    speculate,
)
from spies import UserCode, at, raising
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria

import mmspec
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree_cache import CACHE_ARGUMENT, VALUES_START_AS_KEYS

TWO = pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
SIZES = {
    "llava": {},
    "qwen2_5_vl": {"window": 7, "mixed": True},
}


def two(family: str, **more: Any) -> PreTrainedModel:
    """A model of a family, with sliding windows where it has them."""
    return get_model(family, **SIZES[family], **more)


def copy_cache(cache: Any) -> tuple[int, list[tuple[torch.dtype, Tensor, Tensor]]]:
    """Length and contents of a cache, copied."""
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return cache.get_seq_length(), [(layer.keys.dtype, layer.keys.clone(), layer.values.clone()) for layer in layers]


def same_cache(mine: Any, plain: Any) -> None:
    """Two results of `held` agree."""
    assert mine[0] == plain[0] and len(mine[1]) == len(plain[1])
    for (a_type, a_keys, a_values), (b_type, b_keys, b_values) in zip(mine[1], plain[1], strict=True):
        assert a_type == b_type and a_values.dtype == b_values.dtype
        torch.testing.assert_close(a_keys, b_keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a_values, b_values, rtol=1e-4, atol=1e-5)


# --- autocast ---------------------------------------------------------------------------------------------------------


def agree_up_to_near_ties(model: PreTrainedModel, inputs: tiny.Inputs, kwargs: Kwargs) -> bool:
    """Assert that plain and patched agree up to a near-tie of the plain model; whether they agree altogether.

    Autocast computes in bfloat16, where the products of a tree and of one token round differently.
    """
    margins: list[list[float]] = []
    with fuzz.record_margins(margins):
        plain = generate_plain(model, inputs, **kwargs)
    with speculate(model, "bush", plain):
        mine = generate_plain(model, inputs, **kwargs)
        assert mmspec.stats(model, last=True).num_accepted_tokens > 0
    assert mine.shape == plain.shape
    for row, column in (mine != plain).nonzero().tolist():
        if torch.equal(mine[row, :column], plain[row, :column]):
            assert margins[column - inputs["input_ids"].shape[1]][row] < 0.3, "no near-tie"  # the bound of bfloat16
    return torch.equal(mine, plain)


@pytest.mark.every(3)
@MODES
@FAMILIES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast_with_rows_of_different_length(mode: Kwargs, family: str, attention: str) -> None:
    model = get_model(family, seed=3, attention=attention)
    mode = {**mode, "max_new_tokens": 10, "eos_token_id": None}
    several: Kwargs = {**SAMPLED, **mode, "do_sample": True, "num_return_sequences": 2}
    with torch.autocast("cpu", torch.bfloat16):
        same_ones = [
            agree_up_to_near_ties(model, tiny.build_inputs(model, seed, 2), kw)
            for seed in (1, 2, 3)
            for kw in (mode, several)
        ]
    assert sum(same_ones) >= 3, same_ones


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("of_keys", TYPES)
@pytest.mark.parametrize("of_values", TYPES)
@pytest.mark.parametrize("later", TYPES)
def test_keys_and_values_have_the_types_of_a_dynamic_cache(
    of_keys: torch.dtype, of_values: torch.dtype, later: torch.dtype
) -> None:
    """Bit for bit, with rows of one length and of several, and also where the types change on the way."""
    noise = torch.Generator().manual_seed(0)
    caches, buffer = [DynamicCache(), DynamicCache()], RaggedKVCache(2, 40, VALUES_START_AS_KEYS)
    for step, (count, ahead) in enumerate([(5, 0), (1, 1), (3, 0), (2, 2), (12, 0), (1, 0)]):
        nodes = count + ahead
        new = [torch.randn(2, 2, nodes, 3, generator=noise).to(kind) for kind in (of_keys, of_values)]
        if step == 3:
            new = [part.to(later) for part in new]
        buffer.begin_forward(nodes)
        keys, values = buffer.write(0, *new)
        # The second row keeps `ahead` more nodes than the first.
        for row, cache in enumerate(caches):
            num_kept = count + ahead * row
            wanted = cache.update(*(part[row : row + 1, :, :num_kept] for part in new), 0)
            length = cache.get_seq_length()
            for mine, plain in zip((keys, values), wanted, strict=True):
                assert mine.dtype == plain.dtype
                assert torch.equal(mine[row : row + 1, :, :length], plain)
        accepted_nodes = [list(range(count)), list(range(nodes))]
        buffer.keep_path(torch.arange(nodes).expand(2, -1), torch.tensor([count, nodes]), accepted_nodes)


@TWO
def test_a_cache_filled_under_autocast_has_the_types_of_a_dynamic_cache(family: str) -> None:
    model = get_model(family, seed=3)
    inputs = tiny.build_inputs(model, 1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        plain = generate_plain(model, inputs, **GREEDY, return_dict_in_generate=True)
        with speculate(model, "bush", plain):
            mine = generate_plain(model, inputs, **GREEDY, return_dict_in_generate=True)
            assert mmspec.stats(model, last=True).num_accepted_tokens > 0
    types = [[(layer.keys.dtype, layer.values.dtype) for layer in r.past_key_values.layers] for r in (mine, plain)]
    assert types[0] == types[1]


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
@TWO
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    ("where", "number"),
    [(where, number) for where in ("streamer", "criterion", "processor") for number in (1, 2, 6)] + [("streamer", -1)],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, adversarial.InjectedError])
def test_an_interrupted_call_leaves_the_cache_filled(
    family: str, bare: bool, where: str, number: int, error: type[BaseException]
) -> None:
    model = two(family, seed=17)
    batch = 1 if where == "streamer" else 2
    inputs = tiny.build_inputs(model, 14, batch, images=[1] * batch)
    mode = {**GREEDY, "eos_token_id": None}
    plain = generate_plain(model, inputs, **mode)

    def attempt(cache: DynamicCache) -> Any:
        user = UserCode(at(number, raising(error("stop"))), where)
        with pytest.raises(error):
            model.generate(**inputs, **mode, **{CACHE_ARGUMENT: cache}, **user.argument)
        found = copy_cache(cache)
        more = tiny.build_next_turn(inputs, plain[:, : found[0] + 1], 3, model.tiny_spec)
        return found, model.generate(**more, **{CACHE_ARGUMENT: cache}, **mode)

    def cache() -> DynamicCache:
        return DynamicCache() if bare else DynamicCache(config=model.config.get_text_config())

    wanted, answer = attempt(cache())
    assert wanted[0] >= inputs["input_ids"].shape[1]
    with speculate(model, "oracle", plain):
        mine, again = attempt(cache())
    same_cache(mine, wanted)
    assert torch.equal(again, answer), "the next turn differs"


def test_a_second_turn_that_is_interrupted() -> None:
    model = two("llava", seed=17)
    inputs = tiny.build_inputs(model, 14, 1, images=[1])
    first = model.generate(**inputs, **GREEDY, eos_token_id=None, return_dict_in_generate=True)
    more = tiny.build_next_turn(inputs, first.sequences, 3, model.tiny_spec)
    plain = model.generate(
        **more, **GREEDY, eos_token_id=None, **{CACHE_ARGUMENT: copy.deepcopy(first.past_key_values)}
    )
    found = []
    for patched in (False, True):
        cache, user = copy.deepcopy(first.past_key_values), UserCode(at(5, raising(KeyboardInterrupt())))
        options = {CACHE_ARGUMENT: cache, **user.argument, "mmspec": {"enabled": patched}}
        with speculate(model, "oracle", plain), pytest.raises(KeyboardInterrupt):
            model.generate(**more, **GREEDY, eos_token_id=None, **options)
        found.append(copy_cache(cache))
    same_cache(found[1], found[0])


# --- a sliding window that changes ------------------------------------------------------------------------------------


@contextmanager
def windowed(model: PreTrainedModel, window: int | None) -> Iterator[None]:
    """The model with another sliding window."""
    text = model.config.get_text_config()
    old, text.sliding_window = text.sliding_window, window
    try:
        yield
    finally:
        text.sliding_window = old


WINDOWS = pytest.mark.parametrize(
    ("family", "mixed"), [("llava_next", False), ("llava_onevision", True), ("qwen2_5_vl", True), ("qwen2_5_vl", False)]
)


@pytest.mark.every(2)
@MODES
@WINDOWS
@pytest.mark.parametrize("window", [3, 9])
def test_a_sliding_window_changed_after_patch(mode: Kwargs, family: str, mixed: bool, window: int) -> None:
    model = get_model(family, window=5, mixed=mixed, seed=4)
    inputs = tiny.build_inputs(model, 2, 2)
    before = generate_plain(model, inputs, **mode, eos_token_id=None)
    with windowed(model, window):
        wanted = generate_plain(model, inputs, **mode, eos_token_id=None)
    assert not torch.equal(before, wanted), "the window must matter"
    with speculate(model, "oracle", wanted), windowed(model, window):
        mine = generate_plain(model, inputs, **mode, eos_token_id=None)
        assert mmspec.stats(model, last=True).num_accepted_tokens > 0
    assert torch.equal(mine, wanted)


def test_a_sliding_window_taken_off_or_put_on_after_patch() -> None:
    for window, other in ((5, None), (0, 5)):
        model = get_model("llava_next", window=window, seed=4)
        inputs = tiny.build_inputs(model, 2, 2)
        with windowed(model, other):
            wanted = generate_plain(model, inputs, **GREEDY)
        with speculate(model, "oracle", wanted):
            model.generate(**inputs, **GREEDY)
            with windowed(model, other):
                assert torch.equal(generate_plain(model, inputs, **GREEDY), wanted)


def test_the_attribute_of_an_attention_layer_changes_nothing_in_either_kernel() -> None:
    for attention in ("sdpa", "eager"):
        model = tiny.build_model(tiny.ModelSpec("qwen2_5_vl", window=5, seed=4, attention=attention))
        inputs = tiny.build_inputs(model, 2, 2)
        for layer in model.model.language_model.layers:
            layer.self_attn.sliding_window = 2
        assert_parity(model, inputs, **GREEDY)


@pytest.mark.parametrize("window", [3, 9, None])
def test_a_cache_of_another_window_falls_back(window: int | None) -> None:
    model = get_model("llava_next", window=5, seed=4)
    inputs = tiny.build_inputs(model, 2, 2)
    first = generate_plain(model, inputs, **GREEDY, return_dict_in_generate=True)
    assert all(isinstance(layer, DynamicSlidingWindowLayer) for layer in first.past_key_values.layers)
    more = tiny.build_next_turn(inputs, first.sequences, 3, model.tiny_spec)
    with windowed(model, window):
        wanted = generate_plain(model, more, **{CACHE_ARGUMENT: copy.deepcopy(first.past_key_values)}, **GREEDY)
        with speculate(model, "oracle", wanted):
            mine = generate_plain(model, more, **{CACHE_ARGUMENT: copy.deepcopy(first.past_key_values)}, **GREEDY)
            assert "sliding_window=5" in str(mmspec.stats(model, last=True).fallback_reason)
    assert torch.equal(mine, wanted)


# --- user code that writes into what it is given ----------------------------------------------------------------------


class Scribbling(UserCode):
    """Writes into the ids at its `at`-th call: the newest token, an older one or the prompt; a criterion writes later
    into another row too, and notes what it read."""

    def __init__(self, what: str, at: int, token: int, where: str = "criterion") -> None:
        super().__init__(self.write, where)
        self.index, self.at, self.token = {"newest": -1, "older": -2, "prompt": 1}[what], at, token
        self.read: list[Any] = []

    def write(self, number: int, ids: Tensor) -> None:
        if number == self.at or (number == self.at + 3 and self.where == "criterion"):
            ids[-1 if number == self.at else 0, self.index] = self.token
        self.read.append(ids.tolist())


WRITES = pytest.mark.parametrize("what", ["newest", "older", "prompt"])


def copied(inputs: tiny.Inputs) -> tiny.Inputs:
    """Fresh tensors, since the prompt may be written into."""
    return {name: value.clone() for name, value in inputs.items()}


def both(model: PreTrainedModel, inputs: tiny.Inputs, make: Callable[[], Kwargs], mode: Kwargs) -> mmspec.Stats:
    """Assert that plain and patched agree, also in what becomes of the prompt."""
    unwritten = generate_plain(model, copied(inputs), 5, **mode)
    outcomes = []
    for patched in (False, True):
        mine, more = copied(inputs), make()
        with speculate(model, "oracle", unwritten):
            result = generate_plain(model, mine, 5, **mode, **more, mmspec={"enabled": patched})
            stats = mmspec.stats(model, last=True)
        read = [one.read for one in more.get("stopping_criteria", []) if isinstance(one, Scribbling)]
        outcomes.append((result, mine["input_ids"], torch.get_rng_state(), read))
    (wanted, wanted_prompt, wanted_state, wanted_read), (got, prompt, state, read) = outcomes
    assert wanted_read == read
    assert torch.equal(wanted, got) and torch.equal(wanted_prompt, prompt) and torch.equal(wanted_state, state)
    assert not torch.equal(got, unwritten), "the writing must matter"
    return stats


@pytest.mark.every(7)
@MODES
@TWO
@WRITES
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(("where", "penalty"), [("criterion", 1.0), ("criterion", 1.6), ("processor", 1.6)])
def test_code_that_writes_into_the_ids(
    mode: Kwargs, family: str, what: str, number: int, where: str, penalty: float
) -> None:
    model = two(family, seed=21)
    inputs = tiny.build_inputs(model, 5, 2)
    mode = {**mode, "repetition_penalty": penalty, "eos_token_id": None}
    both(model, inputs, lambda: Scribbling(what, number, 40, where).argument, mode)


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("to_eos", [False, True])
def test_a_criterion_that_writes_the_stop_token(mode: Kwargs, first: bool, to_eos: bool) -> None:
    """Before or behind the eos criterion; a row that would end goes on, or one that would go on ends."""
    model = two("llava", seed=21)
    inputs = tiny.build_inputs(model, 5, 2)
    tokens = generate_tokens(model, inputs, **{**mode, "max_new_tokens": 20})
    step = next(
        i for i in range(2, 12) if tokens[-1][i] not in tokens[-1][:i] and tokens[-1][i] not in tokens[0][: i + 1]
    )
    eos = 41 if to_eos else tokens[-1][step]

    def make() -> Kwargs:
        own = [Scribbling("newest", step + 1, 41 if to_eos else 40)]
        ends = EosTokenCriteria(torch.tensor([eos]))
        return {"stopping_criteria": StoppingCriteriaList([*own, ends] if first else [ends, *own])}

    both(model, inputs, make, {**mode, "eos_token_id": eos})


@MODES
def test_without_writing_a_criterion_stays_fast(mode: Kwargs) -> None:
    model = two("llava", seed=21)
    make = lambda: StoppingCriteriaList([Scribbling("newest", 1000, 40)])  # noqa: E731
    assert (
        assert_parity(
            model, tiny.build_inputs(model, 5, 2), stopping_criteria=make, **mode, eos_token_id=None
        ).num_accepted_tokens
        > 5
    )


# --- user code that looks into its own cache --------------------------------------------------------------------------


@pytest.mark.every(2)
@MODES
@TWO
@pytest.mark.parametrize("where", ["criterion", "processor", "streamer"])
@pytest.mark.parametrize("turns", [1, 2])
def test_what_user_code_finds_in_its_cache(mode: Kwargs, family: str, where: str, turns: int) -> None:
    model = two(family, seed=23)
    batch = 1 if where == "streamer" else 2
    inputs = tiny.build_inputs(model, 6, batch, images=[1] * batch)
    mode = {**mode, "eos_token_id": None}
    cache = DynamicCache(config=model.config.get_text_config())
    if turns == 2:
        first = generate_plain(model, inputs, **{CACHE_ARGUMENT: cache}, **mode)
        inputs = tiny.build_next_turn(inputs, first, 3, model.tiny_spec)
    plain = generate_plain(model, inputs, 1, **{CACHE_ARGUMENT: copy.deepcopy(cache)}, **mode)
    found = []
    for patched in (False, True):
        own, seen = copy.deepcopy(cache), list[Any]()
        user = UserCode(lambda number, ids, own=own, seen=seen: seen.append(copy_cache(own)), where)
        with speculate(model, "oracle", plain):
            options = {CACHE_ARGUMENT: own, "mmspec": {"enabled": patched}}
            result = generate_plain(model, inputs, 1, **mode, **user.argument, **options)
            assert not patched or where == "processor" or mmspec.stats(model, last=True).num_accepted_tokens > 0
        assert torch.equal(result, plain)
        found.append([*seen, copy_cache(own)])
    assert len(found[0]) == len(found[1]) >= mode["max_new_tokens"]
    for wanted, mine in zip(*found, strict=True):
        same_cache(mine, wanted)


def erase(cache: DynamicCache) -> None:
    for layer in cache.layers:
        layer.values[:, :, 2:6].zero_()


@TWO
def test_code_that_writes_into_its_cache(family: str) -> None:
    """What was decoded ahead is decoded anew."""
    model = get_model(family, seed=23)
    inputs, mode = tiny.build_inputs(model, 6, 2), {**GREEDY, "eos_token_id": None}
    unwritten, results = generate_plain(model, inputs, **mode), []
    for patched in (False, True):
        cache = DynamicCache()
        more = {CACHE_ARGUMENT: cache, **UserCode(at(3, partial(erase, cache)), "criterion").argument}
        with speculate(model, "oracle", unwritten):
            results.append(
                (generate_plain(model, inputs, **mode, **more, mmspec={"enabled": patched}), copy_cache(cache))
            )
    (wanted, wanted_cache), (mine, cached) = results
    assert torch.equal(mine, wanted) and not torch.equal(wanted, unwritten)
    same_cache(cached, wanted_cache)


def test_code_that_crops_its_cache_is_an_error_that_names_it() -> None:
    model = two("llava", seed=23)
    inputs, cache = tiny.build_inputs(model, 6, 1), DynamicCache()
    mode = {**GREEDY, "eos_token_id": None, CACHE_ARGUMENT: cache}
    message = r"past_key_values was .* mmspec=dict\(enabled=False\)"
    user = UserCode(at(3, lambda: cache.crop(-1)), "criterion")
    with fuzz.patch_model(model, "none"), pytest.raises(RuntimeError, match=message):
        model.generate(**inputs, **mode, **user.argument)


# --- `generate` taken before `unpatch` --------------------------------------------------------------------------------


@TWO
def test_a_generate_that_outlives_the_patch(family: str) -> None:
    model = two(family, seed=23)
    inputs = tiny.build_inputs(model, 6, 2)
    plain = generate_plain(model, inputs, **ALL_OUTPUTS, **GREEDY).sequences
    with speculate(model, "oracle", plain):
        taken = model.generate
    assert not mmspec.is_patched(model)
    assert torch.equal(taken(**inputs, **GREEDY), plain)
    assert torch.equal(taken(**inputs, **GREEDY, mmspec={"deterministic": True}), plain)
