"""Learning rate schedule, shared by the training of draft heads and of the scenes model."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, max_steps: int, final_scale: float) -> float:
    """Learning rate of a step: linear warm-up to `peak`, then a cosine down to `peak * final_scale` at `max_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return peak * (final_scale + (1 - final_scale) * 0.5 * (1 + math.cos(math.pi * progress)))
