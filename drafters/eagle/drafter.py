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
from mmspec.drafters.block.block_tree import STEP, best
from mmspec.drafters.eagle.head import Attend, EagleHead
from mmspec.drafters.eagle.visual_inputs import RULES, Sight, pack, segments_of, shrunk
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

WIDTHS = {"cpu": 4}
"""Nodes of a level that are followed further, where nobody says how many; elsewhere 8."""


@dataclass
class State:
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

    words: SharedEmbeddings
    buffer: RaggedKVCache
    shut: Tensor
    prompt: Prompt | None
    places: list[int]
    last: Tensor
    waiting: list[tuple[Tensor, Tensor, list[int]]] = field(default_factory=list)
    noise: Callable[[int], Tensor] | None = None
    temperature: float = 1.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    fixed: bool = False
    first: Tensor | None = None
    levels: int = 0
    drafting_s: float = 0.0
    since: float = 0.0
    ids: Tensor | None = None
    trimmed: Tensor | None = None
    more: Tensor | None = None
    meter: CallTimer = field(default_factory=CallTimer)


class EagleDrafter:
    """Drafts with an `EagleHead`."""

    def __init__(
        self,
        head: EagleHead,
        rule: str = "decoupled",
        *,
        layers: int,
        name: str = "eagle",
        depth: int = 6,
        width: int | None = None,
        draft_ids: Tensor | None = None,
        known: int | None = None,
    ) -> None:
        """
        Args:
            rule: how visual tokens are read, of `drafters.rules.RULES`. layers: of the target.
            depth: levels of a tree at most; fewer are drafted where that pays better.
            width: nodes of a level that are followed further. None: 8, and 4 on a CPU, where each of them costs.
            draft_ids: [V'] int64, the ids that may be drafted (VocabTrim, or EAGLE-3's own vocabulary); None for all.
            known: ids from here on are never drafted; None if all are known.
        """
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1; got {depth}")
        if width is not None and width < 1:
            raise ValueError(f"width must be at least 1, or None for what suits the device; got {width}")
        self.head, self.rule, self.name, self.width = head.eval(), rule, name, width
        self.depth, self.reach, self.pace = DepthController(depth), depth, DraftCostModel()
        self.draft_ids, self.known = draft_ids, known
        self.bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None
        self.compressor: Compressor | None = None
        self.tap(head.taps(layers), layers)
        self.vocab_size: int | None = head.config.vocab_size

    def tap(self, taps: tuple[int, ...], layers: int) -> None:
        """Read these states of the target, in this order."""
        if not taps or min(taps) < 0 or max(taps) > layers:
            raise ValueError(f"this head reads states {taps}; a target of {layers} layers has 0 to {layers}.")
        self.taps = taps
        self.requirements = DrafterRequirements(
            hidden_state_indices=tuple(dict.fromkeys((0, *taps))), max_tree_size=BUCKETS[-2]
        )

    # --- a call -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, prompt: Prompt) -> State:
        """Keep the prompt; it is read before the first draft, which may never be asked for."""
        if prompt.shared_embeddings is None:
            raise ValueError(f"drafter {self.name!r} needs the target's embedding and head (Prompt.words).")
        states = prompt.hidden_states[self.taps[-1]]
        weight = self.head.fc.weight
        if weight.device != states.device or weight.dtype != states.dtype:  # the target was moved, or is not float32
            self.head.to(states.device, states.dtype)
        batch, hidden = states.shape[0], self.head.config.hidden_size
        shut = states.new_zeros(prompt.vocab_size, dtype=torch.float32)
        shut[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = float("-inf")
        shut[self.known or prompt.vocab_size :] = float("-inf")
        return State(
            words=prompt.shared_embeddings,
            buffer=RaggedKVCache(batch, max_length=1 << 30),
            shut=shut,
            prompt=prompt,
            places=[0] * batch,
            last=states.new_zeros(batch, hidden),
            noise=prompt.noise,
            temperature=prompt.temperature,
            fixed=prompt.static_shapes,
        )

    @torch.inference_mode()
    def observe(self, state: State, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Note what was emitted, and the states it came from. It is read before the next draft."""
        if state.first is None:
            state.first = result.tokens[:, 0].to(state.last.device)
            return
        counts = [len(row) for row in result.emitted_ids]
        longest = max(counts)
        if not longest:
            return
        state.meter.drain()
        if state.levels and result.tree.num_nodes > 1:
            kept = [count - 1 for count in counts if count]
            spent, passes = time.perf_counter() - state.since, state.levels - 1
            pass_s = state.drafting_s / passes if passes else 0.0
            reached = -(-(result.tree.num_nodes - 1) // self.depth.steps_per_level)  # levels of the scored tree
            self.depth.record(len(counts), min(state.levels, reached), kept, pass_s, spent - passes * pass_s)
            state.meter.record_round(spent, 1 + sum(kept) / len(kept))
        state.levels = 0
        path = result.path[:, :longest].to(state.last.device)
        states = self._states(hidden_states)
        walked = states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))
        state.waiting.append((result.tokens[:, :longest].to(path.device), walked, counts))

    @torch.inference_mode()
    def propose(self, state: State, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The likeliest nodes of a tree of up to `depth` levels, `width` nodes of each followed."""
        max_nodes = min(max_nodes, BUCKETS[-1])
        if max_nodes < 2 or not any(active):
            return root_only(len(active), state.last.device)
        state.since = time.perf_counter()
        self.read(state)
        drafts = time.perf_counter()
        state.levels = self.depth.max_levels if state.fixed else self.depth.choose(len(active))
        began = state.meter.now()
        tree = self._tree(state, max_nodes, state.levels)
        state.meter.record_draft(began, max(state.buffer.seq_lens), state.levels)
        state.drafting_s = time.perf_counter() - drafts
        if not all(active):
            tree.valid &= torch.tensor(active, device=tree.valid.device)[:, None]
        return tree

    def fuse(self, state: State, embeddings: Tensor, states: Tensor) -> Tensor:
        """Input rows of text in a call."""
        return self.head.fuse(embeddings, states)

    def rows(self, state: State, sight: Sight) -> tuple[Tensor, Tensor | None]:
        """Input rows of a prompt, and which of them are kept (None: all)."""
        return RULES[self.rule](self.head, sight)

    def _states(self, taps: Mapping[int, Tensor]) -> Tensor:
        """[B, n, S] the states that the head reads, side by side."""
        return taps[self.taps[0]] if len(self.taps) == 1 else torch.cat([taps[tap] for tap in self.taps], dim=-1)

    # --- reading ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read(self, state: State) -> None:
        """Read the prompt, and what was emitted since the last draft, as far as that was not done."""
        if state.prompt is not None:
            assert state.first is not None
            if self.draft_ids is not None:
                state.ids = self.draft_ids.to(state.shut.device)
                state.shut, state.trimmed = state.shut[state.ids], self.head.trimmed(state.words, state.ids)
            self._read_prompt(state, state.prompt, state.first)
            state.prompt = None
        self._catch_up(state)

    def _read_prompt(self, state: State, prompt: Prompt, first: Tensor) -> None:
        """Run the head over the prompt, whose last position is followed by `first` [B]."""
        embedded, states = prompt.hidden_states[0], self._states(prompt.hidden_states)
        n = states.shape[1]  # of a conversation that goes on, only what is new
        words, real, visual = state.words, prompt.attention_mask[:, -n:], prompt.visual_mask[:, -n:]
        attended = None if prompt.visual_saliency is None else prompt.visual_saliency[:, -n:]
        counts, after = real.sum(1), words.embed_tokens(first)[:, None].to(embedded.dtype)
        if bool(real.all()):  # once per prompt, so that all of it need not be moved
            following = torch.cat((embedded[:, 1:], after), dim=1)
        else:
            _, embedded, states, visual = pack(real, embedded, states, visual)
            following = scatter_rows(embedded.roll(-1, 1), (counts - 1)[:, None], after)
            attended = None if attended is None else pack(real, attended)[1]
        index = torch.arange(n, device=states.device)
        final = index == (counts - 1)[:, None]
        sight = Sight(
            following=following,
            states=states,
            visual=visual.roll(-1, 1) & ~final,
            placeholder=self._placeholder(prompt, words, embedded),
        )
        inside = index < counts[:, None]
        positions, kept = index.expand(inside.shape), counts
        compressor = prompt.compressor or self.compressor
        if isinstance(compressor, nn.Module):  # made where its file was read
            compressor.to(states.device)
        if compressor is None:
            rows, keep = self.rows(state, sight)
        else:
            query = states.gather(1, (counts - 1)[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
            segments = segments_of(prompt, n)
            state.meter = CallTimer(self.pace, len(counts), states.device)
            outlook = self._outlook(prompt)
            attended = None if attended is None else attended.roll(-1, 1)
            given = self.head, self.rule, sight, inside, positions, compressor, query, segments, outlook, attended
            rows, keep, positions = shrunk(*given)
            inside = torch.ones_like(keep)
        if keep is not None:
            kept, rows, positions = pack(inside & keep, rows, positions)
        counts_, kept_ = torch.stack((counts, kept)).tolist()
        rows, positions = rows[:, : max(kept_)], positions[:, : max(kept_)]
        began = state.meter.now()
        state.places = counts_  # before they are read: few rows may stand far apart
        self._read(state, rows, positions, kept_)
        state.meter.record_prefill(began, max(kept_))

    def _outlook(self, prompt: Prompt) -> CompressionContext:
        """What a compressor may know of a call."""
        if prompt.static_shapes:
            return CompressionContext(prompt.max_new_tokens)
        batch = len(prompt.input_ids)
        return CompressionContext(prompt.max_new_tokens, self.pace.costs(batch), self.pace.exploration(batch))

    def _placeholder(self, prompt: Prompt, words: SharedEmbeddings, like: Tensor) -> Tensor:
        ids = prompt.input_ids[prompt.visual_mask][:1] if self.rule == "blind" else prompt.input_ids.new_zeros(0)
        return words.embed_tokens(ids)[0].to(like.dtype) if len(ids) else like.new_zeros(like.shape[-1])

    def _catch_up(self, state: State) -> None:
        """Read what was emitted since the last draft."""
        if not state.waiting:
            return
        waiting, state.waiting = state.waiting, []
        tokens, states = (torch.cat([part[i] for part in waiting], dim=1) for i in (0, 1))  # type: ignore[misc]
        if len(waiting) == 1:
            counts = waiting[0][2]
        else:
            where = [list[int]() for _ in state.places]
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
        rows = self.fuse(state, state.words.embed_tokens(tokens).to(states.dtype), states)
        start = torch.tensor(state.places, device=tokens.device)[:, None]
        self._read(state, rows, start + torch.arange(tokens.shape[1], device=tokens.device), counts)
        state.places = [place + count for place, count in zip(state.places, counts, strict=True)]

    def _read(self, state: State, rows: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Run the head over [B, n, D] rows, of which each row of the batch has `counts`, and keep them."""
        buffer, n = state.buffer, rows.shape[1]
        buffer.begin_forward(n)
        cos, sin = self._angles(state, positions)
        if not any(buffer.seq_lens):  # a prompt: only what its last row says is ever used
            last = torch.tensor([max(0, count - 1) for count in counts], device=rows.device)[:, None]
            mask = None if min(counts) == n else (torch.arange(n, device=rows.device) <= last)[:, None, None]
            out = self.head(rows, cos, sin, attention(buffer, mask), last)
            state.last = last_of(out, [min(count, 1) for count in counts], state.last)
        else:
            mask = None
            if n > 1 or not buffer.is_uniform:
                ends = torch.tensor(buffer.seq_lens, device=rows.device)[:, None] + torch.arange(n, device=rows.device)
                mask = (torch.arange(buffer.kv_len, device=rows.device) <= ends[..., None])[:, None]
            state.last = last_of(self.head(rows, cos, sin, attention(buffer, mask)), counts, state.last)
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]

    def _angles(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, 1, n, d] of positions [B, n], from a table that grows by a half."""
        need = max(state.places) + positions.shape[1] + self.reach + 1
        if state.cos is None or state.cos.shape[0] < need:
            table = torch.arange(max(512, need + need // 2), device=positions.device)
            state.cos, state.sin = self.head.angles(table, state.last.dtype)
        assert state.sin is not None
        return state.cos[positions][:, None], state.sin[positions][:, None]

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _tree(self, state: State, budget: int, depth: int) -> DraftTree:
        """Expand level by level, then keep the best nodes of all levels (EAGLE-2, section 4)."""
        batch, device = len(state.last), state.last.device
        width, noise = min(self._followed(device), state.shut.shape[0]), self._noise(state, depth)
        descent = self._descent(state, width)

        first = self._likely(state, descent.scores(0, descent.start), None if noise is None else noise[:, :1])
        reached, tokens = (part[:, 0] for part in first.topk(width))
        reached = reached - STEP
        pool = [(tokens, reached, torch.full_like(tokens, -1))]
        beam = torch.arange(width, device=device).expand(batch, width)  # where the followed nodes stand in the pool
        feature, made = descent.start.expand(batch, width, -1), width
        for level in range(1, depth):
            out = descent.step(level, self._embed(state, tokens).to(feature.dtype), feature)
            ahead = None if noise is None else noise[:, level : level + 1]
            chances, offered = self._likely(state, descent.scores(level, out), ahead).topk(width)
            totals, offered = (reached[..., None] + chances).flatten(1) - STEP, offered.flatten(1)
            pool.append((offered, totals, beam.repeat_interleave(width, dim=1)))
            if level < depth - 1:
                reached, chosen = totals.topk(width)
                tokens, source = offered.gather(1, chosen), (chosen // width)[..., None]
                beam, made = made + chosen, made + width * width
                feature = out.gather(1, source.expand(-1, -1, out.shape[-1]))
                descent.follow(source)
        descent.close()
        return best(state.ids, *(torch.cat(parts, dim=1) for parts in zip(*pool, strict=True)), nodes=budget)

    def _followed(self, device: torch.device) -> int:
        return self.width or WIDTHS.get(device.type, 8)

    def _descent(self, state: State, width: int) -> Descent:
        """What leads from a level of the tree to the next."""
        return Layered(self, state, width)

    def _noise(self, state: State, depth: int) -> Tensor | None:
        """[B, depth, V'] log of the noise with which the next tokens will be sampled, None when they will not be."""
        if state.noise is None:
            return None
        noise = state.noise(depth).to(state.last.device)
        return (noise if state.ids is None else noise[..., state.ids]).log()

    def scores(self, state: State, out: Tensor) -> Tensor:
        """[..., V'] logits of what follows, -inf for what is never drafted."""
        return self.head.logits(out, state.words, state.trimmed).float() + state.shut

    def _likely(self, state: State, scores: Tensor, noise: Tensor | None) -> Tensor:
        """[..., V'] log probability that a node is followed by each id: by argmax, or by what the noise will pick."""
        if noise is None:
            return scores.log_softmax(-1)
        return ((scores / state.temperature).log_softmax(-1) - noise).log_softmax(-1)

    def _embed(self, state: State, tokens: Tensor) -> Tensor:
        embedded: Tensor = state.words.embed_tokens(tokens if state.ids is None else state.ids[tokens])
        return embedded


class Descent(Protocol):
    """From a level of a tree to the next, W nodes of each.

    Attributes:
        start: [B, 1, D] what is said behind the text.
    """

    start: Tensor

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """[B, W, D'] outputs at the nodes of a level, of their tokens' embeddings and their parents' outputs."""

    def scores(self, level: int, out: Tensor) -> Tensor:
        """[B, W, V'] logits of what follows them."""

    def follow(self, source: Tensor) -> None:
        """Go on from the children of these nodes, [B, W, 1]."""

    def close(self) -> None:
        """Leave everything as it was."""


class Layered:
    """A pass of the head for every level; a node sees the text and its own ancestors."""

    def __init__(self, drafter: EagleDrafter, state: State, width: int, each: int = 1) -> None:
        """
        Args:
            each: rows that every node stands for, all of which see each other.
        """
        buffer, batch, device = state.buffer, state.last.shape[0], state.last.device
        self.drafter, self.state, self.each, self.start = drafter, state, each, state.last[:, None]
        # Every row's tree begins behind the longest row, so that one slice takes it; what lies between is masked.
        self.committed, buffer.seq_lens = buffer.seq_lens, [max(buffer.seq_lens)] * batch
        seen = torch.arange(max(self.committed), device=device) < torch.tensor(self.committed, device=device)[:, None]
        self.seen = seen[:, None].expand(batch, width, -1)
        # A level's rows stand at the same places: `each` of them, one behind the other.
        places = torch.tensor(state.places, device=device)[:, None] + torch.arange(drafter.reach, device=device)
        self.cos, self.sin = drafter._angles(state, places)
        own = torch.eye(width, dtype=torch.bool, device=device).repeat_interleave(each, 1)
        self.own = own.expand(batch, width, width * each)
        self.above = self.own[..., :0]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `Descent`; [B, W * each, D] if nodes are several rows."""
        drafter, state, buffer = self.drafter, self.state, self.state.buffer
        self.above = torch.cat((self.above, self.own), dim=-1)
        rows = drafter.fuse(state, embedded, feature)
        here = slice((level - 1) * self.each, level * self.each)
        cos, sin = self.cos[:, :, here], self.sin[:, :, here]
        mask = torch.cat((self.seen, self.above), dim=-1)
        if self.each > 1:
            cos, sin = (part.repeat(1, 1, rows.shape[1] // self.each, 1) for part in (cos, sin))
            mask = mask.repeat_interleave(self.each, 1)
        buffer.begin_forward(rows.shape[1])
        out: Tensor = drafter.head(rows, cos, sin, attention(buffer, mask[:, None]))
        buffer.advance(rows.shape[1])
        return out

    def scores(self, level: int, out: Tensor) -> Tensor:
        """See `Descent`."""
        return self.drafter.scores(self.state, out)

    def follow(self, source: Tensor) -> None:
        """See `Descent`."""
        self.above = self.above.gather(1, source.expand(-1, -1, self.above.shape[-1]))

    def close(self) -> None:
        """See `Descent`."""
        self.state.buffer.seq_lens = self.committed


def last_of(out: Tensor, counts: Sequence[int], before: Tensor) -> Tensor:
    """[B, D], of each row of [B, n, D] the last one counted, or what there was before."""
    if min(counts) == max(counts):
        return out[:, counts[0] - 1]
    place = torch.tensor([max(0, count - 1) for count in counts], device=out.device)
    last = out.gather(1, place[:, None, None].expand(-1, 1, out.shape[-1]))[:, 0]
    return torch.where(torch.tensor([count > 0 for count in counts], device=out.device)[:, None], last, before)


def attention(buffer: RaggedKVCache, mask: Tensor | None) -> Attend:
    """Attention to what the buffer holds and the rows that it is given. mask: [B, 1, n, keys] bool, or None."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared = queries.shape[1] != keys.shape[1]
        keys, values = buffer.write(0, keys, values)
        return functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=shared)

    return attend


__all__ = ["Descent", "EagleDrafter", "Layered", "State", "attention", "last_of"]
