"""The draft head of a call in C (`mmspec.cpu.draft`), where the head and the call are for it.

A head is recognised by the exact classes of its modules. Whatever differs (hooks, replaced modules or weights, other
dtypes), prompts, and calls whose target may not run in C either, run in the head's own forward. Both
give the same trees up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmspec.cpu.draft import CHead
from mmspec.cpu.draft_types import HeadContext, HeadWeights, TreeRequest
from mmspec.cpu.layers import DecoderShape
from mmspec.cpu.linear import active_kernel
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.drafters.rerank import LEVEL_PENALTY
from mmspec.engine.revision import revision_of, run_plain_forwards
from mmspec.engine.tree import DraftTree, root_only

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.heads.base.expand import PairExpander

KNOWN_CLASSES = (nn.Linear, nn.Embedding, RMSNorm)
"""Classes of the modules in a head and of the target's embeddings, besides the head's own."""


class CDraft:
    """The drafts of one call by a `CHead`. Each may decline: the drafter's own code then does it, over the same state.

    Attributes:
        revision: of the modules whose weights it reads.
    """

    def __init__(self, head: CHead, modules: list[nn.Module], layer_types: Sequence[str] = ()) -> None:
        """
        Args:
            head: the head in C.
            modules: all whose weights it reads, the head first.
            layer_types: of an assistant's layers; empty for heads with keys of their own.
        """
        self._head = head
        self._layer_types = layer_types
        self.revision = revision_of(modules[0], modules)

    def extend_context(self, state: DraftState, pending: Pending) -> bool:
        """`HeadDrafter.extend_context` over emitted tokens; whether it was done."""
        if self._layer_types:
            return False  # an assistant reads the last token alone
        rows = _indices(count > 0 for count in pending.counts)
        context = self._context(state, pending.tokens.shape[1], rows)
        if context is None:
            return False
        tokens, hidden_states = _take(pending.tokens, rows), _take(pending.hidden_states, rows)
        counts = [count for count in pending.counts if count]
        last_hidden = self._head.forward(tokens, hidden_states, counts, context)
        if last_hidden is None:
            return False
        state.last_hidden = last_hidden if rows is None else _spread(last_hidden, rows, state.last_hidden.clone())
        state.kv_cache.seq_lens = [n + count for n, count in zip(state.kv_cache.seq_lens, pending.counts, strict=True)]
        return True

    def tree(
        self, state: DraftState, top_k: int, max_nodes: int, num_levels: int, pairs: PairExpander | None = None
    ) -> DraftTree | None:
        """The tree that `expand_levels` grows with `top_k` children a node, over scores of pairs if there are any, in
        active rows; the others have a root alone. None if it was not done."""
        if pairs is None and not self._head.grows_trees:
            return None
        rows = _indices(state.active or [True])
        context = self._context(state, max(num_levels, self._head.num_written(top_k, num_levels)), rows)
        if context is None:
            return None
        log_noise = state.log_noise(num_levels)
        request = TreeRequest(
            num_levels=num_levels,
            top_k=top_k,
            max_nodes=max_nodes,
            logit_bias=state.logit_bias,
            log_noise=None if log_noise is None else _take(log_noise, rows),
            temperature=float(state.temperature),
            draft_ids=state.draft_ids,
            level_penalty=LEVEL_PENALTY,
            candidates=None if pairs is None else _take(pairs.candidates[:, :num_levels], rows),
            pair_scores=None if pairs is None else _take(pairs.pair_scores[:, :num_levels], rows),
        )
        tree = self._head.tree(request, context)
        if tree is None or rows is None:
            return tree
        spread = root_only(len(state.last_hidden)).pad(tree.num_nodes)
        assert spread.scores is not None and tree.scores is not None
        return DraftTree(
            _spread(tree.tokens, rows, spread.tokens),
            _spread(tree.parents, rows, spread.parents),
            _spread(tree.node_mask, rows, spread.node_mask),
            _spread(tree.scores, rows, spread.scores),
        )

    def block(self, state: DraftState) -> tuple[Tensor, Tensor] | None:
        """`BlockDrafter.block` in active rows, zeros in the others; None if it was not done."""
        if not self._head.reads_anchors:  # its block is part of its tree
            return None
        rows = _indices(state.active or [True])
        context = self._context(state, self._head.num_written(0, 0), rows)
        found = None if context is None else self._head.block(context)
        if found is None or rows is None:
            return found
        batch = len(state.last_hidden)
        features, logits = (_spread(part, rows, part.new_zeros(batch, *part.shape[1:])) for part in found)
        return features, logits

    def _context(self, state: DraftState, num_new: int, rows: list[int] | None) -> HeadContext | None:
        """What the head has read in these rows, with room for `num_new` positions; None if it must not run in C."""
        kv_cache, padding, positions = state.kv_cache, None, state.next_positions
        if torch.is_autocast_enabled("cpu") or not self.revision.is_current():
            return None
        if self._layer_types and state.target_keys is not None:
            caches, padding = state.target_keys.buffers(self._layer_types), state.target_keys.padding
            lengths, positions = state.target_keys.lengths, [position - 1 for position in positions]
        else:
            kv_cache.begin_forward(num_new)
            caches, lengths = kv_cache.common_buffers(), kv_cache.seq_lens
        if not caches:
            return None
        anchors, last_hidden = state.carry if self._head.reads_anchors else None, state.last_hidden
        if rows is not None:
            lengths, positions = ([values[row] for row in rows] for values in (lengths, positions))
            anchors, padding = (None if part is None else part[rows] for part in (anchors, padding))
        return HeadContext(lengths, positions, caches, _take(last_hidden, rows), anchors, rows, padding)


def _indices(chosen: Iterable[bool]) -> list[int] | None:
    """The rows that are chosen; None if all are."""
    flags = list(chosen)
    return None if all(flags) else [row for row, on in enumerate(flags) if on]


def _take(tensor: Tensor, rows: list[int] | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _spread(computed: Tensor, rows: list[int], whole: Tensor) -> Tensor:
    """`whole` [B, ...] with `computed` in these rows."""
    whole[rows] = computed
    return whole


def find_c_draft(drafter: HeadDrafter, state: DraftState, classes: tuple[type, ...]) -> CDraft | None:
    """The drafts of a call in C; None if the head or the call is not for them.

    Args:
        drafter: with the head.
        state: of the call, after the prompt.
        classes: of the head and its modules, besides `KNOWN_CLASSES`.
    """
    kernel, head, shared = active_kernel(), drafter.head, state.shared_embeddings
    modules, embed_tokens = [*head.modules(), shared.embed_tokens, shared.lm_head], shared.embed_tokens
    if not isinstance(embed_tokens, nn.Embedding) or not isinstance(shared.lm_head, nn.Linear):
        return None
    scale, target = shared.embed_scale, state.c_shape()
    if type(embed_tokens) is not nn.Embedding:  # its factor is a trait of the target
        if target is None or drafter.own_embeddings is not None:
            return None
        scale, classes = target.embed_scale, (*classes, type(embed_tokens))
    known = (*KNOWN_CLASSES, *classes)
    if kernel is None or any(type(module) not in known for module in modules) or not run_plain_forwards(modules):
        return None
    if embed_tokens.max_norm is not None or head.config.head_dim % 2 or (found := drafter.c_weights(state)) is None:
        return None
    rotary = partial(head.rotary_embedding, dtype=state.last_hidden.dtype)
    scale = scale if found.embed_scale is None else found.embed_scale
    shape = replace(found.shape or _shape(head.config, found), embed_scale=scale)
    try:
        c_head = CHead(kernel, shape, found, found.rotaries or [rotary] * len(found.layers))
    except ValueError:  # weights of other dtypes, devices or shapes
        return None
    return CDraft(c_head, modules, () if found.assistant is None else found.assistant.layer_types)


def _shape(config: HeadConfig, weights: HeadWeights) -> DecoderShape:
    queries = weights.layers[0].q
    assert queries is not None
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scaling=config.head_dim**-0.5,
        attention_input_size=0 if queries.shape[1] == config.hidden_size else queries.shape[1],
    )


def shared_weights(state: DraftState) -> dict[str, Any]:
    """Attributes of `HeadWeights`: the target's embeddings and LM head, or its rows for a draft vocabulary."""
    embed_tokens, lm_head = state.shared_embeddings.embed_tokens, state.shared_embeddings.lm_head
    assert isinstance(embed_tokens, nn.Embedding) and isinstance(lm_head, nn.Linear)
    rows, cap = state.draft_lm_head, state.shared_embeddings.logit_softcap
    return {
        "logit_scale": state.shared_embeddings.logit_scale,
        "logit_softcap": cap or 0.0,
        "embeddings": embed_tokens.weight,
        "lm_head": lm_head.weight if rows is None else rows,
        "lm_head_bias": lm_head.bias if rows is None else None,
    }


def own_lm_head(weight: Tensor) -> dict[str, Any]:
    """Attributes of `HeadWeights` of an LM head whose logits are left as they are."""
    return {"lm_head": weight, "lm_head_bias": None, "logit_scale": 1.0, "logit_softcap": 0.0}
