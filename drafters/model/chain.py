"""`ChainDrafter`: drafts token by token with a whole model behind a KV cache; what its users share.

The model decodes one chain per row, the likeliest token of each step. The `top_k` likeliest tokens of every step are
nodes of the tree, so that a tree costs no more forwards than the chain. A forward scores the next positions of all
rows by `DraftTarget.score`, as the decode loop scores trees: rows have lengths of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.chain_types import ChainGuesses
from mmspec.drafters.model.chain_draft import ChainDraft, DraftRule, draft_under_rules
from mmspec.drafters.ngram.output_ngrams import MAX_CONTEXT, MIN_UNSEEN_PROB
from mmspec.economy.known import Economy, Source
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.interfaces import Drafter, DraftTarget, Prompt, VerifyResult

DEFAULT_TOP_K_NODES = 2
"""Tokens of each step that become nodes; the second is accepted far less often, and may be dropped."""
MAX_GUESSED_NODES = 8
"""Nodes of a tree of the guide, root included."""
GUIDE = Source("guide")
"""Under which drafts of the guide are measured."""


@dataclass(frozen=True)
class ChainPlan:
    """How to draft in one round.

    Attributes:
        variant: of the model.
        length: largest number of tokens.
        min_prob: stop behind a token that is accepted with a smaller probability: it costs more time than it saves.
    """

    variant: Hashable
    length: int
    min_prob: float = 0.0


@dataclass
class ChainState:
    """State of one call.

    Attributes:
        prompt: of the call.
        output_ids: emitted tokens of each row.
        logit_bias: [V] float32, -inf for ids that must not be drafted, else 0.
        guide: the guide's state, or None.
    """

    prompt: Prompt
    output_ids: list[list[int]]
    logit_bias: Tensor
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
        variants: what may draft, for `sources`.
        open_chain: the model, and the tokens that it has not read yet.
        close_chain: what remains in its cache.

    Attributes:
        name: of the drafter.
        requirements: see `mmspec.interfaces.Drafter`.
        vocab_size: V of the target, or None if any fits.
        max_length: largest number of tokens of a chain.
        top_k: likeliest tokens of each step that become nodes.
        guide: counts n-grams, by which chains in C guess what the model decodes; None for none.
        drafts_under_rules: whether it reads the target's ids, so that it can draft under `Prompt.rules`.
        owns_guide: whether this drafter begins and observes it; else the one around it does, and sets
            `ChainState.guide`.
    """

    owns_guide: bool = True
    drafts_under_rules: bool = False

    def __init__(self, max_length: int = 6, top_k: int = DEFAULT_TOP_K_NODES, guide: Drafter | None = None) -> None:
        """
        Args:
            max_length: largest number of tokens of a chain.
            top_k: likeliest tokens of each step that become nodes.
            guide: counts n-grams, by which chains in C guess what the model decodes; None for one token a forward.

        Raises:
            ValueError: `max_length` outside of 1 to 32, or `top_k` below 1.
        """
        if not 1 <= max_length <= BUCKETS[-2]:
            raise ValueError(f"max_length must be 1 to {BUCKETS[-2]}; got {max_length}.")
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1; got {top_k}.")
        self.max_length = max_length
        self.top_k = top_k
        self.guide = guide
        self._guide_costs: dict[Hashable, Economy] = {}

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
        variants = self.variants(state) if max_nodes > 1 and any(active) else ()
        if not variants:
            return root_only(len(active), state.logit_bias.device)
        plan = self._plan(state, variants)
        chain = self.open_chain(state, plan.variant, active)
        try:
            tree = self._draft(state, chain, plan, min(max_nodes, BUCKETS[-1]), active)
        finally:
            self.close_chain(state, chain)
        return tree

    def observe(self, state: ChainState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Store the emitted tokens."""
        for row, ids in zip(state.output_ids, result.emitted_ids, strict=True):
            row += ids
        if self.guide is not None and self.owns_guide:
            self.guide.observe(state.guide, result, {})

    # --- one draft ----------------------------------------------------------------------------------------------------

    def sources(self, state: ChainState) -> list[Source]:
        """The variants, for the chooser."""
        return [
            Source("-".join(map(str, (self.name, *self._label(one)))), one, *self.prior(state, number), self.max_length)
            for number, one in enumerate(self.variants(state))
        ]

    def prior(self, state: ChainState, number: int) -> tuple[float, float]:
        """What is assumed of a variant: acceptance of a token, and seconds of a step as a fraction of a plain round."""
        return 0.6, 0.25

    @staticmethod
    def _label(variant: Hashable) -> tuple[object, ...]:
        return (len(variant), variant[-1]) if isinstance(variant, tuple) else ()

    def _plan(self, state: ChainState, variants: Sequence[Hashable]) -> ChainPlan:
        chooser = state.prompt.chooser
        source = None if chooser is None else chooser.source
        if chooser is None or source is None or source.variant not in variants:
            return ChainPlan(variants[0], self.max_length)
        return ChainPlan(source.variant, chooser.levels, chooser.min_prob)

    @staticmethod
    def _drafted(state: ChainState, num_tokens: int) -> None:
        """So many tokens were drafted, where more may have been planned."""
        if state.prompt.chooser is not None:
            state.prompt.chooser.levels = num_tokens

    def _draft(
        self, state: ChainState, chain: ChainInputs, plan: ChainPlan, max_nodes: int, active: Sequence[bool]
    ) -> DraftTree:
        """Decode the chains of all rows, and rank the tokens of all steps."""
        device = state.logit_bias.device
        length = min(plan.length, max_nodes - 1)
        rule = DraftRule(state.prompt, state.logit_bias, self.top_k, length, self._log_noise(state, length))
        drafted: DraftTree | None = None
        if device.type == "cpu" and state.prompt.rules is not None and self.drafts_under_rules:
            found = draft_under_rules(chain.target, chain.tokens[0], rule, plan.min_prob, max_nodes)
            if found is not None:
                drafted, num_steps = found
                self._drafted(state, max(1, num_steps))
        elif device.type == "cpu":
            drafted = self._draft_in_c(state, chain, plan, rule, max_nodes, active)
        if drafted is not None:
            return drafted
        draft = ChainDraft(chain.target, rule, active)
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
            self._drafted(state, draft.num_tokens)
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
        prompt, costs = state.prompt, self._guide_costs.setdefault(plan.variant, Economy())
        counts = None if self.guide is None or prompt.static_shapes else self.guide.counts(state.guide)
        guesses = None
        if counts is not None and len(chain.tokens) == 1:
            context = tuple(state.output_ids[0][-MAX_CONTEXT:])
            sizes = [costs.rounds_s.get("score", 1, size) or 1.0 for size in range(1, MAX_GUESSED_NODES + 1)]
            relative = [seconds / sizes[0] for seconds in sizes]
            guesses = ChainGuesses(counts, context, relative, MIN_UNSEEN_PROB, costs.trust(GUIDE))
        unread = [ids if on else () for ids, on in zip(chain.tokens, active, strict=True)]
        drafted = chain.target.draft_chain(
            rule.request(unread, max_nodes, min_prob=plan.min_prob, stop_ids=sorted(prompt.stop_ids), guesses=guesses)
        )
        if drafted is None:
            return None
        chain.drafted = [drafted.chains]
        self._drafted(state, drafted.num_tokens)
        for size, seconds in drafted.forward_s.items():
            costs.rounds_s.add("score", 1, size, seconds)
        costs.count_trust(GUIDE, drafted.num_right, drafted.expected)
        return drafted.tree

    def _log_noise(self, state: ChainState, length: int) -> Tensor | None:
        """[B, length, V] log of the noise that samples the next tokens; None for greedy decoding."""
        noise = state.prompt.noise
        return None if noise is None else noise(length).to(state.logit_bias.device).log()
