"""Which models are patched, and which model types are tested with random calls.

Every decoder-only model is served by `ModelAdapter`. Whether it can be decoded in trees is decided by `selftest`, not
here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mmspec.targets.base import ModelAdapter
from mmspec.vision.grids.registry import VISUAL_LAYOUTS

TESTED = frozenset(VISUAL_LAYOUTS)
"""Model types whose random calls with images are compared with plain `generate` in the tests."""


class UnsupportedModelError(ValueError):
    """The model cannot be decoded in trees: its self-test fails."""


def supported() -> tuple[str, ...]:
    """The values of `config.model_type` whose visual grids are known. `patch` accepts other decoder-only models too."""
    return tuple(sorted(VISUAL_LAYOUTS))


def unwrap(model: Any) -> Any:
    """The transformers model in a wrapper of PEFT, whose `generate` calls the model's; any other model unchanged."""
    is_peft_wrapper = any(kind.__module__.split(".")[0] == "peft" for kind in type(model).__mro__)
    if not is_peft_wrapper or isinstance(model, PreTrainedModel):
        return model
    base = getattr(model, "base_model", None)
    # A tuner such as LoRA's `LoraModel` is a second wrapper; with a learned prompt `base_model` is the model itself.
    return base if base is None or isinstance(base, PreTrainedModel) else getattr(base, "model", base)


def find_adapter(model: Any) -> ModelAdapter:
    """A new adapter of the model (`unwrap`).

    Raises:
        TypeError: not a transformers model that can generate.
    """
    model = unwrap(model)
    if "_orig_mod" in getattr(model, "__dict__", {}).get("_modules", {}):
        raise TypeError(
            f"mmspec patches the transformers model itself; got {type(model).__name__}, a wrapper created by "
            "torch.compile. Patch the wrapped model: mmspec.patch(model._orig_mod)."
        )
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None or not hasattr(model, "forward") or not callable(getattr(type(model), "generate", None)):
        raise TypeError(
            f"mmspec patches a transformers vision-language model that can generate; got {type(model).__name__}. "
            "Load one with AutoModelForImageTextToText.from_pretrained(...)."
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"mmspec patches the transformers model itself; got {type(model).__name__}, which is none. If "
            "it wraps one, patch the wrapped model."
        )
    return ModelAdapter(model)
