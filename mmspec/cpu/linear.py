"""Linear layers over a few rows on a CPU, computed in whichever way is fastest here.

A plain float32 `nn.Linear` is at its worst for products of a few rows, which eats the gain of scoring several nodes at
once. There are two other ways to the same product: *turned* (weight times rows, so that the kernel's wide side is the
weight's; needs nothing but a transposed result; a single row goes twice) and, if the user asks for it, *packed* (the
weight brought into the kernel's own order once, in a copy). Here the layers of exact type `nn.Linear` are served so,
only inside the decode loop (a context variable, so that training, other threads and `disabled()` see plain layers), and
only for shapes at which real calls were faster that way. Knows no model.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

logger = logging.getLogger("mmspec")

MAX_ROWS = 128
"""Products of more rows are not worth it: there the plain kernel's repacking is a small part."""
TIMED_CALLS = 5
"""Real calls of each kind that are timed before a shape is decided."""
PACK_BATCH_HINT = 8
"""Rows for which weights are packed."""


def bf16_is_faster(device: torch.device) -> bool:
    """Whether bfloat16 is worth it in training. CPUs without instructions for it emulate it, fifty times as slowly.

    With them it depends: on a Xeon with AVX-512's but without AMX products took twice as long as in float32
    (2026-11-24). So it is measured there, once a process.
    """
    if device.type != "cpu":
        return True
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


@cache
def _seconds(dtype: torch.dtype) -> float:
    """What a product of the size of a small layer takes on this CPU: the least of five after one to warm up."""
    rows, weight = torch.ones(1024, 384, dtype=dtype), torch.ones(1024, 384, dtype=dtype)
    taken = []
    with torch.no_grad():
        for _ in range(6):
            began = time.perf_counter()
            functional.linear(rows, weight)
            taken.append(time.perf_counter() - began)
    return min(taken[1:])


Shape = tuple[int, int, int]
"""(outputs, inputs, rows)"""


@dataclass
class PackedWeight:
    """The packed copy of one weight, and which weight, with which bits, it is of."""

    weight: Tensor
    data_ptr: int
    version: int
    checksums: tuple[Tensor, Tensor]

    def matches(self, weight: Tensor) -> bool:
        """Whether the weight is still the one that was packed, as far as can be seen without reading it."""
        return weight.data_ptr() == self.data_ptr and weight._version == self.version


def weight_checksums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a weight's bits over rows and over columns, exact."""
    bits = weight.detach().view(torch.int32)
    return bits.sum(0), bits.sum(1)


@dataclass
class KernelTiming:
    """Times of one shape, and what came of them: the best way, None while undecided."""

    kernels: tuple[str, ...] = ("plain", "turned", "packed")
    seconds: dict[str, list[float]] = field(default_factory=dict)
    best: str | None = None

    def next_kernel(self) -> str:
        """The way that was tried least."""
        return min(self.kernels, key=lambda way: len(self.seconds.get(way, ())))

    def add(self, way: str, seconds: float) -> None:
        """Note one call; when there are enough of all ways, decide by the medians."""
        self.seconds.setdefault(way, []).append(seconds)
        if all(len(self.seconds.get(way, ())) >= TIMED_CALLS for way in self.kernels):
            self.best = min(self.kernels, key=lambda way: median(self.seconds[way]))


class LinearAutotuner:
    """How a model's linear layers are computed fastest. One per patched model; calls in several threads share it.

    Attributes:
        packs: the copies. trials: what is known of each shape. broken: this torch, or this machine's memory, cannot
            pack.
    """

    def __init__(self) -> None:
        self.packed_weights: weakref.WeakKeyDictionary[nn.Module, PackedWeight] = weakref.WeakKeyDictionary()
        self.timings: dict[Shape, KernelTiming] = {}
        self.cannot_pack = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(pack.weight.element_size() * pack.weight.numel() for pack in self.packed_weights.values())

    def linear(
        self, layer: nn.Linear, rows: Tensor, deterministic: bool = False, allow_packing: bool = False
    ) -> Tensor:
        """`layer(rows)`, in the way that is known, or being found out, to be the fastest.

        Args:
            fixed: decide by the number of rows alone, so that no shape is chosen by timing.
            copies: packed copies may be made.
        """
        count = rows.numel() // rows.shape[-1]
        if count > MAX_ROWS or torch.is_grad_enabled() or rows.dtype != torch.float32 or _casts():
            return functional.linear(rows, layer.weight, layer.bias)
        if deterministic:
            return self._in_way("turned" if count > 1 else "plain", layer, rows)
        ways = ("plain", "turned", *(("packed",) if allow_packing and not self.cannot_pack else ()))
        shape = (layer.out_features, layer.in_features, count)
        trial = self.timings.get(shape)
        if trial is not None and trial.best is not None and trial.best in ways:
            return self._in_way(trial.best, layer, rows)
        if trial is None or trial.kernels != ways:
            trial = self.timings[shape] = KernelTiming(ways)
        way = trial.next_kernel()
        if way == "packed":
            self._pack(layer)  # not a part of what is timed
        began = time.perf_counter()
        out = self._in_way(way, layer, rows)
        trial.add(way, time.perf_counter() - began)
        return out

    def drop_stale(self, layers: Iterable[nn.Linear]) -> None:
        """Drop the copies of weights that were changed behind torch's back.

        `weight.data += delta`, as peft merges, changes neither address nor version, so the bits are compared: 10 ms for
        20 million weights.
        """
        for layer in layers:
            pack = self.packed_weights.get(layer)
            if pack is not None and not all(map(torch.equal, pack.checksums, weight_checksums(layer.weight))):
                del self.packed_weights[layer]

    def _in_way(self, way: str, layer: nn.Linear, rows: Tensor) -> Tensor:
        if way == "packed":
            return self._packed(layer, rows)
        return transposed_linear(layer, rows) if way == "turned" else functional.linear(rows, layer.weight, layer.bias)

    def _packed(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        pack = self._pack(layer)
        if pack is None:
            return functional.linear(rows, layer.weight, layer.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, pack.weight, layer.bias, "none", [], "")
        return out

    def _pack(self, layer: nn.Linear) -> PackedWeight | None:
        """The layer's copy, made or renewed if need be; None if this torch cannot."""
        pack = self.packed_weights.get(layer)
        if pack is not None and pack.matches(layer.weight):
            return pack
        with self._lock:
            weight = layer.weight
            data, version = weight.data_ptr(), weight._version  # before: an edit meanwhile must not go unnoticed
            try:
                copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_BATCH_HINT)
            except (AttributeError, NotImplementedError, RuntimeError) as error:
                # An operator of torch's own that may be missing, or refuse a build or a shape, or run out of memory:
                # plain layers do the same, so this costs speed alone.
                self.cannot_pack = True
                logger.debug("linear layers stay plain: %s", error)
                return None
            pack = PackedWeight(copy, data, version, weight_checksums(weight))
            self.packed_weights[layer] = pack
        return pack


def transposed_linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    """[..., out], `layer(rows)` as weight times rows. Laid out like the plain result, since others view it.

    A single row is multiplied twice, of two rows in memory: some kernels (MKL's on an AMD EPYC) take three times as
    long for a vector as for a matrix of two such columns.
    """
    flat, count, bias = rows.reshape(-1, rows.shape[-1]), rows.numel() // rows.shape[-1], layer.bias
    flat = (flat.repeat(2, 1) if count == 1 else flat).t()
    out = torch.mm(layer.weight, flat) if bias is None else torch.addmm(bias[:, None], layer.weight, flat)
    return out[:, :count].t().contiguous().view(*rows.shape[:-1], layer.out_features)


def _casts() -> bool:
    """Whether autocast is on, under which a plain layer would compute in half precision, and others might not."""
    return torch.is_autocast_enabled("cpu")


@dataclass(frozen=True)
class _Use:
    packs: LinearAutotuner
    fixed: bool
    copies: bool


ACTIVE_AUTOTUNER: ContextVar[_Use | None] = ContextVar("mmspec_packs", default=None)
_INSTALLED: dict[int, int] = {}
_INSTALL = threading.Lock()


def _forward(self: nn.Linear, rows: Tensor) -> Tensor:
    use = ACTIVE_AUTOTUNER.get()
    if use is None:
        return functional.linear(rows, self.weight, self.bias)
    return use.packs.linear(self, rows, use.fixed, use.copies)


def find_linear_layers(roots: Iterable[nn.Module]) -> list[nn.Linear]:
    """The layers that can be served: exact type, float32, on the CPU, unhooked."""
    found: dict[int, nn.Linear] = {}
    for root in roots:
        for module in root.modules():
            if type(module) is nn.Linear and _plain(module):
                found[id(module)] = module
    return list(found.values())


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's forward is replaced by ours, for a call in some thread."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def _plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    own = "forward" in layer.__dict__ and not is_replaced(layer)
    whole = type(weight) is nn.Parameter and weight.is_contiguous() and not weight.is_inference()
    return whole and weight.dtype == torch.float32 and weight.device.type == "cpu" and not own


@contextlib.contextmanager
def use_fast_linears(
    autotuner: LinearAutotuner | None,
    layers: Iterable[nn.Linear],
    deterministic: bool = False,
    allow_packing: bool = False,
) -> Iterator[None]:
    """Within it, this thread's calls of these layers may be computed in other ways. Nothing is left behind.

    Args:
        fixed, copies: see `Packs.linear`.
    """
    chosen = list(layers) if autotuner is not None else []
    if autotuner is None or not chosen:
        yield
        return
    allow_packing = allow_packing and torch.backends.mkldnn.is_available()
    if allow_packing:
        autotuner.drop_stale(chosen)
    with _INSTALL:
        for layer in chosen:
            _INSTALLED[id(layer)] = _INSTALLED.get(id(layer), 0) + 1
            layer.__dict__["forward"] = types.MethodType(_forward, layer)
    token = ACTIVE_AUTOTUNER.set(_Use(autotuner, deterministic, allow_packing))
    try:
        yield
    finally:
        ACTIVE_AUTOTUNER.reset(token)
        with _INSTALL:
            for layer in chosen:
                _INSTALLED[id(layer)] -= 1
                if not _INSTALLED[id(layer)]:
                    del _INSTALLED[id(layer)]
                    layer.__dict__.pop("forward", None)


__all__ = ["LinearAutotuner", "find_linear_layers", "is_replaced", "transposed_linear", "use_fast_linears"]
