"""Whether two computations of the same logits agree up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
        is_comparable: [...] bool, the tokens for which that holds; None for all. The others differ by more than can
            be held for rounding whatever computes them.
    """

    mean: float = 0.0
    largest: float = 0.0
    is_comparable: Tensor | None = None

    @classmethod
    def between(cls, first: Tensor, second: Tensor, share: float = 1.0) -> Rounding:
        """Of two computations [..., V] of the same logits by the model.

        Nothing where less than `share` of the tokens agree as far as is held for rounding.
        """
        difference = relative_difference(first, second)
        is_comparable = difference.mean(-1) <= MAX_OWN
        if not float(is_comparable.float().mean()) >= share:
            return cls()
        difference = difference[is_comparable]
        return cls(
            float(difference.mean(-1).max()),
            min(float(difference.max()), MAX_OWN_LARGEST),
            None if bool(is_comparable.all()) else is_comparable,
        )

    @classmethod
    def typical(cls, first: Tensor, second: Tensor) -> Rounding:
        """The same of a token in the middle; nothing if that is more than is held for rounding."""
        difference = relative_difference(first, second).flatten(0, -2)
        mean, largest = float(difference.mean(-1).median()), float(difference.amax(-1).median())
        return cls(mean, min(largest, MAX_OWN_LARGEST)) if mean <= MAX_OWN else cls()

    def widened(self, other: Rounding) -> Rounding:
        """At least what `other` is of some of the same tokens."""
        return replace(self, mean=max(self.mean, other.mean), largest=max(self.largest, other.largest))


def equal_logits(
    expected: Tensor,
    found: Tensor,
    dtype: torch.dtype,
    own_rounding: Callable[[], Rounding] | None = None,
    share: float = 1.0,
) -> bool:
    """Whether logits [..., V] are equal up to rounding. In half precision the best of two near-ties may differ.

    Args:
        expected: logits.
        found: logits.
        dtype: in which they were computed.
        own_rounding: measures what rounding does to this model, where more than that of a shallow one is found; None
            for nothing more.
        share: of the tokens that must agree in half precision.
    """
    for special in (torch.isnan, torch.isposinf):
        here, there = special(expected), special(found)
        if not torch.equal(here, there):
            return False
        if bool(here.any()):  # what else the token has is compared
            expected, found = (logits.masked_fill(here, 2 * MASKED) for logits in (expected, found))
    difference = relative_difference(expected, found)
    if dtype not in HALF_TYPES:
        return bool((difference <= TOLERANCE).all())
    value_range = expected.amax(-1) - expected.masked_fill(expected < MASKED, torch.inf).amin(-1)
    top = expected.topk(2, dim=-1).values
    margins = (top[..., 0] - top[..., 1]) / value_range
    margins = margins.masked_fill(expected.argmax(-1) == found.argmax(-1), 0.0)
    means, resolution = difference.mean(-1), torch.finfo(dtype).eps
    if _share((means <= HALF_MEAN * resolution) & (margins <= HALF_MARGIN * resolution)) >= share:
        return True
    own = Rounding() if own_rounding is None else own_rounding()
    agree = means <= max(HALF_MEAN * resolution, OWN_MEAN * own.mean)
    agree &= margins <= max(HALF_MARGIN * resolution, OWN_MARGIN * own.largest)
    return _share(agree if own.is_comparable is None else agree[own.is_comparable]) >= share


def _share(agree: Tensor) -> float:
    """Share of what is True; 1 of nothing."""
    return float(agree.double().mean()) if agree.numel() else 1.0
