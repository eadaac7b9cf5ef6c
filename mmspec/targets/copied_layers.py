"""The linear layers that a quantised copy of a model has, and how large their inputs are."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.linear import find_linear_layers, why_not_replaced
from mmspec.cpu.weights import TILE_ROWS, QuantisedWeight, version_of
from mmspec.engine.draws import PrivateDraws
from mmspec.live import reread
from mmspec.targets.base import ModelAdapter
from mmspec.targets.layer_access import LayerAccess, LinearForward, with_forwards

logger = logging.getLogger("mmspec")

CALIBRATION_TOKENS = 64
"""Ids of the forward that measures how large the inputs of each layer are."""
MIN_COPIED_SHARE = 0.5
"""Share of the bytes of the decoder layers that must be copied: below, a draft would take as long as the target."""
NUM_SAMPLES = 512
"""Numbers of each weight by which a change of all is noticed that no version counter counts."""


@dataclass(frozen=True)
class CopiedLayer:
    """A linear layer and its copy.

    Attributes:
        weight: quantised.
        version: version counter of the layer's weight when it was copied.
        samples: uint8, the bytes of some of its numbers.
    """

    weight: QuantisedWeight
    version: int
    samples: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Whether the layer's weight is what was copied, as far as the version counter and the samples tell."""
        same = self.version == version_of(weight) and self.weight.shape == tuple(weight.shape)
        return same and torch.equal(self.samples, sample_bytes(weight))


def copied_layers(model: Any, access: LayerAccess) -> tuple[list[nn.Linear], nn.Linear | None]:
    """The linear layers of the decoder that are copied, and the LM head if it can be.

    Raises:
        ValueError: too little of the decoder can be copied.
    """
    decoder = model.get_submodule(".".join(access.path))
    layers = _large_layers(decoder, model)
    tensors = {id(one): one for one in (*decoder.parameters(), *decoder.buffers())}
    total = sum(one.nbytes for one in tensors.values())
    share = sum(layer.weight.nbytes for layer in layers) / max(1, total)
    if share < MIN_COPIED_SHARE:
        raise ValueError(
            f"drafter='quantized' copies linear layers in float32, bfloat16 or float16, which are {share:.0%} of the "
            f"decoder of {type(model).__name__}: that cannot pay. Most others are "
            f"{_main_reason(decoder, layers, model.device.type)}. Use drafter='hybrid'."
        )
    head = model.get_output_embeddings()
    return layers, head if head is not None and _large_layers(head, model) == [head] else None


def _large_layers(module: nn.Module, model: Any) -> list[nn.Linear]:
    found = find_linear_layers([module], model.device.type)
    return [layer for layer in found if min(layer.weight.shape) >= TILE_ROWS]


@reread
def _main_reason(decoder: nn.Module, copied: Collection[nn.Module], device_type: str) -> str:
    """Why most of the weights that are not copied are not."""
    nbytes = Counter[str]()
    for module in set(decoder.modules()).difference(copied):
        reason = why_not_replaced(module, device_type) or "too small"
        nbytes[reason] += sum(one.nbytes for one in module.parameters(recurse=False))
    return nbytes.most_common(1)[0][0]


def calibrate(
    adapter: ModelAdapter, access: LayerAccess, layers: Mapping[str, nn.Linear]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """{name: [in_features] mean squares of the inputs of a layer} and `calibration_logits` of the model.

    They depend on the weights alone, so that the copies of two processes are the same. Where the forward fails, those
    that were measured before, and None.
    """
    found: dict[str, Tensor] = {}

    def record(name: str) -> LinearForward:
        def forward(layer: nn.Linear, rows: Tensor) -> Tensor:
            squares = rows.detach().reshape(-1, rows.shape[-1]).float().square().mean(0)
            if bool(squares.isfinite().all()):
                found[name] = squares
            return functional.linear(rows, layer.weight, layer.bias)

        return forward

    twin = with_forwards(adapter.model, {name: record(name) for name in layers})
    logits = calibration_logits(adapter, access, twin)
    return found, logits


def calibration_logits(adapter: ModelAdapter, access: LayerAccess, model: Any) -> Tensor | None:
    """[n, V] float32 logits of a model, or a shallow copy of it, behind ids spread over the vocabulary; or None."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(adapter.num_embeddings, (1, CALIBRATION_TOKENS), generator=generator, device="cpu")
    text_model = model.get_submodule(".".join(access.path[: access.text_depth]))
    try:
        with torch.no_grad(), PrivateDraws():  # dropout draws in train mode, and other threads may be sampling
            states = text_model(input_ids=ids.to(adapter.model.device), use_cache=False, return_dict=True)[0]
            head = model.get_output_embeddings()
            if head is None or states.shape[-1] != head.in_features:
                return None
            logits: Tensor = head(states)[0].float()
            return logits
    except Exception as error:  # whatever a model's own code raises: the copy is a little worse
        logger.debug("mmspec: the copy's errors could not be measured: %s", error)
        return None


def agreement(logits: Tensor | None, others: Tensor | None) -> float:
    """Mean probability with which two models sample the same token if both can; 0 where it is not known."""
    if logits is None or others is None:
        return 0.0
    found = float(torch.minimum(logits.softmax(-1), others.softmax(-1)).sum(-1).mean())
    return 0.0 if math.isnan(found) else found


def is_copy(module: Any, one: CopiedLayer) -> bool:
    return type(module) is nn.Linear and one.is_of(module.weight)


def sample_bytes(weight: Tensor) -> Tensor:
    """The bytes of some numbers of a weight, evenly spread; nan is equal to itself."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUM_SAMPLES)].clone().view(torch.uint8)
