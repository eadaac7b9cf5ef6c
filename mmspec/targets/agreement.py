"""Whether two computations of the same logits agree up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest accepted difference of float32 logits, relative to their range."""
HALF_MEAN, HALF_MARGIN = 1, 4
"""Accepted in half precision, in units of its resolution relative to the range of the logits: mean difference of a
token's logits, and margin of a best token that becomes second."""
HALF_TYPES = (torch.float16, torch.bfloat16)
OWN_MEAN, OWN_MARGIN = 3.0, 2.0
"""The same in units of what the model's own logits differ by between two ways to compute them (`Rounding`)."""
MAX_OWN = 0.025
"""Largest mean difference of a model's own logits that is held for rounding."""
MAX_OWN_LARGEST = 0.1
"""The same of one logit."""
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


@dataclass(frozen=True)
class Rounding:
    """What rounding in half precision does to the logits of one model, relative to their range.

    Deep models with trained weights amplify it to several times the resolution of their type.

    Attributes:
        mean: largest mean difference of a token's logits.
        largest: largest difference of one logit.
    """

    mean: float = 0.0
    largest: float = 0.0

    @classmethod
    def between(cls, first: Tensor, second: Tensor) -> Rounding:
        """Of two computations [..., V] of the same logits by the model; nothing where they differ by more."""
        difference = relative_difference(first, second)
        mean = float(difference.mean(-1).max())
        if not mean <= MAX_OWN:
            return cls()
        return cls(mean, min(float(difference.max()), MAX_OWN_LARGEST))


def equal_logits(
    expected: Tensor, found: Tensor, dtype: torch.dtype, own_rounding: Callable[[], Rounding] | None = None
) -> bool:
    """Whether logits [..., V] are equal up to rounding. In half precision the best of two near-ties may differ.

    Args:
        expected: logits.
        found: logits.
        dtype: in which they were computed.
        own_rounding: measures what rounding does to this model, where more than that of a shallow one is found; None
            for nothing more.
    """
    difference = relative_difference(expected, found)
    if bool(difference.isnan().any()):
        return bool((expected.isnan() == found.isnan()).all())
    if dtype not in HALF_TYPES:
        return bool((difference <= TOLERANCE).all())
    value_range = expected.amax(-1) - expected.masked_fill(expected < MASKED, torch.inf).amin(-1)
    top = expected.topk(2, dim=-1).values
    margins = ((top[..., 0] - top[..., 1]) / value_range)[expected.argmax(-1) != found.argmax(-1)]
    mean, margin = float(difference.mean(-1).max()), float(margins.max()) if margins.numel() else 0.0
    resolution = torch.finfo(dtype).eps
    if mean <= HALF_MEAN * resolution and margin <= HALF_MARGIN * resolution:
        return True
    own = Rounding() if own_rounding is None else own_rounding()
    return mean <= max(HALF_MEAN * resolution, OWN_MEAN * own.mean) and margin <= max(
        HALF_MARGIN * resolution, OWN_MARGIN * own.largest
    )
