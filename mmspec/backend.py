"""Who runs and who computes the rounds of a call (`patch(backend=)`), chosen once per call.

| | runs or computes | by default | `backend=` | decided by |
|---|---|---|---|---|
| *recorded* | replays of whole rounds | on a GPU | `"recorded"` | `find_recorder` |
| *C* | the target's forwards over nodes | on a CPU, for known models | `"c"` | `_use_c` |
| | drafts of heads | the same, where linear layers run in our kernels | | `find_c_draft` |
| *eager* | the parts one by one, in torch | else | `"torch"` | |

On a CPU linear layers of eager parts run in their fastest kernel (`use_kernels`), but with `backend="torch"`, and what
recurrent layers compute between them in C, in prompts too (`use_prompt_kernels`).
A call that the named one does not serve runs eager, with one warning that says why. `find_recorder` is asked before the
prompt (`mmspec.prefill`), `find_c_draft` at a head's first draft, the others when the first tokens are out
(`mmspec.engine.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from mmspec.call import Call, CallPlan
from mmspec.config import SpecConfig
from mmspec.cpu.c_kernel import describe_kernel, load_kernel
from mmspec.cpu.interception import operators_are_intercepted
from mmspec.cpu.linear import find_linear_layers, use_fast_linears
from mmspec.engine.graph import CudaGraphRecorder, Recorder
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces.drafter import modules_of
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import MAX_LENGTH
from mmspec.targets.state_log import computed_in_c, updating_functions

SMALLEST_REPLACED = 1 << 16
"""Weights of a linear layer from which its forward is replaced. To choose a kernel takes longer than smaller ones."""

# --- recorded ---------------------------------------------------------------------------------------------------------


def find_recorder(call: Call, max_length: int) -> Callable[[], Recorder] | None:
    """Creates the recorder of a call whose rows have at most `max_length` positions; None if it is not recorded."""
    config, device = call.plan.config, call.plan.adapter.model.device
    recorder = recorder_for(device, config.backend, config.deterministic)
    if recorder is None and config.backend != "recorded":
        return None
    if (reason := _reason_against_recording(call, max_length, recorder)) is not None:
        if config.backend == "recorded":
            call.plan.warn(f"backend='recorded': a call runs eager ({reason})")
        return None
    return recorder


def recorder_for(device: torch.device, backend: str, deterministic: bool) -> Callable[[], Recorder] | None:
    """Creates the recorder for a device, or None if rounds are not to be recorded.

    Args:
        device: of the model.
        backend, deterministic: the options of `patch`. A recording rounds half precision differently, so that "auto"
            records no deterministic calls.
    """
    is_wanted = backend == "recorded" or (backend == "auto" and not deterministic)
    return CudaGraphRecorder if is_wanted and device.type == "cuda" else None


def _reason_against_recording(call: Call, max_length: int, recorder: Callable[[], Recorder] | None) -> str | None:
    """Why a call is not recorded, or None."""
    plan, needs, cache = call.plan, call.plan.config.drafter.requirements, call.model_kwargs[CACHE_ARGUMENT]
    model = plan.adapter.model
    if recorder is None:
        return f"nothing records on {model.device}"
    if needs.layer_subsets and not needs.optional_copy:  # a recorded round runs all layers
        return "the drafter runs some of the model's layers"
    if plan.unknown_code is not None:
        return plan.unknown_code
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
        return "past_key_values that was passed to generate"
    if max_length > MAX_LENGTH:
        return f"a length limit beyond {MAX_LENGTH}"
    if len({parameter.device for parameter in model.parameters()}) > 1 or model.device.type == "meta":
        return "weights on several devices"
    return None


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def use_kernels(plan: CallPlan, target: HFTarget) -> AbstractContextManager[None]:
    """After the prompt: decide who computes the rounds; the context in which they run.

    On a CPU linear layers of the decoding step and of the drafter run there in their fastest kernel. Weights that our
    kernels read for every token are moved into huge pages.
    """
    reason, config = _reason_against_c(plan), plan.config
    _use_c(plan, target, reason)
    if reason is not None or config.backend == "torch":
        return nullcontext()
    layers = _large(find_linear_layers([*plan.modules.linear_layers, *modules_of(config.drafter)]), config)
    if load_kernel() is not None and plan.autotuner.allow_c:
        of_target = set(plan.modules.linear_layers)
        read = [layer.weight for layer in layers if layer in of_target]
        weights = read if target.c_forwards is None else target.c_forwards.decoder.matrices()
        plan.huge_pages.add(weights, target.max_new_tokens)
    linears = use_fast_linears(plan.autotuner, layers, config.deterministic, not config.may_use_c)
    return linears if target.c_forwards is not None else _and_recurrent_kernels(plan, linears)


def use_prompt_kernels(plan: CallPlan) -> AbstractContextManager[None]:
    """The same for the prompt's forward, vision tower included."""
    if plan.config.backend == "torch" or _reason_against_c(plan) is not None:
        return nullcontext()
    layers = _large(plan.modules.prompt_linear_layers, plan.config)
    return _and_recurrent_kernels(plan, use_fast_linears(plan.autotuner, layers, plan.config.deterministic))


def _and_recurrent_kernels(plan: CallPlan, linears: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """The context `linears`, in which the model runs, where C also computes what recurrent layers do between them."""
    functions = updating_functions(plan.modules.kinds) if plan.config.may_use_c and plan.unknown_code is None else []
    kernel = load_kernel() if functions and plan.autotuner.allow_c else None
    return linears if kernel is None else _both(linears, computed_in_c(kernel, functions))


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield


def _large(layers: Iterable[nn.Linear], config: SpecConfig) -> list[nn.Linear]:
    """The linear layers whose kernel is chosen; with `deterministic` all of them have the same."""
    least = 0 if config.deterministic else SMALLEST_REPLACED
    return [layer for layer in layers if layer.in_features * layer.out_features >= least]


# --- C ----------------------------------------------------------------------------------------------------------------


def _use_c(plan: CallPlan, target: HFTarget, reason: str | None) -> None:
    """Let the forwards of the target run in C where that is allowed and possible. With `backend="c"` says why not.

    Args:
        plan, target: of the call.
        reason: why nothing of it may run in C, or None.
    """
    if not plan.config.may_use_c or target.max_new_tokens < 2:  # the prompt's forward has the only token
        return
    kernel = None
    if reason is None:
        kernel = load_kernel() if plan.autotuner.allow_c else None
        reason = f"there is no C kernel: {describe_kernel().removeprefix('none: ')}"
    if kernel is not None:
        target.use_c(kernel, plan.unknown_code)
        reason = None if target.c_forwards is not None else "it does not compute this model, with these inputs"
    if reason is not None and plan.config.backend == "c":
        plan.warn(f"backend='c': a call runs in torch ({reason})")


def _reason_against_c(plan: CallPlan) -> str | None:
    """Why nothing of a call may run in C, or None."""
    device = plan.adapter.model.device
    if device.type != "cpu":
        return f"the model is on {device}, C computes on a CPU"
    if operators_are_intercepted():
        return "user code sees or replaces the operators of torch"
    return None
