"""A copy of a target with weights of 4 or 8 bits, which drafts for it (`mmspec.drafters.model.self_drafter`).

Copied are the linear layers of the decoder and the LM head; norms, embeddings, biases, adapters and the KV cache are
the target's own. The copy runs in the C decoder where the target does, else in the target's own forward: modules
on the way to a copied layer are copied shallowly, and the layer's forward is the compiled product. What it computes
decides how much is accepted, never a token.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.logging import tqdm

from mmspec.cpu.bf16_copies import free_bytes
from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, describe_kernel, load_kernel
from mmspec.cpu.decoder import CDecoder
from mmspec.cpu.huge_pages import HugeMemory
from mmspec.cpu.quantise import quantise, quantised_bytes
from mmspec.cpu.weights import QuantisedWeight, Weight, version_of
from mmspec.engine.revision import Revision
from mmspec.forks import new_lock
from mmspec.interfaces import DrafterRequirements
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.copied_layers import (
    CopiedLayer,
    agreement,
    calibrate,
    calibration_logits,
    copied_layers,
    is_copy,
    sample_bytes,
)
from mmspec.targets.layer_access import LayerAccess, LinearForward, layer_access, with_forwards
from mmspec.targets.model_state import model_revision

logger = logging.getLogger("mmspec")

HEAD_BITS = 8
"""Of the LM head, whose errors reach the logits as they are."""
FEW_WEIGHTS = 1_000_000_000
"""Copies of models with fewer weights have 4 bits if that agrees with the model (`MIN_AGREEMENT`), else 8."""
MIN_AGREEMENT = 0.8
"""`agreement` with the model that 4 bits of such a model must have, behind random ids; in texts it is higher: the
scenes model, with 0.86, accepts 0.995 of the tokens that its copy drafts, SmolLM2-135M, with 0.70, accepts 0.84."""
COPY_MEMORY_FACTOR = 1.2
"""Free memory that there must be, in bytes of the copy."""
MAX_COPIES = 4
"""Times that the copy of one patched model is made; after as many changes of the weights it stays off."""
PROGRESS_FROM = 200_000_000
"""Weights from which a progress bar is shown."""
NUM_COPIED = "copied weights"
"""Key of `num_copied_weights` among what is derived from a model."""
_LOCK = new_lock()


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
            bits: 4 or 8; 0 chooses by the number of weights and, where they are few, by what 4 bits change.

        Raises:
            ValueError: the model cannot be copied, or there is no memory for it.
        """
        self.model = adapter.model
        self._adapter = adapter
        self._access = access
        self._kernel = kernel_for(self.model.device)
        self._device = self.model.device
        self._choices = bit_choices(bits, num_copied_weights(adapter))
        self.bits = self._choices[0]
        self._num_made = 0
        self._lock = new_lock()
        self.layers: dict[str, CopiedLayer] = {}
        self._decoder: CDecoder | None = None  # for the rounds of all calls of one revision of the model
        self._revision: Revision | None = None
        self._make()

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weights."""
        return sum(one.weight.nbytes for one in self.layers.values())

    def refresh(self) -> bool:
        """Whether there is a copy of the weights as they are now; made anew if they have changed."""
        if self.model.device != self._device:
            return False
        if self._is_current():
            return True
        with self._lock:
            return self._is_current() or self._make_anew()

    def _is_current(self) -> bool:
        modules = dict(self.model.named_modules())
        return bool(self.layers) and all(is_copy(modules.get(name), one) for name, one in self.layers.items())

    def _make_anew(self) -> bool:
        if not self.layers:
            return False
        self.layers, self._decoder = {}, None  # frees the old copy first
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

    def c_forwards(self, forwards: CForwards) -> CForwards | None:
        """The forwards in C of a call on the quantised weights; None where they do not fit."""
        known, revision = self._decoder, forwards.call.revision
        if known is None or known.shape != forwards.decoder.shape or self._revision is not revision:
            known = self._decoder = self._copied(forwards.decoder)
            self._revision = revision
        return None if known is None else replace(forwards, decoder=known)

    def _copied(self, decoder: CDecoder) -> CDecoder | None:
        """The decoder on the quantised weights; None where they do not fit."""
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

        try:
            copied = decoder.with_matrices(convert)
        except ValueError:
            return None
        copied.prepare_angles()
        return copied

    def _forward(self, weight: QuantisedWeight) -> LinearForward:
        kernel = self._kernel

        def forward(layer: nn.Linear, rows: Tensor) -> Tensor:
            flat = rows.reshape(-1, rows.shape[-1]).contiguous()
            parts: list[Tensor | None] = [None]
            if len(flat) and not torch.is_autocast_enabled(rows.device.type):
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
        linears, head = copied_layers(self.model, self._access)
        names = {module: name for name, module in self.model.named_modules()}
        layers = {names[layer]: layer for layer in (*linears, *([] if head is None else [head]))}
        choices = [
            {name: HEAD_BITS if layer is head else bits for name, layer in layers.items()} for bits in self._choices
        ]
        self._num_made += 1
        try:
            marks = {name: (version_of(layer.weight), sample_bytes(layer.weight)) for name, layer in layers.items()}
            weights = self._best(layers, choices)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter for memory that it cannot have
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ValueError(f"drafter='quantized' cannot copy the weights: {reason}. Use drafter='hybrid'.") from error
        self.bits = next(one.bits for name, one in weights.items() if layers[name] is not head)
        self.layers = {name: CopiedLayer(weights[name], *mark) for name, mark in marks.items()}

    def _best(
        self, layers: Mapping[str, nn.Linear], choices: Sequence[Mapping[str, int]]
    ) -> Mapping[str, QuantisedWeight]:
        """Weights with the first of these bits that agree well enough with the model, else with the last."""
        costs, logits = calibrate(self._adapter, self._access, layers)
        found: dict[str, QuantisedWeight] = {}
        for number, bits in enumerate(choices):
            found = {name: one for name, one in found.items() if one.bits == bits[name]}  # frees the others
            found |= self._quantise({name: one for name, one in layers.items() if name not in found}, bits, costs)
            is_last = number == len(choices) - 1
            if is_last or agreement(logits, self._calibration_logits(found)) >= MIN_AGREEMENT:
                break
        return found

    def _calibration_logits(self, weights: Mapping[str, QuantisedWeight]) -> Tensor | None:
        """Those of a copy with these weights."""
        twin = with_forwards(self.model, {name: self._forward(one) for name, one in weights.items()})
        return calibration_logits(self._adapter, self._access, twin)

    def _quantise(
        self, layers: Mapping[str, nn.Linear], bits: Mapping[str, int], costs: Mapping[str, Tensor]
    ) -> dict[str, QuantisedWeight]:
        """Weights of these bits.

        Raises:
            ValueError: there is no memory for them.
        """
        count = sum(layer.weight.numel() for layer in layers.values())
        sizes = Counter[int]()  # by bits: those of a head are kept where those of the layers are freed
        for name, layer in layers.items():
            sizes[bits[name]] += sum(quantised_bytes(layer.out_features, layer.in_features, bits[name])) + 2 * 64
        needed = sizes.total()
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
        bar = tqdm(layers.items(), desc="mmspec: quantized copy", disable=count < PROGRESS_FROM or None, leave=False)
        new = {bits: HugeMemory(size).take for bits, size in sizes.items()}
        return {
            name: quantise(self._kernel, one.weight.detach(), bits[name], costs.get(name), new[bits[name]])
            for name, one in bar
        }


def kernel_for(device: torch.device) -> CKernel:
    """The kernel that multiplies rows with the copy of a model on a device.

    Raises:
        ValueError: there can be no copy.
    """
    if device.type != "cpu":
        raise ValueError(
            f"drafter='quantized' runs on a CPU; the model is on {device}. Use drafter='self' or 'hybrid'."
        )
    kernel = load_kernel()
    if kernel is None:
        raise ValueError(
            "drafter='quantized' needs the C kernel, which cannot be had here: "
            f"{describe_kernel()}. Use drafter='hybrid'."
        )
    return kernel


def bit_choices(bits: int, count: int) -> tuple[int, ...]:
    """Bits of the decoder's weights in a copy of so many, the first to be tried first; `bits` if it is not 0."""
    return (bits,) if bits else (4, 8) if count < FEW_WEIGHTS else (4,)


def quantised_copy(adapter: ModelAdapter, access: LayerAccess, needs: DrafterRequirements) -> QuantisedCopy:
    """The copy of an adapter's model that a drafter needs, made when it is first asked for; it lives as long as the
    adapter.

    Raises:
        ValueError: see `QuantisedCopy`.
    """
    bits = needs.copy_bits or 0
    if (found := find_copy(adapter, bits)) is not None:
        return found
    with _LOCK:
        found = find_copy(adapter, bits)
        if found is None:
            found = QuantisedCopy(adapter, access, bits)
            adapter.__dict__.setdefault("_quantised_copies", {})[bits] = found
        return found


def find_copy(adapter: ModelAdapter, bits: int) -> QuantisedCopy | None:
    """The copy if it has been made."""
    copies: dict[int, QuantisedCopy] = adapter.__dict__.get("_quantised_copies", {})
    return copies.get(bits)


def drop_copies(adapter: ModelAdapter) -> None:
    """Forget the copies that an adapter holds: its model is another one now, or patched no more."""
    adapter.__dict__.pop("_quantised_copies", None)


def num_copied_weights(adapter: ModelAdapter, revision: Revision | None = None) -> int:
    """Weights that a copy would have; 0 where there can be none. Found once for each revision of the model."""
    revision = model_revision(adapter) if revision is None else revision

    def count() -> int:
        try:
            kernel_for(adapter.model.device)
            layers, head = copied_layers(adapter.model, layer_access(adapter, revision))
        except ValueError as error:
            logger.info("mmspec: there is no quantized copy: %s", error)
            return 0
        return sum(layer.weight.numel() for layer in (*layers, *([] if head is None else [head])))

    return revision.cached(NUM_COPIED, count)


def forget_copies(revision: Revision, reason: Exception) -> None:
    """Let there be no copies of a model any more, as long as it is the same."""
    logger.info("mmspec: there is no quantized copy: %s", reason)
    revision.keep(NUM_COPIED, 0)
