"""The draft head of a call in compiled code (`mmspec.cpu.draft`), where the head and the call are for it.

A head is recognised by the exact classes of its modules. Whatever differs (hooks, replaced modules or weights, other
dtypes, scaled embeddings), prompts, and calls whose target may not run in compiled code either, run in the head's own
forward. Both give the same trees up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from mmspec.cpu.draft import BlockWeights, HeadContext, HeadWeights, NativeHead, TreeRequest
from mmspec.cpu.layers import DecoderShape, LayerWeights
from mmspec.cpu.linear import active_kernel, is_replaced
from mmspec.drafters.eagle.head import DecoderLayer, HeadConfig, RMSNorm
from mmspec.drafters.eagle.state import DraftState, Pending
from mmspec.drafters.rerank import LEVEL_PENALTY
from mmspec.engine.tree import DraftTree

if TYPE_CHECKING:
    from mmspec.drafters.eagle.base import HeadDrafter

KNOWN_CLASSES = frozenset((nn.Linear, nn.Embedding, RMSNorm, DecoderLayer))
"""Classes of the modules in a head and of the target's embeddings, besides the head's own."""


class NativeDraft:
    """The drafts of one call by a `NativeHead`. Implements `mmspec.drafters.eagle.state.DraftBackend`."""

    def __init__(self, head: NativeHead, modules: list[nn.Module], rotary_embedding: Callable[..., Any]) -> None:
        """
        Args:
            head: the compiled head.
            modules: all whose weights it reads.
            rotary_embedding: `EagleHead.rotary_embedding`.
        """
        self._head = head
        self._modules = modules
        self._rotary_embedding = rotary_embedding
        self._weights = [
            (module._parameters, name, weight) for module in modules for name, weight in module._parameters.items()
        ]

    def extend_context(self, state: DraftState, pending: Pending) -> bool:
        """See `DraftBackend`."""
        num_new = pending.tokens.shape[1]
        context = self._context(state, num_new)
        if context is None:
            return False
        last_hidden = self._head.forward(pending.tokens, pending.hidden_states, pending.counts, context)
        if last_hidden is None:
            return False
        state.last_hidden = last_hidden
        state.kv_cache.seq_lens = [n + count for n, count in zip(state.kv_cache.seq_lens, pending.counts, strict=True)]
        return True

    def tree(self, state: DraftState, top_k: int, max_nodes: int, num_levels: int) -> DraftTree | None:
        """The tree that `expand_levels` grows for these arguments."""
        context = self._context(state, top_k * num_levels)
        if context is None:
            return None
        request = TreeRequest(
            num_levels=num_levels,
            top_k=top_k,
            max_nodes=max_nodes,
            logit_bias=state.logit_bias,
            log_noise=state.log_noise(num_levels),
            temperature=float(state.temperature),
            draft_ids=state.draft_ids,
            level_penalty=LEVEL_PENALTY,
        )
        return self._head.tree(request, context)

    def _context(self, state: DraftState, num_new: int) -> HeadContext | None:
        """What the head has read, with room for `num_new` positions; None if it must not run in compiled code."""
        kv_cache = state.kv_cache
        if torch.is_autocast_enabled("cpu") or not self._is_current():
            return None
        kv_cache.begin_forward(num_new)
        caches = kv_cache.common_buffers()
        if not caches:
            return None
        cos, sin = state.rotary_table(max(state.next_positions) + num_new, self._rotary_embedding)
        return HeadContext(kv_cache.seq_lens, state.next_positions, caches[0], cos, sin, state.last_hidden)

    def _is_current(self) -> bool:
        """Whether the modules compute as when they were recognised, apart from the numbers in their weights."""
        return all(parameters.get(name) is weight for parameters, name, weight in self._weights) and not any(
            module._forward_hooks or module._forward_pre_hooks for module in self._modules
        )


def find_native_draft(
    drafter: HeadDrafter, state: DraftState, block: BlockWeights | None = None, block_classes: tuple[type, ...] = ()
) -> NativeDraft | None:
    """The compiled drafts of a call; None if the head or the call is not for them.

    Args:
        drafter: with a head that computes as `EagleHead` does: `fc` and one layer, then the target's LM head.
        state: of the call, after the prompt.
        block: weights of a block head.
        block_classes: further classes of modules in the head.
    """
    kernel, head, shared = active_kernel(), drafter.head, state.shared_embeddings
    modules = [*head.modules(), shared.embed_tokens, shared.lm_head]
    if kernel is None or not _are_known(modules, (type(head), *block_classes)):
        return None
    if shared.embed_scale != 1.0 or shared.logit_scale != 1.0 or shared.logit_softcap is not None:
        return None
    embeddings, lm_head, draft_lm_head = shared.embed_tokens, shared.lm_head, state.draft_lm_head
    if not isinstance(embeddings, nn.Embedding) or not isinstance(lm_head, nn.Linear):
        return None
    if embeddings.max_norm is not None or head.config.eagle3_input or head.config.head_dim % 2:
        return None
    weights = HeadWeights(
        fuse=head.fc.weight,
        fuse_bias=head.fc.bias,
        layer=_layer_weights(head.layer),
        embeddings=embeddings.weight,
        lm_head=lm_head.weight if draft_lm_head is None else draft_lm_head,
        lm_head_bias=lm_head.bias if draft_lm_head is None else None,
        block=block,
        sources=tuple(weight for module in modules for weight in module.parameters(recurse=False)),
    )
    try:
        return NativeDraft(NativeHead(kernel, _shape(head.config), weights), modules, head.rotary_embedding)
    except ValueError:  # weights of other dtypes, devices or shapes
        return None


def _are_known(modules: list[nn.Module], head_classes: tuple[type, ...]) -> bool:
    """Whether modules are of known classes, and `run_plain_forwards`."""
    is_known = all(type(module) in KNOWN_CLASSES or type(module) in head_classes for module in modules)
    return is_known and run_plain_forwards(modules)


def run_plain_forwards(modules: Iterable[nn.Module]) -> bool:
    """Whether modules have no hooks or forwards of their own, and plain parameters."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return all(
        ("forward" not in module.__dict__ or is_replaced(module))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and all(weight is None or type(weight) is nn.Parameter for weight in module._parameters.values())
        for module in modules
    )


def _shape(config: HeadConfig) -> DecoderShape:
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scaling=config.head_dim**-0.5,
    )


def _layer_weights(layer: DecoderLayer) -> LayerWeights:
    """The weights of a layer; those of fused projections are views."""
    sizes = [number * layer.config.head_dim for number in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)]
    q, k, v = layer.qkv_proj.weight.split(sizes)
    bias = layer.qkv_proj.bias
    q_bias, k_bias, v_bias = (None, None, None) if bias is None else bias.split(sizes)
    gate, up = layer.gate_up_proj.weight.chunk(2) if layer.has_mlp else (None, None)
    return LayerWeights(
        input_norm=None if layer.input_norm is None else layer.input_norm.weight,
        q=q,
        k=k,
        v=v,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        q_norm=None,
        k_norm=None,
        o=layer.o_proj.weight,
        o_bias=None,
        post_norm=layer.post_norm.weight if layer.has_mlp else None,
        gate=gate,
        up=up,
        gate_bias=None,
        up_bias=None,
        down=layer.down_proj.weight if layer.has_mlp else None,
        down_bias=None,
    )


__all__ = ["NativeDraft", "find_native_draft", "run_plain_forwards"]
