"""A stack of decoder layers in C: one call per forward over the nodes of trees (few_rows.c).

Embedding, decoder layers, final norm and LM head of few rows, on the memory of weights and KV cache, which are
float32, bfloat16 or float16. In half precision numbers are rounded where the modules of transformers round them. Every
number of a node depends on its own token, position and ancestors alone, bit for bit: not on the other nodes of the
tree or of the batch, and not on where in the tree, or already committed, the ancestors are. So scoring a tree and
decoding its path token by token give the same logits. Independent of transformers.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.addresses import WeightAddresses, new_floats
from mmspec.cpu.angles import RotaryFn, set_angles
from mmspec.cpu.bf16_copies import CheckedWeights, WeightCopies
from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.chain import Chain
from mmspec.cpu.chain_types import ChainRequest, DraftedChains
from mmspec.cpu.decoder_types import DecoderContext, DecoderEnds, DecoderInputs, NodeLog
from mmspec.cpu.layer_memory import log_nodes, mixer_sizes, set_caches
from mmspec.cpu.layers import (
    LAYER_MATRICES,
    MOST_LAYER_INPUTS,
    DecoderShape,
    DecoderStruct,
    LayerStruct,
    LayerWeights,
    decoder_struct,
    set_layer,
)
from mmspec.cpu.weights import FLOAT_TYPES, Weight, weight_struct

MAX_DECODER_ROWS = 128
"""Rows times nodes of a forward. Beyond, arithmetic is the limit, and the products of torch are as fast."""
MIN_ANGLES, MAX_ANGLES = 256, 1 << 20
"""Positions that the first rotary table has, and those that one may need; it is enlarged when they do not suffice."""


class CDecoder:
    """A decoder stack for the forwards of one call. Not thread-safe: its scratch memory is reused.

    The weights are read where they lie, so that changes in place are seen. Of a weight that is given other memory
    (`weight.data = ...`) the old one is read: its owner asks for changes of the model (`mmspec.engine.revision`).
    """

    def __init__(
        self,
        kernel: CKernel,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        ends: DecoderEnds,
        rotary: RotaryFn | Sequence[RotaryFn | None],
        copies: WeightCopies | None = None,
    ) -> None:
        """
        Args:
            kernel: the C kernel.
            shape: sizes, to which all weights must correspond.
            layers: weights of the layers.
            ends: embeddings, final norm and LM head.
            rotary: rotary angles of positions, for all layers or for each, None for those without. Each must depend on
                its position alone.
            copies: bfloat16 copies of float32 weights, for calls in which nothing changes the weights; else None.

        Raises:
            ValueError: a weight is not contiguous on the CPU, of another type than the embeddings, of a type that has
                no kernel, or of another shape.
        """
        self._kernel = kernel
        self.shape = shape
        self.dtype = ends.embeddings.dtype
        if self.dtype not in FLOAT_TYPES:
            raise ValueError(f"embeddings must be float32, bfloat16 or float16; got {self.dtype}")
        self._rotaries = [rotary] * len(layers) if callable(rotary) else list(rotary)
        self._angles = list[Tensor]()
        self.logs: list[NodeLog | None] = []  # of the last forward, of each layer
        self._num_angles = 0
        self._scratch = new_floats(0)
        self._cache_places: list[Any] | None = None
        self._layers = (LayerStruct * len(layers))()
        self._layer_weights, self._ends, self._copies = list(layers), ends, copies
        self._owners = shape.owners
        self._weights = WeightAddresses(self.dtype, shape.norm_offset, kernel.multiplies_pairs)
        for index, weights in enumerate(layers):
            set_layer(self._layers[index], weights, shape, self._weights, f"of layer {index}", index)
        add, add_matrix = self._weights.add, self._weights.add_matrix
        rows, vocab = len(ends.embeddings), ends.lm_head.shape[0]
        self._decoder = decoder_struct(
            shape,
            self._weights,
            num_layers=len(layers),
            vocab_size=vocab,
            num_embeddings=rows,
            layers=ctypes.addressof(self._layers),
            embeddings=add_matrix("embeddings", ends.embeddings, (rows, shape.hidden_size)),
            final_norm=add("final_norm", ends.final_norm, (shape.hidden_size,)),
            lm_head=add_matrix("lm_head", ends.lm_head, (vocab, shape.hidden_size)),
            lm_head_bias=add("lm_head_bias", ends.lm_head_bias, (vocab,)),
            **mixer_sizes(self._layers),
        )
        self._set_per_layer_inputs()
        self._vectors = self._weights.vectors()
        self._decoder.vectors, self._decoder.num_vectors = ctypes.addressof(self._vectors), len(self._vectors)
        self._checked = self._check_copies()

    def matrices(self) -> list[Weight]:
        """The matrices that a forward reads whole, or their bfloat16 copies, which all but the first forward read."""
        layers = (getattr(layer, name) for layer in self._layer_weights for name in LAYER_MATRICES)
        found = [one for one in (self._ends.lm_head, self._ends.per_layer_in, *layers) if one is not None]
        return found if self._checked is None else self._checked.copies_of(found)

    def forward(
        self, inputs: DecoderInputs, hidden_state_indices: Sequence[int] = (), continues: bool = False
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Score the nodes and store their keys and values behind the committed ones.

        Args:
            inputs: the nodes.
            hidden_state_indices: hidden states to return, as transformers counts them: 0 is the embeddings, i the
                output of layer i - 1, and the last one the output of the final norm.
            continues: these are other rows of the last forward's trees, with the same states: its `logs` go on.

        Returns:
            Logits [B, N, V] and {index: [B, N, D]} of the type of the weights; None, and nothing is written, if the
            forward is not for this kernel: too many rows or positions, weights or caches in other memory, an id
            without an embedding.
        """
        batch, nodes = inputs.tokens.shape
        decoder = self._decoder
        memory = self._set_context(decoder, inputs, nodes)
        if memory is None or not (continues or self._set_states(inputs)):
            return None
        tokens, depths = inputs.tokens.contiguous(), inputs.depths.contiguous()
        ancestors = inputs.ancestor_mask.contiguous()
        logits = torch.empty(batch, nodes, decoder.vocab_size, dtype=self.dtype, device="cpu")
        hidden_states = self._set_hidden_states(hidden_state_indices, batch, nodes)
        decoder.tokens, decoder.depths, decoder.logits = tokens.data_ptr(), depths.data_ptr(), logits.data_ptr()
        decoder.ancestors = ancestors.data_ptr() if nodes > 1 else None
        if self._checked is not None:
            self._checked.before_forward()
        if not self._kernel.decode(ctypes.addressof(decoder), torch.get_num_threads()):
            return None
        del memory  # lives until here
        if self._checked is not None:
            self._checked.after_forward()
        return logits, {index: state.to(self.dtype) for index, state in hidden_states.items()}

    def chain(
        self, context: DecoderContext, request: ChainRequest, logit_scale: float = 1.0, logit_softcap: float = 0.0
    ) -> DraftedChains | None:
        """Draft chains: as many forwards as they take, in one call.

        Keys and values of what is read are stored behind the committed ones.

        Args:
            context: what the chains come behind.
            request: which chains; `unread` has at least one id for each row of the context.
            logit_scale: factor of the logits.
            logit_softcap: their limit by tanh; 0 for none.

        Returns:
            None, and nothing is written, in the cases of `forward`.
        """
        if self._checked is not None:
            self._checked.before_forward()  # before the struct is copied
        chain = Chain(request, self._decoder, self.dtype)
        chain.struct.logit_scale, chain.struct.logit_softcap = logit_scale, logit_softcap
        decoder = chain.struct.d
        memory = self._set_context(decoder, context, request.most_nodes, request.num_positions)
        if memory is None:
            return None
        self._set_hidden_states((), len(request.unread), 0)
        decoder.embedded = decoder.normed = None
        drafted = chain.run(self._kernel, context.lengths)
        del memory  # lives until here
        if drafted is not None and self._checked is not None:
            self._checked.after_forward()
        return drafted

    def _set_context(
        self, decoder: DecoderStruct, context: DecoderContext, nodes: int, num_positions: int | None = None
    ) -> list[Any] | None:
        """Set what forwards over at most `nodes` nodes of each row read besides these.

        Args:
            decoder: the struct to set it in.
            context: what the nodes come behind.
            nodes: N.
            num_positions: that are written behind each row's committed ones; N if None.

        Returns:
            What must outlive the forwards; None if they are not for this kernel.
        """
        batch, num_new = len(context.lengths), num_positions or nodes
        if batch * nodes > MAX_DECODER_ROWS:
            return None
        kv_len = max(context.lengths) + num_new
        num_angles = max(context.position_base) + min(kv_len, context.max_position) + 1
        if not self._set_caches(context, kv_len) or num_angles > MAX_ANGLES:
            return None
        self._set_angles(num_angles)
        decoder.num_angles = self._num_angles
        padding = None if context.padding is None else context.padding.contiguous()
        numbers = [
            (ctypes.c_int64 * batch)(*one) for one in (context.lengths, context.position_base, context.cache_rows or ())
        ]
        decoder.batch, decoder.nodes, decoder.max_position = batch, nodes, context.max_position
        decoder.span, decoder.max_keys = nodes, kv_len
        decoder.lengths, decoder.position_base = map(ctypes.addressof, numbers[:2])
        decoder.cache_rows = None if context.cache_rows is None else ctypes.addressof(numbers[2])
        decoder.padding = None if padding is None else padding.data_ptr()
        decoder.padding_length = 0 if padding is None else padding.shape[1]
        num_floats = self._kernel.decode_scratch(ctypes.addressof(decoder), torch.get_num_threads())
        if self._scratch.numel() < num_floats:
            self._scratch = new_floats(num_floats + num_floats // 4)
        decoder.scratch = self._scratch.data_ptr()
        return [padding, numbers]

    def restrict(self, layers: Sequence[int]) -> CDecoder:
        """A decoder of these layers only, on the same weights; its caches are those of these layers."""
        twin = copy.copy(self)
        twin._layers = (LayerStruct * len(layers))(*(self._layers[index] for index in layers))
        twin._rotaries, twin._owners = [self._rotaries[index] for index in layers], ()
        twin._decoder = DecoderStruct.from_buffer_copy(self._decoder)
        twin._decoder.num_layers = len(layers)
        twin._decoder.layers = ctypes.addressof(twin._layers)
        twin._scratch, twin._cache_places = new_floats(0), None
        twin._layer_weights = [self._layer_weights[index] for index in layers]
        twin._checked = twin._check_copies()
        return twin

    def with_matrices(self, convert: Callable[[Weight], Weight]) -> CDecoder:
        """A decoder whose matrices are what `convert` returns for these; embeddings, norms and biases are the same.

        Raises:
            ValueError: what it returns does not fit.
        """
        layers = list(map(copy.copy, self._layer_weights))
        for layer in layers:
            for name in LAYER_MATRICES:
                if (weight := getattr(layer, name)) is not None:
                    object.__setattr__(layer, name, convert(weight))  # a copy that nobody else has seen
        ends = replace(self._ends, lm_head=convert(self._ends.lm_head))
        return CDecoder(self._kernel, self.shape, layers, ends, self._rotaries)

    def prepare_angles(self) -> None:
        """Make the rotary tables that most calls need; those that `restrict` returns share them."""
        self._set_angles(MIN_ANGLES)

    def _check_copies(self) -> CheckedWeights | None:
        """Let the next forward check the copies of the weights; until then the weights themselves are read."""
        weights = [(self._decoder, "lm_head", self._ends.lm_head)]
        for struct, layer in zip(self._layers, self._layer_weights, strict=True):
            weights += [(struct, name, getattr(layer, name)) for name in LAYER_MATRICES]
        found = [(getattr(struct, name), weight) for struct, name, weight in weights if weight is not None]
        for view, weight in found:  # views of the structs that the kernel reads
            plain = weight_struct(weight, self._weights.in_pairs)
            ctypes.memmove(ctypes.addressof(view), ctypes.addressof(plain), ctypes.sizeof(plain))
        return None if self._copies is None else self._copies.checked(self._kernel, found)

    def _set_caches(self, context: DecoderContext, kv_len: int) -> bool:
        """Set the addresses of keys and values; False if a cache is not as `DecoderContext` describes."""
        batch, rows, caches = len(context.lengths), context.cache_rows, context.caches
        written = [cache for cache in caches if cache is not None]
        places = [(batch, rows, cache.data_ptr(), cache.shape, cache.dtype) for cache in written]
        if places != self._cache_places or any(cache.shape[3] < kv_len for cache in written):
            self._cache_places = None
            if not set_caches(self._layers, caches, self.shape, batch, rows, kv_len, self.dtype, self._owners):
                return False
            self._cache_places = places  # they are set, which takes longer than to compare them
        return True

    def _set_angles(self, num_positions: int) -> None:
        """Let the rotary tables cover positions 0 to `num_positions` - 1."""
        if self._num_angles >= num_positions:
            return
        count = max(MIN_ANGLES, num_positions + num_positions // 2)
        self._angles = set_angles(self._layers, self._rotaries, self.shape, count)
        self._num_angles = self._decoder.num_angles = count

    def _set_per_layer_inputs(self) -> None:
        """Set what gives each layer inputs besides the last one's output.

        Raises:
            ValueError: see the constructor.
        """
        ends, decoder, layers = self._ends, self._decoder, self._layer_weights
        if ends.per_layer_embeddings is None or ends.per_layer_in is None:
            return
        rows, size = len(ends.embeddings), 0 if ends.per_layer_norm is None else len(ends.per_layer_norm)
        if not 0 < size <= MOST_LAYER_INPUTS or size > decoder.intermediate_size:
            raise ValueError(f"per-layer inputs must have 1 to {MOST_LAYER_INPUTS} numbers; got {size}")
        if any(one.per_layer_gate is None or one.per_layer_gate.shape[0] != size for one in layers):
            raise ValueError(f"all layers must read {size} per-layer inputs")
        width, hidden = size * len(layers), self.shape.hidden_size
        add, add_matrix = self._weights.add, self._weights.add_matrix
        decoder.per_layer_size = size
        decoder.per_layer_embeddings = add_matrix(
            "per_layer_embeddings", ends.per_layer_embeddings, (max(rows, len(ends.per_layer_embeddings)), width)
        )
        decoder.per_layer_in = add_matrix("per_layer_in", ends.per_layer_in, (width, hidden))
        decoder.per_layer_norm = add("per_layer_norm", ends.per_layer_norm, (size,))

    def _set_states(self, inputs: DecoderInputs) -> bool:
        """Set the states that the layers read, and where they log; False if one is not as `LayerState` describes."""
        self.logs = [None] * len(self._layers)
        for index, layer in enumerate(self._layers):
            if layer.conv:
                state = inputs.states[index] if index < len(inputs.states) else None
                self.logs[index] = log_nodes(self._kernel, layer, state, inputs, self.dtype)
                if self.logs[index] is None:
                    return False
        return True

    def _set_hidden_states(self, indices: Sequence[int], batch: int, nodes: int) -> dict[int, Tensor]:
        """Allocate {index: [B, N, D]} and let the forward fill it."""
        states = {index: new_floats(batch, nodes, self.shape.hidden_size) for index in indices}
        pointers = {index: state.data_ptr() for index, state in states.items()}
        last = len(self._layers)
        self._decoder.embedded = pointers.get(0)
        self._decoder.normed = pointers.get(last)
        for index in range(1, last):
            self._layers[index - 1].hidden = pointers.get(index)
        return states
