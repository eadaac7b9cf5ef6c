"""The scan of a model's modules is made anew where it would find something else (`ModelState`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mmspec.targets.model_state import ModelState
from mmspec.targets.module_scan import scan_modules
from mmspec.targets.registry import find_adapter


class OwnLinear(nn.Linear):
    """A class of user code."""


def hook(*arguments: Any) -> None:
    """Of a user."""


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "train mode": lambda model, mlp: model.train(),
    "a hook": lambda model, mlp: mlp.register_forward_hook(hook),
    "a forward": lambda model, mlp: setattr(mlp, "forward", lambda rows: rows),
    "a forward of the tower": lambda model, mlp: setattr(model.model.vision_tower, "forward", hook),
    "a hook of the tower": lambda model, mlp: model.model.vision_tower.register_forward_pre_hook(hook),
    "compiled": lambda model, mlp: mlp.compile(),
    "offloaded": lambda model, mlp: setattr(mlp, "_hf_hook", object()),
    "a map of devices": lambda model, mlp: setattr(model, "hf_device_map", {}),
    "a quantiser": lambda model, mlp: setattr(mlp.down_proj, "activation_qtype", "int8"),
    "a class": lambda model, mlp: setattr(mlp.down_proj, "__class__", OwnLinear),
    "a module": lambda model, mlp: setattr(mlp, "down_proj", copy.deepcopy(mlp.down_proj)),
    "a type": lambda model, mlp: mlp.down_proj.to(torch.float64),
    "a transposed weight": lambda model, mlp: setattr(mlp.down_proj.weight, "data", mlp.down_proj.weight.data.t()),
    "a hook of all modules": lambda model, mlp: register_module_forward_hook(hook),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_scanned(name: str) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=3))
    state, adapter = ModelState(), find_adapter(model)
    before, revision = state.now(adapter)
    assert state.now(adapter) == (before, revision) and state.now(adapter)[0] is before
    found = CHANGES[name](model, model.get_decoder().layers[0].mlp)
    try:
        after = scan_modules(model)
        assert after != before and state.now(adapter)[0] == after
    finally:
        if name == "a hook of all modules":
            found.remove()
