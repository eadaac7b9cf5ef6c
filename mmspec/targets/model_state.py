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
from mmspec.live import all_modules, reread
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import ModuleScan, called_functions, calls_library_code, scan_modules

PLAIN_CODE = ("transformers.", "torch.nn.")
"""Packages whose modules have no switches that change a forward without changing a weight."""


def model_revision(adapter: ModelAdapter) -> Revision:
    """The present revision of what a model's rounds run: the same object as long as nothing has changed."""
    return revision_of(adapter.model, _modules_of(adapter)[0], describe_calls)


class ModelState:
    """The scan of a model's modules, and the revision of those that its rounds run: found anew where they changed.

    A scan of plain modules reads nothing but what a revision compares.
    """

    def __init__(self) -> None:
        self._is_plain = True
        self._known: tuple[Revision, Revision, ModuleScan] | None = None
        self._unknown_code: tuple[ModuleScan, str | None] | None = None

    def now(self, adapter: ModelAdapter) -> tuple[ModuleScan, Revision]:
        """Both for the model as it is at present."""
        of_rounds, others = _modules_of(adapter)
        revision, known = revision_of(adapter.model, of_rounds, describe_calls), self._known
        if known is not None and known[0] is revision and known[1].is_of(others):
            return known[2], revision
        other = Revision(others, describe_calls) if self._is_plain else None  # before the scan: threads may change it
        scan = scan_modules(adapter.model)
        self._is_plain = not (scan.has_user_code or scan.foreign) and scan.can_use_inference_mode
        self._is_plain &= all(map(is_plain_class, scan.kinds))
        self._known = (revision, other, scan) if self._is_plain and other is not None else None
        return scan, revision

    def unknown_code(self, adapter: ModelAdapter, modules: ModuleScan) -> str | None:
        """`unknown_code` for a scan of `now`."""
        known = self._unknown_code
        if known is None or known[0] is not modules:
            known = self._unknown_code = modules, _unknown_modules(adapter, modules)
        return known[1] or _unknown_mode(adapter)


@reread
def _modules_of(adapter: ModelAdapter) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that run in a forward over text, with those around them; and those that encode images."""
    model, text_model = adapter.model, adapter.text_model
    parts = text_model, model.get_input_embeddings(), model.get_output_embeddings()
    inner = all_modules(part for part in parts if part is not None)
    of_rounds = dict.fromkeys((*_path_to(model, text_model), *inner))
    return list(of_rounds), [module for module in all_modules([model]) if module not in of_rounds]


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


def unknown_code(adapter: ModelAdapter, modules: ModuleScan) -> str | None:
    """Why it is not known what exactly a model's rounds run, so that nothing may stand in for it; None if it is.

    Args:
        adapter: of the model.
        modules: result of the scan over its modules.
    """
    return _unknown_modules(adapter, modules) or _unknown_mode(adapter)


@reread
def _unknown_modules(adapter: ModelAdapter, modules: ModuleScan) -> str | None:
    if modules.hook is not None or modules.foreign or modules.compiled or not modules.can_use_inference_mode:
        return "quantised, offloaded, compiled or replaced modules"
    if not all(map(is_plain_class, set(map(type, all_modules([adapter.text_model]))))):
        return "modules of other packages, which may switch their forward"
    if not all(map(calls_library_code, modules.kinds)):
        return "a function of transformers or torch that user code has replaced"
    return None


def _unknown_mode(adapter: ModelAdapter) -> str | None:
    return "autocast" if torch.is_autocast_enabled(adapter.model.device.type) else None


def is_plain_class(kind: type) -> bool:
    """Whether a class of modules is of `PLAIN_CODE`."""
    return kind.__module__.startswith(PLAIN_CODE)
