"""Packed linear layers on a CPU: the weight is brought into the kernel's own order once, not in every small product.

A plain float32 `nn.Linear` repacks its weight for each product of a few rows, which eats the gain of scoring several
nodes at once. Here the layers of exact type `nn.Linear` are served from packed copies, only inside the decode loop (a
context variable, so that training, other threads and `disabled()` see plain layers), and only for shapes at which real
calls were faster that way. A copy is never older than its weight: an edit in place is noticed. Knows no model.
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
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

logger = logging.getLogger("mmspec")

MOST_ROWS = 128
"""Products of more rows are not worth it: there the plain kernel's repacking is a small part."""
MOST_BYTES = 2 << 30
"""Copies for all layers together may take that much, unless the user asked for them."""
TRIALS = 5
"""Real calls of each kind that are timed before a shape is decided."""
HINT = 8
"""Rows for which weights are packed."""

Shape = tuple[int, int, int]
"""(outputs, inputs, rows)"""


@dataclass
class Pack:
    """The packed copy of one weight, and whose it is."""

    weight: Tensor
    data: int
    version: int

    def fits(self, weight: Tensor) -> bool:
        """Whether the weight is still the one that was packed."""
        return weight.data_ptr() == self.data and weight._version == self.version


@dataclass
class Trial:
    """Times of one shape, and what came of them: True for packed, None while undecided."""

    plain: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)
    better: bool | None = None

    def add(self, packed: bool, seconds: float) -> None:
        """Note one call; when there are enough of both, decide by the medians."""
        (self.packed if packed else self.plain).append(seconds)
        if min(len(self.plain), len(self.packed)) >= TRIALS:
            self.better = median(self.packed) < median(self.plain)


class Packs:
    """The packed copies of a model's linear layers. One object per patched model; calls in several threads share it.

    Attributes:
        trials: what is known of each shape. broken: this torch, or this machine's memory, cannot pack.
    """

    def __init__(self) -> None:
        self.packs: weakref.WeakKeyDictionary[nn.Module, Pack] = weakref.WeakKeyDictionary()
        self.trials: dict[Shape, Trial] = {}
        self.broken = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(pack.weight.element_size() * pack.weight.numel() for pack in self.packs.values())

    def linear(self, layer: nn.Linear, rows: Tensor, fixed: bool) -> Tensor:
        """`layer(rows)`, from the packed copy where that is known, or being found out, to be faster.

        Args:
            fixed: decide by the number of rows alone, so that no shape is chosen by timing.
        """
        count = rows.numel() // rows.shape[-1]
        plain = functional.linear
        if self.broken or count > MOST_ROWS or torch.is_grad_enabled() or rows.dtype != torch.float32:
            return plain(rows, layer.weight, layer.bias)
        if fixed:
            return self._packed(layer, rows) if count > 1 else plain(rows, layer.weight, layer.bias)
        trial = self.trials.setdefault((layer.out_features, layer.in_features, count), Trial())
        if trial.better is not None:
            return self._packed(layer, rows) if trial.better else plain(rows, layer.weight, layer.bias)
        use = len(trial.packed) <= len(trial.plain)
        if use:
            self._pack(layer)  # not a part of what is timed
        began = time.perf_counter()
        out = self._packed(layer, rows) if use else plain(rows, layer.weight, layer.bias)
        trial.add(use, time.perf_counter() - began)
        return out

    def _packed(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        pack = self._pack(layer)
        if pack is None:
            return functional.linear(rows, layer.weight, layer.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, pack.weight, layer.bias, "none", [], "")
        return out

    def _pack(self, layer: nn.Linear) -> Pack | None:
        """The layer's copy, made or renewed if need be; None if this torch cannot."""
        pack = self.packs.get(layer)
        if pack is not None and pack.fits(layer.weight):
            return pack
        with self._lock:
            weight = layer.weight
            data, version = weight.data_ptr(), weight._version  # before: an edit meanwhile must not go unnoticed
            try:
                copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT)
            except (AttributeError, NotImplementedError, RuntimeError) as error:
                # An operator of torch's own that may be missing, or refuse a build or a shape, or run out of memory:
                # plain layers do the same, so this costs speed alone.
                self.broken = True
                logger.debug("linear layers stay plain: %s", error)
                return None
            pack = Pack(copy, data, version)
            self.packs[layer] = pack
        return pack


@dataclass(frozen=True)
class _Use:
    packs: Packs
    fixed: bool


ACTIVE: ContextVar[_Use | None] = ContextVar("mmspec_packs", default=None)
_INSTALLED: dict[int, int] = {}
_INSTALL = threading.Lock()


def _forward(self: nn.Linear, rows: Tensor) -> Tensor:
    use = ACTIVE.get()
    if use is None:
        return functional.linear(rows, self.weight, self.bias)
    return use.packs.linear(self, rows, use.fixed)


def layers_of(roots: Iterable[nn.Module], most: int | None = MOST_BYTES) -> list[nn.Linear]:
    """The layers that can be packed: exact type, float32, on the CPU, unhooked; none if copies would take too much."""
    found: dict[int, nn.Linear] = {}
    for root in roots:
        for module in root.modules():
            if type(module) is nn.Linear and _plain(module):
                found[id(module)] = module
    size = sum(layer.weight.nbytes for layer in found.values())
    return [] if most is not None and size > most else list(found.values())


def served(module: nn.Module) -> bool:
    """Whether a module's forward is replaced by ours, for a call in some thread."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def _plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    own = "forward" in layer.__dict__ and not served(layer)
    whole = type(weight) is nn.Parameter and weight.is_contiguous() and not weight.is_inference()
    return whole and weight.dtype == torch.float32 and weight.device.type == "cpu" and not own


@contextlib.contextmanager
def packed(packs: Packs | None, layers: Iterable[nn.Linear], fixed: bool = False) -> Iterator[None]:
    """Within it, this thread's calls of these layers may be served from packed copies. Nothing is left behind."""
    chosen = list(layers) if packs is not None and torch.backends.mkldnn.is_available() else []
    if packs is None or not chosen:
        yield
        return
    with _INSTALL:
        for layer in chosen:
            _INSTALLED[id(layer)] = _INSTALLED.get(id(layer), 0) + 1
            layer.__dict__["forward"] = types.MethodType(_forward, layer)
    token = ACTIVE.set(_Use(packs, fixed))
    try:
        yield
    finally:
        ACTIVE.reset(token)
        with _INSTALL:
            for layer in chosen:
                _INSTALLED[id(layer)] -= 1
                if not _INSTALLED[id(layer)]:
                    del _INSTALLED[id(layer)]
                    layer.__dict__.pop("forward", None)


__all__ = ["MOST_BYTES", "Packs", "layers_of", "packed", "served"]
