"""The target of a call, and its prefill: the forward over the prompt that transformers prepared."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from mmspec.backend import find_recorder, use_prompt_linear_kernels
from mmspec.call import CallContext, FallbackRequired, PreparedInputs
from mmspec.engine.criteria import is_user_code, max_steps
from mmspec.engine.draws import DrawsRandomNumbers, ForbidDraws
from mmspec.engine.prefix import Prefix
from mmspec.engine.sampler import unknown
from mmspec.targets.agreement import equal_logits
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import Lane, UnrecordableCallError
from mmspec.targets.module_state import DRAWS_RANDOM_NUMBERS
from mmspec.targets.recurrent import target_class
from mmspec.targets.selftest import own_rounding


@dataclass
class Prefilled:
    """The target after its forward over the prompt.

    Attributes:
        target: the target, with the prompt in its cache.
        logits: [B, V] of the last position.
        hidden_states: {index: [B, L, D]}, those that the drafter requires.
    """

    target: HFTarget
    logits: Tensor
    hidden_states: dict[int, Tensor]


def prefill(call: CallContext, inputs: PreparedInputs, stack: ExitStack) -> Prefilled:
    """Run the prompt of a call by a target that it chooses: one that replays recorded rounds if that is possible.

    Args:
        call: the call.
        inputs: what transformers prepared.
        stack: holds what the target needs until the call ends.

    Raises:
        FallbackRequired: transformers must decode this call.
    """
    length = inputs.input_ids.shape[1] + max_new_tokens(inputs)
    recorder = find_recorder(call, inputs, length)
    with use_prompt_linear_kernels(call):
        lane = stack.enter_context(call.lanes.lease(call.revision, len(inputs.input_ids), length, recorder))
        try:
            return _prefill(call, inputs, lane)
        except (UnrecordableCallError, torch.OutOfMemoryError) as error:
            if lane is None:
                raise
            call.lanes.fail(error)
            return _prefill(call, inputs, None)


def _prefill(call: CallContext, inputs: PreparedInputs, lane: Lane | None) -> Prefilled:
    target, use = _build_target(call, inputs, lane), call.prefix_use
    if use is None or use.prefix is None:
        return _watched_prefill(call, inputs, target, None)
    prefix = use.prefix.repeated(call.num_return_sequences)
    prefilled = _watched_prefill(call, inputs, target, prefix if use.is_known else None)
    if use.is_known:
        seen = use.rows.tokens[:, : prefix.length, 1]
        call.stats.reused_positions = int(seen.sum()) * call.num_return_sequences
    else:
        use.store.judge(use.has_media, _serves(call, inputs, prefix, prefilled), use.revision)
    return prefilled


def _watched_prefill(call: CallContext, inputs: PreparedInputs, target: HFTarget, prefix: Prefix | None) -> Prefilled:
    """The prefill, which ends where it draws random numbers."""
    indices = call.spec_config.drafter.requirements.hidden_state_indices
    key, quiet = _watch_key(call, inputs), call.revision.cached("prompts without draws", set[Hashable])
    if key in quiet:
        return Prefilled(target, *target.prefill(indices, prefix))
    with ForbidDraws() as watch, suppress(DrawsRandomNumbers):
        logits, hidden_states = target.prefill(indices, prefix)
    if watch.has_drawn:
        raise FallbackRequired(DRAWS_RANDOM_NUMBERS)
    if key is not None:
        quiet.add(key)
    return Prefilled(target, logits, hidden_states)


def _serves(call: CallContext, inputs: PreparedInputs, prefix: Prefix, whole: Prefilled) -> bool:
    """Whether a forward behind the prefix gives what the forward over the whole prompt gave, up to rounding."""
    dtype = call.adapter.model.dtype
    try:
        logits, states = _build_target(call, inputs, None).prefill(tuple(whole.hidden_states), prefix)
        pairs = [(whole.logits, logits), *((whole.hidden_states[index], states[index]) for index in states)]
        rounding = partial(own_rounding, call.adapter, call.revision)
        agree = all(equal_logits(expected.float(), found.float(), dtype, rounding) for expected, found in pairs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # a model that cannot go on
        agree = False
    if not agree:
        call.warn("reuse_prefix has no effect: behind a prefix this model computes other logits than in one forward")
    return agree


def _watch_key(call: CallContext, inputs: PreparedInputs) -> Hashable | None:
    """The kind of prefill of which one without a draw tells of the next; None where user code runs in it.

    Library modules, those of the vision tower included, draw by their class, their mode and the kinds of inputs.
    """
    if call.modules.has_user_code:
        return None
    return call.modules.kinds, frozenset(name for name, value in inputs.model_kwargs.items() if value is not None)


def _build_target(call: CallContext, inputs: PreparedInputs, lane: Lane | None) -> HFTarget:
    runs_user_code = bool(
        call.streamer is not None or unknown(inputs.processors) or any(map(is_user_code, inputs.criteria))
    )
    arguments = call.adapter, inputs.input_ids, inputs.model_kwargs, inputs.generation_config, max_new_tokens(inputs)
    options: dict[str, Any] = {
        "inference_mode": call.modules.can_use_inference_mode,
        "revision": call.revision,
        "cache_is_observed": runs_user_code,
    }
    target = target_class(call.adapter)(*arguments, **options, lane=lane)
    if (reason := target.length_reason()) is not None:
        raise FallbackRequired(reason)
    return target


def max_new_tokens(inputs: PreparedInputs) -> int:
    """Largest number of new tokens of any row, at least 1."""
    lengths = [criterion.max_length for criterion in inputs.criteria if type(criterion) is MaxLengthCriteria]
    if inputs.generation_config.max_length is not None:
        lengths.append(inputs.generation_config.max_length)
    return max_steps(lengths, inputs.input_ids.shape[1])
