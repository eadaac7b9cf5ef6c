"""How much a vision tower looks at each patch of a picture, heard while transformers encodes the pictures of a call.

The usual attention kernels do not return their weights, so a hook keeps what the tower's last used layer was fed, and
the weights are computed from that once more, for that layer alone. Where a class token stands first and is dropped
(CLIP), a patch scores what that token gives it (FasterVLM, arXiv 2412.01818; VisionZip, arXiv 2412.04467); else the
mean over all patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_hearer: ContextVar[AttentionCapture | None] = ContextVar("mmspec_tower", default=None)


class AttentionCapture:
    """What one call's pictures were fed to an attention layer as.

    Attributes:
        layer: an attention module with `q_proj`, `k_proj`, `num_heads` and `scale`. first: a class token stands first.
    """

    def __init__(self, layer: nn.Module, first: bool) -> None:
        self.layer, self.has_class_token = layer, first
        self._fed: list[Tensor] = []

    @contextmanager
    def active(self) -> Iterator[AttentionCapture]:
        """Hears what this thread feeds the layer. Other threads may use the model meanwhile; theirs is not heard."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _hearer.get() is self:
                self._fed.append((args[0] if args else kwargs["hidden_states"]).detach())

        handle, token = self.layer.register_forward_pre_hook(hook, with_kwargs=True), _hearer.set(self)
        try:
            yield self
        finally:
            _hearer.reset(token)
            handle.remove()

    @torch.no_grad()
    def scores(self) -> Tensor | None:
        """[P, N] float32 of each picture (or tile) and patch, its share of attention; None if none was fed."""
        if not self._fed or len({part.shape[1:] for part in self._fed}) > 1:
            return None
        # Picture by picture: a square of patches for each head is kept for no longer than its sums.
        return torch.stack([self._of(picture) for part in self._fed for picture in part])

    def _of(self, fed: Tensor) -> Tensor:
        layer: Any = self.layer
        heads, count = int(layer.num_heads), len(fed)
        fed = fed.to(layer.q_proj.weight.dtype)  # another one under autocast
        asking = fed[:1] if self.has_class_token else fed
        queries = layer.q_proj(asking).view(len(asking), heads, -1).transpose(0, 1).float()
        keys = layer.k_proj(fed).view(count, heads, -1).transpose(0, 1).float()
        given = (queries @ keys.mT * layer.scale).softmax(-1).mean((0, 1))
        return given[1:] if self.has_class_token else given


def capture_attention(tower: nn.Module, feature_layer: int | Sequence[int], first: bool) -> AttentionCapture | None:
    """For the layer whose output the projector is given; None where the tower is built otherwise.

    Args:
        feature_layer: `vision_feature_layer` of the config, a number or several. first: a class token is dropped.
    """
    number = feature_layer if isinstance(feature_layer, int) else feature_layer[-1]
    place = number if number < 0 else number - 1  # state 0 is what goes into the first layer
    for name, layers in tower.named_modules():
        if name.rpartition(".")[2] != "layers" or not isinstance(layers, nn.ModuleList):
            continue
        if not number or not -len(layers) <= place < len(layers):
            return None
        attention: Any = getattr(layers[place], "self_attn", None)
        if all(hasattr(attention, part) for part in ("q_proj", "k_proj", "num_heads", "scale")):
            return AttentionCapture(attention, first)
    return None


__all__ = ["AttentionCapture", "capture_attention"]
