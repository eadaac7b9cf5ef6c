"""Run the same call on the plain and on the patched model, and compare all outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import Prompt

Kwargs = dict[str, Any]


@lru_cache(maxsize=32)
def build_cached_model(spec: tiny.ModelSpec) -> PreTrainedModel:
    """A model, built once per spec."""
    return tiny.build_model(spec)


def get_model(family: str = "llava", **changes: Any) -> PreTrainedModel:
    """A model shared between tests; a test must undo its changes."""
    return build_cached_model(tiny.ModelSpec(family, **changes))


def generate_plain(model: PreTrainedModel, inputs: tiny.Inputs, seed: int = 0, /, **kwargs: Any) -> Any:
    """The output of `generate` after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return model.generate(**inputs, **kwargs)


def generate_tokens(model: PreTrainedModel, inputs: tiny.Inputs, **kwargs: Any) -> list[list[int]]:
    """Rows of tokens that the plain model generates with no eos."""
    with fuzz.override_generation_config(model, None):
        return generate_plain(model, inputs, **kwargs)[:, inputs["input_ids"].shape[1] :].tolist()


@contextmanager
def speculate(model: PreTrainedModel, drafter: Any = "oracle", reference: Any = None, **options: Any) -> Iterator[Any]:
    """Context with the model patched; adversarial drafters know `reference`, the plain output."""
    answers = [] if reference is None else [reference if isinstance(reference, Tensor) else reference.sequences]
    if drafter in adversarial.DRAFTERS:
        drafter = adversarial.DRAFTERS[drafter](1, answers)
    options.setdefault("tree_size", 8)
    with fuzz.patch_model(model, drafter, **options):
        yield drafter


def assert_parity(
    model: PreTrainedModel,
    inputs: tiny.Inputs,
    drafter: Any = "oracle",
    seed: int = 0,
    patch_options: Kwargs | None = None,
    **kwargs: Any,
) -> mmspec.Stats:
    """Assert that plain and patched agree in tokens, scores, cache and generator state; returns the statistics.

    `drafter` may be a function from the plain sequences to a drafter.
    """
    plain = generate_plain(model, inputs, seed, **call_factories(kwargs))
    state = torch.get_rng_state()
    if callable(drafter):
        drafter = drafter(plain if isinstance(plain, Tensor) else plain.sequences)
    with speculate(model, drafter, plain, **(patch_options or {})):
        mine = generate_plain(model, inputs, seed, **call_factories(kwargs))
        assert torch.equal(torch.get_rng_state(), state), "the generator state differs"
        stats = mmspec.stats(model, last=True)
    outcomes = [build_outcome(result, state) for result in (plain, mine)]
    differences = fuzz.compare_outcomes(*outcomes, 0, fuzz.tolerance_of(getattr(model, "tiny_spec", None)))
    assert not differences, differences
    return stats


FACTORY_ARGUMENTS = ("logits_processor", "stopping_criteria", CACHE_ARGUMENT, "prefix_allowed_tokens_fn")
"""Arguments that may be passed as a factory, because they are stateful."""


def call_factories(kwargs: Kwargs) -> Kwargs:
    return {k: v() if callable(v) and k in FACTORY_ARGUMENTS else v for k, v in kwargs.items()}


def build_outcome(result: Any, state: Tensor) -> fuzz.CallOutcome:
    outcome = fuzz.CallOutcome(type_name=type(result).__name__, rng_state=state)
    outcome.sequences = result if isinstance(result, Tensor) else result.sequences
    if not isinstance(result, Tensor):
        outcome.tensors = {k: tuple(result[k]) for k in ("scores", "logits") if result.get(k) is not None}
        if (cache := result.past_key_values) is not None:
            outcome.tensors["cache"], outcome.cache_length = fuzz.clone_cache_tensors(cache), cache.get_seq_length()
    return outcome


def get_prompt(model: PreTrainedModel, inputs: tiny.Inputs, compressor: Any = None, **options: Any) -> Prompt:
    """The prompt that a drafter receives in a call."""
    recorder = adversarial.PromptRecorder()
    with fuzz.patch_model(model, drafter=recorder, compressor=compressor):
        model.generate(**inputs, max_new_tokens=2, do_sample=bool(options), **options)
        assert not mmspec.stats(model).fallback_calls
    return recorder.prompts[0]


@contextmanager
def count_vision_calls(model: PreTrainedModel) -> Iterator[list[int]]:
    """A list that grows by one whenever the vision tower runs."""
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    calls: list[int] = []
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        hook.remove()


ALL_OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
GREEDY: Kwargs = {"do_sample": False, "max_new_tokens": 20}
SAMPLED: Kwargs = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 20}
MODES = pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)
