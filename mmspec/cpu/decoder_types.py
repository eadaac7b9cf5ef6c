"""What `CDecoder` computes with: what is around its layers, and one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.cpu.weights import Weight


@dataclass(frozen=True)
class DecoderEnds:
    """What is around the layers.

    Attributes:
        embeddings: [num_embeddings, D].
        final_norm: [D].
        lm_head: [V, D].
        lm_head_bias: [V] or None.
        per_layer_embeddings: [num_embeddings, layers * P] of the inputs that each layer has besides, or None.
        per_layer_in: [layers * P, D], a projection that is added to them.
        per_layer_norm: [P], of that projection.
    """

    embeddings: Tensor
    final_norm: Tensor
    lm_head: Weight
    lm_head_bias: Tensor | None
    per_layer_embeddings: Tensor | None = None
    per_layer_in: Weight | None = None
    per_layer_norm: Tensor | None = None


@dataclass(frozen=True)
class LayerState:
    """The state of a layer with a convolution, which a forward leaves as it is.

    Attributes:
        conv: [R, C, K] the last inputs of each channel, of the decoder's type; R as of `DecoderContext.caches`.
        recurrent: [R, H, K, V] float32 of a delta rule, [R, H, V, K] of a state space; None if the layer has none.
    """

    conv: Tensor
    recurrent: Tensor | None = None


@dataclass(frozen=True)
class NodeLog:
    """What N nodes of each row have read in a layer with a state.

    Attributes:
        window: [R, C, K + N], `LayerState.conv` and the nodes' inputs behind it.
        next_state: `LayerState.recurrent` behind the last node of the rows that were computed, or None.
        advance: (counts [R] int64, path [R, n] int64 -> `LayerState.recurrent` behind the first `counts[b]` nodes of
            row b's path), while the state is what it was.
    """

    window: Tensor
    next_state: Tensor | None
    advance: Callable[[Tensor, Tensor], Tensor]

    def repeat(self, counts: Tensor, longest: int, path: Tensor) -> Tensor:
        """See `mmspec.targets.state_log.RecurrenceCall.repeat`."""
        return self.advance(counts, path[:, : max(longest, 1)])


@dataclass(frozen=True, kw_only=True)
class DecoderContext:
    """What the nodes of B rows come behind.

    Attributes:
        lengths: committed positions of each row.
        position_base: rotary position of each row's cache position 0, if all its positions were text.
        max_position: largest cache position with a rotary position of its own; those behind it share it.
        padding: [B, P] bool, False at committed positions that are masked; None if none is.
        caches: [2, R, num_kv_heads, capacity, head_dim] of each layer, keys and values, with room for the nodes'
            behind each row's length; None, or nothing at the end, for layers that have none of their own.
        cache_rows: which of the R rows of caches and states each row is; None: R is B, and they are the same.
        states: of each layer with a convolution; None for others.
    """

    lengths: Sequence[int]
    position_base: Sequence[int]
    max_position: int
    padding: Tensor | None
    caches: Sequence[Tensor | None]
    cache_rows: Sequence[int] | None = None
    states: Sequence[LayerState | None] = ()


@dataclass(frozen=True, kw_only=True)
class DecoderInputs(DecoderContext):
    """One forward over N nodes in each of B rows.

    Attributes:
        tokens: [B, N] int64.
        depths: [B, N] int64, positions behind the row's committed ones.
        ancestor_mask: [B, N, N] bool, whether a node attends to another; itself included.
    """

    tokens: Tensor
    depths: Tensor
    ancestor_mask: Tensor
