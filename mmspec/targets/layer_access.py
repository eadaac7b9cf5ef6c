"""Where the decoder layers of a model are, and shallow copies of the model without some of them.

Nothing of the model is changed and no weight is copied: the modules from the model down to the list of its decoder
layers are copied shallowly, and the layers to skip are replaced by modules that return their input. So threads can
decode the model and draft with it at the same time.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.engine.revision import Revision
from mmspec.targets.base import ModelAdapter
from mmspec.targets.model_state import model_revision

CHECK_LENGTH = 4
"""Tokens of the forward that decides whether the layers of a model can be skipped."""
LinearForward = Callable[[nn.Linear, Tensor], Tensor]
"""The forward of a linear layer."""
OWN_DRAFTERS = "drafter='self' or 'quantized'"
OTHER_DRAFTER = "Use another drafter, such as 'hybrid'."


class SkippedLayer(nn.Module):
    """Stands for a decoder layer and returns its input; other attributes are the layer's (`attention_type`).

    Attributes:
        returns_tuple: whether the output is a tuple that begins with the hidden states.
        last_input: hidden states of the last forward.
    """

    def __init__(self, layer: nn.Module, returns_tuple: bool = False) -> None:
        """
        Args:
            layer: the layer that is skipped; no submodule of this one.
            returns_tuple: whether the layer returns a tuple that begins with the hidden states.
        """
        super().__init__()
        self.__dict__["skipped"] = layer
        self.returns_tuple = returns_tuple
        self.last_input: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["skipped"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, as they are."""
        self.last_input = hidden_states
        return (hidden_states, None) if self.returns_tuple else hidden_states


@dataclass(frozen=True)
class LayerAccess:
    """Where the decoder layers of a model are, and what they return.

    Attributes:
        path: attribute names from the model to the list of its decoder layers.
        text_depth: how many of them lead to the text model.
        returns_tuple: whether a layer returns a tuple that begins with the hidden states.
    """

    path: tuple[str, ...]
    text_depth: int
    returns_tuple: bool = False

    def restrict(self, model: Any, layers: Sequence[int]) -> Any:
        """A shallow copy of the model that runs these layers only."""
        top = twin = shallow_copy(model)
        for name in self.path[:-1]:
            child = shallow_copy(getattr(twin, name))
            twin._modules[name] = child
            twin = child
        chosen = set(layers)
        twin._modules[self.path[-1]] = nn.ModuleList(
            layer if index in chosen else SkippedLayer(layer, self.returns_tuple)
            for index, layer in enumerate(getattr(twin, self.path[-1]))
        ).train(model.training)
        return top

    def bypassed(self, model: Any) -> nn.Module | None:
        """A module on the way whose hooks or replaced forward a shallow copy would not run as they are; or None."""
        module = model
        for name in self.path:
            if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
                return module
            module = getattr(module, name)
        return None


def layer_access(adapter: ModelAdapter, revision: Revision | None = None) -> LayerAccess:
    """How to run a model without some of its decoder layers; found out by a forward of a few tokens.

    Args:
        adapter: of the model.
        revision: of the model; asked for if None.

    Raises:
        ValueError: recurrent layers, one layer, layers that cannot be addressed, or a model that needs them all.
    """
    revision = model_revision(adapter) if revision is None else revision
    return revision.cached("layer access", lambda: _find_access(adapter))


def _find_access(adapter: ModelAdapter) -> LayerAccess:
    model = adapter.model
    name = type(model).__name__
    if adapter.is_recurrent:
        raise ValueError(
            f"{OWN_DRAFTERS} needs layers with keys and values; {name} has layers with a recurrent state, which a "
            f"draft would change. {OTHER_DRAFTER}"
        )
    if adapter.num_layers < 2:
        raise ValueError(
            f"{OWN_DRAFTERS} skips decoder layers, of which {name} has {adapter.num_layers}. {OTHER_DRAFTER}"
        )
    access = _find_layers(adapter)
    if (module := access.bypassed(model)) is not None:
        raise ValueError(
            f"{OWN_DRAFTERS} runs a copy of {type(module).__name__} with fewer layers, which would bypass its hooks or "
            f"its replaced forward (offloaded or wrapped models). {OTHER_DRAFTER}"
        )
    problem = ""
    for candidate in (access, replace(access, returns_tuple=True)):
        if (failure := _failure(adapter, candidate)) is None:
            return candidate
        problem = problem or failure
    raise ValueError(
        f"{OWN_DRAFTERS} runs the target without some of its decoder layers, which {name} does not support ({problem})."
        f" {OTHER_DRAFTER}"
    )


def _failure(adapter: ModelAdapter, access: LayerAccess) -> str | None:
    """What goes wrong when a few tokens run through the first layer alone; None if nothing does."""
    model = adapter.model
    if model.device.type == "meta":
        return None
    ids = torch.arange(1, CHECK_LENGTH + 1, device=model.device)[None] % adapter.num_embeddings
    try:
        with torch.no_grad():
            text_model = access.restrict(model, (0,)).get_submodule(".".join(access.path[: access.text_depth]))
            outputs = text_model(input_ids=ids, use_cache=False, return_dict=True)[0]  # hidden states or logits
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {str(error).strip()[:200]}"
    if outputs.shape[:2] != ids.shape:
        return f"outputs of shape {list(outputs.shape)} for ids of shape {list(ids.shape)}"
    return None


def _find_layers(adapter: ModelAdapter) -> LayerAccess:
    """Where the list of decoder layers is: the one list of that length in the text model.

    Raises:
        ValueError: there is no such list, or more than one.
    """
    text_model = adapter.text_model
    prefix = next((name for name, module in adapter.model.named_modules() if module is text_model), None)
    lists = [
        name
        for name, module in text_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == adapter.num_layers
    ]
    if prefix is None or len(lists) != 1:
        raise ValueError(
            f"{OWN_DRAFTERS} needs one list of {adapter.num_layers} decoder layers in {type(text_model).__name__}; "
            f"found {len(lists)}. {OTHER_DRAFTER}"
        )
    to_text_model = [name for name in prefix.split(".") if name]
    return LayerAccess((*to_text_model, *lists[0].split(".")), len(to_text_model))


def shallow_copy(module: nn.Module) -> Any:
    """A module of the same class with the same parameters and children, whose children can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def with_forwards(module: Any, forwards: Mapping[str, LinearForward]) -> Any:
    """A shallow copy of a module in which the linear layers with these names have other forwards."""
    twin = shallow_copy(module)
    below: dict[str, dict[str, LinearForward]] = {}
    for path, forward in forwards.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = forward
    for name, inner in below.items():
        child = module._modules[name]
        if "" in inner:
            twin._modules[name] = shallow_copy(child)
            twin._modules[name].__dict__["forward"] = types.MethodType(inner[""], twin._modules[name])
        else:
            twin._modules[name] = with_forwards(child, inner)
    return twin
