"""Whether two computations of the same logits agree up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest accepted difference of float32 logits, relative to their range."""
HALF_MEAN, HALF_MARGIN = 1, 4
"""Accepted in half precision, in units of its resolution relative to the range of the logits: mean difference of a
token's logits, and margin of a best token that becomes second."""
MASKED = -1e30
"""Logits below are masked by the model (placeholders that it never emits)."""


def relative_difference(expected: Tensor, found: Tensor) -> Tensor:
    """|expected - found| [..., V], relative to the range of the expected logits of each token.

    Logits that the model masks (below `MASKED`) count as equal if both are, else as different.
    """
    masked = expected < MASKED
    lowest = expected.masked_fill(masked, torch.inf).amin(-1, keepdim=True)
    value_range = (expected.amax(-1, keepdim=True) - lowest).clamp(min=torch.finfo(torch.float32).tiny)
    difference = (expected - found).abs() / value_range
    return torch.where(masked, (found >= MASKED).float(), difference)


def equal_logits(expected: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits [..., V] are equal up to rounding. In half precision the best of two near-ties may differ."""
    difference = relative_difference(expected, found)
    if bool(difference.isnan().any()):
        return bool((expected.isnan() == found.isnan()).all())
    if dtype not in (torch.float16, torch.bfloat16):
        return bool((difference <= TOLERANCE).all())
    resolution = torch.finfo(dtype).eps
    value_range = expected.amax(-1) - expected.masked_fill(expected < MASKED, torch.inf).amin(-1)
    top = expected.topk(2, dim=-1).values
    margin = (top[..., 0] - top[..., 1]) / value_range
    flipped = (expected.argmax(-1) != found.argmax(-1)) & (margin > HALF_MARGIN * resolution)
    return not bool(flipped.any()) and bool((difference.mean(-1) <= HALF_MEAN * resolution).all())
