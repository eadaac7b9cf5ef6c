"""Loss of a head of the target's checkpoint (MTP): logits of the tokens ahead, over a rollout on its own outputs.

As `mmspec.drafters.heads.eagle.loss`, but the attention is the target's own layer, and what the head reads on is its
carry. The hidden states have no loss: the head's outputs are read through its own norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.training.batch import (
    DraftModel,
    HeadInputsAndLabels,
    PackedQueries,
    TrainBatch,
    build_inputs_and_labels,
    shift,
)
from mmspec.drafters.training.losses import LossAccumulator, LossAndMetrics, LossWeights, TrainProgress
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import SharedEmbeddings


class RolloutRows:
    """Keys and values of a rollout, a `mmspec.interfaces.HeadCache`: those of all positions, then of each step."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadCache`."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def mtp_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: TrainProgress,
) -> LossAndMetrics:
    """The loss of an `MTPHead`; arguments as in `eagle_loss`."""
    head: MTPHead = draft_model.head
    data = build_inputs_and_labels(draft_model, batch, placeholder, progress.rng)
    packed, positions, rows = PackedQueries(data), _positions(head, batch, data), RolloutRows()
    loss = LossAccumulator(shared_embeddings, weights, data.compressor_loss, draft_model)
    n = data.inputs.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=data.inputs.device).tril()[None, None]
    outputs = gather_rows(
        head.run_block(data.inputs, *head.rotate(positions, data.inputs.dtype), causal, rows), packed.query_index
    )
    own = torch.eye(outputs.shape[1], dtype=torch.bool, device=causal.device).expand(len(outputs), 1, -1, -1)
    positions, mask = _gather(positions, packed.query_index), packed.causal_mask[:, None]
    for step in range(weights.ttt_steps):
        counted = packed.loss_mask_at(step)
        labels = packed.gather(shift(data.target_hidden, step))[counted]
        loss.add(step, outputs[counted], labels, mask=counted)
        if step + 1 < weights.ttt_steps:
            inputs = head.fuse(packed.gather(shift(data.next_embeds, step + 1)), head.carried(outputs))
            mask = torch.cat((mask, own), dim=-1)
            outputs = head.run_block(inputs, *head.rotate(positions + step + 1, inputs.dtype), mask, rows)
    return loss.result()


def _positions(head: MTPHead, batch: TrainBatch, data: HeadInputsAndLabels) -> Tensor:
    """[B, n] position ids of the rows, [3, B, n] where the target counts on several axes."""
    if not head.config.mrope_section or batch.position_ids is None:
        return data.position_ids
    axes = batch.position_ids.movedim(1, 0)
    return axes.gather(2, data.position_ids.expand(len(axes), -1, -1))


def _gather(positions: Tensor, index: Tensor) -> Tensor:
    """The positions [..., B, n] of the rows with an index [B, m]."""
    return positions.gather(-1, index.expand(*positions.shape[:-1], -1))
