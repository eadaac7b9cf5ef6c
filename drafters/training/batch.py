"""Training batches of draft heads: `TrainBatch` of the target, and the inputs and labels of a head for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmspec.drafters.heads.base.compressed_inputs import compressed_inputs
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES, DraftInputs, left_pack
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
        aux_hidden_states: {index: [B, L, D]} of other layers, for heads that read them (EAGLE-3).
        position_ids: [B, 3, L] int64, the target's on its axes, or None: 0, 1, 2, ... on all of them.
        next_ids: [B, L] int64, the target's likeliest next token at the response; None where no head needs it, as
            those with a draft vocabulary do.
    """

    input_ids: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    response_mask: Tensor
    inputs_embeds: Tensor
    hidden_states: Tensor
    grids: tuple[VisualGrid, ...] = field(default=(), kw_only=True)
    aux_hidden_states: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    position_ids: Tensor | None = field(default=None, kw_only=True)
    next_ids: Tensor | None = field(default=None, kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states, embeddings and masks."""
        return sum(part.nbytes for part in (*self.tensors(), *self.aux_hidden_states.values()))

    def float(self) -> TrainBatch:
        """With hidden states and embeddings in float32."""
        return self._map(lambda part: part.float() if part.is_floating_point() else part)

    def select_hidden_states(self, layers: Sequence[int]) -> Tensor:
        """[B, L, S] the hidden states of these layers, concatenated; those after the final norm if none is named."""
        if not layers:
            return self.hidden_states
        return torch.cat([self.aux_hidden_states[layer] for layer in layers], dim=-1)

    def response_scale(self) -> Tensor:
        """[D] float32 root mean square of the hidden states at the response; of a normalised state it is 1."""
        return _root_mean_square(self.hidden_states[self.response_mask])

    def layer_scales(self, layers: Sequence[int]) -> Tensor:
        """[number of layers] float32, the mean of the same for each of `aux_hidden_states`."""
        states = (self.aux_hidden_states[layer][self.response_mask] for layer in layers)
        return torch.stack([_root_mean_square(part).mean() for part in states])

    def to(self, device: torch.device | str) -> TrainBatch:
        """A copy on a device."""
        return self._map(lambda part: part.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """With all tensors changed."""
        aux = {layer: change(states) for layer, states in self.aux_hidden_states.items()}
        positions = None if self.position_ids is None else change(self.position_ids)
        next_ids = None if self.next_ids is None else change(self.next_ids)
        tensors = map(change, self.tensors())
        return TrainBatch(*tensors, grids=self.grids, aux_hidden_states=aux, position_ids=positions, next_ids=next_ids)

    def tensors(self) -> tuple[Tensor, ...]:
        """The required tensors in the order of the fields."""
        masks = (self.attention_mask, self.visual_mask, self.response_mask)
        return self.input_ids, *masks, self.inputs_embeds, self.hidden_states

    def split(self) -> list[TrainBatch]:
        """One batch per sequence without padding; copies, so that a sequence can outlive the batch."""
        lengths = self.attention_mask.sum(1).tolist()

        def select(row: int, length: int) -> TrainBatch:
            positions = None if self.position_ids is None else self.position_ids[row : row + 1, :, :length].clone()
            return TrainBatch(
                *(part[row : row + 1, :length].clone() for part in self.tensors()),
                grids=tuple(replace(grid, row=0) for grid in self.grids if grid.row == row),
                position_ids=positions,
                next_ids=None if self.next_ids is None else self.next_ids[row : row + 1, :length].clone(),
                aux_hidden_states={
                    layer: states[row : row + 1, :length].clone() for layer, states in self.aux_hidden_states.items()
                },
            )

        return [select(row, length) for row, length in enumerate(lengths)]

    @classmethod
    def collate(cls, sequences: Sequence[TrainBatch]) -> TrainBatch:
        """Batches of one sequence each as one batch, padded with zeros."""
        grids = tuple(replace(grid, row=row) for row, one in enumerate(sequences) for grid in one.grids)
        positions = [one.position_ids.mT for one in sequences if one.position_ids is not None]
        next_ids = [one.next_ids for one in sequences if one.next_ids is not None]

        def pad(parts: Sequence[Tensor]) -> Tensor:
            return pad_sequence([part[0] for part in parts], batch_first=True)

        tensors = map(pad, zip(*(one.tensors() for one in sequences), strict=True))
        layers = sequences[0].aux_hidden_states
        return cls(
            *tensors,
            grids=grids,
            aux_hidden_states={layer: pad([one.aux_hidden_states[layer] for one in sequences]) for layer in layers},
            position_ids=pad(positions).mT if len(positions) == len(sequences) else None,
            next_ids=pad(next_ids) if len(next_ids) == len(sequences) else None,
        )


def _root_mean_square(states: Tensor) -> Tensor:
    """[D] over states [n, D]."""
    return states.float().pow(2).mean(0).sqrt()


MIXED, MIXED_DRAFTS_AS = "mixed", "coupled"
"""Visual mode of training only: each sequence is "coupled" or "placeholder" at random, so that the head serves in
engines that feed projected embeddings (SGLang, and mmspec: "coupled") and in those that feed placeholders (vLLM).
"""


class DraftModel(nn.Module):
    """A head in training, and the compressor that is trained with it.

    Attributes:
        head: the draft head.
        visual_mode: a key of `VISUAL_MODES`, or `MIXED`.
        architecture: name of its method (`mmspec.drafters.heads.registry`).
        compressor: reduces the visual tokens of the head's inputs, or None. Its weights, if any, are trained too.
        draft_ids: [V'] int64, target ids of the draft vocabulary; None for that of the target.
    """

    def __init__(self, head: Any, visual_mode: str, architecture: str = "eagle", compressor: Any = None) -> None:
        super().__init__()
        self.head = head
        self.visual_mode = visual_mode
        self.architecture = architecture
        self.compressor = compressor
        self.draft_ids: Tensor | None = None

    @property
    def drafting_mode(self) -> str:
        """The visual mode with which the trained head drafts."""
        return MIXED_DRAFTS_AS if self.visual_mode == MIXED else self.visual_mode


@dataclass(frozen=True)
class HeadInputsAndLabels:
    """Inputs of a head, and the labels of each position.

    Attributes:
        inputs: [B, n, D] inputs of the head.
        next_embeds: [B, n, D] embedding of the next token.
        target_hidden: [B, n, D] label: the target's hidden state at the next position.
        loss_mask: [B, n] bool, True at positions that the loss counts.
        next_ids: [B, n] int64, the next token.
        is_draftable: [B, n] bool, whether the likeliest token of the label is in the draft vocabulary.
        position_ids: [B, n] int64.
        compressor_loss: scalar that the compressor adds to the loss, or None.
    """

    inputs: Tensor
    next_embeds: Tensor
    target_hidden: Tensor
    loss_mask: Tensor
    next_ids: Tensor
    is_draftable: Tensor
    position_ids: Tensor
    compressor_loss: Tensor | None = None

    def loss_mask_at(self, distance: int) -> Tensor:
        """[B, n] bool, positions whose label `distance` positions further on counts."""
        n = self.loss_mask.shape[1]
        is_inside = torch.arange(n, device=self.loss_mask.device) < n - distance
        return self.loss_mask & shift(self.loss_mask, distance) & is_inside


def mix_visual_inputs(batch: TrainBatch, placeholder: Tensor, rng: torch.Generator) -> TrainBatch:
    """The batch with the placeholder's embedding at the visual tokens of about half of its sequences.

    Args:
        batch: with projected embeddings at visual tokens.
        placeholder: [D] embedding of the media placeholder id.
        rng: random generator on the CPU.
    """
    is_placeholder = torch.rand(len(batch.input_ids), 1, generator=rng).to(batch.visual_mask.device) < 0.5
    replaced = (batch.visual_mask & is_placeholder)[..., None]
    embeds = torch.where(replaced, placeholder.to(batch.inputs_embeds.dtype), batch.inputs_embeds)
    return replace(batch, inputs_embeds=embeds)


def build_inputs_and_labels(
    draft_model: DraftModel, batch: TrainBatch, placeholder: Tensor, rng: torch.Generator | None = None
) -> HeadInputsAndLabels:
    """Align the inputs of a head with their labels; only tokens of the response are learned.

    Args:
        draft_model: head, visual mode and compressor.
        batch: hidden states of the target.
        placeholder: [D] embedding of the media placeholder id.
        rng: random generator for the visual mode `MIXED`.
    """
    if draft_model.visual_mode == MIXED and rng is not None:
        batch = mix_visual_inputs(batch, placeholder, rng)
    length = batch.input_ids.shape[1]
    position_ids = torch.arange(length, device=batch.input_ids.device).expand(batch.input_ids.shape)
    inputs = draft_model.head.prepare(
        DraftInputs(
            next_embeds=batch.inputs_embeds.roll(-1, 1),
            hidden_states=batch.select_hidden_states(draft_model.head.config.hidden_state_layers),
            visual_mask=batch.visual_mask.roll(-1, 1),
            placeholder_embed=placeholder,
            attention_mask=batch.attention_mask,
            position_ids=position_ids,
            grids=batch.grids,
        )
    )
    is_response = batch.response_mask & batch.attention_mask
    # Input i pairs state i with token i + 1 and predicts state i + 1, which scores token i + 2: both must be of the
    # response. With a prompt of three tokens and a response of two, only input 2 is learned:
    #
    #     position            0     1     2     3     4
    #     token               p0    p1    p2    r3    r4
    #     input, state        s0    s1    s2    s3    -
    #     input, next token   p1    p2    r3    r4    -
    #     label, state        s1    s2    s3    s4    -
    #     token it scores     p2    r3    r4    -     -
    #     loss_mask           no    no    yes   no    no
    loss_mask = is_response.roll(-1, 1) & is_response.roll(-2, 1) & (position_ids < length - 2)
    next_ids = batch.input_ids.roll(-1, 1)
    is_draftable = torch.ones_like(loss_mask)
    if draft_model.draft_ids is not None:
        if batch.next_ids is None:
            raise ValueError("A draft vocabulary needs the batch's next_ids, the target's likeliest tokens.")
        is_draftable = torch.isin(batch.next_ids, draft_model.draft_ids).roll(-1, 1)
    labels: tuple[Tensor, ...] = (inputs.next_embeds, batch.hidden_states.roll(-1, 1))
    labels += (loss_mask, next_ids, is_draftable)
    if draft_model.compressor is None:
        layer_inputs, selected = VISUAL_MODES[draft_model.drafting_mode](draft_model.head, inputs)
        if selected is None:
            return HeadInputsAndLabels(*(layer_inputs, *labels, position_ids))
        keep = selected & batch.attention_mask
    else:
        layer_inputs, keep, position_ids = compressed_inputs(
            draft_model.head, draft_model.drafting_mode, inputs, draft_model.compressor, _last_prompt_hidden(batch)
        )
        labels = _align_text(batch.attention_mask & ~inputs.visual_mask, labels, layer_inputs.shape[1])
    counts, *packed = left_pack(keep, layer_inputs, *labels, position_ids)
    longest = int(counts.max())
    is_valid = torch.arange(longest, device=counts.device) < counts[:, None]
    data = HeadInputsAndLabels(*(part[:, :longest] for part in packed))
    compressor_loss = getattr(draft_model.compressor, "cost", None)
    return replace(data, loss_mask=data.loss_mask & is_valid, compressor_loss=compressor_loss)


def _last_prompt_hidden(batch: TrainBatch) -> Tensor:
    """[B, D] hidden state before the response: when the compressor runs, a drafter does not know later ones."""
    last = (batch.response_mask & batch.attention_mask).long().argmax(1).sub(1).clamp(min=0)
    return batch.hidden_states.gather(1, last[:, None, None].expand(-1, 1, batch.hidden_states.shape[-1]))[:, 0]


def _align_text(is_text: Tensor, labels: tuple[Tensor, ...], num_positions: int) -> tuple[Tensor, ...]:
    """Labels of the text at the end of `num_positions` positions, as `compressed_inputs` orders them; zeros before."""
    counts, *packed = left_pack(is_text, *labels)
    max_text = int(counts.max())
    padding = [part.new_zeros(len(part), num_positions - max_text, *part.shape[2:]) for part in labels]
    return tuple(torch.cat((zeros, part[:, :max_text]), dim=1) for zeros, part in zip(padding, packed, strict=True))


class Labels(NamedTuple):
    """What n positions are to predict.

    Attributes:
        hidden_states: [n, D] the target's.
        is_draftable: [n] bool, see `HeadInputsAndLabels`.
    """

    hidden_states: Tensor
    is_draftable: Tensor


def shift(part: Tensor, distance: int) -> Tensor:
    """[B, n, ...] moved to the left by `distance`; `HeadInputsAndLabels.loss_mask_at` excludes the last positions."""
    return part.roll(-distance, 1)


class PackedQueries:
    """The positions whose outputs the loss needs, packed to the left; others contribute keys and values only.

    Attributes:
        data: all positions.
        query_index: [B, m] int64, indices of the packed positions; those past a row's own repeat others.
        causal_mask: [B, m, n] bool, True where a packed position attends.
    """

    def __init__(self, data: HeadInputsAndLabels, query_mask: Tensor | None = None) -> None:
        """
        Args:
            data: all positions.
            query_mask: [B, n] bool, the positions to pack; None for those of the loss mask.
        """
        n = data.loss_mask.shape[1]
        self.data = data
        index = torch.arange(n, device=data.loss_mask.device).expand(data.loss_mask.shape)
        counts, packed = left_pack(data.loss_mask if query_mask is None else query_mask, index)
        self.query_index = packed[:, : max(1, int(counts.max()))]
        self._is_valid = torch.arange(self.query_index.shape[1], device=packed.device) < counts[:, None]
        self.causal_mask = index[:, None] <= self.query_index[..., None]

    def gather(self, part: Tensor) -> Tensor:
        """[B, n, ...] -> [B, m, ...]."""
        return gather_rows(part, self.query_index)

    def labels(self, distance: int, mask: Tensor) -> Labels:
        """Those `distance` positions further on, of the packed positions in the mask [B, m]."""
        parts = (self.data.target_hidden, self.data.is_draftable)
        return Labels(*(self.gather(shift(part, distance))[mask] for part in parts))

    def loss_mask_at(self, distance: int) -> Tensor:
        """[B, m] bool, `HeadInputsAndLabels.loss_mask_at` of the packed positions."""
        return self.gather(self.data.loss_mask_at(distance)) & self._is_valid
