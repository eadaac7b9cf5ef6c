"""`NodeForward`: a target's forward over the nodes of trees, as a function of tensors.

Mask, position ids and transformers' own forward, which writes keys and values behind the committed positions. It reads
no value on the host, so that over a `RecordedKVCache` it can be recorded and replayed (`mmspec.engine.recordings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT, TreeCache
from mmspec.targets.base import ModelAdapter
from mmspec.targets.capture_hooks import layer_inputs

CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "selected_hidden_states")
"""Whether this transformers can return chosen hidden states only; older versions return all of them."""
MASK_ALIGNMENT = 16
"""Attention kernels on a GPU copy a mask whose rows do not begin at a multiple of this many numbers."""


@dataclass(frozen=True)
class CallTensors:
    """What the forwards of a call read besides the nodes.

    Attributes:
        position_base: [B or 1, 1] or [axes, B or 1, 1] int64, position id of cache position 0 if all positions were
            text.
        max_position: [1] int64, largest cache position with a position id of its own: drafts past the end may exceed
            the model's positions.
        last_position: the same on the host.
        padding: [B, L] bool, False at left pads of the prompt; None without padding.
        token_types: [..., B, 1] of the new tokens, for each model input with one value per token.
        position_limit: number of position ids of the model, if the call may reach it: it may have a table of so many.
    """

    position_base: Tensor
    max_position: Tensor
    last_position: int
    padding: Tensor | None
    token_types: Mapping[str, Tensor]
    position_limit: int | None = None

    def tensors(self) -> list[Tensor]:
        """All of them, in one order."""
        padding = [] if self.padding is None else [self.padding]
        return [self.position_base, self.max_position, *padding, *self.token_types.values()]

    def over(self, tensors: Sequence[Tensor]) -> CallTensors:
        """The same with other `tensors`."""
        base, max_position, *rest = tensors
        padding = None if self.padding is None else rest.pop(0)
        token_types = dict(zip(self.token_types, rest, strict=True))
        return replace(self, position_base=base, max_position=max_position, padding=padding, token_types=token_types)


class NodeForward:
    """The forward of one model and call over nodes.

    Attributes:
        adapter: of the model.
        template: inputs of the forward that are the same in every round.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        template: Mapping[str, Any],
        make_model: Callable[[], Any] | None = None,
        window: int | None = None,
    ) -> None:
        """
        Args:
            adapter: of the model.
            template: see the attributes.
            make_model: makes a copy of the model, with fewer layers for example; None for the adapter's.
            window: of layers that have one; None for the model's.
        """
        self.adapter = adapter
        self._make_model = make_model
        self.template = dict(template)
        self._layer_types = adapter.layer_types
        self._window = adapter.sliding_window if window is None else window
        self._has_one_mask = takes_one_mask(adapter)

    @cached_property
    def model(self) -> Any:
        """Whose forward runs. Made when it first does, which is hardly ever where rounds are in C."""
        return self.adapter.model if self._make_model is None else self._make_model()

    @property
    def constants(self) -> str:
        """The inputs that a recording repeats, besides tensors."""
        simple = (bool, int, float, str, type(None))
        return repr(sorted((name, value) for name, value in self.template.items() if isinstance(value, simple)))

    def __call__(
        self,
        tree: DraftTree,
        kv_cache: RaggedKVCache,
        call: CallTensors,
        hidden_state_indices: Sequence[int],
        cache: TreeCache | None = None,
    ) -> tuple[Tensor, ...]:
        """One forward, after `kv_cache.begin_forward`.

        Args:
            tree: the sanitized tree, on the device of the forward.
            kv_cache: of the call; the nodes' keys and values are written behind its lengths.
            call: of the call.
            hidden_state_indices: hidden states to return.
            cache: `kv_cache` and recurrent states behind transformers' interface; None for the template's.

        Returns:
            logits [B, N, V], and [B, N, D] of each hidden state.
        """
        inputs = dict(self.template)
        inputs["input_ids"] = tree.tokens
        inputs["position_ids"] = self._positions(tree, kv_cache, call)
        inputs["attention_mask"] = self._mask(tree, kv_cache, call.padding)
        if cache is not None:
            inputs[CACHE_ARGUMENT] = cache
        for name, last in call.token_types.items():
            inputs[name] = last.expand(*last.shape[:-1], tree.num_nodes)
        return run_forward(self.model, self.adapter, inputs, hidden_state_indices)

    def _positions(self, tree: DraftTree, kv_cache: RaggedKVCache, call: CallTensors) -> Tensor:
        """Position ids of the nodes, [B, N] or [axes, B, N]."""
        if tree.num_nodes == 1 and kv_cache.is_uniform:
            return call.position_base + min(kv_cache.seq_lens[0], call.last_position)
        assert tree.depths is not None
        lengths = kv_cache.lengths_on(tree.tokens.device)
        positions = call.position_base + torch.minimum(lengths[:, None] + tree.depths, call.max_position)
        if call.position_limit is None:
            return positions
        # Nodes behind the limit are never accepted; a root there is for the model to compute, or to refuse.
        root_exists = call.position_base + lengths[:, None] < call.position_limit
        return torch.where(root_exists, positions.clamp(max=call.position_limit - 1), positions)

    def _mask(self, tree: DraftTree, kv_cache: RaggedKVCache, padding: Tensor | None) -> Any:
        """Attention mask of a round: each node attends to its row's committed positions and to its ancestors.

        Returns:
            [B, 1, N, kv_len], bool or additive (see `_to_mask`); {layer type: mask} if the layers differ; None where
            transformers' own causal mask is the same.
        """
        if tree.num_nodes == 1 and kv_cache.is_uniform and padding is None:
            return None
        is_recorded = isinstance(kv_cache, RecordedKVCache)
        lengths = kv_cache.lengths_on(tree.tokens.device)
        visible = _visible_keys(tree, lengths, kv_cache.kv_len, padding)
        if "sliding_attention" not in self._layer_types or self._has_one_mask:
            return self._to_mask(visible, is_recorded)
        assert self._window is not None
        sliding = self._to_mask(visible & _within_window(tree, lengths, kv_cache.kv_len, self._window), is_recorded)
        if self._layer_types == {"sliding_attention"}:
            return sliding
        full = self._to_mask(visible, is_recorded)
        return {**dict.fromkeys(self._layer_types), "full_attention": full, "sliding_attention": sliding}

    def _to_mask(self, visible: Tensor, is_recorded: bool) -> Tensor:
        """[B, 1, N, kv_len]: bool for sdpa, which is valid under autocast too; additive for eager attention.

        Additive in recordings too, since sdpa would convert a bool mask in every layer.

        Args:
            visible: [B, N, kv_len] bool.
            is_recorded: whether a `RecordedKVCache` is read.
        """
        if self.adapter.attention == "sdpa" and not is_recorded:
            return visible[:, None]
        *rows, width = visible.shape
        dtype = self.adapter.model.dtype
        aligned = -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.zeros(*rows, aligned, dtype=dtype, device=visible.device)[..., :width]
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def _visible_keys(tree: DraftTree, lengths: Tensor, kv_len: int, padding: Tensor | None) -> Tensor:
    """[B, N, kv_len] bool: each node attends to its row's committed positions and to its ancestors.

    Args:
        tree: the tree to score.
        lengths: [B] int64, committed positions.
        kv_len: positions of the cache.
        padding: [B, any length] bool, False where a prompt is padded; None without padding.
    """
    assert tree.ancestor_mask is not None
    batch, num_nodes = tree.tokens.shape
    committed = torch.arange(kv_len, device=lengths.device) < lengths[:, None]
    if padding is not None:
        committed[:, : padding.shape[1]] &= padding[:, :kv_len]
    visible = committed[:, None].expand(batch, num_nodes, -1).contiguous()
    keys = _node_keys(tree, lengths)[:, None].expand(batch, num_nodes, num_nodes)
    return visible.scatter_(2, keys, tree.ancestor_mask)


def _within_window(tree: DraftTree, lengths: Tensor, kv_len: int, window: int) -> Tensor:
    """[B, N, kv_len] bool: keys less than `window` positions before each node.

    Positions are those of the sequence, padding included, as transformers' own masks count them. Arguments as above.
    """
    assert tree.depths is not None
    depths = torch.where(tree.node_mask, tree.depths, 0)
    index = torch.arange(kv_len, device=lengths.device).expand(len(lengths), -1)
    position = index.scatter(1, _node_keys(tree, lengths), lengths[:, None] + depths)
    return (lengths[:, None] + tree.depths)[:, :, None] - position[:, None] < window


def _node_keys(tree: DraftTree, lengths: Tensor) -> Tensor:
    """[B, N] index of the nodes' keys in the cache."""
    return lengths[:, None] + torch.arange(tree.num_nodes, device=lengths.device)


def takes_one_mask(adapter: ModelAdapter) -> bool:
    """Whether a model has layers of several types, or a window, and takes one mask for all positions and layers."""
    types = adapter.layer_types
    if len(types) > 1 and not adapter.accepts_mask_per_layer_type:
        return True
    return "sliding_attention" in types and not adapter.has_window_masks


def unsupported_length(adapter: ModelAdapter, max_length: int) -> str | None:
    """Why a call of so many positions at most is not supported; None if it is."""
    window = adapter.sliding_window
    if window is None or max_length <= window or not takes_one_mask(adapter):
        return None
    return (
        f"a length limit beyond sliding_window={window} (the model accepts one mask for all layers, which is "
        "exact within the window)"
    )


def run_forward(
    model: Any, adapter: ModelAdapter, inputs: Mapping[str, Any], hidden_state_indices: Sequence[int]
) -> tuple[Tensor, ...]:
    """transformers' forward of `model`: logits, and each of the hidden states, the inputs of layers.

    Of models with several streams (AltUp of Gemma 3n) the active one.
    """
    if hidden_state_indices:
        selected = sorted(hidden_state_indices) if CAN_SELECT_HIDDEN_STATES else True
        inputs = {**inputs, "output_hidden_states": selected}
    with layer_inputs(adapter, hidden_state_indices, inputs) as received:
        outputs = model(**inputs, return_dict=True)
    stream = getattr(adapter.text_config, "altup_active_idx", 0)
    states = (received.get(index, outputs.hidden_states[index]) for index in hidden_state_indices)
    return outputs.logits, *(state if state.dim() == 3 else state[stream] for state in states)
