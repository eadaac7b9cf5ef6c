"""Attention that a vision tower pays to each patch, captured while transformers encodes the images of a call.

The usual attention kernels do not return their weights, so a hook stores the input of the last used layer, and the
weights are recomputed for that layer alone. If a class token comes first and is dropped (CLIP), a patch's share is the
class token's attention to it (FasterVLM, arXiv 2412.01818; VisionZip, arXiv 2412.04467); otherwise the mean attention
of all patches to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.engine.undo import Undoable, VariableSet

_active_capture: ContextVar[AttentionCapture | None] = ContextVar("mmspec_attention_capture", default=None)


class _Hooked(Undoable):
    """Context in which a module has a pre-hook with keyword arguments."""

    def __init__(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._module = module
        self._hook = hook

    def _make(self) -> None:
        self._module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _undo(self) -> None:
        for key, hook in list(self._module._forward_pre_hooks.items()):  # a handle may be lost in an interrupt
            if hook is self._hook:
                self._module._forward_pre_hooks_with_kwargs.pop(key, None)
                self._module._forward_pre_hooks.pop(key, None)


class AttentionCapture:
    """Inputs of one attention layer during one call.

    Attributes:
        layer: an attention module with `q_proj`, `k_proj`, `num_heads` and `scale`.
        has_class_token: whether the first token is a class token.
    """

    def __init__(self, layer: nn.Module, has_class_token: bool) -> None:
        self.layer = layer
        self.has_class_token = has_class_token
        self._inputs: list[Tensor] = []  # [P, 1 + N or N, D] each

    @contextmanager
    def active(self) -> Iterator[AttentionCapture]:
        """Capture the layer's inputs in the current thread; forwards of other threads are ignored."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _active_capture.get() is self:
                self._inputs.append((args[0] if args else kwargs["hidden_states"]).detach())

        with _Hooked(self.layer, hook), VariableSet(_active_capture, self):
            yield self

    @torch.no_grad()
    def scores(self) -> Tensor | None:
        """[P, N] float32, attention share of each patch of each image or tile; None if nothing was captured."""
        if not self._inputs or len({part.shape[1:] for part in self._inputs}) > 1:
            return None
        # One image at a time: the [heads, N, N] weights are large.
        return torch.stack([self._attention_shares(image) for part in self._inputs for image in part])

    def _attention_shares(self, hidden_states: Tensor) -> Tensor:
        """[N] attention to each patch, from the layer's input [1 + N or N, D] for one image."""
        layer: Any = self.layer
        num_heads = int(layer.num_heads)
        hidden_states = hidden_states.to(layer.q_proj.weight.dtype)  # may differ under autocast
        query_states = hidden_states[:1] if self.has_class_token else hidden_states
        queries = layer.q_proj(query_states).view(len(query_states), num_heads, -1).transpose(0, 1).float()
        keys = layer.k_proj(hidden_states).view(len(hidden_states), num_heads, -1).transpose(0, 1).float()
        shares = (queries @ keys.mT * layer.scale).softmax(-1).mean((0, 1))
        return shares[1:] if self.has_class_token else shares


def capture_attention(
    tower: nn.Module, feature_layer: int | Sequence[int], has_class_token: bool
) -> AttentionCapture | None:
    """A capture of the layer whose output the projector reads; None if the tower has no such attention layer.

    Args:
        tower: the vision tower.
        feature_layer: `config.vision_feature_layer`, an index into `hidden_states`, or several (the last counts).
        has_class_token: whether the first token is a class token, which is dropped.
    """
    state_index = feature_layer if isinstance(feature_layer, int) else feature_layer[-1]
    layer_index = state_index if state_index < 0 else state_index - 1  # hidden state 0 is the first layer's input
    for name, layers in tower.named_modules():
        if name.rpartition(".")[2] != "layers" or not isinstance(layers, nn.ModuleList):
            continue
        if not state_index or not -len(layers) <= layer_index < len(layers):
            return None
        attention: Any = getattr(layers[layer_index], "self_attn", None)
        if all(hasattr(attention, part) for part in ("q_proj", "k_proj", "num_heads", "scale")):
            return AttentionCapture(attention, has_class_token)
    return None
