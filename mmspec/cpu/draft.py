"""Draft heads of one decoder layer in compiled code: a forward over committed tokens, and whole trees in one call.

A tree is grown level by level as in EAGLE-2: the likeliest nodes of a level are expanded, then the likeliest of all
candidates are selected. The distributions of a level come from a forward of the layer (EAGLE), or, for heads that
predict a block of positions at once (FLASH), from the logits of its position and a correction by the token before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mmspec.cpu.decoder import MAX_DECODER_ROWS
from mmspec.cpu.layers import (
    DecoderShape,
    DecoderStruct,
    LayerStruct,
    LayerWeights,
    WeightAddresses,
    new_floats,
    set_cache,
    set_layer,
)
from mmspec.cpu.native import FewRowsKernel, is_plain
from mmspec.engine.tree import DraftTree


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a head that predicts k positions: feature i is x + (down @ silu(up @ norm(x)))[i].

    The logits of a position are the LM head's of its feature, plus vocab_proj @ silu(feature_proj @
    feature_norm(feature) + token_proj @ token_norm(token)), of the token before it; without that at the first position.
    The order of the attributes is that of `draft` in draft_types.h.

    Attributes:
        norm: [D].
        up: [F, D].
        down: [k D, F].
        feature_norm: [D].
        feature_proj: [R, D].
        token_norm: [D].
        token_proj: [R, D].
        vocab_proj: [V, R].
    """

    norm: Tensor
    up: Tensor
    down: Tensor
    feature_norm: Tensor
    feature_proj: Tensor
    token_norm: Tensor
    token_proj: Tensor
    vocab_proj: Tensor


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head, contiguous float32 on the CPU.

    Attributes:
        fuse: [D, 2 D], from [embedding ; hidden state] to the input of the layer.
        fuse_bias: [D] or None.
        layer: the decoder layer.
        embeddings: [num_embeddings, D].
        lm_head: [V, D], of the draft vocabulary.
        lm_head_bias: [V] or None.
        block: None for a head that runs the layer for each level.
        sources: tensors of which some of these are views: if one of them gets other memory, the views are stale.
    """

    fuse: Tensor
    fuse_bias: Tensor | None
    layer: LayerWeights
    embeddings: Tensor
    lm_head: Tensor
    lm_head_bias: Tensor | None
    block: BlockWeights | None = None
    sources: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class HeadContext:
    """What the head has read so far.

    Attributes:
        lengths: positions in the cache of each row.
        positions: rotary position of each row's next token.
        cache: [2, B, num_kv_heads, capacity, head_dim] keys and values.
        cos: [P, head_dim] float32 of positions 0 to P - 1, all that will be used.
        sin: [P, head_dim] float32.
        last_hidden: [B, D] output of the layer at each row's last position.
    """

    lengths: Sequence[int]
    positions: Sequence[int]
    cache: Tensor
    cos: Tensor
    sin: Tensor
    last_hidden: Tensor


@dataclass(frozen=True)
class TreeRequest:
    """Which trees to grow.

    Attributes:
        num_levels: levels below the root; of a block head at most k.
        top_k: W, nodes per level that are expanded, and children of each.
        max_nodes: size of a tree, the root included.
        logit_bias: [V] float32, added to the logits.
        log_noise: [B, num_levels, V] float32, subtracted from the logits divided by the temperature; None for none.
        temperature: of the sampling.
        draft_ids: [V] int64 target ids of the draft vocabulary; None if it is the target's.
        level_penalty: subtracted from the log probability per level.
    """

    num_levels: int
    top_k: int
    max_nodes: int
    logit_bias: Tensor
    log_noise: Tensor | None
    temperature: float
    draft_ids: Tensor | None
    level_penalty: float


class _Draft(ctypes.Structure):
    """`draft` of draft_types.h."""

    _fields_ = [
        ("d", DecoderStruct),
        *((name, ctypes.c_void_p) for name in ("fuse", "fuse_bias", "positions", "root", "states", "counts")),
        *((name, ctypes.c_int64) for name in ("levels", "max_nodes")),
        *((name, ctypes.c_void_p) for name in ("bias", "noise", "ids")),
        *((name, ctypes.c_float) for name in ("temperature", "level_penalty")),
        *((name, ctypes.c_int64) for name in ("block_ffn_size", "rank")),
        *((f"block_{field.name}", ctypes.c_void_p) for field in fields(BlockWeights)),
        *((name, ctypes.c_void_p) for name in ("tree_tokens", "tree_parents", "tree_scores", "tree_mask")),
    ]


class NativeHead:
    """A draft head for the drafts of one call. Not thread-safe: its scratch memory is reused.

    As with `NativeDecoder`, weights are read where they lie, and a method returns None if one of them has other memory
    or the arguments are not for compiled code.
    """

    def __init__(self, kernel: FewRowsKernel, shape: DecoderShape, weights: HeadWeights) -> None:
        """
        Args:
            kernel: the compiled kernel.
            shape: sizes, to which all weights must correspond; `intermediate_size` 0 for a layer without feed-forward.
            weights: of the head.

        Raises:
            ValueError: a weight is not contiguous float32 on the CPU, or of another shape.
        """
        self._kernel = kernel
        self._shape = shape
        self._block_size = 0  # 0 for a head that runs the layer for each level
        self._addresses = WeightAddresses()
        self._scratch = new_floats(0)
        self._layer = LayerStruct()
        set_layer(self._layer, weights.layer, shape, self._addresses, "of the head")
        size, vocab, rows = shape.hidden_size, len(weights.lm_head), len(weights.embeddings)
        add = self._addresses.add
        for source in weights.sources:
            add("a source", source, tuple(source.shape))
        self._draft = _Draft(
            d=DecoderStruct(
                num_layers=1,
                hidden_size=size,
                intermediate_size=shape.intermediate_size,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                vocab_size=vocab,
                num_embeddings=rows,
                layers=ctypes.addressof(self._layer),
                embeddings=add("embeddings", weights.embeddings, (rows, size)),
                lm_head=add("lm_head", weights.lm_head, (vocab, size)),
                lm_head_bias=add("lm_head_bias", weights.lm_head_bias, (vocab,)),
                eps=shape.eps,
                scaling=shape.scaling,
            ),
            fuse=add("fuse", weights.fuse, (size, 2 * size)),
            fuse_bias=add("fuse_bias", weights.fuse_bias, (size,)),
        )
        if weights.block is not None:
            self._set_block(weights.block)

    def forward(
        self, tokens: Tensor, hidden_states: Tensor, counts: Sequence[int], context: HeadContext
    ) -> Tensor | None:
        """Read committed tokens: append their keys and values to the cache.

        Args:
            tokens: [B, n] int64, padded on the right.
            hidden_states: [B, n, D] before each token.
            counts: valid tokens of each row.
            context: what has been read before; its cache has room for n positions behind each row's length.

        Returns:
            `last_hidden` [B, D] after these tokens.
        """
        num_new, draft = tokens.shape[1], self._draft
        is_valid = is_plain(hidden_states) and type(hidden_states) is Tensor and tokens.dtype is torch.long
        if not is_valid or not self._set_context(context, num_new, num_new, num_new):
            return None
        tokens, last_hidden = tokens.contiguous(), context.last_hidden.clone(memory_format=torch.contiguous_format)
        row_counts = _integers(counts)
        draft.levels = 0
        draft.d.tokens, draft.states = tokens.data_ptr(), hidden_states.data_ptr()
        draft.counts, draft.root = ctypes.addressof(row_counts), last_hidden.data_ptr()
        self._run(self._kernel.head_forward, context)
        return last_hidden

    def tree(self, request: TreeRequest, context: HeadContext) -> DraftTree | None:
        """Grow the trees of all rows.

        Args:
            request: which trees.
            context: what has been read; the cache has room for `top_k * (num_levels - 1)` positions behind each row's
                length (none of a block head), which may be overwritten.
        """
        draft, top_k, levels, batch = self._draft, request.top_k, request.num_levels, len(context.lengths)
        is_block = self._block_size > 0
        if not 0 < top_k <= draft.d.vocab_size or levels < 1 or (is_block and levels > self._block_size):
            return None
        noise, root = request.log_noise, context.last_hidden.contiguous()
        floats = (root, request.logit_bias, *([] if noise is None else [noise]))
        if any(part.dtype != torch.float32 or not part.is_cpu for part in floats):
            return None
        if not self._set_context(context, top_k, 0 if is_block else top_k * (levels - 1), levels):
            return None
        num_nodes = min(request.max_nodes, 1 + top_k + (levels - 1) * top_k * top_k)
        tokens = torch.empty(batch, num_nodes, dtype=torch.long, device="cpu")
        parents, scores = torch.empty_like(tokens), new_floats(batch, num_nodes)
        node_mask = torch.empty(batch, num_nodes, dtype=torch.bool, device="cpu")
        bias, ids = request.logit_bias.contiguous(), request.draft_ids
        noise = None if noise is None else noise.contiguous()
        draft.levels, draft.max_nodes, draft.root = levels, request.max_nodes, root.data_ptr()
        draft.bias, draft.noise = bias.data_ptr(), None if noise is None else noise.data_ptr()
        draft.ids = None if ids is None else ids.data_ptr()
        draft.temperature, draft.level_penalty = request.temperature, request.level_penalty
        draft.tree_tokens, draft.tree_parents = tokens.data_ptr(), parents.data_ptr()
        draft.tree_scores, draft.tree_mask = scores.data_ptr(), node_mask.data_ptr()
        self._run(self._kernel.draft_tree, context)
        return DraftTree(tokens, parents, node_mask, scores)

    def _set_block(self, weights: BlockWeights) -> None:
        """Set the weights of a block head."""
        size, vocab, draft = self._shape.hidden_size, self._draft.d.vocab_size, self._draft
        ffn_size, rank, block_size = len(weights.up), len(weights.feature_proj), len(weights.down) // size
        shapes = {
            **{"norm": (size,), "up": (ffn_size, size), "down": (block_size * size, ffn_size)},
            **dict.fromkeys(("feature_norm", "token_norm"), (size,)),
            **dict.fromkeys(("feature_proj", "token_proj"), (rank, size)),
            "vocab_proj": (vocab, rank),
        }
        for name, tensor in vars(weights).items():
            setattr(draft, f"block_{name}", self._addresses.add(name, tensor, shapes[name]))
        draft.block_ffn_size, draft.rank, self._block_size = ffn_size, rank, block_size

    def _set_context(self, context: HeadContext, nodes: int, num_new: int, num_positions: int) -> bool:
        """Set what both functions read; False if it is not for compiled code.

        Args:
            context: what the head has read.
            nodes: rows of a forward, per batch row.
            num_new: positions of the cache that will be written, per batch row.
            num_positions: rotary positions that will be read behind `context.positions`.
        """
        batch, num_keys, draft = len(context.lengths), max(context.lengths) + num_new, self._draft
        if not 0 < batch * nodes <= MAX_DECODER_ROWS or not self._addresses.are_valid():
            return False
        tables, size = (context.cos, context.sin), max(context.positions) + num_positions
        if not all(is_plain(part) and part.shape[0] >= size for part in tables):
            return False
        if not set_cache(self._layer, context.cache, self._shape, batch, num_keys):
            return False
        draft.d.batch, draft.d.nodes, draft.d.max_keys = batch, nodes, max(1, num_keys)
        draft.d.cos, draft.d.sin = context.cos.data_ptr(), context.sin.data_ptr()
        return True

    def _run(self, function: Callable[[int, int], None], context: HeadContext) -> None:
        """Call the kernel with enough scratch memory."""
        lengths, positions = _integers(context.lengths), _integers(context.positions)
        draft, address, num_threads = self._draft, ctypes.addressof(self._draft), torch.get_num_threads()
        draft.d.lengths, draft.positions = ctypes.addressof(lengths), ctypes.addressof(positions)
        num_floats = self._kernel.draft_scratch(address, num_threads)
        if self._scratch.numel() < num_floats:
            self._scratch = new_floats(num_floats + num_floats // 4)
        draft.d.scratch = self._scratch.data_ptr()
        function(address, num_threads)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


__all__ = ["BlockWeights", "HeadContext", "HeadWeights", "NativeHead", "TreeRequest"]
