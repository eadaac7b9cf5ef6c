"""Whether user code sees or replaces the operators of torch: C would bypass it."""

from __future__ import annotations

from operator import attrgetter

from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_FUNCTIONS = attrgetter("linear", "embedding", "silu", "conv1d", "scaled_dot_product_attention")
_ORIGINALS = _FUNCTIONS(functional)


def operators_are_intercepted() -> bool:
    """Whether a mode of this thread (`TorchDispatchMode`, `TorchFunctionMode`) is active or a function was replaced.

    `torch.device` as a context is such a mode too, which only chooses where new tensors are.
    """
    if _get_current_dispatch_mode_stack():
        return True
    if any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()):
        return True
    return bool(_FUNCTIONS(functional) != _ORIGINALS)
