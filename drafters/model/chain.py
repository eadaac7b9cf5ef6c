"""`ChainDrafter`: drafts token by token with a whole model behind a KV cache; what its users share.

The model decodes one chain per row, the likeliest token of each step. The `top_k` likeliest tokens of every step are
nodes of the tree, so that a tree costs no more forwards than the chain. A forward scores the next positions of all
rows by `DraftTarget.score`, as the decode loop scores trees: rows have lengths of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmspec.control.chain import ChainController, ChainPlan
from mmspec.drafters.rerank import LEVEL_PENALTY, NodePool, next_log_probs
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.interfaces import DrafterRequirements, DraftTarget, Prompt, VerifyResult

DEFAULT_TOP_K_NODES = 2
"""Tokens of each step that become nodes; the second is accepted far less often, and the controller may drop it."""


@dataclass
class ChainState:
    """State of one call.

    Attributes:
        prompt: of the call.
        output_ids: emitted tokens of each row.
        logit_bias: [V] float32, -inf for ids that must not be drafted, else 0.
        plan: of the last draft, None if there was none.
        num_steps: forwards of the last draft.
        draft_s: seconds of the last draft.
        start_time: `time.perf_counter()` at the start of the last draft.
    """

    prompt: Prompt
    output_ids: list[list[int]]
    logit_bias: Tensor
    plan: ChainPlan | None = None
    num_steps: int = 0
    draft_s: float = 0.0
    start_time: float = 0.0


@dataclass
class ChainInputs:
    """What the model reads before it drafts.

    Attributes:
        target: the model behind its cache.
        tokens: ids of each row behind the cached ones, the last emitted token at the end.
        drafted: [B, 1] ids of each step that the model has read as well, in order.
    """

    target: DraftTarget
    tokens: list[list[int]]
    drafted: list[Tensor] = field(default_factory=list)


class ChainDrafter(ABC):
    """A `mmspec.interfaces.Drafter` that decodes with a model.

    Hooks:
        variants: what the controller chooses from.
        open_chain: the model, and the tokens that it has not read yet.
        close_chain: what remains in its cache.

    Attributes:
        name: of the drafter.
        requirements: see `mmspec.interfaces.Drafter`.
        vocab_size: V of the target, or None if any fits.
        controller: chooses the variant and the number of tokens of each draft.
        top_k: likeliest tokens of each step that become nodes.
    """

    name: str
    requirements: DrafterRequirements = DrafterRequirements()
    vocab_size: int | None = None

    def __init__(self, max_length: int = 6, top_k: int = DEFAULT_TOP_K_NODES) -> None:
        """
        Args:
            max_length: largest number of tokens of a chain.
            top_k: likeliest tokens of each step that become nodes.

        Raises:
            ValueError: `max_length` outside of 1 to 32, or `top_k` below 1.
        """
        if not 1 <= max_length <= BUCKETS[-2]:
            raise ValueError(f"max_length must be 1 to {BUCKETS[-2]}; got {max_length}.")
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1; got {top_k}.")
        self.controller = ChainController(max_length)
        self.top_k = top_k

    @abstractmethod
    def variants(self, state: ChainState) -> Sequence[Hashable]:
        """The variants of the model that may draft, the likeliest to be good first; empty for no draft."""

    @abstractmethod
    def open_chain(self, state: ChainState, variant: Hashable, active: Sequence[bool]) -> ChainInputs:
        """The model and its unread tokens.

        Args:
            state: of the call.
            variant: one of `variants`.
            active: rows to draft for; the others may have no tokens.
        """

    @abstractmethod
    def close_chain(self, state: ChainState, chain: ChainInputs) -> None:
        """Crop the cache of the model after a draft, also one that was interrupted by an exception."""

    # --- the Drafter protocol -----------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ChainState:
        """Start a call. Nothing is computed before the first draft, which may never be requested."""
        device = prompt.input_ids.device
        logit_bias = torch.zeros(prompt.vocab_size, device=device)
        logit_bias[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        return ChainState(prompt, [[] for _ in range(len(prompt.input_ids))], logit_bias)

    def propose(self, state: ChainState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """A tree of at most `max_nodes` nodes, the root included."""
        state.plan = None
        variants = self.variants(state) if max_nodes > 1 and any(active) else ()
        if not variants:
            return root_only(len(active), state.logit_bias.device)
        state.start_time = time.perf_counter()
        plan = self._plan(state, variants)
        chain = self.open_chain(state, plan.variant, active)
        try:
            tree = self._draft(state, chain, plan, min(max_nodes, BUCKETS[-1]), active)
        finally:
            self.close_chain(state, chain)
        state.plan = plan
        state.draft_s = time.perf_counter() - state.start_time
        return tree

    def observe(self, state: ChainState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Store the emitted tokens, and update the controller."""
        for row, ids in zip(state.output_ids, result.emitted_ids, strict=True):
            row += ids
        plan, state.plan = state.plan, None
        if plan is None:
            return
        self.controller.record(
            len(state.output_ids),
            plan,
            min(state.num_steps, result.tree.num_nodes - 1),
            [len(ids) - 1 for ids in result.emitted_ids if ids],
            state.draft_s / state.num_steps,
            time.perf_counter() - state.start_time - state.draft_s,
        )

    # --- one draft ----------------------------------------------------------------------------------------------------

    def _plan(self, state: ChainState, variants: Sequence[Hashable]) -> ChainPlan:
        if state.prompt.static_shapes:  # the shapes must not depend on timing, nor on what was accepted
            return ChainPlan(variants[0], self.controller.max_length)
        return self.controller.plan(len(state.output_ids), variants)

    def _draft(
        self, state: ChainState, chain: ChainInputs, plan: ChainPlan, max_nodes: int, active: Sequence[bool]
    ) -> DraftTree:
        """Decode the chains of all rows, and rank the tokens of all steps."""
        device = state.logit_bias.device
        length = min(plan.length, max_nodes - 1)
        if device.type != "cpu":  # reading a probability would synchronise the device
            plan = replace(plan, min_prob=0.0)
        noise = self._log_noise(state, length)
        is_active = from_host(active, device)
        counts = [len(ids) for ids in chain.tokens]
        tokens = from_host([ids + [0] * (max(counts) - len(ids)) for ids in chain.tokens], device)
        pool = NodePool()
        path_log_probs, parents = torch.zeros(len(active), 1, device=device), -1
        for step in range(length):
            logits = score_next(chain.target, tokens, counts).to(device)
            if step:
                chain.drafted.append(tokens)
            step_noise = None if noise is None else noise[:, step]
            log_probs = next_log_probs(self._fit(logits, state), state.prompt.temperature, step_noise)
            best, best_ids = log_probs.topk(min(self.top_k, log_probs.shape[-1]))
            node_log_probs = path_log_probs + best - LEVEL_PENALTY
            first = pool.num_nodes
            pool.add(best_ids, node_log_probs, torch.full_like(best_ids, parents))
            state.num_steps = step + 1
            path_log_probs, parents = node_log_probs[:, :1], first
            tokens, counts = best_ids[:, :1], [1] * len(active)
            if plan.min_prob and float(path_log_probs[is_active].exp().mean()) < plan.min_prob:
                break
        tree = pool.select(None, max_nodes)
        if not all(active):
            tree.node_mask &= is_active[:, None]
        return tree

    def _log_noise(self, state: ChainState, length: int) -> Tensor | None:
        """[B, length, V] log of the noise that samples the next tokens; None for greedy decoding."""
        noise = state.prompt.noise
        return None if noise is None else noise(length).to(state.logit_bias.device).log()

    def _fit(self, logits: Tensor, state: ChainState) -> Tensor:
        """[B, V] float32 logits over the target's vocabulary, -inf for ids that must not be drafted."""
        vocab_size = len(state.logit_bias)
        logits = logits[:, :vocab_size].float()
        missing = vocab_size - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits + state.logit_bias


def score_next(target: DraftTarget, tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """Feed tokens and commit them.

    Args:
        target: the model behind its cache.
        tokens: [B, n] int64, padded on the right.
        counts: number of valid tokens of each row.

    Returns:
        [B, V] logits behind the last valid token of each row.
    """
    batch, n = tokens.shape
    device = tokens.device
    index = torch.arange(n, device=device)
    on_device = from_host(counts, device)
    causal = (index[:, None] >= index).expand(batch, n, n)
    tree = DraftTree(
        tokens=tokens,
        parents=(index - 1).expand(batch, n),
        node_mask=index < on_device[:, None],
        ancestor_mask=causal,
        depths=index.expand(batch, n),
    )
    logits, _ = target.score(tree)
    nodes = [list(range(count)) for count in counts]
    target.commit(VerifyResult(tree, index.expand(batch, n), on_device, tokens, [], nodes))
    last = (on_device - 1).clamp(min=0).to(logits.device)
    return logits[torch.arange(batch, device=logits.device), last]
