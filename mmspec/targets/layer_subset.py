"""The target of a call with some of its decoder layers, or by a copy of them (`mmspec.drafters.model`).

Keys and values of committed positions are those of the whole target, as in SWIFT (arXiv 2410.06916): there is no prompt
to process and no second cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from mmspec.cpu.quantise import quantised_bytes
from mmspec.cpu.weights import GROUP
from mmspec.interfaces import DrafterRequirements, DraftTarget
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.forward import NodeForward
from mmspec.targets.hf import HFTarget
from mmspec.targets.layer_access import LayerAccess, layer_access
from mmspec.targets.quantised_copy import (
    QuantisedCopy,
    bit_choices,
    find_copy,
    forget_copies,
    num_copied_weights,
    quantised_copy,
)


class CallLayerSubsets:
    """Implements `mmspec.interfaces.LayerSubsets` for the target of one call."""

    def __init__(self, access: LayerAccess, target: HFTarget, needs: DrafterRequirements) -> None:
        """
        Args:
            access: where the decoder layers are.
            target: of the call, after its prefill.
            needs: of the drafter: which copy computes them, or none.
        """
        adapter = target.adapter
        self.num_layers = adapter.num_layers
        self.exit_limit = None if adapter.num_cache_layers == adapter.num_layers else adapter.num_cache_layers
        self._access, self._target, self._needs = access, target, needs

    @cached_property
    def byte_share(self) -> float:
        if (bits := self._needs.copy_bits) is None:
            return 1.0
        adapter, forwards = self._target.adapter, self._target.c_forwards
        count = max(1, num_copied_weights(adapter, self._target.revision))
        if (known := find_copy(adapter, bits)) is not None:
            copied: float = known.nbytes
        else:  # of those that it may have, the most: who makes it for nothing has lost more than who waits
            copied = sum(quantised_bytes(-(-count // GROUP), GROUP, max(bit_choices(bits, count))))
        read = [] if forwards is None else [one for one in forwards.decoder.matrices() if isinstance(one, Tensor)]
        itemsize = sum(one.nbytes for one in read) / sum(one.numel() for one in read) if read else 0
        return copied / count / (itemsize or adapter.model.dtype.itemsize)

    @property
    def is_made(self) -> bool:
        bits = self._needs.copy_bits
        return bits is None or find_copy(self._target.adapter, bits) is not None

    def make(self) -> bool:
        if self._needs.copy_bits is None:
            return True
        try:
            return quantised_copy(self._target.adapter, self._access, self._needs).refresh()
        except ValueError as error:
            forget_copies(self._target.revision, error)
            return False

    @cached_property
    def _copy(self) -> QuantisedCopy | None:
        if self._needs.copy_bits is None:
            return None
        return quantised_copy(self._target.adapter, self._access, self._needs)

    @cached_property
    def _model(self) -> Any:
        """The model that drafts, with all layers."""
        return self._target.model if self._copy is None else self._copy.twin(self._target.model)

    @cached_property
    def _c_forwards(self) -> CForwards | None:
        """Its forwards in C; the target has its own by the first draft."""
        forwards = self._target.c_forwards
        return forwards if forwards is None or self._copy is None else self._copy.c_forwards(forwards)

    def open(self, layers: Sequence[int]) -> DraftTarget:
        twin = copy.copy(self._target)  # with the buffer, the positions and the padding of the call
        twin.c_forwards = None if self._c_forwards is None else self._c_forwards.restrict(layers)
        own = self._target.node_forward
        twin.node_forward = NodeForward(own.adapter, own.template, lambda: self._access.restrict(self._model, layers))
        return twin


def open_layer_subsets(target: HFTarget, needs: DrafterRequirements) -> CallLayerSubsets | None:
    """The target of a call with fewer layers; None where it cannot be opened in the present state of the model.

    Args:
        target: of the call, after its prefill.
        needs: of the drafter.
    """
    if type(target) is not HFTarget:
        return None
    adapter = target.adapter
    if needs.optional_copy and (target.recordings is not None or not num_copied_weights(adapter, target.revision)):
        return None
    try:
        access = layer_access(adapter, target.revision)
    except ValueError:  # the model has changed since `check_layer_subsets`
        return None
    subsets = CallLayerSubsets(access, target, needs)
    may_wait = needs.optional_copy and not subsets.is_made
    return subsets if may_wait or subsets.make() else None


def check_layer_subsets(adapter: ModelAdapter, needs: DrafterRequirements) -> None:
    """Find out whether a model can draft with some of its layers, and make the copy that does.

    Raises:
        ValueError: see `layer_access` and `QuantisedCopy`.
    """
    access = layer_access(adapter)
    if needs.copy_bits is not None:
        quantised_copy(adapter, access, needs)
