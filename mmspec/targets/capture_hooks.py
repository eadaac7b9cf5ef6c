"""Hidden states of a forward: transformers' own hooks for them, and what layers receive where that is something else.

transformers (`transformers.utils.output_capturing`) installs its hooks at the first forward that asks for hidden states
and never removes them; they are local functions, which cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.utils import output_capturing

if TYPE_CHECKING:
    from mmspec.targets.base import ModelAdapter

from mmspec.live import reread

_INSTALLED = "_output_capturing_hooks_installed"
"""Attribute of a model whose modules have them."""
ENCODED = "mm_encoder_outputs"
"""Argument of a forward in place of pixels, once transformers has run the vision tower."""


@reread
def has_capture_hooks(model: nn.Module) -> bool:
    """Whether a part of the model has them."""
    return any(_INSTALLED in module.__dict__ for module in model.modules())


@reread
def remove_capture_hooks(model: nn.Module) -> None:
    """Remove these hooks; transformers installs them again when it needs them. No forward may be running."""
    lock: Any = getattr(output_capturing, "_hook_installation_lock", nullcontext())
    with lock:
        for module in model.modules():
            module.__dict__.pop(_INSTALLED, None)
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", None) == output_capturing.__name__:
                    del module._forward_hooks[key]


@contextmanager
def layer_inputs(
    adapter: ModelAdapter, indices: Sequence[int], inputs: Mapping[str, Any]
) -> Iterator[dict[int, Tensor]]:
    """Context of a forward: the hidden states that decoder layers receive, where they are not those of the layer below.

    transformers returns the outputs of layers. Models with deepstack add visual features to the first of them, and
    serving engines, which read what a layer receives, see the sum.

    Args:
        adapter: of the model.
        indices: of hidden states.
        inputs: of the forward; without images or videos nothing is added.

    Yields:
        {index: [B, L, D]}, filled by the forward; indices that are not in it are as transformers returns them.
    """
    found: dict[int, Tensor] = {}
    has_media = any("pixel" in name or name == ENCODED for name, value in inputs.items() if value is not None)
    layers = getattr(adapter.text_model, "layers", ()) if has_media and adapter.adds_between_layers else ()
    handles = []

    def keep(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[index] = args[0] if args else kwargs["hidden_states"]

    for index in set(indices):
        if 0 < index < len(layers):
            hook = partial(lambda index, module, args, kwargs: keep(index, args, kwargs), index)
            handles.append(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
