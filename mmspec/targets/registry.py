"""Supported model families: `model_type` -> adapter. To add one see `docs/extending.md`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mmspec.targets.base import ModelAdapter
from mmspec.targets.llava import LlavaAdapter
from mmspec.targets.llava_next import LlavaNextAdapter
from mmspec.targets.llava_next_video import LlavaNextVideoAdapter
from mmspec.targets.llava_onevision import LlavaOnevisionAdapter
from mmspec.targets.qwen2_5_vl import (
    Ernie45VLAdapter,
    Glm4vAdapter,
    HunYuanVLAdapter,
    Qwen25VLAdapter,
    VideoLlama3Adapter,
)

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.model_type: adapter
    for adapter in (LlavaAdapter, LlavaNextAdapter, LlavaNextVideoAdapter, LlavaOnevisionAdapter, Qwen25VLAdapter)
}
for _adapter in (Qwen25VLAdapter, Glm4vAdapter, Ernie45VLAdapter, VideoLlama3Adapter, HunYuanVLAdapter):
    ADAPTERS |= dict.fromkeys(_adapter.model_types, _adapter)


class UnsupportedModelError(ValueError):
    """There is no adapter for the model's family."""


def supported() -> tuple[str, ...]:
    """The values of `config.model_type` that `patch` accepts."""
    return tuple(sorted(ADAPTERS))


def find_adapter(model: Any) -> ModelAdapter:
    """A new adapter of the model's family.

    Raises:
        TypeError: not a transformers model that can generate.
        UnsupportedModelError: no adapter for its family.
    """
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
            f"mmspec patches the transformers model itself; got {type(model).__name__}, a wrapper around one. Patch "
            "the wrapped model (model.get_base_model() of PEFT, model._orig_mod of torch.compile)."
        )
    return ADAPTERS.get(model_type, ModelAdapter)(model)
