"""Layers that quantise their input in the forward.

Rounding an activation to a step is a discontinuity: where one token and a tree differ in the last bit, as all forwards
of different shapes do, the layer may return another step. No bound on the difference of the logits holds, also where
each token has a scale of its own.
"""

from __future__ import annotations

from torch import nn

ACTIVATION_QUANTISERS = (
    "bitsandbytes.nn.modules.Linear8bitLt",
    "transformers.integrations.bitnet.AutoBitLinear",
    "transformers.integrations.bitnet.BitLinear",
)
"""Classes that always do so."""
WEIGHT_ATTRIBUTES = ("act_quant_kwargs", "act_quant_scale", "activation_quantization", "input_quant_func")
"""Attributes of torchao's weights that are not None where the input is quantised too."""


def quantises_activations(module: nn.Module) -> bool:
    """Whether a module is known to quantise its input: by its class, weights, or compressed-tensors scheme."""
    if any(_qualified_name(kind) in ACTIVATION_QUANTISERS for kind in type(module).__mro__):
        return True
    if getattr(module.__dict__.get("quantization_scheme"), "input_activations", None) is not None:
        return True
    weights = [
        weight for weight in module._parameters.values() if weight is not None and type(weight) is not nn.Parameter
    ]
    return any(getattr(weight, name, None) is not None for weight in weights for name in WEIGHT_ATTRIBUTES)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
