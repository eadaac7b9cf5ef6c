"""Weights of 8 and 4 bits: how close they are, and their products, to the bit."""

from __future__ import annotations

import pytest
import torch
from dequantised import dequantise
from torch import Tensor

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, load_kernel
from mmspec.cpu.quantise import quantise
from mmspec.cpu.weights import GROUP, QuantisedWeight

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
SHAPES = [(1, 1), (3, 7), (5, 16), (37, 100), (64, 384), (30, 1029), (18, 1536)]


@pytest.fixture(params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(matrix: Tensor) -> Tensor:
    """[rows, groups, 32], filled with zeros."""
    rows, cols = matrix.shape
    wide = matrix.new_zeros(rows, -(-cols // GROUP) * GROUP)
    wide[:, :cols] = matrix
    return wide.view(rows, -1, GROUP)


def reference(weight: QuantisedWeight, rows: Tensor) -> Tensor:
    """The product as the kernel defines it: whole numbers within a group, groups in ascending order in float32."""
    inputs = grouped(rows.float())
    largest = inputs.abs().amax(-1)
    range_ = torch.full_like(largest, 127)  # a number over a tensor is its reciprocal times the number in torch
    inverse = torch.where(largest > 0, range_ / largest, torch.zeros(()))
    whole_inputs, scales = (inputs * inverse[..., None]).round().double(), largest / range_
    tiles = weight.scales.float().view(-1, inputs.shape[1], 16).transpose(1, 2)
    weight_scales = tiles.reshape(-1, inputs.shape[1])[: weight.rows]
    divisor = torch.where(weight_scales == 0, torch.ones(()), weight_scales)
    whole_weights = (grouped(dequantise(weight)) / divisor[..., None]).round().double()
    sums = torch.einsum("rgk,ngk->grn", whole_inputs, whole_weights)
    total = torch.zeros(len(rows), weight.rows)
    for group, part in enumerate(sums):
        factor = scales[:, None, group] * weight_scales[None, :, group]
        total = (part * factor.double() + total.double()).float()  # one rounding, as of a fused operation
    return total


def product(kernel: CKernel, weight: QuantisedWeight, bias: Tensor | None, rows: Tensor) -> Tensor:
    got = kernel.linear(weight, bias, rows)
    assert got is not None
    return got


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products_have_the_bits_of_the_reference_with_any_number_of_rows(
    kernel: CKernel, bits: int, out_features: int, in_features: int
) -> None:
    weight = quantise(kernel, normal(out_features, in_features), bits)
    bias, rows = normal(out_features, seed=1), normal(MAX_C_ROWS, in_features, seed=2)
    want = reference(weight, rows) + bias
    for num_rows in (*range(1, 10), 15, MAX_C_ROWS):
        assert torch.equal(product(kernel, weight, bias, rows[:num_rows]), want[:num_rows]), num_rows
    for dtype in (torch.bfloat16, torch.float16):
        narrow, narrow_bias = rows[:5].to(dtype), bias.to(dtype)
        got = product(kernel, weight, narrow_bias, narrow)
        assert got.dtype is dtype
        assert torch.equal(got, (reference(weight, narrow) + narrow_bias.float()).to(dtype))


def test_products_do_not_depend_on_the_number_of_threads(kernel: CKernel, bits: int) -> None:
    before, weight, rows = torch.get_num_threads(), normal(1000, 384), normal(5, 384, seed=1)
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            quantised = quantise(kernel, weight, bits)
            results += [(quantised.data, quantised.scales, product(kernel, quantised, None, rows)) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def test_numbers_that_are_not_finite_are_not_hidden(kernel: CKernel, bits: int) -> None:
    weight, rows = normal(20, 100), normal(4, 100, seed=1)
    weight[3, 40], weight[17, 99], rows[1, 5], rows[2, 99] = torch.nan, torch.inf, torch.inf, torch.nan
    got = product(kernel, quantise(kernel, weight, bits), None, rows)
    want = torch.zeros(4, 20, dtype=torch.bool)
    want[1:3], want[:, [3, 17]] = True, True
    assert torch.equal(got.isnan(), want) and got[~want].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_small(bits: int, dtype: torch.dtype) -> None:
    """Smaller than with the scale that makes the largest number the end of the range, as in llama.cpp's Q4_0."""
    kernel, weight = load_kernel(), normal(64, 200).to(dtype)
    assert kernel is not None
    got = dequantise(quantise(kernel, weight, bits))
    parts = grouped(weight.float())
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    top = 8 if bits == 4 else 127
    scale = extreme / -top
    naive = (parts / scale).round().clamp(-top, top - 1 if bits == 4 else top) * scale
    naive_error = (naive - parts).square().sum()
    assert (got - weight.float()).square().sum() <= (0.92 if bits == 4 else 1.1) * naive_error
    assert (got - weight.float()).abs().max() <= weight.abs().max() / (6 if bits == 4 else 120)


def test_columns_with_larger_inputs_have_smaller_errors(bits: int) -> None:
    kernel, weight = load_kernel(), normal(256, 320)
    assert kernel is not None
    mean_squares = torch.linspace(-4, 4, 320)[torch.randperm(320, generator=torch.Generator().manual_seed(3))].exp()
    errors = [
        (dequantise(quantise(kernel, weight, bits, costs)) - weight).square().mul(mean_squares).sum()
        for costs in (mean_squares, mean_squares * 1e30, None)
    ]
    assert errors[0] < (0.95 if bits == 4 else 1.0) * errors[2] and torch.isclose(*errors[:2], rtol=1e-3)


def test_special_groups(bits: int) -> None:
    """Zeros, one number, numbers so small that a scale has no room, columns that cost nothing."""
    kernel = load_kernel()
    assert kernel is not None
    weight = torch.zeros(4, 64)
    weight[1, 5], weight[2] = -3.0, 1e-38
    got = dequantise(quantise(kernel, weight, bits))
    assert torch.allclose(got, weight, rtol=0.01, atol=1e-30)
    free = dequantise(quantise(kernel, normal(4, 64), bits, torch.zeros(64)))
    assert (free - normal(4, 64)).abs().max() <= normal(4, 64).abs().max() / 7


def test_arguments_that_are_refused() -> None:
    kernel, weight = load_kernel(), normal(8, 64)
    assert kernel is not None
    with pytest.raises(ValueError, match=r"bits must be one of \[4, 8\]; got 3"):
        quantise(kernel, weight, 3)
    for other in (weight.double(), weight.t(), weight[0], weight[:0], weight.to("meta")):
        with pytest.raises(ValueError, match="weight must be a contiguous matrix"):
            quantise(kernel, other, 4)
    for costs, message in ((torch.ones(8), r"shape \[64\]"), (-torch.ones(64), "finite"), (weight[0] / 0, "finite")):
        with pytest.raises(ValueError, match=f"mean_squares must .*{message}"):
            quantise(kernel, weight, 8, costs)
    for rows in (normal(2, 63), normal(MAX_C_ROWS + 1, 64)):
        assert kernel.linear(quantise(kernel, weight, 4), None, rows) is None
