"""`ChainDrafter`: drafts token by token with a whole model behind a KV cache; what its users share.

The model decodes one chain per row, the likeliest token of each step. The `top_k` likeliest tokens of every step are
nodes of the tree, so that a tree costs no more forwards than the chain. A forward scores the next positions of all
rows by `DraftTarget.score`, as the decode loop scores trees: rows have lengths of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.control.chain import ChainController, ChainPlan
from mmspec.control.round_cost import RoundCostModel, cost_rows
from mmspec.control.tree_size import TreeSizeController
from mmspec.cpu.chain_types import ChainGuesses, ChainRequest
from mmspec.drafters.model.chain_draft import ChainDraft, DraftRule, Guide
from mmspec.drafters.ngram.output_ngrams import MAX_CONTEXT, MIN_UNSEEN_PROB
from mmspec.drafters.rerank import LEVEL_PENALTY
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.interfaces import Drafter, DraftTarget, Prompt, VerifyResult

DEFAULT_TOP_K_NODES = 2
"""Tokens of each step that become nodes; the second is accepted far less often, and the controller may drop it."""
MAX_GUIDE_TREE = 8
"""Nodes of a tree of the guide, root included."""
GUESS_RECOVERY = 0.01
"""Part of what its calibration lacks to 1 that the guide regains with each draft in C that takes no guess of it."""


@dataclass
class ChainState:
    """State of one call.

    Attributes:
        prompt: of the call.
        output_ids: emitted tokens of each row.
        logit_bias: [V] float32, -inf for ids that must not be drafted, else 0.
        plan: of the last draft, None if there was none.
        num_rows: `cost_rows` of the last draft.
        num_steps: forwards of the last draft.
        draft_s: seconds of the last draft.
        start_time: `time.perf_counter()` at the start of the last draft.
        guide: the guide's state, or None.
    """

    prompt: Prompt
    output_ids: list[list[int]]
    logit_bias: Tensor
    plan: ChainPlan | None = None
    num_rows: int = 0
    num_steps: int = 0
    draft_s: float = 0.0
    start_time: float = 0.0
    guide: Any = None


@dataclass
class ChainInputs:
    """What the model reads before it drafts.

    Attributes:
        target: the model behind its cache.
        tokens: ids of each row behind the cached ones, the last emitted token at the end.
        drafted: [B, 1] ids of each step that the model has read as well, in order; -1 in rows that are not active.
    """

    target: DraftTarget
    tokens: list[list[int]]
    drafted: list[Tensor] = field(default_factory=list)


class ChainDrafter(Drafter, ABC):
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
        guide: drafts for the model; None for none.
        owns_guide: whether this drafter begins and observes it; else the one around it does, and sets
            `ChainState.guide`.
    """

    owns_guide: bool = True

    def __init__(self, max_length: int = 6, top_k: int = DEFAULT_TOP_K_NODES, guide: Drafter | None = None) -> None:
        """
        Args:
            max_length: largest number of tokens of a chain.
            top_k: likeliest tokens of each step that become nodes.
            guide: drafts for the model, on a CPU; None for one token in each of its forwards.

        Raises:
            ValueError: `max_length` outside of 1 to 32, or `top_k` below 1.
        """
        if not 1 <= max_length <= BUCKETS[-2]:
            raise ValueError(f"max_length must be 1 to {BUCKETS[-2]}; got {max_length}.")
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1; got {top_k}.")
        self.controller = ChainController(max_length)
        self.top_k = top_k
        self.guide = guide
        self._guide_costs: dict[Hashable, RoundCostModel] = {}

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

    # --- a call ------------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ChainState:
        """Start a call. Nothing is computed before the first draft, which may never be requested."""
        device = prompt.input_ids.device
        logit_bias = torch.zeros(prompt.vocab_size, device=device)
        logit_bias[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        guide = self.guide.begin(prompt) if self.guide is not None and self.owns_guide else None
        return ChainState(prompt, [[] for _ in range(len(prompt.input_ids))], logit_bias, guide=guide)

    def propose(self, state: ChainState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """A tree of at most `max_nodes` nodes, the root included."""
        state.plan = None
        variants = self.variants(state) if max_nodes > 1 and any(active) else ()
        if not variants:
            return root_only(len(active), state.logit_bias.device)
        state.start_time = time.perf_counter()
        state.num_rows = cost_rows(sum(active), len(active))
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
        if self.guide is not None and self.owns_guide:
            self.guide.observe(state.guide, result, {})
        plan, state.plan = state.plan, None
        if plan is None:
            return
        self.controller.record(
            state.num_rows,
            plan,
            min(state.num_steps, result.tree.num_nodes - 1),
            [len(ids) - 1 for ids in result.emitted_ids if ids],
            state.draft_s / state.num_steps,
            time.perf_counter() - state.start_time - state.draft_s,
            result.tree.num_nodes,
        )

    # --- one draft ----------------------------------------------------------------------------------------------------

    def _plan(self, state: ChainState, variants: Sequence[Hashable]) -> ChainPlan:
        if state.prompt.static_shapes:  # the shapes must not depend on timing, nor on what was accepted
            return ChainPlan(variants[0], self.controller.max_length)
        return self.controller.plan(state.num_rows, variants)

    def _draft(
        self, state: ChainState, chain: ChainInputs, plan: ChainPlan, max_nodes: int, active: Sequence[bool]
    ) -> DraftTree:
        """Decode the chains of all rows, and rank the tokens of all steps."""
        device = state.logit_bias.device
        length = min(plan.length, max_nodes - 1)
        rule = DraftRule(state.prompt, state.logit_bias, self.top_k, length, self._log_noise(state, length))
        drafted = self._draft_in_c(state, chain, plan, rule, max_nodes, active) if device.type == "cpu" else None
        if drafted is not None:
            return drafted
        guide = self._guide(state, plan, rule, active)
        draft = ChainDraft(chain.target, rule, active, guide)
        is_active = from_host(active, device)
        min_prob = plan.min_prob if device.type == "cpu" else 0.0  # reading a probability would wait for a GPU
        chain.drafted = draft.read_ids
        try:
            draft.begin(chain.tokens)
            while not draft.is_complete and (
                not min_prob or float(draft.path_log_probs[is_active].exp().mean()) >= min_prob
            ):
                draft.go_on()
        finally:
            state.num_steps = draft.num_tokens
            if guide is not None:
                guide.drafter.rewind(guide.state)
        tree = draft.pool.select(None, max_nodes)
        if not all(active):
            tree.node_mask &= is_active[:, None]
        return tree

    def _draft_in_c(
        self,
        state: ChainState,
        chain: ChainInputs,
        plan: ChainPlan,
        rule: DraftRule,
        max_nodes: int,
        active: Sequence[bool],
    ) -> DraftTree | None:
        """The same in one call; None where that is not possible."""
        prompt, costs = state.prompt, self._guide_costs.setdefault(plan.variant, RoundCostModel())
        counts = None if self.guide is None or prompt.static_shapes else self.guide.counts(state.guide)
        guesses = None
        if counts is not None and len(chain.tokens) == 1:
            context = tuple(state.output_ids[0][-MAX_CONTEXT:])
            sizes = [costs.forward_s(1, size) or 1.0 for size in range(1, MAX_GUIDE_TREE + 1)]
            relative = [seconds / sizes[0] for seconds in sizes]
            guesses = ChainGuesses(counts, context, relative, MIN_UNSEEN_PROB, costs.calibration)
        drafted = chain.target.draft_chain(
            ChainRequest(
                unread=[ids if on else () for ids, on in zip(chain.tokens, active, strict=True)],
                length=rule.length,
                top_k=rule.top_k,
                max_nodes=max_nodes,
                logit_bias=state.logit_bias,
                log_noise=rule.log_noise,
                temperature=1.0 if rule.log_noise is None else float(prompt.temperature),
                level_penalty=LEVEL_PENALTY,
                min_prob=plan.min_prob,
                stop_ids=sorted(prompt.stop_ids),
                guesses=guesses,
            )
        )
        if drafted is None:
            return None
        chain.drafted, state.num_steps = [drafted.chains], drafted.num_tokens
        for size, seconds in drafted.forward_s.items():
            costs.update(costs.score_s, (1, size), seconds)
        if drafted.expected:
            costs.calibrate(drafted.num_right / drafted.expected)
        else:
            costs.relax_calibration(GUESS_RECOVERY)
        return drafted.tree

    def _guide(self, state: ChainState, plan: ChainPlan, rule: DraftRule, active: Sequence[bool]) -> Guide | None:
        """The guide of a draft; None on a GPU, which would wait, and where shapes must not depend on what it finds."""
        if self.guide is None or state.prompt.static_shapes or state.logit_bias.device.type != "cpu":
            return None
        costs = self._guide_costs.setdefault(plan.variant, RoundCostModel())
        controller = TreeSizeController(costs, state.num_rows, drafts=True, max_tree_size=MAX_GUIDE_TREE)
        return Guide(self.guide, state.guide, controller, rule, active)

    def _log_noise(self, state: ChainState, length: int) -> Tensor | None:
        """[B, length, V] log of the noise that samples the next tokens; None for greedy decoding."""
        noise = state.prompt.noise
        return None if noise is None else noise(length).to(state.logit_bias.device).log()
