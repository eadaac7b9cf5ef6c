"""Training batches of draft heads: `TrainBatch`, and the aligned inputs and targets that the losses use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmspec.drafters.eagle.visual_inputs import VISUAL_MODES, DraftInputs, compressed_inputs, left_pack
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import VisualGrid


@dataclass(frozen=True)
class TrainBatch:
    """A batch of whole sequences with the target's states, padded on the right.

    Attributes:
        input_ids: [B, L] int64.
        attention_mask: [B, L] bool, False at padding.
        visual_mask: [B, L] bool, True at visual tokens.
        response_mask: [B, L] bool, True at tokens that the target generated.
        inputs_embeds: [B, L, D] merged input embeddings.
        hidden_states: [B, L, D] the target's states after its final norm.
        grids: of the visual tokens, `start` counted in visual tokens of their row (`prompt_grids`); empty if unknown.
        visual_saliency: [B, L] float32, as in `Prompt`, or None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    response_mask: Tensor
    inputs_embeds: Tensor
    hidden_states: Tensor
    grids: tuple[VisualGrid, ...] = field(default=(), kw_only=True)
    visual_saliency: Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device | str) -> TrainBatch:
        """A copy on a device."""
        saliency = None if self.visual_saliency is None else self.visual_saliency.to(device)
        return TrainBatch(*(part.to(device) for part in self.tensors()), grids=self.grids, visual_saliency=saliency)

    def tensors(self) -> tuple[Tensor, ...]:
        """The required tensors in the order of the fields."""
        masks = (self.attention_mask, self.visual_mask, self.response_mask)
        return self.input_ids, *masks, self.inputs_embeds, self.hidden_states

    def split(self) -> list[TrainBatch]:
        """One batch per sequence without padding; copies, so that a sequence can outlive the batch."""
        lengths = self.attention_mask.sum(1).tolist()

        def select(row: int, length: int) -> TrainBatch:
            saliency = None if self.visual_saliency is None else self.visual_saliency[row : row + 1, :length].clone()
            return TrainBatch(
                *(part[row : row + 1, :length].clone() for part in self.tensors()),
                grids=tuple(replace(grid, row=0) for grid in self.grids if grid.row == row),
                visual_saliency=saliency,
            )

        return [select(row, length) for row, length in enumerate(lengths)]

    @classmethod
    def collate(cls, sequences: Sequence[TrainBatch]) -> TrainBatch:
        """Batches of one sequence each as one batch, padded with zeros."""
        grids = tuple(replace(grid, row=row) for row, one in enumerate(sequences) for grid in one.grids)
        saliency = [one.visual_saliency for one in sequences if one.visual_saliency is not None]

        def pad(parts: Sequence[Tensor]) -> Tensor:
            return pad_sequence([part[0] for part in parts], batch_first=True)

        tensors = map(pad, zip(*(one.tensors() for one in sequences), strict=True))
        has_saliency = len(saliency) == len(sequences)
        return cls(*tensors, grids=grids, visual_saliency=pad(saliency) if has_saliency else None)


@dataclass
class DraftModel:
    """A head in training.

    Attributes:
        head: the draft head (`EagleHead` or that of another architecture).
        visual_mode: a key of `VISUAL_MODES`.
        architecture: a key of `mmspec.drafters.architectures.ARCHITECTURES`.
        compressor: reduces its visual tokens and is trained with it, or None.
    """

    head: Any
    visual_mode: str
    architecture: str = "eagle"
    compressor: Any = None

    def modules(self) -> nn.ModuleDict:
        """All modules with weights."""
        has_weights = isinstance(self.compressor, nn.Module)
        return nn.ModuleDict({"head": self.head, **({"compressor": self.compressor} if has_weights else {})})


@dataclass
class DraftTargets:
    """Inputs of a head and what follows each of them.

    Attributes:
        inputs: [B, n, D] input rows.
        next_embeds: [B, n, D] embedding of the next token.
        target_hidden: [B, n, D] the target's hidden state at the next position.
        loss_mask: [B, n] bool, True at rows that the loss counts.
        position_ids: [B, n] int64.
        compressor_loss: scalar that the compressor adds to the loss, or None.
    """

    inputs: Tensor
    next_embeds: Tensor
    target_hidden: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    compressor_loss: Tensor | None = None


def build_targets(draft_model: DraftModel, batch: TrainBatch, placeholder: Tensor) -> DraftTargets:
    """The inputs of a head for a batch and their targets; only tokens of the response are learned.

    Args:
        draft_model: head, visual mode and compressor.
        batch: of the teacher.
        placeholder: [D] embedding of the media placeholder id.
    """
    length = batch.input_ids.shape[1]
    index = torch.arange(length, device=batch.input_ids.device).expand(batch.input_ids.shape)
    inputs = DraftInputs(
        next_embeds=batch.inputs_embeds.roll(-1, 1),
        hidden_states=batch.hidden_states,
        visual_mask=batch.visual_mask.roll(-1, 1),
        placeholder_embed=placeholder,
        attention_mask=batch.attention_mask,
        position_ids=index,
        grids=batch.grids,
        saliency=None if batch.visual_saliency is None else batch.visual_saliency.roll(-1, 1),
    )
    is_response = batch.response_mask & batch.attention_mask
    loss_mask = is_response.roll(-1, 1) & is_response.roll(-2, 1) & (index < length - 2)
    targets = (inputs.next_embeds, batch.hidden_states.roll(-1, 1), loss_mask)
    if draft_model.compressor is not None:
        # The state before the response: a drafter does not know later ones when the compressor runs.
        last = is_response.long().argmax(1).sub(1).clamp(min=0)
        query = batch.hidden_states.gather(1, last[:, None, None].expand(-1, 1, batch.hidden_states.shape[-1]))[:, 0]
        rows, keep, index = compressed_inputs(
            draft_model.head, draft_model.visual_mode, inputs, draft_model.compressor, query
        )
        targets = _align_text(batch.attention_mask & ~inputs.visual_mask, targets, rows.shape[1])
    else:
        rows, selected = VISUAL_MODES[draft_model.visual_mode](draft_model.head, inputs)
        if selected is None:
            return DraftTargets(rows, *targets, index)
        keep = selected & batch.attention_mask
    counts, *packed = left_pack(keep, rows, *targets, index)
    longest = int(counts.max())
    is_valid = torch.arange(longest, device=rows.device) < counts[:, None]
    rows, next_embeds, target_hidden, loss_mask, index = (part[:, :longest] for part in packed)
    compressor_loss = getattr(draft_model.compressor, "cost", None)
    return DraftTargets(rows, next_embeds, target_hidden, loss_mask & is_valid, index, compressor_loss)


def _align_text(
    is_text: Tensor, targets: tuple[Tensor, Tensor, Tensor], num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets of the text rows at the end of `num_rows` rows, as `compressed_inputs` orders them; zeros before."""
    counts, *packed = left_pack(is_text, *targets)
    max_text = int(counts.max())
    padding = [part.new_zeros(len(part), num_rows - max_text, *part.shape[2:]) for part in targets]
    next_embeds, target_hidden, loss_mask = (
        torch.cat((zeros, part[:, :max_text]), dim=1) for zeros, part in zip(padding, packed, strict=True)
    )
    return next_embeds, target_hidden, loss_mask


def shift(part: Tensor, steps: int) -> Tensor:
    """[B, n, ...] moved `steps` rows to the left; the last rows hold values that the loss mask excludes."""
    return part.roll(-steps, 1)


def shifted_loss_mask(targets: DraftTargets, steps: int) -> Tensor:
    """[B, n] bool, rows whose target `steps` rows further on counts."""
    n = targets.loss_mask.shape[1]
    is_inside = torch.arange(n, device=targets.loss_mask.device) < n - steps
    return targets.loss_mask & shift(targets.loss_mask, steps) & is_inside


class PackedQueries:
    """The rows whose outputs the loss needs, packed to the left; other rows contribute keys and values only.

    Attributes:
        targets: all rows.
        query_index: [B, m] int64, indices of the packed rows; columns past a row's own repeat others.
        causal_mask: [B, m, n] bool, True where a packed row attends.
    """

    def __init__(self, targets: DraftTargets, query_mask: Tensor | None = None) -> None:
        """
        Args:
            targets: all rows.
            query_mask: [B, n] bool, the rows to pack; None for those of the loss mask.
        """
        n = targets.loss_mask.shape[1]
        self.targets = targets
        index = torch.arange(n, device=targets.loss_mask.device).expand(targets.loss_mask.shape)
        counts, packed = left_pack(targets.loss_mask if query_mask is None else query_mask, index)
        self.query_index = packed[:, : max(1, int(counts.max()))]
        self._is_valid = torch.arange(self.query_index.shape[1], device=packed.device) < counts[:, None]
        self.causal_mask = index[:, None] <= self.query_index[..., None]

    def gather(self, part: Tensor) -> Tensor:
        """[B, n, ...] -> [B, m, ...]."""
        return gather_rows(part, self.query_index)

    def loss_mask(self, steps: int) -> Tensor:
        """[B, m] bool, `shifted_loss_mask` of the packed rows."""
        return self.gather(shifted_loss_mask(self.targets, steps)) & self._is_valid


__all__ = [
    "DraftModel",
    "DraftTargets",
    "PackedQueries",
    "TrainBatch",
    "build_targets",
    "shift",
    "shifted_loss_mask",
]
