"""Loss of a head of the target's checkpoint (MTP): logits of the tokens ahead, over a rollout on its own outputs.

The attention is the target's own layer, and what the head reads on is its carry. The hidden states have no loss: the
head's outputs are read through its own norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.training.batch import PackedQueries, TrainBatch
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache, rollout_loss
from mmspec.engine.gather import gather_rows


class MTPRollout(RolloutCache):
    """A rollout, a `mmspec.interfaces.HeadCache`: keys and values of all positions, then of each step."""

    head: MTPHead

    def __init__(self, head: MTPHead, batch: TrainBatch, packed: PackedQueries) -> None:
        super().__init__(head, packed)
        self.positions = packed.data.position_ids  # [B, n], or [3, B, n] where the target counts on several axes
        if head.config.mrope_section and batch.position_ids is not None:
            axes = batch.position_ids.movedim(1, 0)
            self.positions = axes.gather(2, self.positions.expand(len(axes), -1, -1))
        self.mask = packed.causal_mask[:, None]

    def forward(self, inputs: Tensor, offset: int = 0) -> Tensor:
        head, index, n = self.head, self.packed.query_index, inputs.shape[1]
        rotary = head.rotate(self.positions + offset, inputs.dtype)
        if not self.keys:
            causal = torch.ones(n, n, dtype=torch.bool, device=inputs.device).tril()[None, None]
            self.positions = self.positions.gather(-1, index.expand(*self.positions.shape[:-1], -1))
            return gather_rows(head.run_block(inputs, *rotary, causal, self), index)
        own = torch.eye(n, dtype=torch.bool, device=inputs.device).expand(len(inputs), 1, -1, -1)
        self.mask = torch.cat((self.mask, own), dim=-1)
        return head.run_block(inputs, *rotary, self.mask, self)

    def carried(self, outputs: Tensor) -> Tensor:
        return self.head.carried(outputs)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadCache`."""
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def mtp_loss(given: LossInputs) -> LossAndMetrics:
    """The loss of an `MTPHead`; results as those of `eagle_loss`."""
    packed = PackedQueries(given.aligned())
    return rollout_loss(given, MTPRollout(given.draft_model.head, given.batch, packed), has_own_lm_head=True)
