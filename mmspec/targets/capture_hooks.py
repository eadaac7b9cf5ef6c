"""The hooks that transformers installs where hidden states are asked for (`transformers.utils.output_capturing`).

It installs them at the first such forward and never removes them; they are local functions, which cannot be pickled.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers.utils import output_capturing

from mmspec.live import reread

_INSTALLED = "_output_capturing_hooks_installed"
"""Attribute of a model whose modules have them."""


@reread
def has_capture_hooks(model: nn.Module) -> bool:
    """Whether a part of the model has them."""
    return any(_INSTALLED in module.__dict__ for module in model.modules())


@reread
def remove_capture_hooks(model: nn.Module) -> None:
    """Remove these hooks; transformers installs them again when it needs them. No forward may be running."""
    lock: Any = getattr(output_capturing, "_hook_installation_lock", nullcontext())
    with lock:
        for module in model.modules():
            module.__dict__.pop(_INSTALLED, None)
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", None) == output_capturing.__name__:
                    del module._forward_hooks[key]
