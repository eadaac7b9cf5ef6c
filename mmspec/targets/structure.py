"""What decides how modules compute, besides the numbers in their parameters: whether user code has changed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.cpu.linear import is_replaced
from mmspec.targets.module_scan import calls_library_code

if TYPE_CHECKING:
    from mmspec.targets.base import ModelAdapter

CONSTANTS = (
    *("variance_epsilon", "eps", "scaling", "layer_idx", "layer_type", "max_norm", "attention_scaling", "head_dim"),
    *("sliding_window", "is_sliding", "attn_logit_softcapping", "num_key_value_groups", "is_causal", "training"),
)
"""Attributes of norms, attention, embeddings and rotary angles that a forward reads."""


def modules_of_rounds(adapter: ModelAdapter) -> list[nn.Module]:
    """The modules that run in a forward over text: without those that encode images."""
    model = adapter.model
    parts = [
        model,
        getattr(model, "model", model),
        *adapter.text_model.modules(),
        *model.get_output_embeddings().modules(),
    ]
    return list(dict.fromkeys(parts))


def describe_structure(modules: Sequence[nn.Module]) -> list[Any]:
    """Classes, forwards, hooks, parts, constants and buffers of modules, and the functions that they call.

    Equal lists mean that the modules compute the same function of their parameters.
    """
    found: list[Any] = [len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks)]
    for module in modules:
        forward = module.__dict__.get("forward")
        found += type(module), None if forward is None or is_replaced(module) else forward
        found += len(module._forward_hooks), len(module._forward_pre_hooks)
        found += map(id, module._modules.values())
        found += map(id, module._parameters.values())
        found += map(module.__dict__.get, CONSTANTS)
        for buffer in module._buffers.values():
            found += id(buffer), 0 if buffer is None or buffer.is_inference() else buffer._version
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    for kind in kinds:
        found += kind.forward, calls_library_code(kind)
    return [*found, ALL_ATTENTION_FUNCTIONS.get("sdpa")]


__all__ = ["describe_structure", "modules_of_rounds"]
