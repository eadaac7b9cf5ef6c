"""Whether modules are still what they were (`mmspec.engine.revision`), and what knowing it leaves possible."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters
from torch.testing._internal.two_tensor import TwoTensor

from mmspec.cpu.linear import LinearAutotuner, use_fast_linears
from mmspec.engine.revision import Revision
from mmspec.live import all_modules


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_weights_can_be_moved(dtype: torch.dtype) -> None:
    """`module.to` swaps tensors of classes of their own, as torchao's; weak references to them would refuse that."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    revision = Revision([layer])
    assert revision.is_current()
    layer.to(dtype)
    assert layer.weight.dtype == dtype and isinstance(layer.weight, TwoTensor) and not revision.is_current()
    revision = Revision([layer])
    assert revision.is_current()
    layer.weight = nn.Parameter(TwoTensor(layer.weight.a.clone(), layer.weight.b.clone()))
    assert not revision.is_current()


class Named(nn.Linear):
    """A layer with what layers of models have besides weights."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scaling, self.mode = 0.5, "plain"
        self.register_buffer("scale", torch.tensor(2.0))

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """A method that the forward calls."""
        return rows * self.scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(rows))


def hook(*arguments: Any) -> None:
    """Of a user."""


def other_hook(*arguments: Any) -> None:
    """Another one."""


def build() -> Any:
    """Four modules, and one that holds them."""
    torch.manual_seed(0)
    return nn.Sequential(Named(), nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Sequential(Named()))


def set_dict(module: nn.Module, **values: Any) -> None:
    """Attributes that stand before those that all modules have."""
    module.__dict__ = values | vars(module)


def step(model: Any) -> None:
    model[1](torch.ones(4)).sum().backward()
    torch.optim.SGD(model.parameters(), 1.0).step()


def replace_hook(module: nn.Module) -> None:
    module._forward_hooks[min(module._forward_hooks)] = other_hook


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model[1].weight.detach().add_(1),
    "by an optimiser": step,
    "other data": lambda model: setattr(model[1].weight, "data", model[1].weight.data.clone()),
    "transposed": lambda model: setattr(model[1].weight, "data", model[1].weight.data.t()),
    "fewer rows": lambda model: setattr(model[1].weight, "data", model[1].weight.data[:2]),
    "another shape": lambda model: setattr(model[1].weight, "data", model[1].weight.data.view(2, 8)),
    "another type": lambda model: model.to(torch.bfloat16),
    "another type of one": lambda model: model[3].double(),
    "a parameter": lambda model: setattr(model[1], "weight", nn.Parameter(model[1].weight.detach())),
    "shared parameter": lambda model: setattr(model[0], "weight", model[1].weight),
    "no bias": lambda model: setattr(model[0], "bias", None),
    "a bias": lambda model: setattr(model[1], "bias", nn.Parameter(torch.zeros(4))),
    "swapped data": lambda model: vector_to_parameters(torch.arange(16.0), [model[1].weight]),
    "loaded and assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "a number without a trace": lambda model: model[0].scale.data.fill_(3),
    "a buffer": lambda model: model[1].register_buffer("more", torch.zeros(2)),
    "another buffer": lambda model: setattr(model[0], "scale", torch.tensor(2.0)),
    "a module": lambda model: model.__setitem__(1, copy.deepcopy(model[1])),
    "an inner module": lambda model: model[3].__setitem__(0, copy.deepcopy(model[3][0])),
    "a module more": lambda model: model[3].append(nn.Identity()),
    "their order": lambda model: model._modules.update({"0": model[1], "1": model[0]}),
    "a hook": lambda model: model[3][0].register_forward_hook(hook),
    "a pre-hook": lambda model: model[3][0].register_forward_pre_hook(hook),
    "a forward": lambda model: setattr(model[1], "forward", lambda rows: rows),
    "a bound forward": lambda model: setattr(model[1], "forward", types.MethodType(nn.Identity.forward, model[1])),
    "a forward of another": lambda model: setattr(model[0], "forward", model[3][0].forward),
    "a partial forward": lambda model: setattr(model[1], "forward", functools.partial(nn.Linear.forward, model[1])),
    "a method": lambda model: setattr(model[0], "scaled", lambda rows: rows),
    "a class": lambda model: setattr(model[1], "__class__", Named),
    "a number": lambda model: setattr(model[0], "scaling", 0.25),
    "a text": lambda model: setattr(model[0], "mode", "other"),
    "an attribute": lambda model: setattr(model[1], "more", 1),
    "no attribute": lambda model: delattr(model[0], "mode"),
    "an attribute before all": lambda model: set_dict(model[1], more=1),
    "train mode": lambda model: model[2].train(not model[2].training),
    "an adapter": lambda model: setattr(model[0], "_active_adapter", ["other"]),
    "parametrized": lambda model: parametrize.register_parametrization(model[1], "weight", nn.Identity()),
    "weight_norm": lambda model: parametrizations.weight_norm(model[1]),
    "spectral_norm": lambda model: nn.utils.spectral_norm(model[1]),
    "pruned": lambda model: prune.l1_unstructured(model[1], "weight", 0.5),
    "the data of another": lambda model: setattr(model[1].weight, "data", model[0].weight.data),
}
AGAIN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "another type in the same place": (
        CHANGES["another type"],
        lambda model: setattr(model[1].weight, "data", model[1].weight.data.view(torch.float16)),
    ),
    "a hook in place of another": (CHANGES["a hook"], lambda model: replace_hook(model[3][0])),
    "no hook any more": (CHANGES["a hook"], lambda model: model[3][0]._forward_hooks.clear()),
    "another forward": (CHANGES["a forward"], lambda model: setattr(model[1], "forward", lambda rows: rows + 1)),
    "a forward of a third": (
        CHANGES["a forward of another"],
        lambda model: setattr(model[0], "forward", Named().forward),
    ),
    "another method": (CHANGES["a method"], CHANGES["a method"]),
    "no method any more": (CHANGES["a method"], lambda model: delattr(model[0], "scaled")),
    "another attribute before all": (
        CHANGES["an attribute before all"],
        lambda model: setattr(model[1], "more", 2),
    ),
    "another adapter": (CHANGES["an adapter"], lambda model: model[0]._active_adapter.append("more")),
    "parametrized no more": (
        CHANGES["parametrized"],
        lambda model: parametrize.remove_parametrizations(model[1], "weight"),
    ),
    "pruned for good": (CHANGES["pruned"], lambda model: prune.remove(model[1], "weight")),
}


@pytest.mark.parametrize("name", [*CHANGES, *AGAIN])
def test_changes_are_seen(name: str) -> None:
    first, change = AGAIN.get(name, (None, CHANGES.get(name)))
    model = build()
    assert change is not None
    if first is not None:
        first(model)
    revision = Revision(all_modules([model]))
    assert revision.is_current() and revision.is_of(all_modules([model]))
    change(model)
    assert not revision.is_current() and not revision.is_of(all_modules([model]))
    assert Revision(all_modules([model])).is_current()


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_are_seen(register: str) -> None:
    revision = Revision([nn.Linear(4, 4)])
    handle = getattr(nn.modules.module, register)(hook)
    try:
        assert not revision.is_current()
    finally:
        handle.remove()


def test_what_changes_no_forward_is_not_seen() -> None:
    model = build()
    revision = Revision(all_modules([model]))
    model.requires_grad_(False)
    model.zero_grad()
    copy.deepcopy(model)
    with use_fast_linears(LinearAutotuner(), [model[1]]):
        assert revision.is_current()
    assert revision.is_current() and revision.is_of(all_modules([model]))


def test_all_modules_are_those_of_torch() -> None:
    model = build()
    model[3].append(model[0])
    assert set(all_modules([model, model[3], model])) == set(model.modules())
    assert len(all_modules([model[3], model])) == len(list(model.modules()))
