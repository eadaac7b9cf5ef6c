"""What counts as equal logits up to rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmspec.targets.agreement import MAX_OWN, Rounding, equal_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logits() -> Tensor:
    """Of three tokens, whose best one is no near-tie."""
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    return values.scatter(1, torch.tensor([[7], [8], [9]]), 20.0)


def with_value(values: Tensor, token: int, index: int, value: float) -> Tensor:
    values = values.clone()
    values[token, index] = value
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_hides_nothing(dtype: torch.dtype, special: float) -> None:
    plain = logits()
    expected = with_value(plain, 1, 3, special)
    assert equal_logits(expected, expected.clone(), dtype)
    assert not equal_logits(expected, plain, dtype) and not equal_logits(plain, expected, dtype)
    for token in (0, 1):  # another one, and that one
        assert not equal_logits(expected, with_value(expected, token, 20, 60.0), dtype)
    everywhere = torch.full_like(plain, special)
    assert equal_logits(everywhere, everywhere.clone(), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_tokens_that_cannot_be_compared(dtype: torch.dtype) -> None:
    expected, small = logits(), 2 * torch.finfo(dtype).eps
    noise = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).abs() * 25 * small
    moved, wild = expected + noise, expected + noise
    wild[2] = expected[2].flip(0)
    own = Rounding.between(expected, wild, share=0.5)
    assert not equal_logits(expected, moved, dtype) and equal_logits(expected, moved, dtype, lambda: own)
    assert 0 < own.mean <= MAX_OWN and own.is_comparable is not None and own.is_comparable.tolist() == [1, 1, 0]
    assert equal_logits(expected, with_value(moved, 2, 7, 90.0), dtype, lambda: own)
    assert not equal_logits(expected, with_value(moved, 1, 7, 90.0), dtype, lambda: own)
    assert Rounding.between(expected, wild) == Rounding.between(expected, wild, share=0.9) == Rounding()
