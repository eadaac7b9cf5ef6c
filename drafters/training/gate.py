"""Fits the gate of a `GatedCompressor` at the end of training, on the loss of each branch per sequence.

During training the gate's choice is sampled, and the loss of a batch says little about one choice: after 400 steps
such a gate was no better than a random one. So each sequence is run once more per branch, with the trained head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmspec.drafters.heads.registry import find_method
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.losses import LossInputs, LossWeights, TrainProgress
from mmspec.interfaces import GatedCompressor, SharedEmbeddings


@torch.no_grad()
def fit_gate_on_batches(
    draft_model: DraftModel,
    batches: Iterable[TrainBatch],
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
) -> None:
    """Fit the gate of `draft_model.compressor` on the logits loss of each branch; a no-op for other compressors.

    Args:
        draft_model: in eval mode.
        batches: to measure the branches on; sequences without visual tokens or without a response are skipped.
        shared_embeddings: of the target.
        placeholder: [D] embedding of the media placeholder id.
        weights: of the training; only `ttt_steps` and `step_decay` are used.
    """
    compressor = draft_model.compressor
    if not isinstance(compressor, GatedCompressor):
        return
    logits_only = LossWeights(hidden=0.0, logits=1.0, ttt_steps=weights.ttt_steps, step_decay=weights.step_decay)
    total_weight = sum(weights.step_decay**step for step in range(weights.ttt_steps))
    compute_loss = find_method(draft_model.architecture).loss()
    costs, features = [], []
    for batch in batches:
        for sequence in batch.split():
            if not (sequence.response_mask.any() and sequence.visual_mask.any()):
                continue
            branch_costs = []
            for branch in range(len(compressor.branches)):
                with compressor.force_branch(branch) as observations:
                    loss, _ = compute_loss(
                        LossInputs(
                            draft_model,
                            sequence,
                            shared_embeddings,
                            placeholder,
                            logits_only,
                            TrainProgress(fraction=1.0),
                        )
                    )
                branch_costs.append(float(loss) / total_weight + float(observations[0].penalty))
            costs.append(branch_costs)
            features.append(observations[0].features[0])
    if costs:
        compressor.fit_gate(torch.stack(features), torch.tensor(costs))
