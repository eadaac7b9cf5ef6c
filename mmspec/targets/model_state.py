"""`model_revision`: the present state of what a model's rounds run; and whether all of that is known code.

The revision is asked for once per call, and before every round of calls during which user code runs, whether it is
still current: a streamer or criterion that changes the model is seen from the next forward on. Numbers that change in
place are read by C as they are; edits through `.data` are seen by whoever copies numbers (`mmspec.cpu.bf16_copies`,
`mmspec.targets.copied_layers`, `mmspec.engine.prefix`).

Whether a *class* is one that C computes is the recognition of `mmspec.targets.c_traits` and of the draft heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.engine.revision import Revision, revision_of
from mmspec.live import reread
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import ModuleScan, called_functions, calls_library_code

PLAIN_CODE = ("transformers.", "torch.nn.")
"""Packages whose modules have no switches that change a forward without changing a weight."""


def model_revision(adapter: ModelAdapter) -> Revision:
    """The present revision of what a model's rounds run: the same object as long as nothing has changed."""
    return revision_of(adapter.model, list(_modules_of_rounds(adapter)), describe_calls)


@reread
def _modules_of_rounds(adapter: ModelAdapter) -> dict[nn.Module, None]:
    """The modules that run in a forward over text, and those around them: without those that encode images."""
    model = adapter.model
    parts = adapter.text_model, model.get_input_embeddings(), model.get_output_embeddings()
    inner = (module for part in parts if part is not None for module in part.modules())
    return dict.fromkeys((*_path_to(model, adapter.text_model), *inner))


def _path_to(root: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The modules from the root down to a part of it; the root alone if it is no part."""
    if root is part:
        return [root]
    for child in root._modules.values():
        if child is not None and (path := _path_to(child, part))[-1] is part:
            return [root, *path]
    return [root]


def describe_calls(modules: Sequence[nn.Module]) -> list[Any]:
    """What a `Revision` compares of the functions that modules call by name."""
    return [*map(id, called_functions(tuple(dict.fromkeys(map(type, modules))))), ALL_ATTENTION_FUNCTIONS.get("sdpa")]


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
