"""One chain draft in C: the memory that chain_types.h needs, around the struct of a decoder."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.addresses import new_floats
from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.chain_types import ChainRequest, ChainStruct, DraftedChains
from mmspec.cpu.layers import DecoderStruct
from mmspec.engine.tree import DraftTree


class Chain:
    """The struct of one request and its memory.

    Attributes:
        struct: what the kernel reads and writes; `d` is a copy of the decoder's.
    """

    def __init__(self, request: ChainRequest, decoder: DecoderStruct, dtype: torch.dtype) -> None:
        """
        Args:
            request: which chains.
            decoder: of the model.
            dtype: of its logits.
        """
        batch, length, most, room = len(request.unread), request.length, request.most_unread, request.most_nodes
        self._request = request
        size = max(2, request.max_nodes)
        num_candidates = length * request.top_k
        self._tree = torch.zeros(2, batch, size, dtype=torch.long, device="cpu")
        self._scores, self._mask = new_floats(batch, size), torch.zeros(batch, size, dtype=torch.bool, device="cpu")
        self._ids, self._parents = torch.zeros(2, batch, num_candidates, dtype=torch.long, device="cpu")
        self._counters = torch.zeros(2, batch, dtype=torch.long, device="cpu")
        self._seconds = torch.zeros(room + 1, dtype=torch.float64, device="cpu")
        self._forwards = torch.zeros(room + 1, dtype=torch.long, device="cpu")
        bias = request.logit_bias.float().contiguous()
        noise = None if request.log_noise is None else request.log_noise.float().contiguous()
        self._kept: list[Any] = [bias, noise]
        self.struct = ChainStruct(
            d=decoder,
            unread=self._ints([token for ids in request.unread for token in (*ids, *[0] * (most - len(ids)))]),
            counts=self._ints([len(ids) for ids in request.unread]),
            most_unread=most,
            length=length,
            top_k=request.top_k,
            max_nodes=size,
            num_biases=len(bias),
            num_stop=len(request.stop_ids),
            bias=bias.data_ptr(),
            noise=None if noise is None else noise.data_ptr(),
            stop=self._ints(request.stop_ids),
            temperature=request.temperature,
            level_penalty=request.level_penalty,
            min_prob=request.min_prob,
            tokens=self._space(torch.empty(2, batch * room, dtype=torch.long, device="cpu")),
            ancestors=self._space(torch.empty(batch * room**2, dtype=torch.uint8, device="cpu")),
            z=self._space(new_floats(max(decoder.vocab_size, len(bias)))),
            ids=self._ids.data_ptr(),
            parents=self._parents.data_ptr(),
            place=self._space(torch.empty(num_candidates, dtype=torch.long, device="cpu")),
            paths=self._space(torch.zeros(batch, num_candidates, dtype=torch.float32, device="cpu")),
            tree_tokens=self._tree[0].data_ptr(),
            tree_parents=self._tree[1].data_ptr(),
            tree_scores=self._scores.data_ptr(),
            tree_mask=self._mask.data_ptr(),
            num_read=self._counters[0].data_ptr(),
            steps=self._counters[1].data_ptr(),
            seconds=self._seconds.data_ptr(),
            forwards=self._forwards.data_ptr(),
        )
        self.struct.depths = self.struct.tokens + 8 * batch * room
        logits = torch.empty(batch * room, decoder.vocab_size, dtype=dtype, device="cpu")
        self.struct.d.logits = self._space(logits)

    def run(self, kernel: CKernel, lengths: Sequence[int]) -> DraftedChains | None:
        """Draft behind so many committed positions of each row; None if not even the first forward is possible."""
        self.struct.lengths = self._ints(lengths)
        guesses = self._request.guesses
        if guesses is None:
            done = kernel.chain(ctypes.addressof(self.struct), torch.get_num_threads())
        else:
            missing = self._request.most_nodes - len(guesses.costs)  # where more is unread than may be guessed at once
            costs = [*guesses.costs, *[math.inf] * missing]
            self.struct.costs = self._keep((ctypes.c_double * len(costs))(*costs))
            self.struct.min_unseen, self.struct.trust = guesses.min_unseen, guesses.trust
            with guesses.counts.locked(guesses.context) as (self.struct.table, self.struct.context):
                done = kernel.chain(ctypes.addressof(self.struct), torch.get_num_threads())
        if not done:
            return None
        seconds, forwards = self._seconds.tolist(), self._forwards.tolist()
        num_read, steps = self._counters.tolist()
        return DraftedChains(
            tree=DraftTree(self._tree[0], self._tree[1], self._mask, self._scores),
            num_tokens=max(steps),
            num_read=num_read,
            chains=self._ids[:, :: self._request.top_k],
            forward_s={nodes: seconds[nodes] / count for nodes, count in enumerate(forwards) if count},
            expected=self.struct.expected,
            num_right=self.struct.num_right,
        )

    def _ints(self, numbers: Sequence[int]) -> int:
        """Address of an array of int64."""
        return self._keep((ctypes.c_int64 * len(numbers))(*numbers))

    def _keep(self, array: Any) -> int:
        self._kept.append(array)
        return ctypes.addressof(array)

    def _space(self, tensor: Tensor) -> int:
        """Address of a tensor that lives as long as this object."""
        self._kept.append(tensor)
        return tensor.data_ptr()
