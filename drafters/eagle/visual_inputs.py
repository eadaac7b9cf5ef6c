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
class DraftInputs:
    """A batch of sequences as a head may see them, row by row.

    Attributes:
        following: [B, n, D] embedding of the token after each position, as the target was fed it (visual tokens
            projected). states: [B, n, D] the target's states after the final norm, or the head's own.
        visual: [B, n] bool, True where a visual token follows. placeholder: [D] embedding of the placeholder id.
    """

    next_embeds: Tensor
    hidden_states: Tensor
    visual_mask: Tensor
    placeholder_embed: Tensor


VisualInputMode = Callable[[EagleHead, DraftInputs], tuple[Tensor, Tensor | None]]
"""(head, what it may see) -> [B, n, D] input rows of the layer, and [B, n] bool which of them are kept (None: all)."""


def decoupled(head: EagleHead, sight: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """MSD: a visual token enters as its projected embedding alone, text as embedding and state (MSD, section 3)."""
    return _text_fused(head, sight), None


def coupled(head: EagleHead, sight: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """EAGLE on a multimodal target: visual tokens are fused with states like text."""
    return head.fuse(sight.next_embeds, sight.hidden_states), None


def placeholder(head: EagleHead, sight: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """EAGLE as it is for text: of a visual token it sees the placeholder's embedding, and the state before it."""
    following = torch.where(sight.visual_mask[..., None], sight.placeholder_embed, sight.next_embeds)
    return head.fuse(following, sight.hidden_states), None


def text_only(head: EagleHead, sight: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """No visual tokens at all: only rows that text follows; they keep their positions."""
    return _text_fused(head, sight), ~sight.visual_mask


def _text_fused(head: EagleHead, sight: DraftInputs) -> Tensor:
    """[B, n, D], fused where text follows, the bare embedding elsewhere: long clips cost what their text costs."""
    most = int((~sight.visual_mask).sum(1).max())
    text = packed_indices(~sight.visual_mask)[:, :most]  # rows with less of it bring others
    following = gather_rows(sight.next_embeds, text)
    fused = head.fuse(following, gather_rows(sight.hidden_states, text))
    fused = torch.where(sight.visual_mask.gather(1, text)[..., None], following, fused)
    return scatter_rows(sight.next_embeds.to(fused.dtype), text, fused)


VISUAL_MODES: dict[str, VisualInputMode] = {
    "decoupled": decoupled,
    "coupled": coupled,
    "blind": placeholder,
    "textual": text_only,
}


def left_pack(keep: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Move what is kept to the left of each row, in order.

    Args:
        keep: [B, n] bool. parts: [B, n, ...] each. Returns counts [B] int64, then the parts; past the counts they hold
        what was not kept.
    """
    order = packed_indices(keep)
    return keep.sum(1), *(gather_rows(part, order) for part in parts)


def packed_indices(keep: Tensor) -> Tensor:
    """[B, n] the places of what is kept [B, n], in order, then those of what is not."""
    return (~keep).long().argsort(dim=1, stable=True)


def compressed_inputs(
    head: EagleHead,
    visual_mode: str,
    inputs: DraftInputs,
    attention_mask: Tensor,
    position_ids: Tensor,
    compressor: Compressor,
    query: Tensor | None,
    grids: tuple[VisualGrid, ...] = (),
    context: CompressionContext | None = None,
    saliency: Tensor | None = None,
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
    seen, words = inputs.visual_mask & attention_mask, ~inputs.visual_mask & attention_mask
    counts, text = seen.sum(1), words.sum(1)
    index = torch.arange(seen.shape[1], device=seen.device)
    ends = (seen[0].int().argmax(), (seen[0] * (index + 1)).amax())
    start, end, most, *sizes = torch.cat((torch.stack((*ends, text.max())), counts)).tolist()
    many, held = max(sizes), [0] * len(sizes)
    together = sizes == [end - start]
    mask, told = index[:many] < counts[:, None], index[:most] < text[:, None]
    look, say = packed_indices(seen)[:, :many], packed_indices(words)[:, :most]

    def visual_of(part: Tensor) -> Tensor:
        """One row's that stand together, as those of a clip do, are not copied."""
        return part[:, start:end] if together else gather_rows(part, look)

    following, before, where = (
        gather_rows(part, say) for part in (inputs.next_embeds, inputs.hidden_states, position_ids)
    )
    for segment in grids:
        held[segment.row] += segment.num_tokens
    # A row whose first token is a visual one has one fewer than its grids, since no row stands before it.
    grids = tuple(one for one in grids if held[one.row] == sizes[one.row])
    visual = VisualTokens(
        inputs_embeds=visual_of(inputs.next_embeds),
        hidden_states=visual_of(inputs.hidden_states),
        mask=mask,
        position_ids=visual_of(position_ids),
        grids=grids,
        saliency=None if saliency is None else visual_of(saliency),
        context=context,
    )
    few = compressor.compress(visual, query, compressor.max_tokens)
    shown = DraftInputs(few.inputs_embeds, few.hidden_states, torch.ones_like(few.mask), inputs.placeholder_embed)
    said = DraftInputs(following, before, torch.zeros_like(told), inputs.placeholder_embed)
    parts = [VISUAL_MODES[visual_mode](head, shown), VISUAL_MODES[visual_mode](head, said)]
    keep = [few.mask, told]
    for place, (_, chosen) in enumerate(parts):
        keep[place] = keep[place] if chosen is None else keep[place] & chosen
    return (
        torch.cat([rows for rows, _ in parts], dim=1),
        torch.cat(keep, dim=1),
        torch.cat([few.position_ids, where], dim=1),
    )


def prompt_grids(prompt: Prompt, num_new: int) -> tuple[VisualGrid, ...]:
    """The grids of a prompt, with `start` counted in visual tokens of their row; empty if only a part is new."""
    if num_new != prompt.input_ids.shape[1]:
        return ()
    before: dict[int, int] = {}
    found = []
    for segment in sorted(prompt.grids, key=lambda one: (one.row, one.start)):
        start = before.get(segment.row, 0)
        before[segment.row] = start + segment.num_tokens
        found.append(replace(segment, start=start))
    return tuple(found)


__all__ = [
    "VISUAL_MODES",
    "VisualInputMode",
    "Sight",
    "placeholder",
    "coupled",
    "decoupled",
    "left_pack",
    "segments_of",
    "compressed_inputs",
    "text_only",
]
