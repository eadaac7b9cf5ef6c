"""EAGLE-2 (arXiv 2406.16858) for vision-language models: a trained head drafts a tree, level by level.

With `visual_mode="decoupled"` this is MSD (arXiv 2505.14260). In every round `sync` runs the head over the tokens
emitted since the last draft, with the target's hidden states; `_draft_tree` then expands levels from its last output;
the tree's keys and values are dropped. No value is copied to the host.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.control.depth import DepthController
from mmspec.control.draft_cost import CallTimer, DraftCostModel
from mmspec.drafters.eagle.expand import (
    AutoregressiveExpander,
    LevelExpander,
    cached_attention,
    expand_levels,
    select_last,
)
from mmspec.drafters.eagle.head import EagleHead
from mmspec.drafters.eagle.state import EagleState, Pending
from mmspec.drafters.eagle.visual_inputs import (
    VISUAL_MODES,
    DraftInputs,
    align_prompt,
    compressed_inputs,
    left_pack,
    prompt_grids,
    resolve_visual_mode,
)
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.interfaces import CompressionContext, Compressor, DrafterRequirements, Prompt, VerifyResult

DEFAULT_BEAM = {"cpu": 4}
"""Default `beam_width` by device type; 8 on every other device."""


class EagleDrafter:
    """Drafts with an `EagleHead`.

    Attributes:
        head: the draft head, in eval mode.
        visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES`.
        depth_controller: chooses the number of levels per draft.
        max_lookahead: largest number of positions that a draft reaches beyond the last emitted token.
        cost_model: measured prefill and draft costs, for compressors that use them.
        bundled_compressor: (settings, weights) of the compressor that the head was trained with, or None.
        compressor: that compressor, once `mmspec.config` has built it.
        hidden_state_indices: the target's hidden states that the head reads.
    """

    def __init__(
        self,
        head: EagleHead,
        visual_mode: str = "decoupled",
        *,
        num_layers: int,
        name: str = "eagle",
        max_depth: int = 6,
        beam_width: int | None = None,
        draft_ids: Tensor | None = None,
        vocab_limit: int | None = None,
    ) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES`.
            num_layers: decoder layers of the target.
            name: of the drafter, in messages and metrics.
            max_depth: maximum number of tree levels; the depth controller drafts fewer where that is faster.
            beam_width: nodes of a level that are expanded further. None: `DEFAULT_BEAM`, else 8.
            draft_ids: [V'] int64, ids that may be drafted (VocabTrim, or EAGLE-3's draft vocabulary); None for all.
            vocab_limit: ids from here on are never drafted; None for no limit.

        Raises:
            ValueError: an unknown visual mode, or a depth or width below 1.
        """
        visual_mode = resolve_visual_mode(visual_mode)
        if max_depth < 1:
            raise ValueError(f"max_depth must be at least 1; got {max_depth}.")
        if beam_width is not None and beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, or None for the device's default; got {beam_width}.")
        self.head = head.eval()
        self.visual_mode = visual_mode
        self.name = name
        self.beam_width = beam_width
        self.depth_controller = DepthController(max_depth)
        self.max_lookahead = max_depth
        self.cost_model = DraftCostModel()
        self.draft_ids = draft_ids
        self.vocab_limit = vocab_limit
        self.bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None
        self.compressor: Compressor | None = None
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
        self.requirements = DrafterRequirements(
            hidden_state_indices=tuple(dict.fromkeys((0, *indices))), max_tree_size=BUCKETS[-2]
        )

    @property
    def compresses_visual_tokens(self) -> bool:
        """See `mmspec.interfaces.TrainedDrafter`."""
        return self.head.compresses_visual_tokens

    @property
    def compressor_hidden_size(self) -> int | None:
        """See `mmspec.interfaces.TrainedDrafter`. Hidden states of EAGLE-3 heads are wider than the embeddings."""
        return None if self.head.config.eagle3_input else self.head.config.hidden_size

    # --- the Drafter protocol -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, prompt: Prompt) -> EagleState:
        """Start a call. The head processes the prompt before the first draft, which may never be requested."""
        if prompt.shared_embeddings is None:
            raise ValueError(f"drafter {self.name!r} needs the target's embeddings; got Prompt.shared_embeddings=None.")
        hidden_states = prompt.hidden_states[self.hidden_state_indices[-1]]
        weight = self.head.fc.weight
        if weight.device != hidden_states.device or weight.dtype != hidden_states.dtype:
            self.head.to(hidden_states.device, hidden_states.dtype)
        batch = hidden_states.shape[0]
        logit_bias = hidden_states.new_zeros(prompt.vocab_size, dtype=torch.float32)
        logit_bias[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        logit_bias[self.vocab_limit or prompt.vocab_size :] = float("-inf")
        return EagleState(
            shared_embeddings=prompt.shared_embeddings,
            kv_cache=RaggedKVCache(batch, max_length=1 << 30),
            logit_bias=logit_bias,
            prompt=prompt,
            next_positions=[0] * batch,
            last_hidden=hidden_states.new_zeros(batch, self.head.config.hidden_size),
            noise=prompt.noise,
            temperature=prompt.temperature,
            static_shapes=prompt.static_shapes,
        )

    @torch.inference_mode()
    def observe(self, state: EagleState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Store the emitted tokens and their hidden states for the next `sync`; update the depth controller."""
        if state.first_ids is None:
            state.first_ids = result.tokens[:, 0].to(state.last_hidden.device)
            return
        counts = [len(row) for row in result.emitted_ids]
        longest = max(counts)
        if not longest:
            return
        state.timer.drain()
        if state.depth and result.tree.num_nodes > 1:
            self._record_round(state, result, counts)
        state.depth = 0
        path = result.path[:, :longest].to(state.last_hidden.device)
        scored = self._select_hidden_states(hidden_states)
        accepted = scored.gather(1, path[..., None].expand(-1, -1, scored.shape[-1]))
        state.pending.append(Pending(result.tokens[:, :longest].to(path.device), accepted, counts))

    def _record_round(self, state: EagleState, result: VerifyResult, counts: list[int]) -> None:
        """Update the depth controller and the cost model with the round that ended."""
        num_accepted = [count - 1 for count in counts if count]
        round_s = time.perf_counter() - state.start_time
        num_steps = state.depth - 1
        step_s = state.draft_s / num_steps if num_steps else 0.0
        # A tree that is smaller than its depth has no nodes on the last levels.
        num_levels = -(-(result.tree.num_nodes - 1) // self.depth_controller.tokens_per_level)
        depth = min(state.depth, num_levels)
        self.depth_controller.record(len(counts), depth, num_accepted, step_s, round_s - num_steps * step_s)
        state.timer.record_round(round_s, 1 + sum(num_accepted) / len(num_accepted))

    @torch.inference_mode()
    def propose(self, state: EagleState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The most likely `max_nodes` nodes (root included) of the levels that were expanded."""
        max_nodes = min(max_nodes, BUCKETS[-1])
        if max_nodes < 2 or not any(active):
            return root_only(len(active), state.last_hidden.device)
        state.start_time = time.perf_counter()
        self.sync(state)
        draft_start = time.perf_counter()
        state.depth = (
            self.depth_controller.max_levels if state.static_shapes else self.depth_controller.choose(len(active))
        )
        timestamp = state.timer.now()
        tree = self._draft_tree(state, max_nodes, state.depth)
        state.timer.record_draft(timestamp, max(state.kv_cache.seq_lens), state.depth)
        state.draft_s = time.perf_counter() - draft_start
        if not all(active):
            tree.node_mask &= torch.tensor(active, device=tree.node_mask.device)[:, None]
        return tree

    # --- inputs of the head, overridden by architectures --------------------------------------------------------------

    def fuse(self, state: EagleState, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[B, n, D] head inputs of text positions."""
        return self.head.fuse(inputs_embeds, hidden_states)

    def prompt_inputs(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """[B, n, D] head inputs of a prompt, and [B, n] bool which of them to keep (None: all)."""
        return VISUAL_MODES[self.visual_mode](self.head, inputs)

    def _select_hidden_states(self, hidden_states: Mapping[int, Tensor]) -> Tensor:
        """[B, n, S] the hidden states that the head reads, concatenated."""
        if len(self.hidden_state_indices) == 1:
            return hidden_states[self.hidden_state_indices[0]]
        return torch.cat([hidden_states[index] for index in self.hidden_state_indices], dim=-1)

    # --- prefill and emitted tokens -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def sync(self, state: EagleState) -> None:
        """Run the head over the prompt, if that is still to be done, and over the pending tokens."""
        if state.prompt is not None:
            assert state.first_ids is not None
            if self.draft_ids is not None:
                state.draft_ids = self.draft_ids.to(state.logit_bias.device)
                state.logit_bias = state.logit_bias[state.draft_ids]
                state.draft_lm_head = self.head.draft_lm_head(state.shared_embeddings, state.draft_ids)
            self._prefill(state, state.prompt, state.first_ids)
            state.prompt = None
        self._forward_pending(state)

    def _prefill(self, state: EagleState, prompt: Prompt, first_ids: Tensor) -> None:
        """Run the head over the prompt; `first_ids` [B] follow its last position."""
        hidden_states = self._select_hidden_states(prompt.hidden_states)
        inputs, counts = align_prompt(prompt, hidden_states, first_ids, state.shared_embeddings, self.visual_mode)
        attention_mask, position_ids, num_inputs = inputs.attention_mask, inputs.position_ids, counts
        assert attention_mask is not None and position_ids is not None
        compressor = prompt.compressor or self.compressor
        if isinstance(compressor, nn.Module):  # it is built on the CPU
            compressor.to(counts.device)
        if compressor is None:
            rows, keep = self.prompt_inputs(state, inputs)
        else:
            last = (counts - 1)[:, None, None].expand(-1, 1, hidden_states.shape[-1])
            query = inputs.hidden_states.gather(1, last)[:, 0]
            state.timer = CallTimer(self.cost_model, len(counts), counts.device)
            inputs = replace(inputs, grids=prompt_grids(prompt, hidden_states.shape[1]))
            context = self._compression_context(prompt)
            rows, keep, position_ids = compressed_inputs(
                self.head, self.visual_mode, inputs, compressor, query, context
            )
            attention_mask = torch.ones_like(keep)
        if keep is not None:
            num_inputs, rows, position_ids = left_pack(attention_mask & keep, rows, position_ids)
        next_positions, num_rows = torch.stack((counts, num_inputs)).tolist()
        rows, position_ids = rows[:, : max(num_rows)], position_ids[:, : max(num_rows)]
        timestamp = state.timer.now()
        state.next_positions = next_positions  # before the forward: the rotary table must cover gaps in the positions
        self._forward(state, rows, position_ids, num_rows)
        state.timer.record_prefill(timestamp, max(num_rows))

    def _compression_context(self, prompt: Prompt) -> CompressionContext:
        """What a compressor may use: no measured costs where shapes must not depend on timing."""
        if prompt.static_shapes:
            return CompressionContext(prompt.max_new_tokens)
        batch = len(prompt.input_ids)
        return CompressionContext(
            prompt.max_new_tokens, self.cost_model.costs(batch), self.cost_model.exploration(batch)
        )

    def _forward_pending(self, state: EagleState) -> None:
        """Run the head over the tokens emitted since the last draft."""
        if not state.pending:
            return
        pending, state.pending = Pending.concatenate(state.pending), []
        tokens, counts = pending.tokens, pending.counts
        embeds = state.shared_embeddings.embed_tokens(tokens).to(pending.hidden_states.dtype)
        inputs = self.fuse(state, embeds, pending.hidden_states)
        first = torch.tensor(state.next_positions, device=tokens.device)[:, None]
        self._forward(state, inputs, first + torch.arange(tokens.shape[1], device=tokens.device), counts)
        state.next_positions = [position + n for position, n in zip(state.next_positions, counts, strict=True)]

    def _forward(self, state: EagleState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Run the head and append to its cache.

        Args:
            state: of the call.
            inputs: [B, n, D] padded on the right.
            position_ids: [B, n].
            counts: number of valid inputs of each row.
        """
        kv_cache, n, device = state.kv_cache, inputs.shape[1], inputs.device
        kv_cache.begin_forward(n)
        cos, sin = self.rotary_embedding(state, position_ids)
        if not any(kv_cache.seq_lens):  # a prompt, of which only the last output is used
            last = torch.tensor([max(0, count - 1) for count in counts], device=device)[:, None]
            mask = None if min(counts) == n else (torch.arange(n, device=device) <= last)[:, None, None]
            outputs = self.head(inputs, cos, sin, cached_attention(kv_cache, mask), last)
            state.last_hidden = select_last(outputs, [min(count, 1) for count in counts], state.last_hidden)
        else:
            mask = None
            if n > 1 or not kv_cache.is_uniform:
                ends = torch.tensor(kv_cache.seq_lens, device=device)[:, None] + torch.arange(n, device=device)
                mask = (torch.arange(kv_cache.kv_len, device=device) <= ends[..., None])[:, None]
            outputs = self.head(inputs, cos, sin, cached_attention(kv_cache, mask))
            state.last_hidden = select_last(outputs, counts, state.last_hidden)
        kv_cache.seq_lens = [length + count for length, count in zip(kv_cache.seq_lens, counts, strict=True)]

    def rotary_embedding(self, state: EagleState, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, 1, n, d], of position ids [B, n], from a table that grows by half its size."""
        size = max(state.next_positions) + position_ids.shape[1] + self.max_lookahead + 1
        if state.cos is None or state.cos.shape[0] < size:
            table = torch.arange(max(512, size + size // 2), device=position_ids.device)
            state.cos, state.sin = self.head.rotary_embedding(table, state.last_hidden.dtype)
        assert state.sin is not None
        return state.cos[position_ids][:, None], state.sin[position_ids][:, None]

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Expand level by level, then re-rank the nodes of all levels (EAGLE-2, section 4)."""
        return expand_levels(self, state, max_nodes, depth)

    def num_followed(self, device: torch.device) -> int:
        """Nodes of a level that are expanded further on this device."""
        return self.beam_width or DEFAULT_BEAM.get(device.type, 8)

    def expander(self, state: EagleState, beam_width: int) -> LevelExpander:
        """The `LevelExpander` of one draft."""
        return AutoregressiveExpander(self, state, beam_width)

    def log_noise(self, state: EagleState, depth: int) -> Tensor | None:
        """[B, depth, V'] log of the noise with which the next tokens will be sampled; None for greedy decoding."""
        if state.noise is None:
            return None
        noise = state.noise(depth).to(state.last_hidden.device)
        return (noise if state.draft_ids is None else noise[..., state.draft_ids]).log()

    def logits(self, state: EagleState, hidden_states: Tensor) -> Tensor:
        """[..., V'] float32 logits of the next token, -inf for ids that must not be drafted."""
        logits = self.head.logits(hidden_states, state.shared_embeddings, state.draft_lm_head)
        return logits.float() + state.logit_bias

    def log_probs(self, state: EagleState, logits: Tensor, noise: Tensor | None) -> Tensor:
        """[..., V'] log probability of each next token: of the argmax, or of the sample under the given noise."""
        if noise is None:
            return logits.log_softmax(-1)
        return ((logits / state.temperature).log_softmax(-1) - noise).log_softmax(-1)

    def embed(self, state: EagleState, tokens: Tensor) -> Tensor:
        """[..., D] embeddings of tokens of the draft vocabulary."""
        ids = tokens if state.draft_ids is None else state.draft_ids[tokens]
        embeds: Tensor = state.shared_embeddings.embed_tokens(ids)
        return embeds


__all__ = ["DEFAULT_BEAM", "EagleDrafter"]
