"""`HeadDrafter`: drafts with a trained head that reads the target's hidden states; what all methods share.

Per round, `propose` lets the head read what the target has emitted (`read_prompt`, `read_pending`), then `draft_tree`
builds the tree from the head's last output and drops its keys and values. Values reach the host a few times per prompt,
never in a round.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft
from mmspec.drafters.heads.base.expand import AutoregressiveExpander, LevelExpander, PairExpander, expand_levels
from mmspec.drafters.heads.base.reader import HeadReader
from mmspec.drafters.heads.base.recorded import find_recorded_draft
from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.economy.known import Source
from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.recordings import Recordings
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import Drafter, Prompt, VerifyResult
from mmspec.interfaces.round import DraftPart

HEAD_STEP = 0.15
"""Seconds of a level before it is measured, as a fraction of plain decoding's round."""


class HeadDrafter(HeadReader, Drafter, ABC):
    """A `mmspec.interfaces.Drafter` with a trained head; a method defines or overrides its hooks.

    Order of the calls: `begin`, the target samples its first token, `observe`; then in every round `propose`
    (`read_prompt`, `read_pending`, `draft_tree`), the target verifies, `observe`.

    Hooks, besides those of `HeadReader`:
        draft_tree: the tree of one draft, after `read_pending`. Default: level by level, by the `expander`.
        expander: grows that tree. Default: one forward of the head per level.
        c_classes: classes of the head and of its modules, for a class of drafters whose heads are computed in C, in
            `draft_tree` and in place of `extend_context`; not for its subclasses. None: any classes (those of the
            target's own layers). Default: none.
        c_weights: of such a head. Default: None.
        records_drafts: whether `follow_tokens`, `extend_rows`, `draft_tree` are functions of tensors. Default: False.

    `draft_tree` may use `logits`, `rotary_embedding`, `top_k_of`, and the methods of `DraftState`.
    """

    c_classes: ClassVar[tuple[type, ...] | None] = ()
    records_drafts = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        parts = self.head, self.own_embeddings, self.compressor
        return tuple(part for part in parts if isinstance(part, nn.Module))

    @property
    def compresses_visual_tokens(self) -> bool:
        return self.head.compresses_visual_tokens

    @property
    def compressor_hidden_size(self) -> int | None:
        """Hidden states of EAGLE-3 heads are wider than the embeddings."""
        return None if len(self.hidden_state_indices) > 1 else self.head.config.hidden_size

    # --- a call ------------------------------------------------------------------------------------------------------

    @InferenceMode()
    def begin(self, prompt: Prompt) -> DraftState:
        """Start a call. The head processes the prompt before the first draft, which may never be requested."""
        if prompt.shared_embeddings is None:
            raise ValueError(f"drafter {self.name!r} needs the target's embeddings; got Prompt.shared_embeddings=None.")
        hidden_states = prompt.hidden_states[self.hidden_state_indices[-1]]
        weight = self.head.fc.weight
        if weight.device != hidden_states.device or weight.dtype != hidden_states.dtype:
            self.head.to(hidden_states.device, hidden_states.dtype)
        shared_embeddings = prompt.shared_embeddings
        if self.own_embeddings is not None:
            own = self.own_embeddings.to(hidden_states.device, hidden_states.dtype)
            shared_embeddings = replace(shared_embeddings, embed_tokens=own, embed_scale=1.0)
        batch = hidden_states.shape[0]
        logit_bias = hidden_states.new_zeros(prompt.vocab_size, dtype=torch.float32)
        logit_bias[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        logit_bias[self.vocab_limit or prompt.vocab_size :] = float("-inf")
        draft_ids = None if self.draft_ids is None else self.draft_ids.to(logit_bias.device)
        if prompt.chooser is not None:
            levels = self.max_levels, self.tokens_per_level, self.min_levels
            prompt.chooser.sources = [Source(self.name, None, self.prior_acceptance, HEAD_STEP, *levels)]
        return DraftState(
            shared_embeddings=shared_embeddings,
            kv_cache=RaggedKVCache(batch, max_length=1 << 30),
            logit_bias=logit_bias if draft_ids is None else logit_bias[draft_ids],
            draft_ids=draft_ids,
            prompt=prompt,
            next_positions=[0] * batch,
            last_hidden=hidden_states.new_zeros(batch, self.head.config.hidden_size),
            noise=prompt.noise,
            temperature=prompt.temperature,
            chooser=prompt.chooser,
            c_shape=prompt.c_shape,
            chains_only=prompt.chains_only,
        )

    def use_recordings(self, state: DraftState, recordings: Recordings) -> None:
        state.recordings = recordings

    @InferenceMode()
    def propose(self, state: DraftState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """A tree of at most `max_nodes` nodes, the root included."""
        max_nodes = min(max_nodes, BUCKETS[-1])
        if max_nodes < 2 or not any(active):
            return root_only(len(active), state.last_hidden.device)
        self.read_prompt(state)
        state.active, state.num_levels = active, self._num_levels(state)
        tree = None if state.recorded is None else state.recorded.tree(state, max_nodes, state.num_levels)
        if tree is None:
            self.read_pending(state)
            tree = self.draft_tree(state, max_nodes, state.num_levels)
        if not all(active):
            tree.node_mask &= from_host(active, tree.node_mask.device)[:, None]
        return tree

    @InferenceMode()
    def observe(self, state: DraftState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Store the emitted tokens and their hidden states for the next `read_pending`."""
        if state.first_ids is None:
            state.first_ids = result.tokens[:, 0].to(state.last_hidden.device)
            return
        counts = self._record_round(state, result)
        if not (longest := max(counts)):
            return
        path = result.path[:, :longest].to(state.last_hidden.device)
        scored = self.select_hidden_states(hidden_states)
        accepted = scored.gather(1, path[..., None].expand(-1, -1, scored.shape[-1]))
        state.pending.append(Pending(result.tokens[:, :longest].to(path.device), accepted, counts, result.counts))

    @InferenceMode()
    def draft_part(self, state: DraftState, num_nodes: int) -> DraftPart | None:
        self.read_prompt(state)
        if state.recorded is None:
            return None
        num_levels = self._num_levels(state)
        part = state.recorded.part(state, min(num_nodes, BUCKETS[-1]), num_levels)
        if part is not None:
            state.num_levels = num_levels
        return part

    @InferenceMode()
    def observe_part(
        self, state: DraftState, result: VerifyResult, hidden_states: Tensor, kept: Sequence[Tensor]
    ) -> None:
        counts = self._record_round(state, result)
        emitted = Pending(result.tokens, hidden_states, counts, result.counts) if any(counts) else None
        assert state.recorded is not None
        state.recorded.follow(state, emitted, kept)

    def _num_levels(self, state: DraftState) -> int:
        """Levels of the coming draft: as the round is planned, else all."""
        return self.max_levels if state.chooser is None else state.chooser.levels

    def _record_round(self, state: DraftState, result: VerifyResult) -> list[int]:
        """A round has ended. Returns emitted tokens per row."""
        counts = [len(row) for row in result.emitted_ids]
        if any(counts):
            state.num_levels = 0
        return counts

    # --- hooks --------------------------------------------------------------------------------------------------------

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """The tree of one draft, from the state after `read_pending`.

        Args:
            state: of the call; its KV cache is left as it is.
            max_nodes: size of the tree, the root included.
            num_levels: levels (Falcon: blocks) to draft.
        """
        tree = self.level_tree(state, max_nodes, num_levels)
        assert tree is not None
        return tree

    def level_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree | None:
        """The `top_k` most likely nodes of each level are expanded, then all re-ranked (EAGLE-2, section 4); arguments
        as of `draft_tree`. None without an expander."""
        top_k = self.top_k_of(state)
        tree = None if state.c_draft is None else state.c_draft.tree(state, top_k, max_nodes, num_levels)
        if tree is not None:
            return tree
        expander = self.expander(state, top_k)
        if state.c_draft is not None and isinstance(expander, PairExpander):
            tree = state.c_draft.tree(state, top_k, max_nodes, num_levels, expander)
            if tree is not None:
                return tree
        if expander is None:
            return None
        return expand_levels(state, expander, top_k, max_nodes=max_nodes, num_levels=num_levels)

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        """Expands the coming tree, `top_k` nodes of each level."""
        return AutoregressiveExpander(self, state, top_k)

    def c_draft(self, state: DraftState) -> CDraft | None:
        """The head of this call in C, after the prompt; None if it runs in its own forward."""
        classes = vars(type(self)).get("c_classes", ())
        if classes is None:
            classes = tuple({type(module) for module in self.head.modules()})
        return find_c_draft(self, state, classes) if type(self.head) in classes else None

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """Weights of a head of `c_classes`; None with settings that are not implemented in C."""
        return None

    def read_prompt(self, state: DraftState) -> None:
        """Run the head over the prompt, if that is still to be done; find who computes the drafts of this call."""
        if state.prompt is None:
            return
        assert state.first_ids is not None
        if state.draft_ids is not None:  # a copy of weights, which a call without drafts does not need
            state.draft_lm_head = self.head.draft_lm_head(state.shared_embeddings, state.draft_ids)
        prompt, state.prompt = state.prompt, None
        self._prefill(state, prompt, state.first_ids)
        state.c_draft = self.c_draft(state)
        state.recorded = find_recorded_draft(self, state, prompt) if state.c_draft is None else None
