"""The target of a call, and its prefill: the forward over the prompt that transformers prepared."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor

from mmspec.backend import find_recorder, use_prompt_kernels
from mmspec.call import Call, FallbackRequired
from mmspec.engine.draws import DrawsRandomNumbers, ForbidDraws
from mmspec.engine.prefix import Prefix
from mmspec.targets.agreement import equal_logits
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import Lane, UnrecordableCallError
from mmspec.targets.module_state import DRAWS_RANDOM_NUMBERS
from mmspec.targets.recurrent import target_class
from mmspec.targets.selftest import own_rounding

Prefilled = tuple[HFTarget, Tensor, dict[int, Tensor]]
"""(the target with the prompt in its cache, logits [B, V] of the last position, {index: [B, L, D]} hidden states that
the drafter requires)"""


def prefill(call: Call, stack: ExitStack) -> Prefilled:
    """Run the prompt of a call by a target that it chooses: one that replays recorded rounds if that is possible.

    Args:
        call: the call.
        stack: holds what the target needs until the call ends.

    Raises:
        FallbackRequired: transformers must decode this call.
    """
    plan = call.plan
    batch, length = call.input_ids.shape[0], call.input_ids.shape[1] + call.max_new_tokens
    recorder = find_recorder(call, length)
    with use_prompt_kernels(plan):
        lane = stack.enter_context(plan.lanes.lease(plan.revision, batch, length, recorder))
        try:
            return _prefill(call, lane)
        except (UnrecordableCallError, torch.OutOfMemoryError) as error:
            if lane is None:
                raise
            plan.lanes.fail(error)
            return _prefill(call, None)


def _prefill(call: Call, lane: Lane | None) -> Prefilled:
    target, use, repeats = _build_target(call, lane), call.plan.prefix_use, call.plan.num_return_sequences
    prefix = None if use is None or use.prefix is None else use.prefix.repeated(repeats)
    try:
        prefilled = _watched_prefill(call, target, None if use is None or not use.is_known else prefix)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if not target.user_cache.get_seq_length():
            raise
        # keys and values of another model
        raise FallbackRequired(f"past_key_values that the forward rejects ({type(error).__name__})") from error
    if use is None or prefix is None:
        return prefilled
    if use.is_known:
        seen = use.rows.tokens[:, : prefix.length, 1]
        call.stats.reused_positions = int(seen.sum()) * repeats
    else:
        serves = _serves(call, prefix, prefilled)
        use.store.judge(use.has_media, serves, use.revision)
    return prefilled


def _watched_prefill(call: Call, target: HFTarget, prefix: Prefix | None) -> Prefilled:
    """The prefill, which ends where it draws random numbers."""
    indices = call.plan.config.drafter.requirements.hidden_state_indices
    key, quiet = _watch_key(call), call.plan.revision.cached("prompts without draws", set[Hashable])
    if key in quiet:
        return target, *target.prefill(indices, prefix)
    with ForbidDraws() as watch, suppress(DrawsRandomNumbers):
        logits, hidden_states = target.prefill(indices, prefix)
    if watch.has_drawn:
        raise FallbackRequired(DRAWS_RANDOM_NUMBERS)
    if key is not None:
        quiet.add(key)
    return target, logits, hidden_states


def _serves(call: Call, prefix: Prefix, whole: Prefilled) -> bool:
    """Whether a forward behind the prefix gives what the forward over the whole prompt gave, up to rounding."""
    plan, (_, expected_logits, expected_states) = call.plan, whole
    dtype = plan.adapter.model.dtype
    try:
        logits, states = _build_target(call, None).prefill(tuple(expected_states), prefix)
        pairs = [(expected_logits, logits), *((expected_states[index], states[index]) for index in states)]
        rounding = partial(own_rounding, plan.adapter, plan.revision)
        agree = all(equal_logits(expected.float(), found.float(), dtype, rounding) for expected, found in pairs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # a model that cannot go on
        agree = False
    if not agree:
        plan.warn("reuse_prefix has no effect: behind a prefix this model computes other logits than in one forward")
    return agree


def _watch_key(call: Call) -> Hashable | None:
    """The kind of prefill of which one without a draw tells of the next; None where user code runs in it.

    Library modules, those of the vision tower included, draw by their class, their mode and the kinds of inputs.
    """
    modules = call.plan.modules
    if modules.has_user_code:
        return None
    return modules.kinds, frozenset(name for name, value in call.model_kwargs.items() if value is not None)


def _build_target(call: Call, lane: Lane | None) -> HFTarget:
    plan = call.plan
    return target_class(plan.adapter)(
        plan.adapter,
        call.input_ids,
        call.model_kwargs,
        call.generation_config,
        call.max_new_tokens,
        inference_mode=plan.modules.can_use_inference_mode,
        revision=plan.revision,
        cache_is_observed=call.runs_user_code,
        lane=lane,
    )
