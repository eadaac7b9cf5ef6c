"""The choice of a call's target, and its prefill: the forward over the prompt that transformers prepared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from mmspec.call import CallContext, FallbackRequired, PreparedInputs
from mmspec.control.device_check import DEVICE_CHECKS
from mmspec.engine.criteria import UNLIMITED_STEPS, is_user_code
from mmspec.engine.draws import DrawsRandomNumbers, ForbidDraws
from mmspec.engine.graph import Recorder
from mmspec.engine.prefix import Prefix
from mmspec.engine.sampler import unknown
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.agreement import equal_logits
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import AUTO_DEVICE_TYPES, Lane, UnrecordableCallError, recorder_for
from mmspec.targets.module_state import DRAWS_RANDOM_NUMBERS
from mmspec.targets.recurrent import target_class


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


@contextmanager
def prefill(call: CallContext, inputs: PreparedInputs) -> Iterator[Prefilled]:
    """Context with the target of a call after its prefill: one that replays recorded rounds if that is possible.

    Raises:
        FallbackRequired: transformers must decode this call.
    """
    length = inputs.input_ids.shape[1] + max_new_tokens(inputs)
    recorder = _find_recorder(call, inputs, length)
    with call.lanes.lease(call.adapter, len(inputs.input_ids), length, recorder) as lane:
        try:
            prefilled = _prefill(call, inputs, lane)
        except (UnrecordableCallError, torch.OutOfMemoryError) as error:
            if lane is None:
                raise
            call.lanes.fail(error)
            prefilled = _prefill(call, inputs, None)
        yield prefilled


def _find_recorder(call: CallContext, inputs: PreparedInputs, max_length: int) -> Callable[[], Recorder] | None:
    """Creates the recorder of this call; None if it is not recorded. With `backend="recorded"` says why not."""
    config, device = call.spec_config, call.adapter.model.device
    recorder = call.lanes.recorder or recorder_for(device, config.backend)
    if recorder is None and config.backend != "recorded":
        return None
    if (reason := _reason_against_recording(call, inputs, max_length, recorder)) is not None:
        if config.backend == "recorded":
            call.warn(f"backend='recorded': a call runs eager ({reason})")
        return None
    if config.backend == "auto" and device.type in AUTO_DEVICE_TYPES:
        # Recording begins with a verdict, in the middle of a process, and rounds half precision differently.
        return recorder if not config.deterministic and DEVICE_CHECKS.passed(device) else None
    return recorder


def _reason_against_recording(
    call: CallContext, inputs: PreparedInputs, max_length: int, recorder: Callable[[], Recorder] | None
) -> str | None:
    """Why a call is not recorded, or None."""
    if recorder is None:
        return f"nothing records on {call.adapter.model.device}"
    if call.spec_config.drafter.requirements.layer_subsets:  # a recorded round runs all layers
        return "the drafter runs some of the model's layers"
    return call.lanes.reason(call.adapter, call.scanned_modules(), inputs.model_kwargs[CACHE_ARGUMENT], max_length)


def _prefill(call: CallContext, inputs: PreparedInputs, lane: Lane | None) -> Prefilled:
    target = _build_target(call, inputs, lane)
    indices = call.spec_config.drafter.requirements.hidden_state_indices
    key = _watch_key(call, inputs)
    use = call.prefix_use
    prefix = use.prefix.repeated(call.num_return_sequences) if use is not None and use.prefix is not None else None
    known = prefix if use is not None and use.is_known else None
    if key in call.quiet_states:
        prefilled = Prefilled(target, *target.prefill(indices, known))
        if prefix is not None:
            _use_prefix(call, inputs, prefix, prefilled)
        return prefilled
    with ForbidDraws() as watch, suppress(DrawsRandomNumbers):
        logits, hidden_states = target.prefill(indices, known)
    if watch.has_drawn:
        raise FallbackRequired(DRAWS_RANDOM_NUMBERS)
    if key is not None:
        call.quiet_states.add(key)
    prefilled = Prefilled(target, logits, hidden_states)
    if prefix is not None:
        _use_prefix(call, inputs, prefix, prefilled)
    return prefilled


def _use_prefix(call: CallContext, inputs: PreparedInputs, prefix: Prefix, prefilled: Prefilled) -> None:
    """Count the positions of a prefix that was used. One that is not known to serve was not: try it beside."""
    use = call.prefix_use
    assert use is not None
    if use.is_known:
        call.stats.reused_positions += (prefix.length - max(use.rows.padding)) * len(inputs.input_ids)
        return
    dtype = call.adapter.model.dtype
    try:
        logits, states = _build_target(call, inputs, None).prefill(tuple(prefilled.hidden_states), prefix)
        pairs = [(prefilled.logits, logits), *((prefilled.hidden_states[index], states[index]) for index in states)]
        agree = all(equal_logits(whole.float(), part.float(), dtype) for whole, part in pairs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # a model that cannot go on
        agree = False
    use.store.verdicts[prefix.needs_media] = agree
    if not agree:
        call.warn("reuse_prefix: the model does not read its prompt causally, so each prompt is computed as a whole")


def _watch_key(call: CallContext, inputs: PreparedInputs) -> Hashable | None:
    """The state of the model in which one prefill without a draw tells of the next; None where user code runs in it.

    Library modules draw in a forward by their class, their mode and the kinds of inputs.
    """
    modules, adapter = call.scanned_modules(), call.adapter
    if modules.has_user_code:
        return None
    given = tuple(sorted(name for name, value in inputs.model_kwargs.items() if value is not None))
    return modules.kinds, given, adapter.model.device, adapter.model.dtype, adapter.attention


def _build_target(call: CallContext, inputs: PreparedInputs, lane: Lane | None) -> HFTarget:
    modules = call.modules
    assert modules is not None
    runs_user_code = bool(
        call.streamer is not None or unknown(inputs.processors) or any(map(is_user_code, inputs.criteria))
    )
    arguments = call.adapter, inputs.input_ids, inputs.model_kwargs, inputs.generation_config, max_new_tokens(inputs)
    options: dict[str, Any] = {"inference_mode": modules.can_use_inference_mode, "cache_is_observed": runs_user_code}
    if lane is not None:
        return HFTarget(*arguments, **options, lane=lane)
    target = target_class(call.adapter)(*arguments, **options)
    if (reason := target.length_reason()) is not None:
        raise FallbackRequired(reason)
    return target


def max_new_tokens(inputs: PreparedInputs) -> int:
    """Largest number of new tokens of any row, at least 1."""
    lengths = [criterion.max_length for criterion in inputs.criteria if type(criterion) is MaxLengthCriteria]
    if inputs.generation_config.max_length is not None:
        lengths.append(inputs.generation_config.max_length)
    return max(1, ceil(min(lengths, default=UNLIMITED_STEPS)) - inputs.input_ids.shape[1])
