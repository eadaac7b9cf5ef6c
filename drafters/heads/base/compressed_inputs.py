"""Inputs of a draft head after a compressor has reduced the visual tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES, DraftInputs, packed_indices
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import Compressor, Prompt, VisualGrid, VisualTokens

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.reader import HeadReader


def compressed_prompt_inputs(
    drafter: HeadReader, prompt: Prompt, inputs: DraftInputs, counts: Tensor, compressor: Compressor
) -> tuple[Tensor, Tensor, Tensor]:
    """`compressed_inputs` of a prompt with `counts` [B] positions per row."""
    if isinstance(compressor, nn.Module):  # compressors are built on the CPU
        compressor.to(counts.device)
    last = (counts - 1)[:, None, None].expand(-1, 1, inputs.hidden_states.shape[-1])
    query = inputs.hidden_states.gather(1, last)[:, 0]
    inputs = replace(inputs, grids=prompt_grids(prompt, inputs.hidden_states.shape[1]))
    return compressed_inputs(drafter.head, drafter.visual_mode, inputs, compressor, query)


def compressed_inputs(
    head: DraftHead, visual_mode: str, inputs: DraftInputs, compressor: Compressor, query: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer inputs of a visual mode after a compressor has reduced the visual tokens.

    The visual tokens come first, then the text; each keeps its position id. A head of one layer sees no other order.

    Args:
        head: the draft head.
        visual_mode: a key of `VISUAL_MODES`.
        inputs: with `attention_mask` and `position_ids`.
        compressor: reduces the visual tokens.
        query: [B, S] the prompt's last hidden state, or None.

    Returns:
        [B, m, D] layer inputs, [B, m] bool which of them to keep, [B, m] their position ids.
    """
    assert inputs.position_ids is not None
    modalities = _ModalityIndex.build(inputs)
    compressed = compressor.compress(_visual_tokens(inputs, modalities), query, compressor.max_tokens)
    placeholder_embed = inputs.placeholder_embed
    if placeholder_embed.dim() == 3:
        placeholder_embed = gather_rows(placeholder_embed, compressed.position_ids)
    visual = DraftInputs(
        compressed.inputs_embeds, compressed.hidden_states, torch.ones_like(compressed.mask), placeholder_embed
    )
    text = DraftInputs(
        gather_rows(inputs.next_embeds, modalities.text_index),
        gather_rows(inputs.hidden_states, modalities.text_index),
        torch.zeros_like(modalities.text_mask),
        inputs.next_embeds.new_zeros(inputs.next_embeds.shape[-1]),  # not read
    )
    layer_inputs, keep = [], []
    for part, mask in ((visual, compressed.mask), (text, modalities.text_mask)):
        part_inputs, part_keep = VISUAL_MODES[visual_mode](head, part)
        layer_inputs.append(part_inputs)
        keep.append(mask if part_keep is None else mask & part_keep)
    position_ids = (compressed.position_ids, gather_rows(inputs.position_ids, modalities.text_index))
    return torch.cat(layer_inputs, dim=1), torch.cat(keep, dim=1), torch.cat(position_ids, dim=1)


@dataclass(frozen=True)
class _ModalityIndex:
    """Where the visual tokens (M at most per row) and the text (T at most per row) of a batch are.

    Attributes:
        visual_index: [B, M] int64 positions; those past a row's count repeat others.
        visual_mask: [B, M] bool, False past a row's count.
        num_visual: number of visual tokens of each row.
        visual_run: (start, end) if the batch is a single row whose visual tokens are contiguous, else None.
        text_index: [B, T] int64 positions, as `visual_index`.
        text_mask: [B, T] bool, False past a row's count.
    """

    visual_index: Tensor
    visual_mask: Tensor
    num_visual: list[int]
    visual_run: tuple[int, int] | None
    text_index: Tensor
    text_mask: Tensor

    @classmethod
    def build(cls, inputs: DraftInputs) -> _ModalityIndex:
        """From `visual_mask` and `attention_mask`."""
        assert inputs.attention_mask is not None
        is_visual, is_text = inputs.visual_mask & inputs.attention_mask, ~inputs.visual_mask & inputs.attention_mask
        visual_counts, text_counts = is_visual.sum(1), is_text.sum(1)
        index = torch.arange(is_visual.shape[1], device=is_visual.device)
        # Every size that the host needs, in one copy.
        span = (is_visual[0].int().argmax(), (is_visual[0] * (index + 1)).amax())
        sizes = torch.cat((torch.stack((*span, text_counts.max())), visual_counts))
        start, end, max_text, *num_visual = sizes.tolist()
        max_visual = max(num_visual)
        return cls(
            visual_index=packed_indices(is_visual)[:, :max_visual],
            visual_mask=index[:max_visual] < visual_counts[:, None],
            num_visual=num_visual,
            visual_run=(start, end) if num_visual == [end - start] else None,
            text_index=packed_indices(is_text)[:, :max_text],
            text_mask=index[:max_text] < text_counts[:, None],
        )

    def select_visual(self, part: Tensor) -> Tensor:
        """[B, n, ...] -> [B, M, ...]; a contiguous run, as of a video, is a view."""
        if self.visual_run is not None:
            return part[:, slice(*self.visual_run)]
        return gather_rows(part, self.visual_index)


def _visual_tokens(inputs: DraftInputs, modalities: _ModalityIndex) -> VisualTokens:
    """The visual tokens of the inputs, as a compressor takes them."""
    assert inputs.position_ids is not None
    return VisualTokens(
        inputs_embeds=modalities.select_visual(inputs.next_embeds),
        hidden_states=modalities.select_visual(inputs.hidden_states),
        mask=modalities.visual_mask,
        position_ids=modalities.select_visual(inputs.position_ids),
        grids=_complete_grids(inputs.grids, modalities.num_visual),
    )


def _complete_grids(grids: tuple[VisualGrid, ...], sizes: list[int]) -> tuple[VisualGrid, ...]:
    """Grids of the rows whose visual tokens they cover exactly.

    A row whose first token is visual has one visual token less than its grids, since no input precedes it.
    """
    covered = [0] * len(sizes)
    for grid in grids:
        covered[grid.row] += grid.num_tokens
    return tuple(grid for grid in grids if covered[grid.row] == sizes[grid.row])


def prompt_grids(prompt: Prompt, num_new: int) -> tuple[VisualGrid, ...]:
    """Grids of a prompt with `start` counted in visual tokens of their row; none where a cache is continued.

    Args:
        prompt: its grids count `start` in tokens of the row, padding included.
        num_new: number of positions that the target processed in this call.
    """
    if num_new != prompt.input_ids.shape[1]:
        return ()
    offsets: dict[int, int] = {}
    grids = []
    for grid in sorted(prompt.grids, key=lambda one: (one.row, one.start)):
        start = offsets.get(grid.row, 0)
        offsets[grid.row] = start + grid.num_tokens
        grids.append(replace(grid, start=start, line_gap=0))
    return tuple(grids)
