"""Random calls of `generate`, run on the plain and on the patched model, with all outputs compared.

A `Case` is drawn from a seed and describes the calls completely. As a script:
`python tests/helpers/fuzz.py --count 2000 --json out`.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import adversarial as adversarial
import assistants
import own_heads
import tiny_heads as heads
import tiny_models as tiny
import torch
import transformers
import zoo
from draft_models import build_draft_model, train_tokenizer
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.model.retokenizing import RetokenizingDrafter
from mmspec.drafters.model.vision_drafter import VisionModelDrafter
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import Prompt
from mmspec.targets.base import ModelAdapter
from mmspec.targets.draft_model import HFDraftModel
from mmspec.targets.registry import find_adapter
from mmspec.targets.selftest import SelfTestResult, judge

FAMILIES = tiny.FAMILIES[:4]
"""The families that a seed chooses from. Later ones are selected by name, so that seeds stay reproducible."""
LATER_FAMILIES = tiny.FAMILIES[4:]
BUILT_IN_DRAFTERS = ("none", "lookup", "recycling", "hybrid", "auto")
WHOLE_MODEL_DRAFTERS = ("self", "quantized", "model", "model-vision", "model-retokenizing")
"""Drafters that decode with a whole model. Selected by name, so that seeds stay reproducible."""
TOLERANCE = 1e-4
"""By how much logits, scores and states may differ."""
RECURRENT_TOLERANCE = 5e-4
"""The same of recurrent models: what a state has taken in stays there, so that another order of sums grows. Of 600
random cases three are beyond 1e-4: two where our linear layers compute (2.6e-4, also without any draft), and one in
torch, from several tokens in one forward, accepted or not (3.5e-4). Plain decoding in torch is repeated to the bit."""


@dataclass(frozen=True)
class Case:
    """A model, one or two calls and their arguments. `options` are fields of a `GenerationConfig`."""

    seed: int
    spec: tiny.ModelSpec
    batch: int
    padding: str
    mask: bool
    videos: bool
    drafter: str
    deterministic: bool
    nodes: int | None
    override: str
    seeded: str
    turns: str
    where: str
    eos: str
    stop_strings: bool
    options: dict[str, Any]
    biased: tuple[str, ...]
    processor: str
    prefix: str
    criterion: str
    cache: str
    streamer: str
    pad: str
    compiled: bool

    def describe(self) -> str:
        """All values that are not defaults, in one line."""
        model = {k: v for k, v in asdict(self.spec).items() if v != getattr(tiny.ModelSpec(), k)}
        rest = {k: v for k, v in asdict(self).items() if k != "spec" and v not in ("", None, False, (), {})}
        return f"{rest} on {model}"


# --- draw a case ------------------------------------------------------------------------------------------------------


def _spec(rng: random.Random, family: str) -> tiny.ModelSpec:
    drawn = rng.choice(FAMILIES)
    family = family or drawn
    texts = {
        "llava": ("", "", "qwen2"),
        "llava_next": ("", "", "llama"),
        "llava_next_video": ("", "mistral"),
    }
    text = texts.get(family, ("",))
    slides, exact = rng.random() < 0.3, rng.random() < 0.08
    hidden, heads = rng.choice(((32, 4), (48, 4), (32, 2)))
    spec = tiny.ModelSpec(
        family=family,
        text=rng.choice(text),
        vocab=rng.choice((100, 120, 160, 40)),
        hidden=hidden,
        layers=rng.choice((2, 2, 3)),
        heads=heads,
        kv_heads=rng.choice((heads, heads // 2)),
        window=rng.choice((12, 16, 30)) if slides else 0,
        mixed=rng.random() < 0.5,
        tied=rng.random() < 0.2,
        attention="eager" if rng.random() < 0.3 and not exact else "sdpa",  # eager and pads give nan in float64
        dtype="float64" if exact else "float32",
        tail=rng.random() < 0.4,
        calm=rng.random() < 0.5,
        seed=rng.randrange(1000),
    )
    return _restrict(spec, zoo.FAMILIES[family])


def _restrict(spec: tiny.ModelSpec, family: zoo.Family) -> tiny.ModelSpec:
    """The spec without what the family does not have."""
    window = spec.window if family.has_window else 0
    dtype = spec.dtype if spec.dtype in family.dtypes else family.dtypes[0]
    attention = spec.attention if spec.attention in family.attentions else family.attentions[0]
    return replace(spec, window=window, dtype=dtype, attention=attention)


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.45:
        return {"do_sample": False}
    rules: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0.3, 0.5, 0.7, 1.0, 1.3)),
        "top_k": lambda: rng.choice((0, 1, 3, 20)),
        "top_p": lambda: rng.choice((0.5, 0.8, 0.95)),
        "min_p": lambda: rng.choice((0.02, 0.1)),
        "typical_p": lambda: rng.choice((0.5, 0.9)),
        "epsilon_cutoff": lambda: 0.02,
        "eta_cutoff": lambda: 0.02,
    }
    chosen = {name: draw() for name, draw in rules.items() if rng.random() < (0.6 if name == "temperature" else 0.2)}
    return {"do_sample": True, **chosen}


def _processors(rng: random.Random, vocab: int) -> dict[str, Any]:
    some = [rng.randrange(vocab) for _ in range(6)]
    rules: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice((1.3, 0.8)),
        "no_repeat_ngram_size": lambda: rng.choice((1, 2, 3)),
        "min_new_tokens": lambda: rng.randint(1, 12),
        "min_length": lambda: rng.randint(10, 60),
        "suppress_tokens": lambda: some,
        "begin_suppress_tokens": lambda: some,
        "exponential_decay_length_penalty": lambda: (rng.randint(1, 8), 1.2),
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "encoder_repetition_penalty": lambda: 1.3,
        "encoder_no_repeat_ngram_size": lambda: 2,
    }
    rate = rng.choice((0.0, 0.0, 0.1, 0.3))
    rates = {name: rate / 3 if name.startswith("encoder") else rate for name in rules}
    return {name: draw() for name, draw in rules.items() if rng.random() < rates[name]}


def _length(rng: random.Random) -> dict[str, Any]:
    """`max_length` is relative to the end of the first prompt; `prepare_case` makes it absolute."""
    kind = rng.random()
    if kind < 0.85:
        return {"max_new_tokens": rng.choice((1, 2, 3, rng.randint(4, 12), rng.randint(8, 24), rng.randint(12, 40)))}
    return {"max_length": rng.choice((-2, 0, *(rng.randint(1, 40) for _ in range(12))))} if kind < 0.97 else {}


def _returns(rng: random.Random) -> dict[str, Any]:
    flags = {name: True for name in ("output_scores", "output_logits") if rng.random() < 0.5}
    if rng.random() < 0.5:
        return flags if rng.random() < 0.1 else {}
    return {"return_dict_in_generate": True, **flags}


def _choose_with_rate(rng: random.Random, rate: float, choices: Sequence[str]) -> str:
    return rng.choice(tuple(choices)) if rng.random() < rate else ""


def draw_case(seed: int, family: str = "") -> Case:
    """The case of `seed`, with a model of `family` instead of the drawn one."""
    rng = random.Random(f"mmspec {seed}")
    spec = _spec(rng, family)
    options = {**_sampling(rng), **_processors(rng, spec.vocab), **_length(rng), **_returns(rng)}
    turns = _choose_with_rate(rng, 0.35, ("again", "other", "continue", "continue", "tail"))
    if options["do_sample"] and rng.random() < 0.2 and turns not in ("continue", "tail"):
        options["num_return_sequences"] = rng.randint(2, 3)
    if rng.random() < 0.05:
        options["max_time"] = 1000.0
    liar = rng.random() < 0.65
    truthful = ("oracle", "bush", "bush", "chaos", "chaos", "wrong", "nosy", "tapper", "empty", "raising")
    odd, eos = rng.random() < 0.3, rng.choice(("one", "one", "several", "several", "none", "first"))
    if eos == "none":
        options.pop("exponential_decay_length_penalty", None)  # HF itself fails on it
    return Case(
        seed=seed,
        spec=spec,
        batch=rng.choice((1, 1, 2, 3, 4)),
        padding=rng.choice(("left", "left", "right", "none")),
        mask=rng.random() < 0.75,
        videos=zoo.FAMILIES[spec.family].videos is not None and rng.random() < 0.35,
        drafter=rng.choice(truthful if liar else BUILT_IN_DRAFTERS),
        deterministic=rng.random() < 0.6,
        nodes=rng.choice((1, 2, 3, 7, 16, 64)) if rng.random() < 0.4 else None,
        override=_choose_with_rate(rng, 0.15, ("drafter", "deterministic", "enabled", "disabled", "reference")),
        seeded=rng.choice(("before", "after")),
        turns=turns,
        where=rng.choice(("call", "call", "config", "model")),
        eos=eos,
        stop_strings=rng.random() < 0.2,
        options=options,
        biased=tuple(k for k in ("bad_words_ids", "sequence_bias", "forced_eos_token_id") if rng.random() < 0.06),
        processor=_choose_with_rate(rng, 0.12 + 0.25 * odd, ("known", "known", *adversarial.PROCESSORS)),
        prefix=_choose_with_rate(rng, 0.15 * odd, ("pure", "counting")),
        criterion=_choose_with_rate(rng, 0.12 + 0.35 * odd, tuple(adversarial.CRITERIA)),
        cache=_choose_with_rate(rng, 0.15, ("bare", "config")),
        streamer=_choose_with_rate(rng, 0.25, ("plain",) * 6 + ("failing", "gambling")),
        pad=_choose_with_rate(rng, 0.2, ("eos", "eos", "none")),
        compiled=seed % 4 != 3,  # nothing is drawn, so that older seeds stay reproducible
    )


# --- making the calls -------------------------------------------------------------------------------------------------


@dataclass
class CallOutcome:
    """All outputs of one call."""

    sequences: Tensor | None = None
    type_name: str = ""
    tensors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    cache_length: int | None = None
    past_key_values: Any = None
    rng_state: Tensor | None = None
    error: str = ""
    traceback: str = ""
    logs: dict[str, list[Any]] = field(default_factory=dict)
    hidden_states: Any = None


@dataclass
class PreparedCase:
    """A case with its model, the inputs of its turns, and the options that depend on the model's output."""

    case: Case
    model: PreTrainedModel
    inputs: list[tiny.Inputs]
    output_options: dict[str, Any]
    eos_token_ids: list[int] | None


def _inputs(case: Case, model: PreTrainedModel) -> list[tiny.Inputs]:
    rng = random.Random(case.seed)
    turns = []
    for turn in range(2 if case.turns == "other" else 1):
        batch = case.batch if turn == 0 else rng.choice([b for b in (1, 2, 3) if b != case.batch])
        clips = [rng.randint(0, 1) for _ in range(batch)] if case.videos else None
        clips = clips if clips and any(clips) else None
        images = [rng.randint(0, 2) for _ in range(batch)] if clips or rng.random() < 0.4 else None
        num_distinct_ids = rng.choice((5, 30))
        seed = rng.randrange(10**6)
        args: dict[str, Any] = {"padding": case.padding, "mask": case.mask, "num_distinct_ids": num_distinct_ids}
        turns.append(tiny.build_inputs(model, seed, batch, images=images, videos=clips, **args))
    return turns * 2 if case.turns == "again" else turns


def _generate_freely(case: Case, model: PreTrainedModel, given: tiny.Inputs) -> list[list[int]]:
    """Rows of generated tokens without stop conditions."""
    free = {k: v for k, v in case.options.items() if k in ("do_sample", "temperature", "top_k", "top_p")}
    torch.manual_seed(case.seed)
    with override_generation_config(model, None):
        sequences = model.generate(**given, **free, max_new_tokens=16)
    return sequences[:, given["input_ids"].shape[1] :].tolist()


def prepare_case(case: Case) -> PreparedCase:
    """Build the model, the inputs, and stop conditions and biases that affect this model's output."""
    model, rng = tiny.build_model(case.spec), random.Random(case.seed + 1)
    inputs = _inputs(case, model)
    looks_at_output = case.stop_strings or case.biased or case.eos in ("first", "several")
    probe = _generate_freely(case, model, inputs[0]) if looks_at_output else [[0, 0]]
    generated = [token for row in probe for token in row[1:]]
    texts_by_id = tiny.token_texts(case.spec)
    found: dict[str, Any] = {}
    if case.stop_strings:
        texts = ["".join(texts_by_id[token] for token in row[1:]) for row in probe]
        begins = [(text, rng.randrange(len(text) - 5)) for text in rng.choices(texts, k=2)]
        stops = [text[begin : begin + rng.randint(2, 5)] for text, begin in begins]
        found["stop_strings"] = stops if rng.random() < 0.7 else stops[0]
    if "bad_words_ids" in case.biased:
        found["bad_words_ids"] = [[generated[0]], generated[3:5], [probe[0][4], probe[0][5], probe[0][6]]]
    if "sequence_bias" in case.biased:
        found["sequence_bias"] = [[[generated[1]], -4.0], [probe[0][2:4], -9.0], [[generated[5], generated[6]], 6.0]]
    if "forced_eos_token_id" in case.biased:
        free = [token for token in generated if token not in case.options.get("suppress_tokens", ())]
        found["forced_eos_token_id"] = rng.choice(free or [tiny.special_ids(case.spec).eos])
    if "max_length" in case.options:
        found["max_length"] = inputs[0]["input_ids"].shape[1] + case.options["max_length"]
    some = rng.choices(generated, k=3)
    own = tiny.special_ids(case.spec).eos
    choices = {"one": [own], "first": [some[0]], "several": [own, *some[: rng.randint(1, 3)]], "none": None}
    return PreparedCase(case, model, inputs, found, choices[case.eos])


@contextmanager
def override_generation_config(
    model: PreTrainedModel, eos_token_ids: list[int] | None, options: dict[str, Any] | None = None, pad: str = ""
) -> Iterator[None]:
    """The model's own generation config, changed within the context. Asserts that `generate` does not change it."""
    original = model.generation_config
    model.generation_config = copy.deepcopy(original)
    model.generation_config.eos_token_id = (
        eos_token_ids if eos_token_ids is None or len(eos_token_ids) > 1 else eos_token_ids[0]
    )
    if pad:
        model.generation_config.pad_token_id = eos_token_ids[-1] if eos_token_ids and pad == "eos" else None
    for name, value in (options or {}).items():
        setattr(model.generation_config, name, value)
    before = model.generation_config.to_dict()
    try:
        yield
        assert model.generation_config.to_dict() == before, "the model's generation config was changed"
    finally:
        model.generation_config = original


def _arguments(
    prepared: PreparedCase, inputs: tiny.Inputs, cache: Any, logs: dict[str, adversarial.CallLog], spy: bool
) -> dict[str, Any]:
    """The keyword arguments of one call, with fresh processors, criteria, streamers and logs."""
    case, arguments = prepared.case, dict(inputs)
    options = copy.deepcopy({**case.options, **prepared.output_options})
    if spy:
        options |= {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    if case.where == "config":
        arguments["generation_config"] = GenerationConfig(**options)
    elif case.where == "call" or spy:
        arguments |= options
    if case.stop_strings:
        arguments["tokenizer"] = tiny.build_tokenizer(case.spec)
    if cache is not None:
        arguments[CACHE_ARGUMENT] = cache
    length, name = inputs["input_ids"].shape[1], case.processor
    if name == "known":
        known = (TopKLogitsWarper(4), TemperatureLogitsWarper(0.6), RepetitionPenaltyLogitsProcessor(1.2))
        arguments["logits_processor"] = LogitsProcessorList([known[case.seed % 3]])
    elif name:
        arguments["logits_processor"] = LogitsProcessorList(
            [adversarial.PROCESSORS[name](logs.setdefault(name, adversarial.CallLog()))]
        )
    if case.prefix:
        log = logs.setdefault("prefix", adversarial.CallLog())
        arguments["prefix_allowed_tokens_fn"] = adversarial.PrefixConstraint(
            log, case.spec.vocab, case.prefix == "pure"
        )
    if case.criterion:
        log = logs.setdefault(case.criterion, adversarial.CallLog())
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [adversarial.CRITERIA[case.criterion](log, length, case.seed)]
        )
    if case.streamer:
        streamer = {
            "plain": adversarial.RecordingStreamer,
            "failing": adversarial.FailingStreamer,
            "gambling": adversarial.RngStreamer,
        }[case.streamer]
        arguments["streamer"] = streamer(logs.setdefault("streamer", adversarial.CallLog()))
    return arguments


def clone_cache_tensors(cache: Any) -> tuple[Tensor, ...]:
    return tuple(x.clone() for layer in cache.layers for x in _layer_tensors(layer) if x is not None)


def _active_stream(hidden_states: Any) -> Any:
    """Hidden states [B, N, D] per step and layer; the first stream of models with several (Gemma 3n)."""
    if hidden_states is None:
        return None
    return tuple(tuple(state if state.dim() == 3 else state[0] for state in step) for step in hidden_states)


def _layer_tensors(layer: Any) -> list[Tensor | None]:
    """Keys and values of a cache layer, or its states."""
    if hasattr(layer, "conv_states"):
        return [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [layer.keys, layer.values]


def _call(model: PreTrainedModel, arguments: dict[str, Any], logs: dict[str, adversarial.CallLog]) -> CallOutcome:
    outcome, cache = CallOutcome(), arguments.get(CACHE_ARGUMENT)
    tensors = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    try:
        result = model.generate(**arguments)
    except AssertionError:
        raise
    except Exception as error:
        outcome.error, outcome.traceback = f"{type(error).__name__}: {error}", traceback.format_exc()
    else:
        outcome.type_name = type(result).__name__
        outcome.sequences = result if isinstance(result, Tensor) else result.sequences
        if not isinstance(result, Tensor):
            outcome.tensors = {k: tuple(result[k]) for k in ("scores", "logits") if result.get(k) is not None}
            cache, outcome.hidden_states = result.past_key_values, _active_stream(result.get("hidden_states"))
        if cache is not None:
            outcome.type_name += f" {type(cache).__name__} {[type(layer).__name__ for layer in cache.layers]}"
            outcome.tensors["cache"], outcome.cache_length = clone_cache_tensors(cache), cache.get_seq_length()
            outcome.past_key_values = cache
    changed = [name for name, value in tensors.items() if not torch.equal(value, arguments[name])]
    assert not changed, f"inputs {changed} were modified"
    outcome.rng_state = torch.get_rng_state()
    outcome.logs = {name: log.calls for name, log in logs.items()}
    return outcome


def _next_inputs(prepared: PreparedCase, turn: int, before: CallOutcome | None) -> tuple[tiny.Inputs, Any]:
    """Inputs and cache of a turn; continued conversations build on the outcome before."""
    case = prepared.case
    if turn and case.turns in ("continue", "tail"):
        assert before is not None and before.sequences is not None
        given = tiny.build_next_turn(
            prepared.inputs[0], before.sequences, case.seed, case.spec, hide_pads=case.seed % 3 == 0
        )
        if case.turns == "tail" and before.cache_length:
            given["input_ids"] = given["input_ids"][:, before.cache_length :]
        return given, before.past_key_values
    if case.cache and not (turn and case.turns == "continue"):
        text = prepared.model.config.get_text_config()
        return prepared.inputs[turn], DynamicCache() if case.cache == "bare" else DynamicCache(config=text)
    return prepared.inputs[turn], None


def run_calls(
    prepared: PreparedCase,
    extra_kwargs: Sequence[dict[str, Any]] = ({}, {}),
    return_states: bool = False,
) -> list[CallOutcome]:
    """Run all calls of a case with the model's current `generate`.

    Args:
        prepared: the case.
        extra_kwargs: more keyword arguments of each call.
        return_states: also return hidden states and logits.
    """
    case, outcomes = prepared.case, list[CallOutcome]()
    options = (
        copy.deepcopy({**case.options, **prepared.output_options})
        if case.where == "model" and not return_states
        else None
    )
    with override_generation_config(prepared.model, prepared.eos_token_ids, options, case.pad):
        for turn in range(2 if case.turns else 1):
            before = outcomes[-1] if outcomes else None
            if before is not None and case.turns in ("continue", "tail") and before.past_key_values is None:
                break
            given, cache = _next_inputs(prepared, turn, before)
            logs: dict[str, adversarial.CallLog] = {}
            arguments = _arguments(prepared, given, cache, logs, return_states)
            outcomes.append(_call(prepared.model, {**arguments, **extra_kwargs[turn]}, logs))
    return outcomes


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """One difference; `margin` is the plain model's top-2 margin where the sequences diverge."""

    kind: str
    turn: int
    detail: str
    margin: float | None = None


@dataclass
class CaseResult:
    """The result of a case."""

    case: Case
    differences: list[Difference]
    plain_errors: list[str]
    calls: int
    tokens: int
    stats: dict[str, Any]
    fallback: str
    seconds: float

    def report(self) -> str:
        """The differences of this case, and the command that reproduces them."""
        later = f" --family {self.case.spec.family}" if self.case.spec.family not in FAMILIES else ""
        lines = [f"seed {self.case.seed}: python tests/helpers/fuzz.py --first-seed {self.case.seed} --count 1{later}"]
        lines += [f"  case: {self.case.describe()}"]
        for d in self.differences:
            margin = "" if d.margin is None else f" (plain margin {d.margin:.2e})"
            lines.append(f"  turn {d.turn}, {d.kind}: {d.detail}{margin}")
        return "\n".join(lines)


def tolerance_of(spec: Any) -> float:
    """By how much logits, scores and states of a model with this specification may differ."""
    family = zoo.ROWS.get(getattr(spec, "family", None))
    return RECURRENT_TOLERANCE if family is not None and "recurrent" in family.traits else TOLERANCE


def _compare_tensors(plain: tuple[Tensor, ...], patched: tuple[Tensor, ...], tolerance: float) -> str:
    """How two tuples of tensors differ, or an empty string."""
    if len(plain) != len(patched):
        return f"{len(plain)} against {len(patched)} entries"
    for i, (a, b) in enumerate(zip(plain, patched, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"entry {i}: {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        if not torch.equal(a.isinf(), b.isinf()):
            rows = (a.isinf() != b.isinf()).nonzero()[:3].tolist()
            if not _tied_at_the_cut(a, b, tolerance):
                return f"entry {i}: infinities differ, first at {rows}"
            a, b = (torch.where(a.isinf() == b.isinf(), one, 0.0) for one in (a, b))
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            off = (a - b).abs().nan_to_num(0)
            where = off.flatten(1).amax(1).nonzero().flatten().tolist() if off.ndim > 1 else []
            return f"entry {i}: off by up to {off.max():.2e} in rows {where}"
    return ""


def _tied_at_the_cut(plain: Tensor, patched: Tensor, tolerance: float) -> bool:
    """Whether scores differ only in which of some equal ones is the last that `top_k` keeps."""
    for a, b in zip(plain.flatten(0, -2), patched.flatten(0, -2), strict=True):
        ours, theirs = a[b.isinf() & ~a.isinf()], b[a.isinf() & ~b.isinf()]
        lowest = [one[one.isfinite()].min() for one in (a, b)]
        if len(ours) != len(theirs) or not torch.allclose(
            torch.cat([ours, theirs, lowest[1][None]]), lowest[0], rtol=tolerance, atol=tolerance
        ):
            return False
    return True


def _compare_sequences(a: Tensor, b: Tensor) -> str:
    if a.shape[0] != b.shape[0]:
        return f"{a.shape[0]} against {b.shape[0]} rows"
    length = min(a.shape[1], b.shape[1])
    off = (a[:, :length] != b[:, :length]).nonzero()
    if len(off):
        row, column = min(off.tolist(), key=lambda x: x[1])
        ours, theirs = (x[row, column : column + 8].tolist() for x in (b, a))
        return f"row {row}, column {column} of {a.shape[1]}: {theirs} became {ours}"
    return f"{a.shape[1]} against {b.shape[1]} columns" if a.shape != b.shape else ""


def _compare_logs(a: list[Any], b: list[Any]) -> str:
    if a == b:
        return ""
    if len(a) != len(b):
        return f"{len(a)} calls became {len(b)}"
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"call {first}: {str(a[first])[:300]} became {str(b[first])[:300]}"


def _strip_tensor(error: str) -> str:
    """An error without the tensor that some messages print: with drafts it has a row per node."""
    return error.split("(Tensor of shape")[0]


def compare_outcomes(
    plain: CallOutcome, patched: CallOutcome, turn: int, tolerance: float = TOLERANCE
) -> list[Difference]:
    """Everything in which two outcomes of the same call differ."""
    if _strip_tensor(plain.error) != _strip_tensor(patched.error):
        trace = patched.traceback.strip().splitlines()[-7:] if patched.error else []
        detail = f"{plain.error or 'no error'!r} became {patched.error or 'no error'!r} {trace}"
        return [Difference("error", turn, detail)]
    found = {"type": "" if plain.type_name == patched.type_name else f"{plain.type_name} became {patched.type_name}"}
    if plain.sequences is not None and patched.sequences is not None:
        found["sequences"] = _compare_sequences(plain.sequences, patched.sequences)
    for name in sorted({*plain.tensors, *patched.tensors}):
        found[name] = _compare_tensors(plain.tensors.get(name, ()), patched.tensors.get(name, ()), tolerance)
    if plain.cache_length != patched.cache_length:
        found["cache length"] = f"{plain.cache_length} became {patched.cache_length}"
    for name in sorted({*plain.logs, *patched.logs}):
        found[f"calls of {name}"] = _compare_logs(plain.logs.get(name, []), patched.logs.get(name, []))
    assert plain.rng_state is not None and patched.rng_state is not None
    found["generator state"] = "" if torch.equal(plain.rng_state, patched.rng_state) else "differs afterwards"
    return [Difference(kind, turn, detail) for kind, detail in found.items() if detail]


@contextmanager
def record_margins(margins: list[list[float]]) -> Iterator[None]:
    """Record for every step the margin, in log space, of each row's sampled id over the second."""
    multinomial, argmax = torch.multinomial, torch.argmax

    def watch(chances: Tensor) -> None:
        top = chances.double().topk(2, -1).values
        margins.append((top[..., 0] - top[..., 1]).flatten().tolist())

    def sample(probs: Tensor, num_samples: int, **kwargs: Any) -> Tensor:
        state = torch.get_rng_state()
        noise = torch.empty_like(probs).exponential_(1)
        torch.set_rng_state(state)
        watch((probs / noise).log())
        return multinomial(probs, num_samples, **kwargs)

    def pick(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if scores.ndim == 2:
            watch(scores)
        return argmax(scores, *args, **kwargs)

    torch.multinomial, torch.argmax = sample, pick
    try:
        yield
    finally:
        torch.multinomial, torch.argmax = multinomial, argmax


def _margin(prepared: PreparedCase, turn: int, plain: CallOutcome, patched: CallOutcome) -> float | None:
    """The plain model's margin at the first step at which the sequences of a turn differ. Runs the calls again."""
    assert plain.sequences is not None and patched.sequences is not None
    length = min(plain.sequences.shape[1], patched.sequences.shape[1])
    off = (plain.sequences[:, :length] != patched.sequences[:, :length]).nonzero().tolist()
    if not off:
        return None
    row, column = min(off, key=lambda x: x[1])
    margins: list[list[float]] = []
    torch.manual_seed(prepared.case.seed)
    with record_margins(margins):
        again = run_calls(prepared)[turn]
    assert again.sequences is not None
    step = len(margins) - (again.sequences.shape[1] - column)
    return margins[step][row] if 0 <= step < len(margins) and row < len(margins[step]) else None


def check_hidden_states(prepared: PreparedCase, drafter: adversarial.HiddenStateDrafter) -> list[Difference]:
    """Compare the hidden states and top ids that a drafter received with those of plain calls."""
    torch.manual_seed(prepared.case.seed)
    plain = run_calls(prepared, return_states=True)
    faults = [Difference("hidden states", 0, fault) for fault in drafter.faults]
    tolerance = tolerance_of(prepared.case.spec)
    for entry in drafter.observed:
        if (
            entry.call_index >= len(plain)
            or plain[entry.call_index].error
            or entry.step + 1 >= len(plain[entry.call_index].hidden_states)
        ):
            continue
        sequences = plain[entry.call_index].sequences
        start = sequences.shape[1] - len(plain[entry.call_index].hidden_states)
        if int(sequences[entry.row, start + entry.step]) != entry.token:
            continue  # scored ahead, and cut later
        states, logits = (
            plain[entry.call_index].hidden_states[entry.step + 1],
            plain[entry.call_index].tensors["logits"][entry.step + 1],
        )
        for i, hidden in entry.hidden_states.items():
            off = (states[i][entry.row, -1] - hidden).abs().max()
            if not off < tolerance * max(1.0, float(hidden.abs().max())):
                where = f"row {entry.row}, step {entry.step}, hidden state {i}"
                faults.append(Difference("hidden states", entry.call_index, f"{where}: off {off:.1e}"))
        row = logits[entry.row]
        if not torch.allclose(row[entry.top_ids], row.topk(len(entry.top_ids)).values, atol=tolerance, rtol=tolerance):
            faults.append(
                Difference("top_ids", entry.call_index, f"row {entry.row}, step {entry.step}: {entry.top_ids}")
            )
    call = 0
    for prompt in drafter.prompts:
        while call < len(plain) and not _is_of_call(prompt, plain[call]):  # one of few tokens, which began no drafter
            call += 1
        if call < len(plain):
            faults += [Difference("prompt", call, fault) for fault in _prompt_faults(prepared, prompt, plain[call])]
        call += 1
    return faults[:5]


def _is_of_call(prompt: Prompt, plain: CallOutcome) -> bool:
    """Whether a prompt has the length of a call's; True where the call shows none."""
    if plain.error or plain.hidden_states is None or plain.sequences is None:
        return True
    return prompt.input_ids.shape[1] == plain.sequences.shape[1] - len(plain.hidden_states)


def _prompt_faults(prepared: PreparedCase, prompt: Prompt, plain: CallOutcome) -> Iterator[str]:
    special, ids = tiny.special_ids(prepared.case.spec), prompt.input_ids
    placeholders = (
        {special.image, prepared.model.config.video_token_id}
        if hasattr(prepared.model.config, "video_token_id")
        else {special.image}
    )
    if prompt.vocab_size != prepared.case.spec.vocab:
        yield f"vocab_size {prompt.vocab_size} instead of {prepared.case.spec.vocab}"
    if zoo.FAMILIES[prepared.case.spec.family].images is None:
        placeholders = set()
    pads = set() if prepared.case.pad or special.pad in (prepared.eos_token_ids or ()) else {special.pad}
    if not placeholders | pads <= prompt.banned_ids:
        yield f"banned {sorted(prompt.banned_ids)} misses placeholders or pad"
    if (
        prompt.attention_mask.shape != ids.shape
        or prompt.visual_mask.shape != ids.shape
        or prompt.position_ids.shape[-1] != ids.shape[1]
    ):
        shapes = [list(x.shape) for x in (ids, prompt.attention_mask, prompt.visual_mask, prompt.position_ids)]
        yield f"shapes of ids, padding, visual, positions do not go together: {shapes}"
    if not torch.equal(prompt.visual_mask, torch.isin(ids, torch.tensor(sorted(placeholders)))):
        yield "visual is not where the placeholders are"
    if prompt.grids and not torch.equal(_grid_mask(prompt), prompt.visual_mask):
        yield "segments do not cover the visual tokens exactly"
    if plain.hidden_states is None:
        return
    bound, is_summed = tolerance_of(prepared.case.spec), find_adapter(prepared.model).adds_between_layers
    for i, hidden in prompt.hidden_states.items():
        state = plain.hidden_states[0][i]
        keep = prompt.attention_mask[:, -state.shape[1] :]  # a continued conversation reads only what is new
        if is_summed:  # what a layer receives has visual features added: `test_deepstack_states`
            keep = keep & ~prompt.visual_mask[:, -state.shape[1] :]
        if state.shape != hidden.shape:
            yield f"hidden state {i} of the prompt has shape {list(hidden.shape)} instead of {list(state.shape)}"
        elif (state - hidden)[keep].abs().max() > bound * max(1.0, float(hidden.abs().max())):
            yield f"hidden state {i} of the prompt is off by {(state - hidden)[keep].abs().max():.1e}"


def _grid_mask(prompt: Prompt) -> Tensor:
    covered = torch.zeros_like(prompt.visual_mask, dtype=torch.long)
    for segment in prompt.grids:
        covered[segment.row, list(segment.token_indices)] += 1
    return covered == 1


# --- running ----------------------------------------------------------------------------------------------------------


def _build_drafter(case: Case, answers: list[Tensor]) -> Any:
    if case.drafter in (*BUILT_IN_DRAFTERS, "arbitrated", "self", "quantized"):
        return case.drafter
    if case.drafter == "model":  # fewer ids than the target, as many, or more
        return ModelDrafter(HFDraftModel(build_draft_model(case.spec, case.seed, case.spec.vocab + case.seed % 3 - 1)))
    if case.drafter == "model-vision":
        draft = tiny.build_model(replace(case.spec, layers=1 + case.seed % 2, seed=case.seed))
        return VisionModelDrafter(HFDraftModel(draft))
    if case.drafter == "model-retokenizing":
        source = HFDraftModel(build_draft_model(case.spec, case.seed, 269), train_tokenizer(10))
        return RetokenizingDrafter(source, train_tokenizer(0))
    if case.drafter == "assistant":
        return assistants.build_assistant(tiny.build_model(case.spec), case.seed, centroids=bool(case.seed % 2))
    if case.drafter == "mtp":
        return own_heads.build_drafter(case.spec, case.seed)
    if case.drafter.startswith("head-"):
        return heads.build_drafter(case.drafter.removeprefix("head-"), case.spec, case.seed)
    if case.drafter == "tapper":
        layers = case.spec.layers
        return adversarial.HiddenStateDrafter(
            case.seed, answers, ((0, 1, layers), (layers,), (0,), (1, layers))[case.seed % 4]
        )
    return adversarial.DRAFTERS[case.drafter](case.seed, answers)


def _per_call_options(case: Case, answers: list[Tensor], prepared: PreparedCase) -> list[dict[str, Any]]:
    """The `mmspec=` argument of each call, if the case has one."""
    options: list[dict[str, Any]] = [{}, {}]
    if (
        case.override == "reference"
        and case.drafter in BUILT_IN_DRAFTERS
        and len(answers)
        and "num_return_sequences" not in case.options
    ):
        options[0] = {"mmspec": {"reference_ids": answers[0].tolist()}}
    elif case.override == "drafter":
        options[case.seed % 2] = {"mmspec": {"drafter": adversarial.MalformedDrafter(case.seed, answers)}}
    elif case.override == "deterministic":
        options = [{"mmspec": {"deterministic": True}}] * 2
    elif case.override == "enabled":
        options[case.seed % 2] = {"mmspec": {"enabled": bool(case.seed % 4 < 2)}}
    return options


_PASSED: dict[tuple[Any, ...], SelfTestResult] = {}


def _judge_kind(case: Case, adapter: ModelAdapter, processor: Any = None) -> SelfTestResult:
    """`judge`, for seven of eight cases once for each kind of model: the self-test takes a quarter of a case's time."""
    spec = case.spec
    kind = type(adapter.model), spec.text, spec.attention, spec.window > 0
    if case.seed % 8 == 0 or kind not in _PASSED:
        result = judge(adapter, processor)
        if not result.passed:
            return result
        _PASSED[kind] = result
    return _PASSED[kind]


@contextmanager
def patch_model(model: PreTrainedModel, *args: Any, **options: Any) -> Iterator[None]:
    """Context in which the model is patched."""
    import mmspec

    own = set(model.__dict__)
    mmspec.patch(model, *args, **options)
    try:
        yield
    finally:
        mmspec.unpatch(model)
    assert not mmspec.is_patched(model) and "generate" not in model.__dict__ and set(model.__dict__) == own, (
        f"unpatch left {set(model.__dict__) ^ own} behind"
    )


def _run_patched(
    case: Case, prepared: PreparedCase, plain: list[CallOutcome]
) -> tuple[list[CallOutcome], Any, dict[str, Any]]:
    import mmspec

    answers = [outcome.sequences for outcome in plain if outcome.sequences is not None]
    drafter = _build_drafter(case, answers)
    if case.seeded == "before":
        torch.manual_seed(case.seed)
    options = {"deterministic": case.deterministic, "tree_size": case.nodes}
    with (
        mock.patch("mmspec.fallback.judge", partial(_judge_kind, case)),
        patch_model(prepared.model, drafter, backend="auto" if case.compiled else "torch", **options),
    ):
        if case.seeded == "after":
            torch.manual_seed(case.seed)
        if case.override == "disabled":
            with mmspec.disabled():
                run_calls(prepared)
            torch.manual_seed(case.seed)
        outcomes = run_calls(prepared, _per_call_options(case, answers, prepared))
        stats = mmspec.stats(prepared.model).as_dict()
    return outcomes, drafter, stats


def run_case(case: Case, identity: bool = False) -> CaseResult:
    """Run a case on the plain model, then on the same model patched, and compare. `identity` leaves out the patch."""
    start_time = time.perf_counter()
    prepared = prepare_case(case)
    torch.manual_seed(case.seed)
    plain = run_calls(prepared)
    drafter: Any = None
    stats: dict[str, Any] = {}
    if identity:
        torch.manual_seed(case.seed)
        outcomes = run_calls(prepared)
    else:
        outcomes, drafter, stats = _run_patched(case, prepared, plain)
    differences = _find_differences(case, prepared, plain, outcomes)
    if isinstance(drafter, adversarial.HiddenStateDrafter) and not differences:
        differences += check_hidden_states(prepared, drafter)
    spent = time.perf_counter() - start_time
    errors = [outcome.error for outcome in plain if outcome.error]
    tokens = sum(
        x.sequences[:, prepared.inputs[0]["input_ids"].shape[1] :].numel() for x in plain if x.sequences is not None
    )
    return CaseResult(
        case, differences, errors, len(plain), tokens, stats, str(stats.get("fallback_reason") or ""), spent
    )


def _find_differences(
    case: Case, prepared: PreparedCase, plain: list[CallOutcome], outcomes: list[CallOutcome]
) -> list[Difference]:
    differences: list[Difference] = []
    for turn, (a, b) in enumerate(zip(plain, outcomes, strict=False)):
        found = compare_outcomes(a, b, turn, tolerance_of(case.spec))
        for difference in found:
            if difference.kind == "sequences":
                difference.margin = _margin(prepared, turn, a, b)
        differences += found
        if found or a.error:
            break  # what follows builds on what differs, or on a generator state that nobody promised
    return differences


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"the case did not end within {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run_seed(
    seed: int, identity: bool = False, timeout_s: int = 120, family: str = "", drafter: str = ""
) -> CaseResult:
    """`run_case(draw_case(seed, family))` with a time limit; an exception becomes a difference.

    With a `drafter`, of whatever seed, trees have 8 nodes unless the case fixes another size.
    """
    case = draw_case(seed, family)
    if drafter:
        case = replace(case, drafter=drafter, nodes=case.nodes or 8, override="")
    try:
        with _time_limit(timeout_s), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="transformers")
            return run_case(case, identity)
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()[-6:]
        found = Difference("crash", 0, f"{type(error).__name__}: {error} {lines}")
        return CaseResult(case, [found], [], 0, 0, {}, "", 0.0)


def init_worker() -> None:
    """One thread, only errors from transformers, and no measured costs of earlier processes."""
    os.environ["MMSPEC_COST_CACHE"] = "0"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def summarize(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Counts over all cases, by family, drafter, mode, batch and so on, and sums per drafter."""

    def count(key: Callable[[CaseResult], str]) -> dict[str, str]:
        total, bad = Counter(map(key, results)), Counter(key(r) for r in results if r.differences)
        return {name: f"{total[name] - bad[name]}/{total[name]}" for name in sorted(total)}

    drafted: dict[str, list[int]] = {}
    for r in results:
        sums = drafted.setdefault(r.case.drafter, [0, 0, 0])
        for i, name in enumerate(("rounds", "num_draft_tokens", "num_accepted_tokens")):
            sums[i] += int(r.stats.get(name) or 0)
    return {
        "cases": len(results),
        "identical": sum(not r.differences for r in results),
        "calls": sum(r.calls for r in results),
        "tokens": sum(r.tokens for r in results),
        "plain errors": dict(Counter(e[:80] for r in results for e in r.plain_errors)),
        "by family": count(lambda r: r.case.spec.family + (" window" if r.case.spec.window else "")),
        "by drafter": count(lambda r: r.case.drafter),
        "by mode": count(lambda r: "sampled" if r.case.options["do_sample"] else "greedy"),
        "by batch": count(lambda r: str(r.case.batch)),
        "by padding": count(lambda r: r.case.padding),
        "by turns": count(lambda r: r.case.turns or "single"),
        "by dtype": count(lambda r: r.case.spec.dtype),
        "by attention": count(lambda r: r.case.spec.attention),
        "by pad": count(lambda r: r.case.pad),
        "by streamer": count(lambda r: r.case.streamer),
        "by processor": count(lambda r: r.case.processor),
        "by criterion": count(lambda r: r.case.criterion),
        "fallbacks": dict(Counter(r.fallback for r in results)),
        "kinds": dict(Counter(d.kind for r in results for d in r.differences)),
        "rounds, drafted, accepted": drafted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--family", default="", help="of all cases; without it each seed chooses among the first four")
    parser.add_argument(
        "--drafter", default="", choices=("", *WHOLE_MODEL_DRAFTERS, "mtp", "assistant"), help="of all cases"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", help="file to write the summary and the failures to")
    parser.add_argument("--identity", action="store_true", help="no patch: checks the cases themselves")
    parser.add_argument("--every", type=int, default=100, help="cases between two lines of progress")
    args = parser.parse_args(argv)
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    seeds = range(args.first_seed, args.first_seed + args.count)
    results: list[CaseResult] = []
    with get_context("fork").Pool(args.jobs, initializer=init_worker) as pool:
        run = partial(run_seed, identity=args.identity, family=args.family, drafter=args.drafter)
        for result in pool.imap(run, seeds, chunksize=4):
            results.append(result)
            if result.differences:
                print(result.report(), flush=True)
            if len(results) % args.every == 0:
                failed = sum(bool(r.differences) for r in results)
                print(f"{len(results)} of {args.count} cases, {failed} failed", file=sys.stderr, flush=True)
    totals = summarize(results)
    print(json.dumps(totals, indent=1))
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "first_seed": args.first_seed}
        failures = [{"seed": r.case.seed, "report": r.report()} for r in results if r.differences]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"versions": versions, "summary": totals, "failures": failures}, file, indent=1)
    return int(totals["identical"] < totals["cases"])


if __name__ == "__main__":
    raise SystemExit(main())
