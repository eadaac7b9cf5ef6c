"""EAGLE-2 (arXiv 2406.16858) for vision-language models: a trained head drafts a tree, level by level.

Batched, on the device, scored in float32, without a look at a value on the host. With the rule "decoupled" this is MSD
(arXiv 2505.14260). Rows that were emitted are read again with the target's true states; the rows of a tree are
forgotten. Knows neither the decode loop nor transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.control.depth import DepthController
from mmspec.control.draft_cost import CallTimer, DraftCostModel
from mmspec.drafters.block.block_tree import LEVEL_PENALTY, select_nodes
from mmspec.drafters.eagle.head import AttentionFn, EagleHead
from mmspec.drafters.eagle.visual_inputs import VISUAL_MODES, DraftInputs, left_pack, prompt_grids, compressed_inputs
from mmspec.engine.gather import scatter_rows
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import BUCKETS, DraftTree, root_only
from mmspec.interfaces import (
    CompressionContext,
    Compressor,
    DrafterRequirements,
    Prompt,
    SharedEmbeddings,
    VerifyResult,
)

DEFAULT_BEAM = {"cpu": 4}
"""Nodes of a level that are followed further, where nobody says how many; elsewhere 8."""


@dataclass
class EagleState:
    """One call.

    Attributes:
        words: the target's embedding and head. shut: [V'] float32, -inf for ids that must not be drafted.
        places: position of each row's next input. last: [B, D] the head's output at each row's last input.
        waiting: what was emitted since the head last read: (following [B, A] ids, states [B, A, D], counts).
        fixed: draft all levels, whatever they bring.
        levels, drafting_s, since: of the last draft, how many levels it had, how long it took, when it began.
        prompt: until it was read. first: [B] the first tokens, once known. noise, temperature: as in `Prompt`.
        cos, sin: tables of angles.
        ids: [V'] the ids that may be drafted, if these are not all. trimmed: [V', D] the head's rows for them.
        more: [B, ...] whatever else a kind of head keeps of a call.
        meter: measures what reading and drafting cost, where a compressor may ask.
    """

    shared_embeddings: SharedEmbeddings
    kv_cache: RaggedKVCache
    logit_bias: Tensor
    prompt: Prompt | None
    next_positions: list[int]
    last_hidden: Tensor
    pending: list[tuple[Tensor, Tensor, list[int]]] = field(default_factory=list)
    noise: Callable[[int], Tensor] | None = None
    temperature: float = 1.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    static_shapes: bool = False
    first_ids: Tensor | None = None
    depth: int = 0
    draft_s: float = 0.0
    start_time: float = 0.0
    draft_ids: Tensor | None = None
    draft_lm_head: Tensor | None = None
    extra: Tensor | None = None
    timer: CallTimer = field(default_factory=CallTimer)


class EagleDrafter:
    """Drafts with an `EagleHead`."""

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
            rule: how visual tokens are read, of `drafters.rules.RULES`. layers: of the target.
            depth: levels of a tree at most; fewer are drafted where that pays better.
            width: nodes of a level that are followed further. None: 8, and 4 on a CPU, where each of them costs.
            draft_ids: [V'] int64, the ids that may be drafted (VocabTrim, or EAGLE-3's own vocabulary); None for all.
            known: ids from here on are never drafted; None if all are known.
        """
        if visual_mode not in VISUAL_MODES:
            raise ValueError(f"rule must be one of {', '.join(VISUAL_MODES)}; got {visual_mode!r}")
        if max_depth < 1:
            raise ValueError(f"depth must be at least 1; got {max_depth}")
        if beam_width is not None and beam_width < 1:
            raise ValueError(f"width must be at least 1, or None for what suits the device; got {beam_width}")
        self.head, self.visual_mode, self.name, self.beam_width = head.eval(), visual_mode, name, beam_width
        self.depth_controller, self.max_lookahead, self.cost_model = (
            DepthController(max_depth),
            max_depth,
            DraftCostModel(),
        )
        self.draft_ids, self.vocab_limit = draft_ids, vocab_limit
        self.bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None
        self.compressor: Compressor | None = None
        self.set_hidden_state_indices(head.hidden_state_indices(num_layers), num_layers)
        self.vocab_size: int | None = head.config.vocab_size

    def set_hidden_state_indices(self, indices: tuple[int, ...], num_layers: int) -> None:
        """Read these states of the target, in this order."""
        if not indices or min(indices) < 0 or max(indices) > num_layers:
            raise ValueError(
                f"this head reads states {indices}; a target of {num_layers} layers has 0 to {num_layers}."
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

    # --- a call -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, prompt: Prompt) -> EagleState:
        """Keep the prompt; it is read before the first draft, which may never be asked for."""
        if prompt.shared_embeddings is None:
            raise ValueError(f"drafter {self.name!r} needs the target's embedding and head (Prompt.words).")
        states = prompt.hidden_states[self.hidden_state_indices[-1]]
        weight = self.head.fc.weight
        if weight.device != states.device or weight.dtype != states.dtype:  # the target was moved, or is not float32
            self.head.to(states.device, states.dtype)
        batch, hidden = states.shape[0], self.head.config.hidden_size
        shut = states.new_zeros(prompt.vocab_size, dtype=torch.float32)
        shut[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        shut[self.vocab_limit or prompt.vocab_size :] = float("-inf")
        return EagleState(
            shared_embeddings=prompt.shared_embeddings,
            kv_cache=RaggedKVCache(batch, max_length=1 << 30),
            logit_bias=shut,
            prompt=prompt,
            next_positions=[0] * batch,
            last_hidden=states.new_zeros(batch, hidden),
            noise=prompt.noise,
            temperature=prompt.temperature,
            static_shapes=prompt.static_shapes,
        )

    @torch.inference_mode()
    def observe(self, state: EagleState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Note what was emitted, and the states it came from. It is read before the next draft."""
        if state.first_ids is None:
            state.first_ids = result.tokens[:, 0].to(state.last_hidden.device)
            return
        counts = [len(row) for row in result.emitted_ids]
        longest = max(counts)
        if not longest:
            return
        state.timer.drain()
        if state.depth and result.tree.num_nodes > 1:
            kept = [count - 1 for count in counts if count]
            spent, passes = time.perf_counter() - state.start_time, state.depth - 1
            pass_s = state.draft_s / passes if passes else 0.0
            reached = -(
                -(result.tree.num_nodes - 1) // self.depth_controller.steps_per_level
            )  # levels of the scored tree
            self.depth_controller.record(len(counts), min(state.depth, reached), kept, pass_s, spent - passes * pass_s)
            state.timer.record_round(spent, 1 + sum(kept) / len(kept))
        state.depth = 0
        path = result.path[:, :longest].to(state.last_hidden.device)
        states = self._select_hidden_states(hidden_states)
        walked = states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))
        state.pending.append((result.tokens[:, :longest].to(path.device), walked, counts))

    @torch.inference_mode()
    def propose(self, state: EagleState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The likeliest nodes of a tree of up to `depth` levels, `width` nodes of each followed."""
        max_nodes = min(max_nodes, BUCKETS[-1])
        if max_nodes < 2 or not any(active):
            return root_only(len(active), state.last_hidden.device)
        state.start_time = time.perf_counter()
        self.sync(state)
        drafts = time.perf_counter()
        state.depth = (
            self.depth_controller.max_levels if state.static_shapes else self.depth_controller.choose(len(active))
        )
        began = state.timer.now()
        tree = self._draft_tree(state, max_nodes, state.depth)
        state.timer.record_draft(began, max(state.kv_cache.seq_lens), state.depth)
        state.draft_s = time.perf_counter() - drafts
        if not all(active):
            tree.valid &= torch.tensor(active, device=tree.valid.device)[:, None]
        return tree

    def fuse(self, state: EagleState, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Input rows of text in a call."""
        return self.head.fuse(inputs_embeds, hidden_states)

    def prompt_inputs(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """Input rows of a prompt, and which of them are kept (None: all)."""
        return VISUAL_MODES[self.visual_mode](self.head, inputs)

    def _select_hidden_states(self, hidden_states: Mapping[int, Tensor]) -> Tensor:
        """[B, n, S] the states that the head reads, side by side."""
        return (
            hidden_states[self.hidden_state_indices[0]]
            if len(self.hidden_state_indices) == 1
            else torch.cat([hidden_states[tap] for tap in self.hidden_state_indices], dim=-1)
        )

    # --- reading ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sync(self, state: EagleState) -> None:
        """Read the prompt, and what was emitted since the last draft, as far as that was not done."""
        if state.prompt is not None:
            assert state.first_ids is not None
            if self.draft_ids is not None:
                state.draft_ids = self.draft_ids.to(state.logit_bias.device)
                state.logit_bias, state.draft_lm_head = (
                    state.logit_bias[state.draft_ids],
                    self.head.draft_lm_head(state.shared_embeddings, state.draft_ids),
                )
            self._prefill(state, state.prompt, state.first_ids)
            state.prompt = None
        self._forward_pending(state)

    def _prefill(self, state: EagleState, prompt: Prompt, first: Tensor) -> None:
        """Run the head over the prompt, whose last position is followed by `first` [B]."""
        embedded, states = prompt.hidden_states[0], self._select_hidden_states(prompt.hidden_states)
        n = states.shape[1]  # of a conversation that goes on, only what is new
        words, real, visual = state.shared_embeddings, prompt.attention_mask[:, -n:], prompt.visual_mask[:, -n:]
        attended = None if prompt.visual_saliency is None else prompt.visual_saliency[:, -n:]
        counts, after = real.sum(1), words.embed_tokens(first)[:, None].to(embedded.dtype)
        if bool(real.all()):  # once per prompt, so that all of it need not be moved
            following = torch.cat((embedded[:, 1:], after), dim=1)
        else:
            _, embedded, states, visual = left_pack(real, embedded, states, visual)
            following = scatter_rows(embedded.roll(-1, 1), (counts - 1)[:, None], after)
            attended = None if attended is None else left_pack(real, attended)[1]
        index = torch.arange(n, device=states.device)
        final = index == (counts - 1)[:, None]
        sight = DraftInputs(
            next_embeds=following,
            hidden_states=states,
            visual_mask=visual.roll(-1, 1) & ~final,
            placeholder_embed=self._placeholder_embedding(prompt, words, embedded),
        )
        inside = index < counts[:, None]
        positions, kept = index.expand(inside.shape), counts
        compressor = prompt.compressor or self.compressor
        if isinstance(compressor, nn.Module):  # made where its file was read
            compressor.to(states.device)
        if compressor is None:
            rows, keep = self.prompt_inputs(state, sight)
        else:
            query = states.gather(1, (counts - 1)[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
            segments = prompt_grids(prompt, n)
            state.timer = CallTimer(self.cost_model, len(counts), states.device)
            outlook = self._compression_context(prompt)
            attended = None if attended is None else attended.roll(-1, 1)
            given = (
                self.head,
                self.visual_mode,
                sight,
                inside,
                positions,
                compressor,
                query,
                segments,
                outlook,
                attended,
            )
            rows, keep, positions = compressed_inputs(*given)
            inside = torch.ones_like(keep)
        if keep is not None:
            kept, rows, positions = left_pack(inside & keep, rows, positions)
        counts_, kept_ = torch.stack((counts, kept)).tolist()
        rows, positions = rows[:, : max(kept_)], positions[:, : max(kept_)]
        began = state.timer.now()
        state.next_positions = counts_  # before they are read: few rows may stand far apart
        self._forward(state, rows, positions, kept_)
        state.timer.record_prefill(began, max(kept_))

    def _compression_context(self, prompt: Prompt) -> CompressionContext:
        """What a compressor may know of a call."""
        if prompt.static_shapes:
            return CompressionContext(prompt.max_new_tokens)
        batch = len(prompt.input_ids)
        return CompressionContext(
            prompt.max_new_tokens, self.cost_model.costs(batch), self.cost_model.exploration(batch)
        )

    def _placeholder_embedding(self, prompt: Prompt, words: SharedEmbeddings, like: Tensor) -> Tensor:
        ids = prompt.input_ids[prompt.visual_mask][:1] if self.visual_mode == "blind" else prompt.input_ids.new_zeros(0)
        return words.embed_tokens(ids)[0].to(like.dtype) if len(ids) else like.new_zeros(like.shape[-1])

    def _forward_pending(self, state: EagleState) -> None:
        """Read what was emitted since the last draft."""
        if not state.pending:
            return
        waiting, state.pending = state.pending, []
        tokens, states = (torch.cat([part[i] for part in waiting], dim=1) for i in (0, 1))  # type: ignore[misc]
        if len(waiting) == 1:
            counts = waiting[0][2]
        else:
            where = [list[int]() for _ in state.next_positions]
            before = 0
            for part, _, sizes in waiting:
                for row, size in zip(where, sizes, strict=True):
                    row.extend(range(before, before + size))
                before += part.shape[1]
            counts = [len(row) for row in where]
            longest = max(counts)
            index = torch.tensor([row + [0] * (longest - len(row)) for row in where], device=tokens.device)
            tokens = tokens.gather(1, index)
            states = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
        rows = self.fuse(state, state.shared_embeddings.embed_tokens(tokens).to(states.dtype), states)
        start = torch.tensor(state.next_positions, device=tokens.device)[:, None]
        self._forward(state, rows, start + torch.arange(tokens.shape[1], device=tokens.device), counts)
        state.next_positions = [place + count for place, count in zip(state.next_positions, counts, strict=True)]

    def _forward(self, state: EagleState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Run the head over [B, n, D] rows, of which each row of the batch has `counts`, and keep them."""
        buffer, n = state.kv_cache, inputs.shape[1]
        buffer.begin_forward(n)
        cos, sin = self.rotary_embedding(state, position_ids)
        if not any(buffer.seq_lens):  # a prompt: only what its last row says is ever used
            last = torch.tensor([max(0, count - 1) for count in counts], device=inputs.device)[:, None]
            mask = None if min(counts) == n else (torch.arange(n, device=inputs.device) <= last)[:, None, None]
            out = self.head(inputs, cos, sin, cached_attention(buffer, mask), last)
            state.last_hidden = select_last(out, [min(count, 1) for count in counts], state.last_hidden)
        else:
            mask = None
            if n > 1 or not buffer.is_uniform:
                ends = torch.tensor(buffer.seq_lens, device=inputs.device)[:, None] + torch.arange(
                    n, device=inputs.device
                )
                mask = (torch.arange(buffer.kv_len, device=inputs.device) <= ends[..., None])[:, None]
            state.last_hidden = select_last(
                self.head(inputs, cos, sin, cached_attention(buffer, mask)), counts, state.last_hidden
            )
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]

    def rotary_embedding(self, state: EagleState, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, 1, n, d] of positions [B, n], from a table that grows by a half."""
        need = max(state.next_positions) + position_ids.shape[1] + self.max_lookahead + 1
        if state.cos is None or state.cos.shape[0] < need:
            table = torch.arange(max(512, need + need // 2), device=position_ids.device)
            state.cos, state.sin = self.head.rotary_embedding(table, state.last_hidden.dtype)
        assert state.sin is not None
        return state.cos[position_ids][:, None], state.sin[position_ids][:, None]

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Expand level by level, then keep the best nodes of all levels (EAGLE-2, section 4)."""
        batch, device = len(state.last_hidden), state.last_hidden.device
        width, noise = min(self._num_followed(device), state.logit_bias.shape[0]), self._log_noise(state, depth)
        descent = self._expander(state, width)

        first = self._log_probs(state, descent.logits(0, descent.start), None if noise is None else noise[:, :1])
        reached, tokens = (part[:, 0] for part in first.topk(width))
        reached = reached - LEVEL_PENALTY
        pool = [(tokens, reached, torch.full_like(tokens, -1))]
        beam = torch.arange(width, device=device).expand(batch, width)  # where the followed nodes stand in the pool
        feature, made = descent.start.expand(batch, width, -1), width
        for level in range(1, depth):
            out = descent.step(level, self._embed(state, tokens).to(feature.dtype), feature)
            ahead = None if noise is None else noise[:, level : level + 1]
            chances, offered = self._log_probs(state, descent.logits(level, out), ahead).topk(width)
            totals, offered = (reached[..., None] + chances).flatten(1) - LEVEL_PENALTY, offered.flatten(1)
            pool.append((offered, totals, beam.repeat_interleave(width, dim=1)))
            if level < depth - 1:
                reached, chosen = totals.topk(width)
                tokens, source = offered.gather(1, chosen), (chosen // width)[..., None]
                beam, made = made + chosen, made + width * width
                feature = out.gather(1, source.expand(-1, -1, out.shape[-1]))
                descent.reorder(source)
        descent.close()
        return select_nodes(
            state.draft_ids, *(torch.cat(parts, dim=1) for parts in zip(*pool, strict=True)), num_nodes=max_nodes
        )

    def _num_followed(self, device: torch.device) -> int:
        return self.beam_width or DEFAULT_BEAM.get(device.type, 8)

    def _expander(self, state: EagleState, beam_width: int) -> LevelExpander:
        """What leads from a level of the tree to the next."""
        return AutoregressiveExpander(self, state, beam_width)

    def _log_noise(self, state: EagleState, depth: int) -> Tensor | None:
        """[B, depth, V'] log of the noise with which the next tokens will be sampled, None when they will not be."""
        if state.noise is None:
            return None
        noise = state.noise(depth).to(state.last_hidden.device)
        return (noise if state.draft_ids is None else noise[..., state.draft_ids]).log()

    def logits(self, state: EagleState, hidden_states: Tensor) -> Tensor:
        """[..., V'] logits of what follows, -inf for what is never drafted."""
        return self.head.logits(hidden_states, state.shared_embeddings, state.draft_lm_head).float() + state.logit_bias

    def _log_probs(self, state: EagleState, logits: Tensor, noise: Tensor | None) -> Tensor:
        """[..., V'] log probability that a node is followed by each id: by argmax, or by what the noise will pick."""
        if noise is None:
            return logits.log_softmax(-1)
        return ((logits / state.temperature).log_softmax(-1) - noise).log_softmax(-1)

    def _embed(self, state: EagleState, tokens: Tensor) -> Tensor:
        embedded: Tensor = state.shared_embeddings.embed_tokens(
            tokens if state.draft_ids is None else state.draft_ids[tokens]
        )
        return embedded


class LevelExpander(Protocol):
    """From a level of a tree to the next, W nodes of each.

    Attributes:
        start: [B, 1, D] what is said behind the text.
    """

    start: Tensor

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """[B, W, D'] outputs at the nodes of a level, of their tokens' embeddings and their parents' outputs."""

    def logits(self, level: int, out: Tensor) -> Tensor:
        """[B, W, V'] logits of what follows them."""

    def reorder(self, parent_index: Tensor) -> None:
        """Go on from the children of these nodes, [B, W, 1]."""

    def close(self) -> None:
        """Leave everything as it was."""


class AutoregressiveExpander:
    """A pass of the head for every level; a node sees the text and its own ancestors."""

    def __init__(self, drafter: EagleDrafter, state: EagleState, beam_width: int, rows_per_node: int = 1) -> None:
        """
        Args:
            each: rows that every node stands for, all of which see each other.
        """
        buffer, batch, device = state.kv_cache, state.last_hidden.shape[0], state.last_hidden.device
        self.drafter, self.state, self.rows_per_node, self.start = (
            drafter,
            state,
            rows_per_node,
            state.last_hidden[:, None],
        )
        # Every row's tree begins behind the longest row, so that one slice takes it; what lies between is masked.
        self.seq_lens, buffer.seq_lens = buffer.seq_lens, [max(buffer.seq_lens)] * batch
        seen = torch.arange(max(self.seq_lens), device=device) < torch.tensor(self.seq_lens, device=device)[:, None]
        self.context_mask = seen[:, None].expand(batch, beam_width, -1)
        # A level's rows stand at the same places: `each` of them, one behind the other.
        places = torch.tensor(state.next_positions, device=device)[:, None] + torch.arange(
            drafter.max_lookahead, device=device
        )
        self.cos, self.sin = drafter.rotary_embedding(state, places)
        own = torch.eye(beam_width, dtype=torch.bool, device=device).repeat_interleave(rows_per_node, 1)
        self.self_mask = own.expand(batch, beam_width, beam_width * rows_per_node)
        self.ancestor_mask = self.self_mask[..., :0]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W * each, D] if nodes are several rows."""
        drafter, state, buffer = self.drafter, self.state, self.state.kv_cache
        self.ancestor_mask = torch.cat((self.ancestor_mask, self.self_mask), dim=-1)
        rows = drafter.fuse(state, embedded, feature)
        here = slice((level - 1) * self.rows_per_node, level * self.rows_per_node)
        cos, sin = self.cos[:, :, here], self.sin[:, :, here]
        mask = torch.cat((self.context_mask, self.ancestor_mask), dim=-1)
        if self.rows_per_node > 1:
            cos, sin = (part.repeat(1, 1, rows.shape[1] // self.rows_per_node, 1) for part in (cos, sin))
            mask = mask.repeat_interleave(self.rows_per_node, 1)
        buffer.begin_forward(rows.shape[1])
        out: Tensor = drafter.head(rows, cos, sin, cached_attention(buffer, mask[:, None]))
        buffer.advance(rows.shape[1])
        return out

    def logits(self, level: int, out: Tensor) -> Tensor:
        """See `LevelExpander`."""
        return self.drafter.logits(self.state, out)

    def reorder(self, parent_index: Tensor) -> None:
        """See `LevelExpander`."""
        self.ancestor_mask = self.ancestor_mask.gather(1, parent_index.expand(-1, -1, self.ancestor_mask.shape[-1]))

    def close(self) -> None:
        """See `LevelExpander`."""
        self.state.kv_cache.seq_lens = self.seq_lens


def select_last(out: Tensor, counts: Sequence[int], before: Tensor) -> Tensor:
    """[B, D], of each row of [B, n, D] the last one counted, or what there was before."""
    if min(counts) == max(counts):
        return out[:, counts[0] - 1]
    place = torch.tensor([max(0, count - 1) for count in counts], device=out.device)
    last = out.gather(1, place[:, None, None].expand(-1, 1, out.shape[-1]))[:, 0]
    return torch.where(torch.tensor([count > 0 for count in counts], device=out.device)[:, None], last, before)


def cached_attention(kv_cache: RaggedKVCache, mask: Tensor | None) -> AttentionFn:
    """Attention to what the buffer holds and the rows that it is given. mask: [B, 1, n, keys] bool, or None."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared = queries.shape[1] != keys.shape[1]
        keys, values = kv_cache.write(0, keys, values)
        return functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=shared)

    return attend


__all__ = ["Descent", "EagleDrafter", "Layered", "EagleState", "cached_attention", "last_of"]
