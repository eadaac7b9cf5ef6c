"""Run the same call on the plain and on the patched model, and compare all outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
    reset: Callable[[], Any] = lambda: None,
    **kwargs: Any,
) -> mmspec.Stats:
    """Assert that plain and patched agree in tokens, scores, cache and generators' states; returns the statistics.

    `drafter` may be a function from the plain sequences to a drafter, and `reset` put the state of user code back.
    """
    reset()
    random.seed(seed)
    plain = generate_plain(model, inputs, seed, **call_factories(kwargs))
    state, python_state = torch.get_rng_state(), random.getstate()
    reset()
    random.seed(seed)
    if callable(drafter):
        drafter = drafter(plain if isinstance(plain, Tensor) else plain.sequences)
    with speculate(model, drafter, plain, **(patch_options or {})):
        mine = generate_plain(model, inputs, seed, **call_factories(kwargs))
        assert torch.equal(torch.get_rng_state(), state), "the generator state differs"
        assert random.getstate() == python_state, "Python's generator differs"
        stats = mmspec.stats(model, last=True)
    outcomes = [build_outcome(result, state) for result in (plain, mine)]
    differences = fuzz.compare_outcomes(*outcomes, 0, fuzz.tolerance_of(getattr(model, "tiny_spec", None)))
    assert not differences, differences
    return stats


def base_of(model: Any) -> PreTrainedModel:
    """The model in a wrapper of PEFT; `PeftMixedModel` has no `get_base_model`."""
    if isinstance(model, PreTrainedModel):
        return model
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


def check(
    model: Any,
    reset: Callable[[], Any] = lambda: None,
    prepare: Callable[[Tensor], Tensor] = lambda ids: ids,
    **options: Any,
) -> list[mmspec.Stats]:
    """`assert_parity` of a model or wrapper, greedy and sampled, whatever is drafted: the statistics.

    `prepare` changes the ids of the prompt.
    """
    inputs = tiny.build_inputs(base_of(model), 27, 2, images=[1, 1])
    inputs["input_ids"] = prepare(inputs["input_ids"])
    return [
        assert_parity(model, inputs, adversarial.BranchingDrafter(1), 2, reset=reset, **mode, **options)
        for mode in (GREEDY, SAMPLED)
    ]


def drafted(found: list[mmspec.Stats]) -> None:
    """Assert that no call fell back, and that trees were scored."""
    for stats in found:
        assert not stats.fallback_reason and stats.num_draft_tokens > 0, stats.fallback_reason


def fell_back(found: list[mmspec.Stats], *names: str) -> None:
    """Assert that transformers decoded all calls, for a reason with these names."""
    for stats in found:
        assert stats.fallback_reason and stats.fallback_calls == 1 and stats.num_draft_tokens == 0
        assert all(name in stats.fallback_reason for name in names), stats.fallback_reason


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
