"""Who runs and who computes the rounds of a call (`patch(backend=)`), chosen once per call.

| | runs or computes | by default | `backend=` | decided by |
|---|---|---|---|---|
| *recorded* | replays of whole rounds | on a GPU | `"recorded"` | `find_recorder` |
| *C* | the target's forwards over nodes | on a CPU, for known models | `"c"` | `use_c` |
| | drafts of heads | the same, where linear layers run in our kernels | | `find_c_draft` |
| *eager* | the parts one by one, in torch | else | `"torch"` | |

On a CPU linear layers of eager parts run in their fastest kernel (`use_linear_kernels`), but with `backend="torch"`.
A call that the named one does not serve runs eager, with one warning that says why. `find_recorder` is asked before the
prompt (`mmspec.prefill`), the others after it (`mmspec.session`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from mmspec.call import CallContext, PreparedInputs
from mmspec.cpu.c_kernel import describe_kernel, load_kernel
from mmspec.cpu.interception import operators_are_intercepted
from mmspec.cpu.linear import find_linear_layers, use_fast_linears
from mmspec.engine.graph import Recorder
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces.drafter import modules_of
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import recorder_for

# --- recorded ---------------------------------------------------------------------------------------------------------


def find_recorder(call: CallContext, inputs: PreparedInputs, max_length: int) -> Callable[[], Recorder] | None:
    """Creates the recorder of a call whose rows have at most `max_length` positions; None if it is not recorded."""
    config, device = call.spec_config, call.adapter.model.device
    recorder = recorder_for(device, config.backend, config.deterministic)
    if recorder is None and config.backend != "recorded":
        return None
    if (reason := _reason_against_recording(call, inputs, max_length, recorder)) is not None:
        if config.backend == "recorded":
            call.warn(f"backend='recorded': a call runs eager ({reason})")
        return None
    return recorder


def _reason_against_recording(
    call: CallContext, inputs: PreparedInputs, max_length: int, recorder: Callable[[], Recorder] | None
) -> str | None:
    """Why a call is not recorded, or None."""
    if recorder is None:
        return f"nothing records on {call.adapter.model.device}"
    needs = call.spec_config.drafter.requirements
    if needs.layer_subsets and not needs.optional_copy:  # a recorded round runs all layers
        return "the drafter runs some of the model's layers"
    return call.lanes.reason(call.adapter, call.modules, inputs.model_kwargs[CACHE_ARGUMENT], max_length)


# --- C ----------------------------------------------------------------------------------------------------------------


def use_c(call: CallContext, target: HFTarget) -> None:
    """Let the forwards of the target run in C where that is allowed and possible. With `backend="c"` says why not."""
    if not call.spec_config.may_use_c or target.max_new_tokens < 2:  # the prompt's forward has the only token
        return
    kernel, reason = None, _reason_against_c(call)
    if reason is None:
        kernel = load_kernel() if call.autotuner.allow_c else None
        reason = f"there is no C kernel: {describe_kernel().removeprefix('none: ')}"
    if kernel is not None:
        target.use_c_rounds(kernel, call.modules)
        reason = None if target.rounds is not None else "it does not compute this model, with these inputs"
    if reason is not None and call.spec_config.backend == "c":
        call.warn(f"backend='c': a call runs in torch ({reason})")


def _reason_against_c(call: CallContext) -> str | None:
    """Why nothing of a call may run in C, or None."""
    device = call.adapter.model.device
    if device.type != "cpu":
        return f"the model is on {device}, C computes on a CPU"
    if operators_are_intercepted():
        return "user code sees or replaces the operators of torch"
    return None


# --- eager ------------------------------------------------------------------------------------------------------------


def use_linear_kernels(call: CallContext, target: HFTarget) -> AbstractContextManager[None]:
    """Context in which linear layers of the decoding step and of the drafter run in their fastest kernel, on a CPU.

    After `use_c`. Weights that our kernels read for every token are moved into huge pages.
    """
    config = call.spec_config
    _use_huge_pages(call, target)
    roots = [*call.modules.linear_layers, *modules_of(config.drafter)]
    layers = find_linear_layers(roots) if _may_replace_linears(call) else []
    return use_fast_linears(call.autotuner, layers, config.deterministic, not config.may_use_c)


def use_prompt_linear_kernels(call: CallContext) -> AbstractContextManager[None]:
    """The same for the prompt's forward, vision tower included."""
    layers = find_linear_layers(call.modules.prompt_linear_layers) if _may_replace_linears(call) else []
    return use_fast_linears(call.autotuner, layers, call.spec_config.deterministic)


def _use_huge_pages(call: CallContext, target: HFTarget) -> None:
    """Let the weights that our kernels read for every token lie in huge pages."""
    if load_kernel() is None or not call.autotuner.allow_c or not _may_replace_linears(call):
        return
    if target.rounds is not None:
        weights = target.rounds.decoder.matrices()
    else:
        weights = [layer.weight for layer in find_linear_layers(call.modules.linear_layers)]
    call.huge_pages.add(weights, target.max_new_tokens)


def _may_replace_linears(call: CallContext) -> bool:
    """Whether other kernels than torch's may compute the linear layers of this call."""
    return call.spec_config.backend != "torch" and _reason_against_c(call) is None
