"""`RecurrentTarget`: models whose layers keep a recurrent or convolution state (Qwen3.5, LFM2).

A state has no positions, so one forward of the model can score a chain but no tree, and a rejected token cannot be cut
off; in C each node reads the state behind its parent. A forward leaves the states as they are; then each row advances
by the tokens that it accepts (`RecurrentStates`).
Whatever else takes tokens back, such as a criterion that cuts a row, is rare: the row goes back to its states after the
prompt, of which there is a copy, and reads its tokens again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import CKernel
from mmspec.engine.host_copy import from_host
from mmspec.engine.prefix import Prefix
from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT, unsupported_shape
from mmspec.interfaces import VerifyResult
from mmspec.targets.base import ModelAdapter
from mmspec.targets.forward import unsupported_length
from mmspec.targets.hf import HFTarget
from mmspec.targets.recurrent_states import RecurrentStates


class RecurrentTarget(HFTarget):
    """Implements `mmspec.interfaces.Target` for a model with recurrent layers: trees in C, else chains.

    Attributes:
        states: of the recurrent layers; they contain what the key-value buffer contains.
    """

    chains_only = True

    def __init__(self, adapter: ModelAdapter, input_ids: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(adapter, input_ids, *args, **kwargs)
        self.states: RecurrentStates = RecurrentStates(self.cache, adapter.text_model)
        self._read: list[tuple[Tensor | Sequence[Sequence[int]], Sequence[Sequence[int]]]] = []  # ids, nodes accepted

    @staticmethod
    def unsupported_reason(
        adapter: ModelAdapter, input_ids: Tensor, model_kwargs: Mapping[str, Any], max_new_tokens: int
    ) -> str | None:
        """Why a call is not supported; None if it is."""
        cache = model_kwargs.get(CACHE_ARGUMENT)
        if cache is None or getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
            return "past_key_values of a model with recurrent layers"
        reason = unsupported_shape(input_ids, model_kwargs.get("attention_mask"))
        return reason or unsupported_length(adapter, input_ids.shape[1] + max_new_tokens)

    def prefill(
        self, hidden_state_indices: Sequence[int] = (), prefix: Prefix | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if prefix is not None:
            with self._mode():
                self.states.load(prefix.recurrent)
        outputs = super().prefill(hidden_state_indices, prefix)
        with self._mode():
            self.states.hold()
        return outputs

    def use_c(self, kernel: CKernel, unknown_code: str | None) -> None:
        super().use_c(kernel, unknown_code)
        self.chains_only = self.c_forwards is None

    def _score_in_model(self, tree: DraftTree, hidden_state_indices: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        if not self.chains_only:  # drafted for C, which has refused this forward
            self.chains_only = True
            index = torch.arange(tree.num_nodes, device=tree.parents.device)
            has_branches = (tree.node_mask & (tree.parents != index - 1)).any(1)
            tree.node_mask[has_branches, 1:] = False  # the root alone is verified
        with self.states.logged():
            return super()._score_in_model(tree, hidden_state_indices)

    def commit(self, result: VerifyResult) -> None:
        super().commit(result)
        counts = {len(nodes) for nodes in result.accepted_nodes}
        with self._mode():
            self.states.advance(self.states.log.after(result.counts, result.tree.num_nodes, counts, result.path))
        self._read.append((result.tree.tokens, result.accepted_nodes))

    def follow_part(self, tokens: Sequence[Sequence[int]], kept: Sequence[Tensor]) -> None:
        super().follow_part(tokens, kept)
        with self._mode():
            self.states.advance(kept)
        self._read.append((tokens, [range(len(row)) for row in tokens]))

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        is_cut = [length < cached for length, cached in zip(lengths, self.cached_lengths, strict=True)]
        if not any(is_cut):
            super().crop(lengths, zero_tail)
            return
        texts = [text[:length] for text, length in zip(self._texts(), lengths, strict=True)]
        super().crop([0 if cut else length for cut, length in zip(is_cut, lengths, strict=True)], zero_tail)
        with self._mode():
            self.states.restore(is_cut)
        kept = [[] if cut else text for cut, text in zip(is_cut, texts, strict=True)]
        self._read = [(kept, [range(len(text)) for text in kept])]
        while any(rest := [text[held:] for text, held in zip(texts, self.cached_lengths, strict=True)]):
            self._read_again([text[: BUCKETS[-1]] for text in rest])

    def export_cache(self, num_steps: int) -> Any:
        self.crop([num_steps - 1] * len(self.cached_lengths))
        self.states.export(self.user_cache)
        return super().export_cache(num_steps)

    def _texts(self) -> list[list[int]]:
        """The tokens after the prompt that the states of each row contain."""
        texts: list[list[int]] = [[] for _ in self.cached_lengths]
        for tokens, accepted in self._read:
            rows = tokens.tolist() if isinstance(tokens, Tensor) else tokens
            for text, row, nodes in zip(texts, rows, accepted, strict=True):
                text += [row[node] for node in nodes]
        return texts

    def _read_again(self, texts: Sequence[Sequence[int]]) -> None:
        """Score tokens of each row and accept them all."""
        tokens, counts = self._padded(texts)
        index = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        is_text = index < from_host(counts, self.device)[:, None]
        chain = DraftTree(tokens, index - 1, is_text, None, index[:, :, None] >= index[:, None, :], index)
        self.score(chain)
        nodes = [list(range(count)) for count in counts]
        self.commit(VerifyResult(chain, index, from_host(counts, self.device), tokens, [list(t) for t in texts], nodes))

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """[B, n] int64 tokens, padded behind with 0, and how many there are in each row."""
        counts = [len(text) for text in texts]
        return from_host([[*text, *[0] * (max(counts) - len(text))] for text in texts], self.device), counts


def target_class(adapter: ModelAdapter) -> type[HFTarget]:
    """The target that decodes models like this one."""
    return RecurrentTarget if adapter.is_recurrent else HFTarget
