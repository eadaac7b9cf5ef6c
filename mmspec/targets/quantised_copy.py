"""A copy of a target with weights of 4 or 8 bits, which drafts for it (`mmspec.drafters.model.self_drafter`).

Copied are the linear layers of the decoder and the LM head; norms, embeddings, biases, adapters and the KV cache are
the target's own. The copy runs in the C decoder where the target does, else in the target's own forward: modules
on the way to a copied layer are copied shallowly, and the layer's forward is the compiled product. What it computes
decides how much is accepted, never a token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.logging import tqdm

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, describe_kernel, load_kernel
from mmspec.cpu.copies import free_bytes
from mmspec.cpu.linear import find_linear_layers
from mmspec.cpu.quantise import quantise
from mmspec.cpu.weights import GROUP, TILE_ROWS, QuantisedWeight, Weight
from mmspec.engine.draws import PrivateDraws
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_rounds import CRounds
from mmspec.targets.layer_access import LayerAccess, LinearForward, layer_access, with_forwards

logger = logging.getLogger("mmspec")

HEAD_BITS = 8
"""Of the LM head, whose errors reach the logits as they are."""
FEW_WEIGHTS = 1_000_000_000
"""Models with fewer weights lose too many tokens to 4 bits: their copies have 8."""
CALIBRATION_TOKENS = 64
"""Ids of the forward that measures how large the inputs of each layer are."""
MIN_COPIED_SHARE = 0.5
"""Share of the bytes of the decoder layers that must be copied: below, a draft would take as long as the target."""
COPY_MEMORY_FACTOR = 1.2
"""Free memory that there must be, in bytes of the copy."""
NUM_SAMPLES = 512
"""Numbers of each weight by which a change of all is noticed that no version counter counts."""
MAX_COPIES = 4
"""Times that the copy of one patched model is made; after as many changes of the weights it stays off."""
PROGRESS_FROM = 200_000_000
"""Weights from which a progress bar is shown."""
WEIGHTS_PER_S = 1e8
"""Weights that are expected to be quantised in a second."""
_LOCK = threading.Lock()


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
        same = self.version == weight._version and self.weight.shape == tuple(weight.shape)
        return same and torch.equal(self.samples, _samples(weight))


class QuantisedCopy:
    """The copy of one model. Thread-safe: it is replaced as a whole.

    Attributes:
        model: the model.
        bits: of the decoder's weights.
        layers: {name of a linear layer: its copy}; empty if there is none.
    """

    def __init__(self, adapter: ModelAdapter, access: LayerAccess, bits: int = 0) -> None:
        """
        Args:
            adapter: of the model.
            access: where its decoder layers are.
            bits: 4 or 8; 0 chooses by the number of weights.

        Raises:
            ValueError: the model cannot be copied, or there is no memory for it.
        """
        self.model = adapter.model
        self._adapter = adapter
        self._access = access
        self._kernel = _kernel(self.model)
        self.bits = bits or (8 if num_copied_weights(adapter) < FEW_WEIGHTS else 4)
        self._num_made = 0
        self._lock = threading.Lock()
        self.layers: dict[str, CopiedLayer] = {}
        self._make()

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weights."""
        return sum(one.weight.nbytes for one in self.layers.values())

    def refresh(self) -> bool:
        """Whether there is a copy of the weights as they are now; made anew if they have changed."""
        if self.model.device.type != "cpu":
            return False
        if self._is_current():
            return True
        with self._lock:
            return self._is_current() or self._make_anew()

    def _is_current(self) -> bool:
        modules = dict(self.model.named_modules())
        return bool(self.layers) and all(_is_copy(modules.get(name), one) for name, one in self.layers.items())

    def _make_anew(self) -> bool:
        if not self.layers:
            return False
        self.layers = {}  # frees the old copy first
        if self._num_made >= MAX_COPIES:
            logger.warning("mmspec: weights changed %d times; the quantized copy of them is off", self._num_made)
            return False
        try:
            self._make()
        except ValueError as error:
            logger.warning("mmspec: weights changed; the quantized copy of them is off: %s", error)
            return False
        logger.info("mmspec: weights changed; the quantized copy was made anew")
        return True

    def twin(self, model: Any) -> Any:
        """A shallow copy of the model that computes the copied layers by the quantised weights."""
        return with_forwards(model, {name: self._forward(one.weight) for name, one in self.layers.items()})

    def rounds(self, rounds: CRounds) -> CRounds | None:
        """The forwards in C of a call on the quantised weights; None where they do not fit."""
        modules = dict(self.model.named_modules())
        weights: dict[tuple[int, tuple[int, ...]], QuantisedWeight] = {}
        for name, one in self.layers.items():
            weight = modules[name].weight
            weights[weight.data_ptr(), tuple(weight.shape)] = one.weight

        def convert(weight: Weight) -> Weight:
            if isinstance(weight, QuantisedWeight):
                return weight
            found = weights.get((weight.data_ptr(), tuple(weight.shape)))
            if found is None:  # a part of a fused layer: the model's own forward has the whole of it
                raise ValueError("a weight without a copy")
            return found

        return rounds.with_matrices(convert)

    def _forward(self, weight: QuantisedWeight) -> LinearForward:
        kernel = self._kernel

        def forward(layer: nn.Linear, rows: Tensor) -> Tensor:
            flat = rows.reshape(-1, rows.shape[-1]).contiguous()
            if not len(flat) or torch.is_autocast_enabled("cpu"):
                return functional.linear(rows, layer.weight, layer.bias)
            parts = [kernel.linear(weight, layer.bias, part) for part in flat.split(MAX_C_ROWS)]
            found = [part for part in parts if part is not None]
            if len(found) < len(parts):
                return functional.linear(rows, layer.weight, layer.bias)
            return torch.cat(found).view(*rows.shape[:-1], layer.out_features)

        return forward

    def _make(self) -> None:
        """Quantise the weights.

        Raises:
            ValueError: the model cannot be copied, or there is no memory for it.
        """
        layers, head = _copied_layers(self.model, self._access)
        names = {module: name for name, module in self.model.named_modules()}
        bits = dict.fromkeys(layers, self.bits) | ({} if head is None else {head: HEAD_BITS})
        count = sum(layer.weight.numel() for layer in bits)
        needed = sum(layer.weight.numel() * (number + 16 / GROUP) / 8 for layer, number in bits.items())
        free = free_bytes()
        if needed * COPY_MEMORY_FACTOR > free:
            raise ValueError(
                f"drafter='quantized' copies {count / 1e6:.0f} million weights: {needed / 2**20:.0f} MiB must "
                f"be free; free are {free / COPY_MEMORY_FACTOR / 2**20:.0f} MiB. Use drafter='hybrid', or free memory."
            )
        logger.info(
            "mmspec: the quantized copy of %.0f million weights takes %.0f MiB of %.0f MiB that are free",
            *(count / 1e6, needed / 2**20, free / 2**20),
        )
        self._num_made += 1
        try:
            costs = _mean_squares(self._adapter, self._access, {names[layer]: layer for layer in bits})
            made: dict[str, CopiedLayer] = {}
            for layer, number in tqdm(
                bits.items(), desc="mmspec: quantized copy", disable=count < PROGRESS_FROM or None, leave=False
            ):
                weight = layer.weight.detach()
                version, samples = layer.weight._version, _samples(weight)
                quantised = quantise(self._kernel, weight, number, costs.get(names[layer]))
                made[names[layer]] = CopiedLayer(quantised, version, samples)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter for memory that it cannot have
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ValueError(f"drafter='quantized' cannot copy the weights: {reason}. Use drafter='hybrid'.") from error
        self.layers = made


def quantised_copy(adapter: ModelAdapter, access: LayerAccess, bits: int = 0) -> QuantisedCopy:
    """The copy of an adapter's model with these bits, made when it is first asked for; it lives as long as the adapter.

    Raises:
        ValueError: see `QuantisedCopy`.
    """
    if (found := find_copy(adapter, bits)) is not None:
        return found
    with _LOCK:
        found = find_copy(adapter, bits)
        if found is None:
            found = adapter.__dict__.setdefault("_quantised_copies", {})[bits] = QuantisedCopy(adapter, access, bits)
        return found


def find_copy(adapter: ModelAdapter, bits: int) -> QuantisedCopy | None:
    """The copy if it has been made."""
    copies: dict[int, QuantisedCopy] = adapter.__dict__.setdefault("_quantised_copies", {})
    found = copies.get(bits)
    if found is not None and found.model is not adapter.model:  # a deep copy of a patched model has an adapter like it
        copies = adapter.__dict__["_quantised_copies"] = {}
        return None
    return found


def drop_copies(adapter: ModelAdapter) -> None:
    """Free the copies that an adapter holds, and what is known of them: it is that of another model now."""
    for name in ("_quantised_copies", "_num_copied_weights"):
        adapter.__dict__.pop(name, None)


def num_copied_weights(adapter: ModelAdapter) -> int:
    """Weights that a copy would have; 0 where there can be none. Found once for each model and device."""
    model, key = adapter.model, (adapter.model, adapter.model.device)
    known, found = adapter.__dict__.get("_num_copied_weights", (None, 0))
    if known is None or known[0] is not model or known[1] != key[1]:
        try:
            _kernel(adapter.model)
            layers, head = _copied_layers(adapter.model, layer_access(adapter))
            found = sum(layer.weight.numel() for layer in layers) + (0 if head is None else head.weight.numel())
            adapter.__dict__["_num_copied_weights"] = key, found
        except ValueError as error:
            forget_copies(adapter, error)
            return 0
    return int(found)


def forget_copies(adapter: ModelAdapter, reason: Exception) -> None:
    """Let there be no copies of a model any more, as long as it is on this device."""
    logger.info("mmspec: there is no quantized copy: %s", reason)
    adapter.__dict__["_num_copied_weights"] = (adapter.model, adapter.model.device), 0


def _kernel(model: Any) -> CKernel:
    """The C kernel.

    Raises:
        ValueError: there is none, or the model is on another device.
    """
    if model.device.type != "cpu":
        raise ValueError(
            f"drafter='quantized' runs on a CPU; the model is on {model.device}. Use drafter='self' or 'hybrid'."
        )
    kernel = load_kernel()
    if kernel is None:
        raise ValueError(
            "drafter='quantized' needs the C kernel (Linux, x86-64 with AVX2, a C compiler or a wheel with kernels); "
            f"{describe_kernel()[:120]}. Use drafter='hybrid'."
        )
    return kernel


def _copied_layers(model: Any, access: LayerAccess) -> tuple[list[nn.Linear], nn.Linear | None]:
    """The linear layers of the decoder that are copied, and the LM head if it can be.

    Raises:
        ValueError: too little of the decoder can be copied.
    """
    decoder = model.get_submodule(".".join(access.path))
    layers = [layer for layer in find_linear_layers([decoder]) if min(layer.weight.shape) >= TILE_ROWS]
    tensors = {id(one): one for one in (*decoder.parameters(), *decoder.buffers())}
    total = sum(one.nbytes for one in tensors.values())
    share = sum(layer.weight.nbytes for layer in layers) / max(1, total)
    if share < MIN_COPIED_SHARE:
        raise ValueError(
            f"drafter='quantized' copies linear layers in float32, bfloat16 or float16, which are {share:.0%} of the "
            f"decoder of {type(model).__name__} (experts, or weights that are quantised already): that cannot pay. Use "
            "drafter='hybrid'."
        )
    head = model.get_output_embeddings()
    heads = [] if head is None else find_linear_layers([head])
    return layers, heads[0] if heads == [head] else None


def _mean_squares(adapter: ModelAdapter, access: LayerAccess, layers: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """{name: [in_features] mean squares of the inputs of a layer}, of a text of ids spread over the vocabulary.

    It depends on the weights alone, so that the copies of two processes are the same. Empty where the forward fails.
    """
    found: dict[str, Tensor] = {}

    def record(name: str) -> LinearForward:
        def forward(layer: nn.Linear, rows: Tensor) -> Tensor:
            squares = rows.detach().reshape(-1, rows.shape[-1]).float().square().mean(0)
            if bool(squares.isfinite().all()):
                found[name] = squares
            return functional.linear(rows, layer.weight, layer.bias)

        return forward

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(adapter.num_embeddings, (1, CALIBRATION_TOKENS), generator=generator)
    twin = with_forwards(adapter.model, {name: record(name) for name in layers})
    text_model = twin.get_submodule(".".join(access.path[: access.text_depth]))
    try:
        with torch.no_grad(), PrivateDraws():  # dropout draws in train mode, and other threads may be sampling
            states = text_model(input_ids=ids, use_cache=False, return_dict=True)[0]
            head = twin.get_output_embeddings()
            if head is not None and states.shape[-1] == head.in_features:
                head(states)
    except Exception as error:  # whatever a model's own code raises: the copy is a little worse
        logger.debug("mmspec: the inputs of the layers could not be measured: %s", error)
        return {}
    return found


def _is_copy(module: Any, one: CopiedLayer) -> bool:
    return type(module) is nn.Linear and one.is_of(module.weight)


def _samples(weight: Tensor) -> Tensor:
    """The bytes of some numbers of a weight, evenly spread; nan is equal to itself."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUM_SAMPLES)].clone().view(torch.uint8)
