"""The forwards over tree nodes of one call in C, for models whose decoder it knows.

Which decoders those are is read from a model's modules (`mmspec.targets.c_traits`) and tested against its own
forward (`mmspec.targets.c_check`). Whatever differs (hooks, adapters, quantised layers) runs in the model's
own forward, as do prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.cpu.bf16_copies import WeightCopies
from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.chain_types import ChainRequest, DraftedChains
from mmspec.cpu.decoder import MAX_DECODER_ROWS, CDecoder
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.c_check import NodeCall, verified_parts
from mmspec.targets.c_traits import DecoderParts

IGNORED_INPUTS = frozenset(
    (CACHE_ARGUMENT, "use_cache", "logits_to_keep", "return_dict", "image_sizes", "image_num_crops")
)
"""Inputs of a round that do not change what such a forward computes: it has no images."""


WEIGHT_COPIES = WeightCopies()
"""Of the weights of all models of this process."""


@dataclass(frozen=True)
class CForwards:
    """The forwards over tree nodes of one call, by a `CDecoder`.

    Attributes:
        decoder: of the model, or of a copy of it.
        parts: of the model, for what is done to the logits.
        call: positions and padding.
        runs_user_code: user code runs during the call, and may change the model.
        layers: decoder layers of the model that `decoder` has; None for all.
    """

    decoder: CDecoder
    parts: DecoderParts
    call: NodeCall
    runs_user_code: bool
    layers: Sequence[int] | None = None

    def score(
        self,
        tree: DraftTree,
        kv_cache: RaggedKVCache,
        hidden_state_indices: Sequence[int],
        active: Sequence[bool] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """As `Target.score`, after `RaggedKVCache.begin_forward`; None if this forward must run in the model.

        Args:
            tree: the sanitized tree.
            kv_cache: where the nodes' keys and values are written.
            hidden_state_indices: hidden states to return.
            active: the rows that are computed, all if None; the results of the others are 0.
        """
        caches = self._caches(kv_cache)
        if caches is None:
            return None
        batch = len(tree.tokens)
        rows = [row for row in range(batch) if active is None or active[row]]
        size = self._rows_at_once(tree.num_nodes, batch)
        groups: list[list[int] | None] = [None]
        if min(len(rows), size) < batch:
            groups = [rows[start : start + size] for start in range(0, max(1, len(rows)), size)]
        found = list[tuple[Tensor, dict[int, Tensor]]]()
        for group in groups:
            inputs = self.call.inputs(tree, caches, group)
            scored = self.decoder.forward(inputs, hidden_state_indices, bool(found))
            if scored is None:
                return None
            found.append(scored)
        if self.call.states is not None:
            self.call.states.record(self.decoder.logs)
        logits, states = found[0]
        if len(found) > 1:
            logits = torch.cat([one for one, _ in found])
            states = {index: torch.cat([part[index] for _, part in found]) for index in states}
        logits = self.parts.finish_logits(logits)
        if len(rows) == batch:
            return logits, states
        return _spread(logits, rows, batch), {index: _spread(one, rows, batch) for index, one in states.items()}

    def _rows_at_once(self, nodes: int, batch: int) -> int:
        """Rows of one forward. For its width none is left to torch, whose bits are others in half precision, and which
        computes recurrent states of chains alone."""
        is_divided = self.decoder.dtype in (torch.bfloat16, torch.float16) or self.call.states is not None
        return max(1, MAX_DECODER_ROWS // nodes) if is_divided else batch

    def chain(self, kv_cache: RaggedKVCache, request: ChainRequest) -> DraftedChains | None:
        """Chains behind the committed positions; None if they must be drafted by forwards of the model."""
        if self.call.states is not None:
            return None
        kv_cache.begin_forward(request.num_positions)
        caches = self._caches(kv_cache)
        if caches is None:
            return None
        batch, rows = len(request.unread), [row for row, ids in enumerate(request.unread) if ids]
        scale, softcap = self.parts.logit_scale, self.parts.logit_softcap or 0.0
        if len(rows) == batch:
            return self.decoder.chain(self.call.context(caches), request, scale, softcap)
        found = self.decoder.chain(self.call.context(caches, rows), request.rows(rows), scale, softcap)
        if found is None:
            return None
        tree, num_read = found.tree, [0] * batch
        for row, count in zip(rows, found.num_read, strict=True):
            num_read[row] = count
        assert tree.scores is not None
        parts = (_spread(part, rows, batch) for part in (tree.tokens, tree.parents, tree.node_mask, tree.scores))
        return replace(found, tree=DraftTree(*parts), num_read=num_read, chains=_spread(found.chains, rows, batch))

    def _caches(self, kv_cache: RaggedKVCache) -> list[Tensor | None] | None:
        """Keys and values of the decoder's layers; None if the forward must run in the model."""
        if torch.is_autocast_enabled("cpu") or (self.runs_user_code and not self.call.revision.is_current()):
            return None
        caches = kv_cache.common_buffers()
        if caches is None or self.layers is None:
            return caches
        return [caches[index] for index in self.layers]

    def restrict(self, layers: Sequence[int]) -> CForwards:
        """The same with these decoder layers of the model only."""
        return replace(self, decoder=self.decoder.restrict(layers), layers=layers)


def _spread(computed: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """[batch, ...] with `computed` in these rows, and 0 in the others."""
    spread = computed.new_zeros(batch, *computed.shape[1:])
    spread[rows] = computed
    return spread


def c_forwards(kernel: CKernel, call: NodeCall, runs_user_code: bool) -> CForwards | None:
    """The forwards in C of a call; None if the model or the call is not for them.

    Args:
        kernel: the C kernel.
        call: the call, after its prefill.
        runs_user_code: user code runs during the call.
    """
    has_more_inputs = any(value is not None and name not in IGNORED_INPUTS for name, value in call.template.items())
    if has_more_inputs or call.position_base is None:
        return None
    parts = verified_parts(kernel, call)
    if parts is None:
        return None
    try:
        copies = None if runs_user_code else WEIGHT_COPIES
        decoder = CDecoder(kernel, parts.shape, parts.layers, parts.ends, parts.rotaries, copies)
    except ValueError:  # weights of other types, devices or shapes
        return None
    return CForwards(decoder, parts, call, runs_user_code)
