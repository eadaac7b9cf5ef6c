"""Draft heads in C: a forward over committed tokens, and whole trees in one call.

A tree is grown level by level as in EAGLE-2: the likeliest nodes of a level are expanded, then the likeliest of all
candidates are selected. The distributions of a level come from a forward of the layers (EAGLE, EAGLE-3, MTP,
assistants), or, for heads that predict a block of positions at once, from the logits of its position and a correction
by the tokens before (FLASH, DSpark, Domino) or from scores of pairs of neighbours (DFlash 2, LiLiCorr).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmspec.cpu.addresses import WeightAddresses, new_floats
from mmspec.cpu.angles import RotaryFn, set_angles
from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.decoder import MAX_DECODER_ROWS, MIN_ANGLES
from mmspec.cpu.draft_types import (
    AssistantWeights,
    BlockWeights,
    CorrectionWeights,
    DraftStruct,
    DsparkWeights,
    HeadContext,
    HeadWeights,
    TreeRequest,
)
from mmspec.cpu.layer_memory import set_caches
from mmspec.cpu.layers import DecoderShape, LayerStruct, decoder_struct, set_layer
from mmspec.cpu.weights import FLOAT_TYPES, is_plain
from mmspec.engine.tree import DraftTree


class CHead:
    """A draft head for the drafts of one call. Not thread-safe: its scratch memory is reused.

    As with `CDecoder`, weights are read where they lie, and a method returns None if the arguments are not for C.
    """

    def __init__(
        self, kernel: CKernel, shape: DecoderShape, weights: HeadWeights, rotaries: Sequence[RotaryFn]
    ) -> None:
        """
        Args:
            kernel: the C kernel.
            shape: sizes, to which all weights must correspond; `intermediate_size` 0 for a layer without feed-forward.
            weights: of the head.
            rotaries: rotary angles of each layer.

        Raises:
            ValueError: a weight is not contiguous on the CPU, of another type than the embeddings, of a type that has
                no kernel, or of another shape.
        """
        self._kernel = kernel
        self._shape = shape
        self._max_levels: int | None = None  # None for a head that runs the layer for each level
        self._dtype = weights.embeddings.dtype
        if self._dtype not in FLOAT_TYPES:
            raise ValueError(f"embeddings must be float32, bfloat16 or float16; got {self._dtype}")
        self._addresses = WeightAddresses(self._dtype, shape.norm_offset, kernel.multiplies_pairs)
        self._window, self._rotaries = weights.window, rotaries
        self._angles, self._num_angles = list[Tensor](), 0
        self._scratch = new_floats(0)
        self._layers = (LayerStruct * len(weights.layers))()
        for index, layer in enumerate(weights.layers):
            set_layer(self._layers[index], layer, shape, self._addresses, f"of the head's layer {index}", index)
        size, vocab = shape.hidden_size, len(weights.lm_head)
        rows, width = len(weights.embeddings), size if weights.assistant is None else len(weights.assistant.carry)
        add, add_matrix = self._addresses.add, self._addresses.add_matrix
        self._draft = DraftStruct(
            d=decoder_struct(
                shape,
                self._addresses,
                num_layers=len(weights.layers),
                vocab_size=vocab,
                num_embeddings=rows,
                layers=ctypes.addressof(self._layers),
                embeddings=add_matrix("embeddings", weights.embeddings, (rows, width)),
                final_norm=add("final_norm", weights.final_norm, (size,)),
                lm_head=add_matrix("lm_head", weights.lm_head, (vocab, size)),
                lm_head_bias=add("lm_head_bias", weights.lm_head_bias, (vocab,)),
            ),
            fuse_bias=add("fuse_bias", weights.fuse_bias, (size,)),
            hidden_norm=add("hidden_norm", weights.hidden_norm, (size,)),
            embedding_norm=add("embedding_norm", weights.embedding_norm, (size,)),
            adds_normed_state=weights.adds_normed_state,
            input_size=width,
            logit_scale=weights.logit_scale,
            logit_softcap=weights.logit_softcap,
        )
        self._set_fuse(weights)
        if weights.block is not None:
            self._set_block(weights.block)
        if weights.correction is not None:
            self._set_correction(weights.correction)
        if weights.dspark is not None:
            self._set_dspark(weights.dspark)
        if weights.assistant is not None:
            self._set_assistant(weights.assistant)
        self._set_angles(2 * MIN_ANGLES)
        self._vectors = self._addresses.vectors()
        self._draft.d.vectors, self._draft.d.num_vectors = ctypes.addressof(self._vectors), len(self._vectors)

    def forward(
        self, tokens: Tensor, hidden_states: Tensor, counts: Sequence[int], context: HeadContext
    ) -> Tensor | None:
        """Read committed tokens: append their keys and values to the cache.

        Args:
            tokens: [B, n] int64, padded on the right.
            hidden_states: [B, n, D], or [B, n, S D] of a head that reads S of the target's, before each token.
            counts: valid tokens of each row.
            context: what has been read before; its cache has room for n positions behind each row's length.

        Returns:
            `last_hidden` [B, D] after these tokens.
        """
        num_new, draft = tokens.shape[1], self._draft
        is_valid = is_plain(hidden_states, self._dtype) and type(hidden_states) is Tensor
        if not is_valid or tokens.dtype is not torch.long or hidden_states.shape[2] != draft.state_size:
            return None
        if not self._set_context(context, num_new, num_new, num_new):
            return None
        tokens, hidden_states = tokens.contiguous(), hidden_states.float()
        last_hidden = context.last_hidden.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        row_counts = _integers(counts)
        draft.levels = 0
        draft.d.tokens, draft.states = tokens.data_ptr(), hidden_states.data_ptr()
        draft.counts, draft.root = ctypes.addressof(row_counts), last_hidden.data_ptr()
        self._run(self._kernel.head_forward, context)
        return last_hidden.to(self._dtype)

    def block(self, context: HeadContext) -> tuple[Tensor, Tensor] | None:
        """The block of a DSpark head: [B, k, D] features of the positions that predict, [B, k, V] float32 logits.

        Args:
            context: as in `tree`.
        """
        draft, batch, positions = self._draft, len(context.lengths), int(self._draft.block_positions)
        if batch * positions > MAX_DECODER_ROWS or not self._set_context(context, 1, positions, positions):
            return None
        features, logits = (new_floats(batch, positions, n) for n in (self._shape.hidden_size, draft.d.vocab_size))
        draft.levels, draft.block_features, draft.block_logits = 0, features.data_ptr(), logits.data_ptr()
        self._run(self._kernel.draft_tree, context)
        draft.block_features = draft.block_logits = None
        return features[:, draft.first_position :].to(self._dtype), logits[:, draft.first_position :]

    def tree(self, request: TreeRequest, context: HeadContext) -> DraftTree | None:
        """Grow the trees of all rows.

        Args:
            request: which trees.
            context: what has been read; the cache has room for `num_written` positions behind each row's length, which
                may be overwritten.
        """
        draft, top_k, levels, batch = self._draft, request.top_k, request.num_levels, len(context.lengths)
        num_logits = draft.num_best * draft.cluster_size or draft.d.vocab_size
        if request.pair_scores is not None:
            num_logits = top_k  # candidates may be fewer
        if not 0 < top_k <= num_logits or not 1 <= levels <= (self._max_levels or levels):
            return None
        noise, root = request.log_noise, context.last_hidden.float().contiguous()
        floats = (root, request.logit_bias, *([] if noise is None else [noise]))
        if any(part.dtype != torch.float32 or not part.is_cpu for part in floats):
            return None
        num_rows, num_positions = max(top_k, draft.block_positions), max(levels, draft.block_positions)
        if batch * num_rows > MAX_DECODER_ROWS:
            return None
        if not self._set_context(context, top_k, self.num_written(top_k, levels), num_positions):
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
        if request.pair_scores is not None and request.candidates is not None:
            pairs, candidates = request.pair_scores.contiguous(), request.candidates.contiguous()
            draft.pairs, draft.candidates, draft.pair_size = pairs.data_ptr(), candidates.data_ptr(), pairs.shape[-1]
        self._run(self._kernel.draft_tree, context)
        draft.pair_size = 0
        return DraftTree(tokens, parents, node_mask, scores)

    @property
    def reads_anchors(self) -> bool:
        """Whether it needs `HeadContext.anchors`."""
        return bool(self._draft.block_positions)

    @property
    def grows_trees(self) -> bool:
        """Whether `tree` needs no scores of pairs."""
        return bool(self._draft.rank) or not self.reads_anchors

    def num_written(self, top_k: int, num_levels: int) -> int:
        """Positions behind each row's length that `tree` writes to the cache."""
        if self._draft.block_positions:
            return int(self._draft.block_positions)
        return 0 if self._max_levels or self._draft.d.hides_nodes else top_k * (num_levels - 1)

    def _set_fuse(self, weights: HeadWeights) -> None:
        """Set the projection of the hidden states, and how many numbers it reads."""
        size, width = self._shape.hidden_size, weights.fuse.shape[1]
        if weights.hidden_norm is None or weights.embedding_norm is not None:
            width, state_size = 2 * self._draft.input_size, self._draft.input_size
        else:
            mixture = None if weights.dspark is None else weights.dspark.mixture
            state_size = width if mixture is None else size * len(mixture)
        self._draft.fuse = self._addresses.add_matrix("fuse", weights.fuse, (size, width))
        self._draft.state_size = state_size

    def _set_block(self, weights: BlockWeights) -> None:
        """Set the weights of FLASH's block."""
        size, draft = self._shape.hidden_size, self._draft
        ffn_size, block_size = len(weights.up), len(weights.down) // size
        shapes = {"norm": (size,), "up": (ffn_size, size), "down": (block_size * size, ffn_size)}
        for name, tensor in vars(weights).items():
            self._addresses.set(draft, f"block_{name}", tensor, shapes[name], name)
        draft.block_ffn_size, self._max_levels = ffn_size, block_size

    def _set_correction(self, weights: CorrectionWeights) -> None:
        """Set the weights of the correction by the tokens before."""
        size, draft, rank = self._shape.hidden_size, self._draft, weights.vocab_proj.shape[1]
        state = 0 if weights.gru_state is None else weights.gru_state.shape[1]
        shapes = {
            **dict.fromkeys(("feature_norm", "token_norm"), (size,)),
            "feature_proj": (rank, size),
            "token_proj": (rank, size + state),
            "token_table": (0 if weights.token_table is None else len(weights.token_table), rank),
            "vocab_proj": (draft.d.vocab_size, rank),
            "gru_in": (3 * state, size),
            "gru_state": (3 * state, state),
        }
        for name, shape in shapes.items():
            self._addresses.set(draft, name, getattr(weights, name), shape, name)
        draft.rank, draft.first_corrected = rank, weights.first_corrected

    def _set_dspark(self, weights: DsparkWeights) -> None:
        """Set what a DSpark head has besides."""
        size, draft, add = self._shape.hidden_size, self._draft, self._addresses.add
        draft.mixture = add("mixture", weights.mixture, (draft.state_size // size,))
        draft.mask_embedding = add("mask_embedding", weights.mask_embedding, (size,))
        draft.confidence = add("confidence", weights.confidence, (1, size + draft.rank))
        draft.confidence_bias = add("confidence_bias", weights.confidence_bias, (1,))
        draft.mask_token = weights.mask_token
        draft.block_positions, draft.first_position = weights.block_positions, weights.first_position
        self._max_levels = weights.block_positions - weights.first_position

    def _set_assistant(self, weights: AssistantWeights) -> None:
        """Set what an assistant has besides.

        Raises:
            ValueError: a layer has keys of its own, or the clusters are not ids of the LM head.
        """
        draft, size, vocab = self._draft, self._shape.hidden_size, self._draft.d.vocab_size
        if any(layer.k.data for layer in self._layers):
            raise ValueError("layers of an assistant must have no keys of their own")
        draft.d.hides_nodes = 1
        draft.carry = self._addresses.add_matrix("carry", weights.carry, (draft.input_size, size))
        if weights.centroids is None or weights.clusters is None:
            return
        clusters, count = weights.clusters, len(weights.centroids)
        is_whole = clusters.dim() == 2 and clusters.numel() == vocab and int(clusters.min()) >= 0
        if not is_whole or int(clusters.max()) >= vocab or len(clusters) != count or weights.num_best > count:
            raise ValueError(f"clusters must be the ids below {vocab}, in {count} of one size")
        self._clusters = clusters.to("cpu", torch.long).contiguous()
        draft.centroids = self._addresses.add_matrix("centroids", weights.centroids, (count, size))
        draft.clusters, draft.cluster_size = self._clusters.data_ptr(), clusters.shape[1]
        draft.num_best = weights.num_best

    def _set_context(self, context: HeadContext, nodes: int, num_new: int, num_positions: int) -> bool:
        """Set what both functions read; False if it is not for C.

        Args:
            context: what the head has read.
            nodes: rows of a forward, per batch row.
            num_new: positions of the cache that will be written, per batch row.
            num_positions: rotary positions that will be read behind `context.positions`.
        """
        batch, num_keys, draft = len(context.lengths), max(context.lengths) + num_new, self._draft
        if not 0 < batch * nodes <= MAX_DECODER_ROWS or (self._window is not None and num_keys > self._window):
            return False
        anchors, padding = context.anchors, context.padding
        if min(context.positions) < 0 or (padding is not None and not (padding.is_cpu and padding.dtype is torch.bool)):
            return False
        if (anchors is not None) != self.reads_anchors:
            return False
        if anchors is not None and (anchors.dtype is not torch.long or not anchors.is_cpu):
            return False
        rows = context.cache_rows
        if not set_caches(self._layers, context.caches, self._shape, batch, rows, num_keys, self._dtype):
            return False
        draft.d.batch, draft.d.nodes, draft.d.max_keys = batch, nodes, max(1, num_keys)
        if (size := max(context.positions) + num_positions) > self._num_angles:
            self._set_angles(size + size // 2)
        return True

    def _set_angles(self, count: int) -> None:
        """Let the rotary tables have positions 0 to `count` - 1."""
        self._angles = set_angles(self._layers, self._rotaries, self._shape, count)
        self._num_angles = count

    def _run(self, function: Callable[[int, int], None], context: HeadContext) -> None:
        """Call the kernel with enough scratch memory."""
        lengths, positions = _integers(context.lengths), _integers(context.positions)
        cache_rows = None if context.cache_rows is None else _integers(context.cache_rows)
        draft, address, num_threads = self._draft, ctypes.addressof(self._draft), torch.get_num_threads()
        draft.d.lengths, draft.positions = ctypes.addressof(lengths), ctypes.addressof(positions)
        draft.d.cache_rows = None if cache_rows is None else ctypes.addressof(cache_rows)
        anchors = None if context.anchors is None else context.anchors.contiguous()
        draft.anchors = None if anchors is None else anchors.data_ptr()
        padding = None if context.padding is None else context.padding.contiguous()
        draft.d.padding = None if padding is None else padding.data_ptr()
        draft.d.padding_length = 0 if padding is None else padding.shape[1]
        num_floats = self._kernel.draft_scratch(address, num_threads)
        if self._scratch.numel() < num_floats:
            self._scratch = new_floats(num_floats + num_floats // 4)
        draft.d.scratch = self._scratch.data_ptr()
        function(address, num_threads)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
