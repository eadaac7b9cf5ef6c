"""`HeadReader`: what a head reads of a call, its prompt and then the tokens that the target has emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention, causal_mask, select_last
from mmspec.drafters.heads.base.compressed_inputs import compressed_prompt_inputs
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.positions import prompt_axes
from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.drafters.heads.base.visual_inputs import (
    VISUAL_MODES,
    DraftInputs,
    align_prompt,
    embed_anew,
    left_pack,
    prompt_order,
    resolve_visual_mode,
)
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import BUCKETS
from mmspec.interfaces import Compressor, DrafterRequirements, Prompt

CosSin = tuple[Tensor, Tensor]
"""(cos, sin), each [B or 1, 1, n or 1, d], of positions."""
MAX_HEAD_TREE_SIZE = BUCKETS[-2]
"""Unless `tree_size` fixes it. The last bucket would double the target's positions for the least likely nodes."""
DEFAULT_TOP_K = {"cpu": 4}
"""Default `top_k` by device type; 8 on every other device."""


class HeadReader:
    """A trained head and what it reads; `HeadDrafter` drafts with it. A method overrides its hooks.

    Hooks:
        extend_prompt, extend_rows: one forward of the head over the positions of a prompt, or behind them, never over
            draft nodes; the second may be recorded. Default: causal attention over its KV cache.
        run_rows: the forward in both. Default: the head's.
        follow_tokens: what else depends on the tokens that are read. Default: nothing.
        fuse: inputs of the head at text positions and at draft nodes. Default: `DraftHead.fuse`.
        prompt_inputs: inputs of the head at the positions of a prompt. Default: as the visual mode defines.

    Attributes:
        head: the draft head, in eval mode.
        visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES`.
        trained_visual_mode: how they entered it in training, or "mixed" for both embeddings; None if unknown.
        top_k: nodes per level that are expanded, and children of each; None for the device's default. 1 where the
            target scores chains only.
        min_levels, max_levels: fewest and most levels of a draft, of `tokens_per_level` tokens each.
        prior_acceptance: of a token, before anything is counted.
        max_depth: largest depth of a draft node, in tokens below the root.
        bundled_compressor: (settings, weights) of the compressor that the head was trained with, or None.
        own_embeddings: that the head reads in place of the target's (published heads that were trained with others).
        compressor: that compressor, once `mmspec.resolve` has built it.
        hidden_state_indices: the target's hidden states that the head reads.
    """

    min_levels = tokens_per_level = 1
    prior_acceptance = 0.75

    def __init__(
        self,
        head: DraftHead,
        visual_mode: str = "decoupled",
        *,
        num_layers: int,
        name: str = "eagle",
        max_depth: int = 6,
        top_k: int | None = None,
        draft_ids: Tensor | None = None,
        vocab_limit: int | None = None,
    ) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES`.
            num_layers: decoder layers of the target.
            name: of the drafter, in messages and metrics.
            max_depth: largest depth of a draft node; fewer levels are drafted where that is faster.
            top_k: nodes per level that are expanded, and children of each. None: `DEFAULT_TOP_K`, else 8.
            draft_ids: [V'] int64, ids that may be drafted (VocabTrim, or EAGLE-3's draft vocabulary); None for all.
            vocab_limit: ids from here on are never drafted; None for no limit.

        Raises:
            ValueError: an unknown visual mode, or `max_depth` or `top_k` below 1.
        """
        visual_mode = resolve_visual_mode(visual_mode)
        if max_depth < 1:
            raise ValueError(f"max_depth must be at least 1; got {max_depth}.")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for the device's default; got {top_k}.")
        self.head = head.eval()
        self.visual_mode = visual_mode
        self.trained_visual_mode: str | None = None
        self.name = name
        self.top_k = top_k
        self.max_levels = self.max_depth = max_depth
        self.draft_ids = draft_ids
        self.vocab_limit = vocab_limit
        self.bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None
        self.compressor: Compressor | None = None
        self.own_embeddings: nn.Embedding | None = None
        self.vocab_size: int | None = head.config.vocab_size
        self.set_hidden_state_indices(head.hidden_state_indices(num_layers), num_layers)

    def set_hidden_state_indices(self, indices: tuple[int, ...], num_layers: int) -> None:
        """Read these hidden states of the target, concatenated in this order.

        Raises:
            ValueError: an index outside of 0 to `num_layers`.
        """
        if not indices or min(indices) < 0 or max(indices) > num_layers:
            raise ValueError(
                f"this head reads hidden states {indices}; a target of {num_layers} layers has 0 to {num_layers}."
            )
        self.hidden_state_indices = indices
        required = tuple(dict.fromkeys((0, *indices)))
        self.requirements = DrafterRequirements(required, max_tree_size=MAX_HEAD_TREE_SIZE)

    def fix_visual_mode(self, visual_mode: str) -> None:
        """Let visual tokens enter the head in this way from now on."""
        self.visual_mode = visual_mode

    # --- hooks --------------------------------------------------------------------------------------------------------

    def extend_context(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Run the head over committed positions: append to its KV cache and set `state.last_hidden`.

        Args:
            state: of the call.
            inputs: [B, n, D] padded on the right.
            position_ids: [B, n]; of a prompt [3, B, n] if the head has `mrope_section`.
            counts: number of valid inputs of each row.
        """
        extend = self.extend_rows if any(state.kv_cache.seq_lens) else self.extend_prompt
        extend(state, inputs, position_ids, counts)
        lengths = state.kv_cache.seq_lens
        state.kv_cache.seq_lens = [length + count for length, count in zip(lengths, counts, strict=True)]

    def extend_prompt(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """The same of a prompt, of which only the last output is used; the lengths of the cache stay."""
        kv_cache, n, device = state.kv_cache, inputs.shape[1], inputs.device
        kv_cache.begin_forward(n)
        rotary = self.rotary_embedding(state, position_ids)
        last = from_host([max(0, count - 1) for count in counts], device)[:, None]
        mask = None if min(counts) == n else (torch.arange(n, device=device) <= last)[:, None, None]
        outputs = self.run_rows(state, inputs, rotary, CachedAttention(kv_cache, mask), last)
        state.last_hidden = select_last(outputs, [min(count, 1) for count in counts], state.last_hidden)

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        """The same behind a context, whose lengths stay; in a recorded function `counts` are a tensor [B] int64."""
        kv_cache, n = state.kv_cache, inputs.shape[1]
        kv_cache.begin_forward(n)
        rotary = self.rotary_embedding(state, position_ids)
        attend = CachedAttention(kv_cache, causal_mask(kv_cache, n, inputs.device))
        outputs = self.run_rows(state, inputs, rotary, attend, None)
        state.last_hidden = select_last(outputs, counts, state.last_hidden)

    def run_rows(
        self, state: DraftState, inputs: Tensor, rotary: CosSin, attend: CachedAttention, query_index: Tensor | None
    ) -> Tensor:
        """[B, m, D] outputs of the head at committed positions behind `state.last_hidden`: all, or `query_index`."""
        outputs: Tensor = self.head(inputs, *rotary, attend, query_index)
        return outputs

    def fuse(self, state: DraftState, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[B, n, D] head inputs of text positions."""
        return self.head.fuse(inputs_embeds, hidden_states)

    def follow_tokens(self, state: DraftState, tokens: Tensor, counts: Sequence[int] | Tensor) -> None:
        """Update the state with emitted tokens [B, n], of which `counts` are valid, before `extend_rows`."""
        return

    def prompt_inputs(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """[B, n, D] head inputs of a prompt, and [B, n] bool which positions to keep (None: all)."""
        return VISUAL_MODES[self.visual_mode](self.head, inputs)

    # --- what the head reads ------------------------------------------------------------------------------------------

    def _prefill(self, state: DraftState, prompt: Prompt, first_ids: Tensor) -> None:
        """Run the head over the prompt; `first_ids` [B] follow its last position."""
        hidden_states = self.select_hidden_states(prompt.hidden_states)
        state.hidden_size = hidden_states.shape[-1]
        if self.own_embeddings is not None:
            prompt = embed_anew(prompt, state.shared_embeddings)
        aligned, counts = align_prompt(prompt, hidden_states, first_ids, state.shared_embeddings, self.visual_mode)
        aligned = self.head.prepare(aligned)
        attention_mask, position_ids, num_inputs = aligned.attention_mask, aligned.position_ids, counts
        assert attention_mask is not None and position_ids is not None
        compressor = prompt.compressor or self.compressor
        if compressor is None:
            inputs, keep = self.prompt_inputs(state, aligned)
            keep = None if keep is None else keep & attention_mask
        else:
            inputs, keep, position_ids = compressed_prompt_inputs(self, prompt, aligned, counts, compressor)
        if keep is not None:
            num_inputs, inputs, position_ids = left_pack(keep, inputs, position_ids)
        first_positions = counts
        if self.head.config.mrope_section:  # `position_ids` are indices into the prompt so far
            axes, first_positions = prompt_axes(prompt, prompt_order(prompt, hidden_states.shape[1]))
            position_ids = axes.gather(2, position_ids.expand(len(axes), -1, -1))
        next_positions, lengths = torch.stack((first_positions, num_inputs)).tolist()
        inputs, position_ids = inputs[:, : max(lengths)], position_ids[..., : max(lengths)]
        state.next_positions = next_positions  # before the forward: the rotary table must cover gaps in the positions
        self.extend_context(state, inputs, position_ids, lengths)

    def read_pending(self, state: DraftState) -> None:
        """Run the head over the tokens emitted since the last draft."""
        if not state.pending:
            return
        pending, state.pending = Pending.concatenate(state.pending), []
        self.follow_tokens(state, pending.tokens, pending.counts)
        if state.c_draft is None or not state.c_draft.extend_context(state, pending):
            inputs, position_ids = self.pending_inputs(state, pending.tokens, pending.hidden_states)
            self.extend_context(state, inputs, position_ids, pending.counts)
        state.next_positions = [position + n for position, n in zip(state.next_positions, pending.counts, strict=True)]

    def pending_inputs(self, state: DraftState, tokens: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, D] head inputs and [B, n] position ids of emitted tokens, arguments as in `Pending`."""
        embeds = state.shared_embeddings.embed(tokens).to(hidden_states.dtype)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        return self.fuse(state, embeds, hidden_states), state.first_positions() + steps

    def select_hidden_states(self, hidden_states: Mapping[int, Tensor]) -> Tensor:
        """[B, n, S] the hidden states that the head reads, concatenated."""
        if len(self.hidden_state_indices) == 1:
            return hidden_states[self.hidden_state_indices[0]]
        return torch.cat([hidden_states[index] for index in self.hidden_state_indices], dim=-1)

    def top_k_of(self, state: DraftState) -> int:
        """Children of a node in the next draft: `top_k` or the device's default, 1 if the target scores chains only."""
        top_k = 1 if state.chains_only() else self.top_k or DEFAULT_TOP_K.get(state.last_hidden.device.type, 8)
        return min(top_k, len(state.logit_bias))

    def logits(self, state: DraftState, hidden_states: Tensor) -> Tensor:
        """[..., V'] float32 logits of the next token, -inf for ids that must not be drafted."""
        logits = self.head.logits(hidden_states, state.shared_embeddings, state.draft_lm_head)
        return logits.float() + state.logit_bias

    def rotary_embedding(self, state: DraftState, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, 1, n, d], of position ids [B, n], from a table that grows by half its size.

        Those of ids [3, B, n] on three axes are computed: only a prompt has them.
        """
        if position_ids.dim() == 3:
            cos, sin = self.head.multi_axis_rotary_embedding(position_ids, state.last_hidden.dtype)
            return cos[:, None], sin[:, None]
        size = max(state.next_positions) + position_ids.shape[1] + self.max_depth + 1
        cos, sin = state.rotary_table(size, self.head.rotary_embedding)
        return cos[position_ids][:, None], sin[position_ids][:, None]
