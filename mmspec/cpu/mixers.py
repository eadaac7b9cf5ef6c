"""What layers with a state compute between their projections, over whole prompts, in C (mixer_prompts.h): a gated delta
rule, a state space and a short convolution. Independent of models.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.structs import fields_of
from mmspec.cpu.weights import FLOAT_TYPES

MOST_KEYS = 256
"""`MOST_KEYS` of decoder_types.h."""
MOST_TAPS = 16
"""`MOST_TAPS` of decoder_types.h."""


class DeltaPromptStruct(ctypes.Structure):
    """`delta_prompt` of mixer_prompts.h."""

    _fields_ = fields_of("delta_prompt")


class ConvPromptStruct(ctypes.Structure):
    """`conv_prompt` of mixer_prompts.h."""

    _fields_ = fields_of("conv_prompt")


def delta_rule(
    kernel: CKernel, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """A gated delta rule: each token lets the state decay, writes what differs from the value that its key finds there,
    and reads by its query. Queries and keys are normalised, queries divided by sqrt(D) besides.

    Args:
        kernel: the C kernel.
        query, key: [B, L, H, D] in float32, bfloat16 or float16; D at most 256.
        value: [B, L, G, V] of the same dtype; heads G/H h to G/H (h + 1) - 1 have query and key h.
        g: [B, L, G] logarithm of the decay.
        beta: [B, L, G] the part that is written.
        initial_state: [B, G, D, V], or None for zeros.

    Returns:
        What is read [B, L, G, V] of that dtype, contiguous, and the last state, float32, a tensor of its own. None if
        these tensors are not for this kernel, or if a number of that state is not finite.
    """
    return _read(kernel, query, key, value, g, beta, initial_state)


def state_space(
    kernel: CKernel,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """A state space (Mamba-2): each token lets the state decay, adds its x times B times the time step, and reads by C.

    Args:
        kernel: the C kernel.
        x: [B, L, G, V] in float32, bfloat16 or float16.
        dt: [B, L, G] time steps.
        decay: [B, L, G] logarithm of the decay.
        b, c: [B, L, H, D] of the same dtype as x; D at most 256. Heads G/H h to G/H (h + 1) - 1 have those of group h.
        skip: [G] factors of x that are added to what is read.
        initial_state: [B, G, V, D], or None for zeros.

    Returns:
        What is read [B, L, G, V] and the last state, float32; None as `delta_rule`.
    """
    return _read(kernel, c, b, x, decay, dt, initial_state, skip)


def _read(
    kernel: CKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `delta_rule`; with `skip` of a state space."""
    tensors = [query, key, value, g, beta, *(one for one in (initial_state, skip) if one is not None)]
    if not _are_plain(tensors) or not query.dtype is key.dtype is value.dtype or query.dtype not in FLOAT_TYPES:
        return None
    if not query.dim() == value.dim() == 4 or query.shape != key.shape or value.shape[:2] != query.shape[:2]:
        return None
    (batch, length, key_heads, key_size), (value_heads, value_size) = query.shape, value.shape[2:]
    state_shape = (batch, value_heads, *((key_size, value_size) if skip is None else (value_size, key_size)))
    if not value.numel() or not query.numel() or value_heads % key_heads or key_size > MOST_KEYS:
        return None
    if not g.shape == beta.shape == value.shape[:3] or (
        initial_state is not None and initial_state.shape != state_shape
    ):
        return None
    if skip is not None and skip.shape != (value_heads,):
        return None
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    decay, write = g.float().contiguous(), beta.float().contiguous()
    factors = None if skip is None else skip.detach().float().contiguous()
    out = torch.empty(value.shape, dtype=query.dtype if skip is None else torch.float32, device="cpu")
    state = torch.zeros(state_shape, dtype=torch.float32, device="cpu")
    if initial_state is not None:
        state.copy_(initial_state)
    steps = (ctypes.c_int64 * 9)(*(step for part in (query, key, value) for step in part.stride()[:3]))
    pointers = [part.data_ptr() for part in (query, key, value)]
    numbers = (batch, length, key_heads, value_heads, key_size, value_size, FLOAT_TYPES[query.dtype])
    kernel.delta_prompt(
        DeltaPromptStruct(
            *pointers,
            ctypes.addressof(steps),
            decay.data_ptr(),
            write.data_ptr(),
            None if factors is None else factors.data_ptr(),
            out.data_ptr(),
            state.data_ptr(),
            *numbers,
        )
    )
    return (out, state) if bool(state.isfinite().all()) else None


def convolution(kernel: CKernel, inputs: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool) -> Tensor | None:
    """A causal convolution of each channel, then SiLU if `has_silu`; both are rounded to the dtype.

    Args:
        kernel: the C kernel.
        inputs: [B, C, L] in float32, bfloat16 or float16.
        weight: [C, K] of the same dtype; K at most 16.
        bias: [C] of that dtype, or None.
        has_silu: see above.

    Returns:
        [B, C, L] of that dtype, a transposed [B, L, C]; None if these tensors are not for this kernel.
    """
    tensors = [inputs, weight, *(() if bias is None else (bias,))]
    if (
        not _are_plain(tensors)
        or any(one.dtype is not inputs.dtype for one in tensors)
        or inputs.dtype not in FLOAT_TYPES
    ):
        return None
    if inputs.dim() != 3 or weight.dim() != 2 or not inputs.numel() or not 1 <= weight.shape[1] <= MOST_TAPS:
        return None
    (batch, channels, length), size = inputs.shape, weight.shape[1]
    if len(weight) != channels or (bias is not None and bias.shape != (channels,)):
        return None
    rows = inputs.transpose(1, 2)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    taps = weight.t().float().contiguous()
    offsets = None if bias is None else bias.float().contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    kernel.conv_prompt(
        ConvPromptStruct(
            rows.data_ptr(),
            *rows.stride()[:2],
            taps.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            out.data_ptr(),
            batch,
            length,
            channels,
            size,
            has_silu,
            FLOAT_TYPES[rows.dtype],
        )
    )
    return out.transpose(1, 2)


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether all are on the CPU, and no subclasses (of a tracer, or without memory)."""
    return all(type(one) in (Tensor, nn.Parameter) and one.is_cpu and one.layout is torch.strided for one in tensors)
