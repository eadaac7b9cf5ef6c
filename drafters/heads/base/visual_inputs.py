"""Inputs of a draft head: how text and visual tokens of a prompt enter it.

Input i pairs the target's hidden state at position i with the embedding of the token at position i + 1, as EAGLE does.
A visual mode defines the input where the next token is visual. The module knows no tree, cache or target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.heads.base.head import DraftHead
from mmspec.engine.gather import gather_rows, scatter_rows
from mmspec.interfaces import Prompt, SharedEmbeddings, VisualGrid


@dataclass(frozen=True)
class DraftInputs:
    """Aligned inputs of a batch of sequences.

    A visual mode reads the fields without a default only.

    Attributes:
        next_embeds: [B, n, D] embedding of the next token as the target received it (visual tokens projected).
        hidden_states: [B, n, S] hidden states of the target, or outputs of the head.
        visual_mask: [B, n] bool, True where the next token is visual.
        placeholder_embed: [D] embedding of the media placeholder id, or [B, n, D] that of the next token's.
        attention_mask: [B, n] bool, False at padding.
        position_ids: [B, n] int64.
        grids: of the visual tokens, `start` counted in visual tokens of their row; empty if unknown.
    """

    next_embeds: Tensor
    hidden_states: Tensor
    visual_mask: Tensor
    placeholder_embed: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    grids: tuple[VisualGrid, ...] = ()


VisualInputMode = Callable[[DraftHead, DraftInputs], tuple[Tensor, Tensor | None]]
"""(head, inputs) -> [B, n, D] inputs of the decoder layer, and [B, n] bool which of them to keep (None: all)."""


def decoupled(head: DraftHead, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """MSD: visual tokens enter as their projected embedding alone, text as embedding and state (MSD, section 3)."""
    text_index, fused = _fuse_text(head, inputs)
    next_embeds = gather_rows(inputs.next_embeds, text_index)
    fused = torch.where(inputs.visual_mask.gather(1, text_index)[..., None], next_embeds, fused)
    return scatter_rows(inputs.next_embeds.to(fused.dtype), text_index, fused), None


def coupled(head: DraftHead, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """EAGLE on a multimodal target: visual tokens are fused with hidden states like text."""
    return head.fuse(inputs.next_embeds, inputs.hidden_states), None


def placeholder(head: DraftHead, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """Text-only EAGLE: visual tokens enter as the placeholder's embedding, fused with the hidden state."""
    next_embeds = torch.where(inputs.visual_mask[..., None], inputs.placeholder_embed, inputs.next_embeds)
    return head.fuse(next_embeds, inputs.hidden_states), None


def text_only(head: DraftHead, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
    """No visual tokens: only positions whose next token is text; they keep their position ids."""
    text_index, fused = _fuse_text(head, inputs)
    zeros = fused.new_zeros(*inputs.visual_mask.shape, fused.shape[-1])
    return scatter_rows(zeros, text_index, fused), ~inputs.visual_mask


def _fuse_text(head: DraftHead, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
    """[B, T] positions whose next token is text, and what is fused there; the cost is that of the text alone."""
    is_text = ~inputs.visual_mask
    max_text = int(is_text.sum(1).max())
    text_index = packed_indices(is_text)[:, :max_text]  # of rows with less text, some are visual
    next_embeds = gather_rows(inputs.next_embeds, text_index)
    return text_index, head.fuse(next_embeds, gather_rows(inputs.hidden_states, text_index))


VISUAL_MODES: dict[str, VisualInputMode] = {
    "decoupled": decoupled,
    "coupled": coupled,
    "placeholder": placeholder,
    "text_only": text_only,
}
"""Visual modes by the name that `HeadMetadata` and `mmspec train` use."""


def resolve_visual_mode(name: Any) -> str:
    """The name, if it is that of a visual mode.

    Raises:
        ValueError: an unknown visual mode.
    """
    if name not in VISUAL_MODES:
        raise ValueError(f"visual_mode must be one of {', '.join(VISUAL_MODES)}; got {name!r}.")
    return str(name)


def embed_anew(prompt: Prompt, shared_embeddings: SharedEmbeddings) -> Prompt:
    """A prompt whose text is embedded by a head's own embeddings; visual positions as before, if the sizes agree."""
    merged = prompt.hidden_states[0]
    embeds = shared_embeddings.embed(prompt.input_ids[:, -merged.shape[1] :]).to(merged.dtype)
    if embeds.shape == merged.shape:
        embeds = torch.where(prompt.visual_mask[:, -merged.shape[1] :, None], merged, embeds)
    return replace(prompt, hidden_states={**prompt.hidden_states, 0: embeds})


def align_prompt(
    prompt: Prompt, hidden_states: Tensor, first_ids: Tensor, shared_embeddings: SharedEmbeddings, visual_mode: str
) -> tuple[DraftInputs, Tensor]:
    """Pair every hidden state of a prompt with the embedding of the next token, padding on the right.

    Args:
        prompt: its `hidden_states[0]` are the merged input embeddings.
        hidden_states: [B, n, S] of the last n positions: all, or the new ones where a cache is continued.
        first_ids: [B] the tokens that follow the prompt.
        shared_embeddings: of the target.
        visual_mode: the placeholder's embedding is looked up for "placeholder" only, else it is zeros.

    Returns:
        The inputs, with every optional field but `grids`, and [B] int64 number of valid positions.
    """
    embeds, n = prompt.hidden_states[0], hidden_states.shape[1]
    mask, visual_mask = _nonempty_rows(prompt.attention_mask[:, -n:]), prompt.visual_mask[:, -n:]
    counts = mask.sum(1)
    first_embeds = shared_embeddings.embed(first_ids)[:, None].to(embeds.dtype)
    if bool(mask.all()):  # one copy to the host per prompt saves packing all of it
        next_embeds = torch.cat((embeds[:, 1:], first_embeds), dim=1)
    else:
        _, embeds, hidden_states, visual_mask = left_pack(mask, embeds, hidden_states, visual_mask)
        next_embeds = scatter_rows(embeds.roll(-1, 1), (counts - 1)[:, None], first_embeds)
    index = torch.arange(n, device=hidden_states.device)
    placeholder_embed = embeds.new_zeros(embeds.shape[-1])
    if visual_mode == "placeholder":
        placeholder_embed = _placeholder_embed(prompt, n, shared_embeddings).to(embeds.dtype)
    inputs = DraftInputs(
        next_embeds=next_embeds,
        hidden_states=hidden_states,
        visual_mask=visual_mask.roll(-1, 1) & (index < (counts - 1)[:, None]),
        placeholder_embed=placeholder_embed,
        attention_mask=index < counts[:, None],
        position_ids=index.expand(len(counts), n),
    )
    return inputs, counts


def _placeholder_embed(prompt: Prompt, n: int, shared_embeddings: SharedEmbeddings) -> Tensor:
    """[D] embedding of the prompt's placeholder id; [B, n, D] of the next token's where there are several (videos)."""
    is_visual = prompt.visual_mask
    ids = prompt.input_ids[is_visual].unique()
    if len(ids) < 2:
        return shared_embeddings.embed(ids if len(ids) else prompt.input_ids[0, :1])[0]
    rows = prompt.input_ids.where(is_visual, ids[0])[:, -n:]
    return shared_embeddings.embed(gather_rows(rows, prompt_order(prompt, n)).roll(-1, 1))


def prompt_order(prompt: Prompt, n: int) -> Tensor:
    """[B, n] int64, the columns of the last n positions of a prompt in the order in which `align_prompt` has them."""
    return packed_indices(_nonempty_rows(prompt.attention_mask[:, -n:]))


def _nonempty_rows(mask: Tensor) -> Tensor:
    """[B, n] bool, a mask in which rows that are nothing but padding have their last position."""
    is_last = torch.arange(mask.shape[1], device=mask.device) == mask.shape[1] - 1
    return mask | (is_last & ~mask.any(1, keepdim=True))


def left_pack(keep: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Move the selected positions of each row to its left, in order.

    Args:
        keep: [B, n] bool.
        parts: [B, n, ...] each.

    Returns:
        [B] int64 counts, then the parts; positions past the counts hold the others.
    """
    order = packed_indices(keep)
    return keep.sum(1), *(gather_rows(part, order) for part in parts)


def packed_indices(keep: Tensor) -> Tensor:
    """[B, n] int64 indices of the selected positions [B, n] in order, then of the others."""
    return (~keep).long().argsort(dim=1, stable=True)
