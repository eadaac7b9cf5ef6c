"""Layers that quantise their input in the forward.

Rounding an activation to a step is a discontinuity: where one token and a tree differ in the last bit, as all forwards
of different shapes do, the layer may return another step. No bound on the difference of the logits holds, also where
each token has a scale of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

ACTIVATION_QUANTISERS = {
    "Linear8bitLt": "bitsandbytes.nn.modules",
    "AutoBitLinear": "transformers.integrations.bitnet",
    "BitLinear": "transformers.integrations.bitnet",
}
"""{class: its Python module} of layers that always do so."""
ACTIVATION_ROUNDERS = {"Linear4bit": "bitsandbytes.nn.modules"}
"""Those that round it to their `compute_dtype`, and to bfloat16 on a CPU with AVX-512 BF16."""
WEIGHT_ATTRIBUTES = ("act_quant_kwargs", "act_quant_scale", "activation_quantization", "input_quant_func")
"""Attributes of torchao's weights that are not None where the input is quantised too."""


def quantises_activations(module: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether a module is known to quantise its input or output: by its class, its weights, or a scheme.

    The scheme is the `quantization_scheme` of compressed-tensors, or the activations' type of optimum-quanto.

    Args:
        module: the module.
        dtype: of its input; None if it is not known.
    """
    kind: Any = type(module)
    if _is_quantiser_class(kind) or (_is_rounder_class(kind) and _rounds(module, dtype)):
        return True
    if module.__dict__.get("activation_qtype") is not None:  # optimum-quanto
        return True
    scheme = module.__dict__.get("quantization_scheme")
    if scheme is not None and _is_any_set(scheme, ("input_activations", "output_activations")):
        return True
    return any(
        weight is not None and type(weight) is not nn.Parameter and _is_any_set(weight, WEIGHT_ATTRIBUTES)
        for weight in module._parameters.values()
    )


@functools.lru_cache(maxsize=1024)
def _is_quantiser_class(kind: type) -> bool:
    return any(ACTIVATION_QUANTISERS.get(base.__qualname__) == base.__module__ for base in kind.__mro__)


@functools.lru_cache(maxsize=1024)
def _is_rounder_class(kind: type) -> bool:
    return any(ACTIVATION_ROUNDERS.get(base.__qualname__) == base.__module__ for base in kind.__mro__)


def _rounds(module: Any, dtype: torch.dtype | None) -> bool:
    """Whether a layer of bitsandbytes rounds an input of a type to a shorter one."""
    types = [getattr(module, "compute_dtype", None)]
    if module.weight.device.type == "cpu" and getattr(module, "support_avx512bf16_for_cpu", True):
        types.append(torch.bfloat16)
    resolution = 0.0 if dtype is None else torch.finfo(dtype).eps
    return any(one is not None and torch.finfo(one).eps > resolution for one in types)


def _is_any_set(value: object, names: Sequence[str]) -> bool:
    return any(getattr(value, name, None) is not None for name in names)
