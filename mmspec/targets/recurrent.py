"""`RecurrentTarget`: models whose layers keep a recurrent or convolution state (Qwen3.5, LFM2).

A state has no positions, so one forward can score a chain but no tree, and a rejected token cannot be cut off. The
state before the chain is copied; when the target accepts only a part, the copy comes back and the accepted tokens are
fed again together with the next chain (`pending`). No forward is spent on the roll-back alone, except when too many
tokens are pending. One row per call: rows that accept different numbers of tokens would need padding inside a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT, export_recurrent_layers, is_recurrent
from mmspec.interfaces import VerifyResult
from mmspec.targets.base import ModelAdapter
from mmspec.targets.forward import run_forward
from mmspec.targets.hf import HFTarget

MAX_PENDING = 16
"""Accepted tokens that are fed again with the next chain; more of them are fed alone first."""

State = list[tuple[dict[int, Tensor | None], dict[int, Tensor | None]]]
"""(convolution states, recurrent states) of each recurrent layer."""


class RecurrentTarget(HFTarget):
    """Implements `mmspec.interfaces.Target` for one row of a model with recurrent layers.

    Positions after the prompt up to `state_length` are part of the states and of the key-value buffer; the tokens
    behind them are pending.

    Attributes:
        tokens: [n] int64, tokens after the prompt that the target has accepted, without the last emitted one.
        state_length: how many of them the states contain.
    """

    chains_only = True

    def __init__(self, adapter: ModelAdapter, input_ids: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(adapter, input_ids, *args, **kwargs)
        self.buffer.max_length += MAX_PENDING + BUCKETS[-1]
        self.tokens = torch.empty(0, dtype=torch.long, device=self.device)
        self.state_length = 0
        self._layers = [layer for layer in self.cache.layers if is_recurrent(layer)]
        self._prompt_state: State = []
        self._state_before: State | None = None  # before the chain that is being scored
        self._is_dirty = False  # the states contain a chain that has not been committed

    @staticmethod
    def unsupported_reason(adapter: ModelAdapter, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
        """Why a call is not supported; None if it is."""
        mask = model_kwargs.get("attention_mask")
        cache = model_kwargs.get(CACHE_ARGUMENT)
        if len(input_ids) > 1:
            return "several rows of a model with recurrent layers"
        if mask is not None and not bool(mask.all()):
            return "padding for a model with recurrent layers"
        if cache is None or getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
            return "past_key_values of a model with recurrent layers"
        return None

    def prefill(self, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        outputs = super().prefill(hidden_state_indices)
        self._prompt_state = self._copy_state()
        return outputs

    def score(self, tree: DraftTree, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """See `mmspec.interfaces.Target.score`; node i of the tree is the parent of node i + 1."""
        if len(self.tokens) - self.state_length > MAX_PENDING:
            self._feed_pending()
        pending = self.tokens[self.state_length :]
        # A single node is always accepted; if its commit fails, the prompt's state remains to start from.
        self._state_before = self._copy_state() if tree.num_nodes > 1 else None
        ids = torch.cat([pending, tree.tokens[0].to(self.device)])
        self._is_dirty = True
        logits, *states = (part[:, len(pending) :] for part in self._feed(ids, hidden_state_indices))
        return logits, dict(zip(hidden_state_indices, states, strict=True))

    def commit(self, result: VerifyResult) -> None:
        num_accepted = len(result.accepted_nodes[0])
        self.tokens = torch.cat([self.tokens, result.tree.tokens[0, :num_accepted].to(self.device)])
        if num_accepted == result.tree.num_nodes:
            self._advance()
        else:
            self._roll_back()

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        if self._is_dirty:
            self._roll_back()
        self.tokens = self.tokens[: lengths[0]]
        if len(self.tokens) < self.state_length:
            self._state_before = None
            self._roll_back()
        super().crop([self.state_length], zero_tail)

    def export_cache(self, num_steps: int) -> Any:
        self.crop([num_steps - 1])
        if len(self.tokens) > self.state_length:
            self._feed_pending()
        export_recurrent_layers(self.cache, self.user_cache)
        return super().export_cache(num_steps)

    def _feed(self, ids: Tensor, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Forward of ids [n] behind the states; see `run_forward`."""
        self.buffer.begin_forward(len(ids))
        offsets = torch.arange(1, len(ids) + 1, device=self.device) + self.state_length
        inputs = dict(self.node_forward.template)
        inputs["input_ids"] = ids[None]
        inputs["position_ids"] = self._prompt_last_position + offsets.clamp(max=self.max_new_tokens)
        inputs["attention_mask"] = None  # causal over everything before, as transformers builds it
        for name, last in self.call_tensors.token_types.items():
            inputs[name] = last.expand(*last.shape[:-1], len(ids))
        with self._mode():
            return run_forward(self.model, self.adapter, inputs, hidden_state_indices)

    def _feed_pending(self) -> None:
        """A forward of the pending tokens alone."""
        self._feed(self.tokens[self.state_length :])
        self._advance()

    def _advance(self) -> None:
        """The states and the buffer now contain all accepted tokens."""
        self.buffer.advance(len(self.tokens) - self.state_length)
        self.state_length = len(self.tokens)
        self._state_before = None
        self._is_dirty = False

    def _roll_back(self) -> None:
        """Back to the states before the chain, or after the prompt where no copy exists."""
        if self._state_before is None:
            self.state_length = 0
            self.buffer.crop([self.prompt_length])
        self._restore_state(self._prompt_state if self._state_before is None else self._state_before)
        self._state_before = None
        self._is_dirty = False

    def _copy_state(self) -> State:
        with self._mode():
            return [(_clone(layer.conv_states), _clone(layer.recurrent_states)) for layer in self._layers]

    def _restore_state(self, state: State) -> None:
        """Write into the tensors of the layers: kernels may hold their addresses."""
        with self._mode():
            for layer, (conv_states, recurrent_states) in zip(self._layers, state, strict=True):
                for current, before in ((layer.conv_states, conv_states), (layer.recurrent_states, recurrent_states)):
                    for index, tensor in before.items():
                        if tensor is not None:
                            current[index].copy_(tensor)


def target_class(adapter: ModelAdapter) -> type[HFTarget]:
    """The target that decodes models like this one."""
    return RecurrentTarget if adapter.is_recurrent else HFTarget


def _clone(states: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}
