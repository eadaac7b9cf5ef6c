"""`ModelGuard`: whether what a model's rounds run is known code, and unchanged since.

Asked once per call by whoever keeps something of the model between calls (recordings, verdicts), and before every round
of calls during which user code runs: a streamer or criterion that changes the model is seen from the next forward on.

Two other questions are answered elsewhere. Whether a *class* is one that C computes is the recognition of
`mmspec.targets.c_traits` and of the draft heads. Whether weights still lie where C reads them is asked at the
first forward of a call, and where user code runs at every one, by the address alone
(`mmspec.cpu.layers.WeightAddresses`): numbers that change in place are read as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.engine.guard import ModuleGuard, describe_modules
from mmspec.live import reread
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import ModuleScan, calls_library_code

PLAIN_CODE = ("transformers.", "torch.nn.")
"""Packages whose modules have no switches that change a forward without changing a weight."""


class ModelGuard(ModuleGuard):
    """The state of what a model's rounds run. Equal guards: nothing has changed."""

    def __init__(self, adapter: ModelAdapter, *, weights: bool = True) -> None:
        """
        Args:
            adapter: of the model.
            weights: whether their places and version counters count.
        """
        tensors = round_tensors(adapter) if weights else ()
        super().__init__(modules_of_rounds(adapter), tensors)

    @reread
    def _read_state(self) -> list[Any]:
        """With the functions that the modules call by name."""
        return [*super()._read_state(), *_called_functions(self._modules)]


@reread
def describe_rounds(adapter: ModelAdapter) -> list[Any]:
    """The state of a `ModelGuard` without weights, for whoever must not hold the model."""
    modules = modules_of_rounds(adapter)
    return [*describe_modules(modules), *_called_functions(modules)]


@reread
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


def _called_functions(modules: Sequence[nn.Module]) -> list[Any]:
    kinds = dict.fromkeys(map(type, modules))
    return [*map(calls_library_code, kinds), ALL_ATTENTION_FUNCTIONS.get("sdpa")]


@reread
def unknown_code(adapter: ModelAdapter, modules: ModuleScan) -> str | None:
    """Why it is not known what exactly a model's rounds run, so that nothing may stand in for it; None if it is.

    Args:
        adapter: of the model.
        modules: result of the scan over its modules.
    """
    if modules.hook is not None or modules.foreign or modules.compiled or not modules.can_use_inference_mode:
        return "quantised, offloaded, compiled or replaced modules"
    if not all(is_plain_class(type(module)) for module in adapter.text_model.modules()):
        return "modules of other packages, which may switch their forward"
    if not all(map(calls_library_code, modules.kinds)):
        return "a function of transformers or torch that user code has replaced"
    if torch.is_autocast_enabled(adapter.model.device.type):
        return "autocast"
    return None


def is_plain_class(kind: type) -> bool:
    """Whether a class of modules is of `PLAIN_CODE`."""
    return kind.__module__.startswith(PLAIN_CODE)


@reread
def round_tensors(adapter: ModelAdapter) -> list[Tensor]:
    """Parameters and buffers that a round reads."""
    parts: tuple[nn.Module | None, ...] = (
        *(adapter.text_model, adapter.model.get_input_embeddings()),
        adapter.model.get_output_embeddings(),
    )
    found = [one for part in parts if part is not None for one in (*part.parameters(), *part.buffers())]
    return list({id(one): one for one in found}.values())
