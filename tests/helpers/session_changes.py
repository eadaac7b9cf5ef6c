"""What people change of a model between two calls: weights, modules, attributes, adapters, hooks, configs.

Each change does the same to equal models. Those that have a way back take it when they are made again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

Change = Callable[[PreTrainedModel], Any]


def head(model: PreTrainedModel) -> nn.Linear:
    return model.get_output_embeddings()


def layer(model: PreTrainedModel, index: int = 0) -> Any:
    return model.get_decoder().layers[index]


def linear(model: PreTrainedModel) -> nn.Linear:
    """The last linear layer of the first decoder layer."""
    return [part for part in layer(model).modules() if isinstance(part, nn.Linear)][-1]


def norm(model: PreTrainedModel) -> Tensor:
    return next(part for name, part in layer(model, 1).named_parameters() if "norm" in name)


def through_numpy(model: PreTrainedModel) -> None:
    linear(model).weight.detach().numpy()[:] *= 1.25


def flip(model: PreTrainedModel) -> None:
    """A vector with the same numbers in another order."""
    norm(model).data.copy_(torch.linspace(0.5, 1.5, len(norm(model))))
    norm(model).data.copy_(norm(model).data.flip(0))


def reload(model: PreTrainedModel, assign: bool) -> None:
    state = {name: one * 1.02 if one.is_floating_point() else one for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def swap(model: PreTrainedModel) -> None:
    for one, other in zip(layer(model).parameters(), layer(model, 1).parameters(), strict=False):
        if one.shape == other.shape:
            one.data, other.data = other.data, one.data


def pruned(model: PreTrainedModel) -> None:
    prune.l1_unstructured(linear(model), "weight", 0.3)
    prune.remove(linear(model), "weight")


def step(model: PreTrainedModel) -> None:
    """A step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    generator_state = torch.get_rng_state()
    loss = model(input_ids=torch.arange(10, 26)[None], use_cache=False).logits[0, -1].log_softmax(-1)[20].neg()
    if loss.requires_grad:  # an adapter that is merged has left the weights frozen
        loss.backward()
    torch.set_rng_state(generator_state)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def transposed(model: PreTrainedModel) -> None:
    """Square weights, in the memory where they are."""
    for weight in layer(model, 1).parameters():
        if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
            weight.data = weight.data.t()


def roll_head(model: PreTrainedModel) -> None:
    head(model).weight = nn.Parameter(torch.roll(head(model).weight.detach(), 5, 0))


def rescale(model: PreTrainedModel) -> None:
    """The scale of an adapter, a number in a table."""
    for part in model.modules():
        if hasattr(part, "set_scale") and "default" in getattr(part, "scaling", ()):
            part.set_scale("default", 2.0 if part.scaling["default"] < 3 else 0.25)


def adapter_layers(model: PreTrainedModel) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "enable_adapters") and hasattr(part, "merged")]


def switch_adapters(model: PreTrainedModel) -> None:
    for part in adapter_layers(model):
        part.enable_adapters(bool(part.disable_adapters))


def merge_adapters(model: PreTrainedModel) -> None:
    for part in adapter_layers(model):
        if part.merged:
            part.unmerge()
        else:
            part.merge()


def louder(*arguments: Any) -> Any:
    """A forward hook, which gets the output last."""
    return arguments[-1] * 1.25


def hook(model: PreTrainedModel) -> None:
    """A hook of the user, or the end of it."""
    found = [key for key, one in linear(model)._forward_hooks.items() if one is louder]
    for key in found:
        del linear(model)._forward_hooks[key]
    if not found:
        linear(model).register_forward_hook(louder)


def replace_forward(model: PreTrainedModel) -> None:
    """A forward of the user on the instance, or the end of it."""
    layer = linear(model)
    if "forward" in vars(layer):
        del layer.forward
    else:
        layer.forward = types.MethodType(lambda self, rows: nn.Linear.forward(self, rows) * 1.25, layer)


def own_function(model: PreTrainedModel) -> None:
    """Another activation."""
    mlp = layer(model).mlp
    name = next((name for name in ("act_fn", "act", "activation_fn") if hasattr(mlp, name)), None)
    if name is not None:
        setattr(mlp, name, nn.SiLU() if isinstance(getattr(mlp, name), nn.Tanh) else nn.Tanh())


def penalty(model: PreTrainedModel) -> None:
    config = model.generation_config
    config.repetition_penalty = 1.4 if config.repetition_penalty in (None, 1.0) else 1.0


def slower_positions(model: PreTrainedModel) -> None:
    """The frequencies of the positions, a buffer that no checkpoint has."""
    for name, buffer in model.get_decoder().named_buffers():
        if name.endswith("inv_freq"):
            buffer.data.mul_(0.9)


def epsilon(model: PreTrainedModel) -> None:
    """A number that every layer norm reads."""
    for part in model.get_decoder().modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 0.05 if getattr(part, name) < 0.01 else 1e-6)


CHANGES: dict[str, Change] = {
    "in place": lambda model: linear(model).weight.data.mul_(1.1),
    "a few rows of the head": lambda model: head(model).weight.data[:5].add_(0.3),
    "by numpy": through_numpy,
    "the order of a vector": flip,
    "loaded": lambda model: reload(model, False),
    "loaded and assigned": lambda model: reload(model, True),
    "layers swapped": swap,
    "pruned": pruned,
    "trained": step,
    "the head rolled": roll_head,
    "the embeddings rolled": lambda model: model.get_input_embeddings().weight.data.copy_(
        model.get_input_embeddings().weight.data.roll(1, 0)
    ),
    "a bias": lambda model: setattr(head(model), "bias", nn.Parameter(torch.linspace(-1, 1, len(head(model).weight)))),
    "transposed": transposed,
    "types and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "shared memory": lambda model: model.share_memory(),
    "a module": lambda model: setattr(layer(model), "mlp", copy.deepcopy(layer(model).mlp)),
    "a number": lambda model: [
        setattr(part, "scaling", part.scaling * 1.1)
        for part in layer(model).modules()
        if isinstance(getattr(part, "scaling", None), float)
    ],
    "an adapter's scale": rescale,
    "the kernel of attention": lambda model: model.set_attn_implementation(
        "eager" if model.config._attn_implementation == "sdpa" else "sdpa"
    ),
    "adapters off and on": switch_adapters,
    "adapters merged": merge_adapters,
    "a hook": hook,
    "a forward": replace_forward,
    "an activation": own_function,
    "a penalty": penalty,
    "frequencies": slower_positions,
    "an epsilon": epsilon,
}
