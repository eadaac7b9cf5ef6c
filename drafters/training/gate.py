"""What a compressor that chooses is told at the end of a training: what each of its ways cost, text by text.

While it trains, its choice is drawn, and a loss of many words says little about one choice: after 400 steps a gate
was no surer than chance had made it. So each text is read once more in each way, by the head as it has become.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmspec.drafters.architectures import ARCHITECTURES
from mmspec.drafters.training.losses import TrainBatch, DraftModel, LossWeights, Progress
from mmspec.interfaces import GatedCompressor, SharedEmbeddings


@torch.no_grad()
def fit_gate_on_batches(
    draft_model: DraftModel,
    batches: Iterable[TrainBatch],
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
) -> None:
    """Lets a `GatedCompressor` learn from the loss on words in each of its ways; other compressors are left alone."""
    chooser = draft_model.compressor
    if not isinstance(chooser, GatedCompressor):
        return
    judged = LossWeights(hidden=0.0, logits=1.0, ttt_steps=weights.ttt_steps, step_decay=weights.step_decay)
    each = sum(weights.step_decay**step for step in range(weights.ttt_steps + 1))
    costs, sights = [], []
    for lesson in batches:
        for text in lesson.split():
            if not (text.response_mask.any() and text.visual_mask.any()):
                continue
            told = []
            for way in range(len(chooser.branches)):
                with chooser.force_branch(way) as seen:
                    loss, _ = ARCHITECTURES[draft_model.architecture].compute_loss(
                        draft_model, text, shared_embeddings, placeholder, judged, Progress(fraction=1.0)
                    )
                told.append(float(loss) / each + float(seen[0].penalty))
            costs.append(told)
            sights.append(seen[0].features[0])
    if costs:
        chooser.fit_gate(torch.stack(sights), torch.tensor(costs))


__all__ = ["fit_gate_on_batches"]
