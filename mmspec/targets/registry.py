"""Which model families are supported: `model_type` -> adapter. Adding one: `docs/adding-a-family.md`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mmspec.targets.base import ModelAdapter
from mmspec.targets.llava import LlavaAdapter
from mmspec.targets.llava_next import LlavaNextAdapter
from mmspec.targets.llava_next_video import LlavaNextVideoAdapter
from mmspec.targets.llava_onevision import LlavaOnevisionAdapter
from mmspec.targets.qwen2_5_vl import Qwen25VLAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    family.model_type: family
    for family in (LlavaAdapter, LlavaNextAdapter, LlavaNextVideoAdapter, LlavaOnevisionAdapter, Qwen25VLAdapter)
}


class UnsupportedModelError(ValueError):
    """The model's family has no adapter."""


def supported() -> tuple[str, ...]:
    """The `model_type`s that `patch` accepts."""
    return tuple(sorted(ADAPTERS))


def find_adapter(model: Any) -> ModelAdapter:
    """The adapter for a model.

    Raises:
        TypeError: not a transformers model that can generate. UnsupportedModelError: no adapter for its family.
    """
    if "_orig_mod" in getattr(model, "__dict__", {}).get("_modules", {}):
        raise TypeError(
            f"mmspec patches the transformers model itself; got {type(model).__name__}, a wrapper that torch.compile "
            "makes. Pass what is inside: mmspec.patch(model._orig_mod)."
        )
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None or not hasattr(model, "forward") or not callable(getattr(type(model), "generate", None)):
        raise TypeError(
            f"mmspec patches a transformers vision-language model that can generate; got {type(model).__name__}. "
            "Load one with AutoModelForImageTextToText.from_pretrained(...)."
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"mmspec patches the transformers model itself; got {type(model).__name__}, a wrapper around one. Patch "
            "what is inside (model.get_base_model() of PEFT, model._orig_mod of torch.compile)."
        )
    if kind not in ADAPTERS:
        raise UnsupportedModelError(
            f"mmspec has no adapter for model_type {kind!r} ({type(model).__name__}); "
            f"supported: {', '.join(supported())}."
        )
    return ADAPTERS[kind](model)
