"""Which rows a draft head reads: text as EAGLE does, visual tokens by one of several rules.

A row stands for a position of the sequence: it joins the state at that position with the embedding of what follows.
What differs is what happens where a visual token follows. Knows no tree, no cache, no target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.drafters.eagle.head import EagleHead
from mmspec.engine.gather import gather_rows, scatter_rows
from mmspec.interfaces import CompressionContext, Compressor, Prompt, VisualGrid, VisualTokens


@dataclass(frozen=True)
class Sight:
    """A batch of sequences as a head may see them, row by row.

    Attributes:
        following: [B, n, D] embedding of the token after each position, as the target was fed it (visual tokens
            projected). states: [B, n, D] the target's states after the final norm, or the head's own.
        visual: [B, n] bool, True where a visual token follows. placeholder: [D] embedding of the placeholder id.
    """

    following: Tensor
    states: Tensor
    visual: Tensor
    placeholder: Tensor


Rule = Callable[[EagleHead, Sight], tuple[Tensor, Tensor | None]]
"""(head, what it may see) -> [B, n, D] input rows of the layer, and [B, n] bool which of them are kept (None: all)."""


def decoupled(head: EagleHead, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """MSD: a visual token enters as its projected embedding alone, text as embedding and state (MSD, section 3)."""
    return _text_fused(head, sight), None


def coupled(head: EagleHead, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """EAGLE on a multimodal target: visual tokens are fused with states like text."""
    return head.fuse(sight.following, sight.states), None


def blind(head: EagleHead, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """EAGLE as it is for text: of a visual token it sees the placeholder's embedding, and the state before it."""
    following = torch.where(sight.visual[..., None], sight.placeholder, sight.following)
    return head.fuse(following, sight.states), None


def textual(head: EagleHead, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """No visual tokens at all: only rows that text follows; they keep their positions."""
    return _text_fused(head, sight), ~sight.visual


def _text_fused(head: EagleHead, sight: Sight) -> Tensor:
    """[B, n, D], fused where text follows, the bare embedding elsewhere: long clips cost what their text costs."""
    most = int((~sight.visual).sum(1).max())
    text = first(~sight.visual)[:, :most]  # rows with less of it bring others
    following = gather_rows(sight.following, text)
    fused = head.fuse(following, gather_rows(sight.states, text))
    fused = torch.where(sight.visual.gather(1, text)[..., None], following, fused)
    return scatter_rows(sight.following.to(fused.dtype), text, fused)


RULES: dict[str, Rule] = {"decoupled": decoupled, "coupled": coupled, "blind": blind, "textual": textual}


def pack(keep: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Move what is kept to the left of each row, in order.

    Args:
        keep: [B, n] bool. parts: [B, n, ...] each. Returns counts [B] int64, then the parts; past the counts they hold
        what was not kept.
    """
    order = first(keep)
    return keep.sum(1), *(gather_rows(part, order) for part in parts)


def first(keep: Tensor) -> Tensor:
    """[B, n] the places of what is kept [B, n], in order, then those of what is not."""
    return (~keep).long().argsort(dim=1, stable=True)


def shrunk(
    head: EagleHead,
    rule: str,
    sight: Sight,
    inside: Tensor,
    positions: Tensor,
    compressor: Compressor,
    query: Tensor | None,
    segments: tuple[VisualGrid, ...] = (),
    outlook: CompressionContext | None = None,
    attended: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a rule when a compressor shows fewer visual tokens.

    What is shown comes first, then the text; each keeps its position. A head of one layer sees no order but that.

    Args:
        inside: [B, n] bool, rows that are there. positions: [B, n]. query: [B, D] the prompt's last state, or None.
        outlook: what is known of the call, for compressors that weigh costs.
        attended: [B, n] how much the vision tower attends to what each row shows, or None.

    Returns:
        [B, m, D] rows, [B, m] bool which of them are kept, [B, m] their positions.
    """
    seen, words = sight.visual & inside, ~sight.visual & inside
    counts, text = seen.sum(1), words.sum(1)
    index = torch.arange(seen.shape[1], device=seen.device)
    ends = (seen[0].int().argmax(), (seen[0] * (index + 1)).amax())
    start, end, most, *sizes = torch.cat((torch.stack((*ends, text.max())), counts)).tolist()
    many, held = max(sizes), [0] * len(sizes)
    together = sizes == [end - start]
    mask, told = index[:many] < counts[:, None], index[:most] < text[:, None]
    look, say = first(seen)[:, :many], first(words)[:, :most]

    def visual_of(part: Tensor) -> Tensor:
        """One row's that stand together, as those of a clip do, are not copied."""
        return part[:, start:end] if together else gather_rows(part, look)

    following, before, where = (gather_rows(part, say) for part in (sight.following, sight.states, positions))
    for segment in segments:
        held[segment.row] += segment.num_tokens
    # A row whose first token is a visual one has one fewer than its grids, since no row stands before it.
    segments = tuple(one for one in segments if held[one.row] == sizes[one.row])
    visual = VisualTokens(
        inputs_embeds=visual_of(sight.following),
        hidden_states=visual_of(sight.states),
        mask=mask,
        position_ids=visual_of(positions),
        grids=segments,
        saliency=None if attended is None else visual_of(attended),
        context=outlook,
    )
    few = compressor.compress(visual, query, compressor.max_tokens)
    shown = Sight(few.inputs_embeds, few.hidden_states, torch.ones_like(few.mask), sight.placeholder)
    said = Sight(following, before, torch.zeros_like(told), sight.placeholder)
    parts = [RULES[rule](head, shown), RULES[rule](head, said)]
    keep = [few.mask, told]
    for place, (_, chosen) in enumerate(parts):
        keep[place] = keep[place] if chosen is None else keep[place] & chosen
    return (
        torch.cat([rows for rows, _ in parts], dim=1),
        torch.cat(keep, dim=1),
        torch.cat([few.position_ids, where], dim=1),
    )


def segments_of(prompt: Prompt, new: int) -> tuple[VisualGrid, ...]:
    """The grids of a prompt, with `start` counted in visual tokens of their row; empty if only a part is new."""
    if new != prompt.input_ids.shape[1]:
        return ()
    before: dict[int, int] = {}
    found = []
    for segment in sorted(prompt.grids, key=lambda one: (one.row, one.start)):
        start = before.get(segment.row, 0)
        before[segment.row] = start + segment.num_tokens
        found.append(replace(segment, start=start))
    return tuple(found)


__all__ = [
    "RULES",
    "Rule",
    "Sight",
    "blind",
    "coupled",
    "decoupled",
    "pack",
    "segments_of",
    "shrunk",
    "textual",
]
