"""What a compressor that chooses is told at the end of a training: what each of its ways cost, text by text.

While it trains, its choice is drawn, and a loss of many words says little about one choice: after 400 steps a gate
was no surer than chance had made it. So each text is read once more in each way, by the head as it has become.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmspec.drafters.architectures import KINDS
from mmspec.drafters.training.losses import Lesson, Pupil, Weights, When
from mmspec.interfaces import GatedCompressor, SharedEmbeddings


@torch.no_grad()
def weigh(
    pupil: Pupil, lessons: Iterable[Lesson], words: SharedEmbeddings, placeholder: Tensor, weights: Weights
) -> None:
    """Lets a `GatedCompressor` learn from the loss on words in each of its ways; other compressors are left alone."""
    chooser = pupil.compressor
    if not isinstance(chooser, GatedCompressor):
        return
    judged = Weights(states=0.0, words=1.0, rollout=weights.rollout, decay=weights.decay)
    each = sum(weights.decay**step for step in range(weights.rollout + 1))
    costs, sights = [], []
    for lesson in lessons:
        for text in lesson.rows():
            if not (text.answer.any() and text.visual.any()):
                continue
            told = []
            for way in range(len(chooser.branches)):
                with chooser.force_branch(way) as seen:
                    loss, _ = KINDS[pupil.kind].losses(pupil, text, words, placeholder, judged, When(done=1.0))
                told.append(float(loss) / each + float(seen[0].penalty))
            costs.append(told)
            sights.append(seen[0].features[0])
    if costs:
        chooser.fit_gate(torch.stack(sights), torch.tensor(costs))


__all__ = ["weigh"]
