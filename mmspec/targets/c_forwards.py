"""The forwards over tree nodes of one call in C, for models whose decoder it knows (`mmspec.targets.c_check`).

Whatever differs (hooks, adapters, quantised layers) runs in the model's own forward, as do prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.chain_types import ChainRequest, DraftedChains
from mmspec.cpu.decoder import MAX_DECODER_ROWS, CDecoder, DecoderContext, DecoderInputs
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.revision import Revision
from mmspec.engine.tree import DraftTree
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_traits import DecoderParts
from mmspec.targets.forward import CallTensors
from mmspec.targets.recurrent_states import RecurrentStates


@dataclass(frozen=True)
class NodeCall:
    """A call of a model after its prefill.

    Attributes:
        adapter: of the model.
        revision: of the model.
        template: inputs of every round that do not change.
        tensors: what the forwards read besides the nodes.
        kv_cache: with the prompt.
        has_media: whether the prompt has images or videos.
        states: of recurrent layers; None if the model has none.
    """

    adapter: ModelAdapter
    revision: Revision
    template: Mapping[str, Any]
    tensors: CallTensors
    kv_cache: RaggedKVCache
    has_media: bool
    states: RecurrentStates | None = None

    @functools.cached_property
    def position_base(self) -> list[int] | None:
        """Position id of each row's cache position 0 if all positions were text; None if the axes differ."""
        base = self.tensors.position_base
        if base.dim() == 3:
            axes = base[1:] if len(base) == 4 else base  # the first of four is for masks only
            if not bool((axes == axes[:1]).all()):
                return None
            base = axes[0]
        return [int(position) for position in base[:, 0].expand(len(self.kv_cache.seq_lens))]

    @functools.cached_property
    def padded_ids(self) -> list[int]:
        """See `ModelAdapter.padded_ids`."""
        return self.adapter.padded_ids

    def logged(self) -> AbstractContextManager[None]:
        """Context for a forward of the model, which leaves recurrent states as they are."""
        return nullcontext() if self.states is None else self.states.logged()

    def context(self, caches: Sequence[Tensor | None], rows: Sequence[int] | None = None) -> DecoderContext:
        """What nodes come behind now.

        Args:
            caches: keys and values of the decoder's layers.
            rows: the rows to compute; None for all.
        """
        assert self.position_base is not None
        context = DecoderContext(
            lengths=self.kv_cache.seq_lens,
            position_base=self.position_base,
            max_position=self.tensors.last_position,
            padding=self.tensors.padding,
            caches=caches,
            states=() if self.states is None else self.states.of_layers(),
        )
        if rows is None:
            return context
        return replace(
            context,
            lengths=[context.lengths[row] for row in rows],
            position_base=[context.position_base[row] for row in rows],
            padding=None if context.padding is None else context.padding[rows],
            cache_rows=rows,
        )

    def inputs(
        self, tree: DraftTree, caches: Sequence[Tensor | None], rows: Sequence[int] | None = None
    ) -> DecoderInputs:
        """A forward over the nodes of a sanitized tree; see `context`."""
        assert tree.depths is not None and tree.ancestor_mask is not None
        nodes = tree.tokens, tree.depths, tree.ancestor_mask
        tokens, depths, ancestors = nodes if rows is None else (part[rows] for part in nodes)
        for token in self.padded_ids:
            tokens = tokens.masked_fill(tokens == token, self.adapter.text_config.pad_token_id)
        context = vars(self.context(caches, rows))
        return DecoderInputs(tokens=tokens, depths=depths, ancestor_mask=ancestors, **context)


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
        logits = self.parts.shared.scale_logits(logits)
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
        scale, softcap = self.parts.shared.logit_scale, self.parts.shared.logit_softcap or 0.0
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
