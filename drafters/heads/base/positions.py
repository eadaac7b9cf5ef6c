"""Positions of a head on the target's axes (M-RoPE, Qwen2-VL, arXiv 2409.12191): time, height and width of a patch.

In text the three agree, so that only the positions of a prompt differ from those of an ordinary rotary embedding. Two
layouts exist: one range of frequencies per axis (Qwen2.5-VL), or the axes in turn (Qwen3-VL).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import Prompt

NUM_AXES = 3


def mrope_axes(section: tuple[int, ...], interleaved: bool, num_frequencies: int, device: torch.device) -> Tensor:
    """[d / 2] int64, the position axis (0 time, 1 height, 2 width) that each rotary frequency follows.

    Args:
        section: frequencies of each axis.
        interleaved: whether the axes take turns. Height and width then have every third frequency of the first
            `3 * size`, from the second and the third one on, and time has the others.
        num_frequencies: d / 2; those past the section are of dimensions that are not rotated.
        device: of the result.
    """
    sizes = torch.tensor(section, device=device)
    index = torch.arange(num_frequencies, device=device)
    if interleaved:
        axes = index % NUM_AXES
        return torch.where(index < NUM_AXES * sizes[axes], axes, torch.zeros_like(axes))
    return torch.bucketize(index, sizes.cumsum(0), right=True).clamp(max=NUM_AXES - 1)


def prompt_axes(prompt: Prompt, order: Tensor) -> tuple[Tensor, Tensor]:
    """The target's position ids of a prompt on three axes, and of what follows it on one.

    Args:
        prompt: with one axis, with three, or with the number of the position before those three.
        order: [B, n] int64, the columns to take of the last n positions, in this order.

    Returns:
        [3, B, n] int64, and [B] int64: behind the last position on every axis, where the target counts on.
    """
    position_ids = prompt.position_ids[..., -order.shape[1] :].to(order.device)
    if position_ids.dim() == 2:
        position_ids = position_ids[None]
    axes = position_ids[-NUM_AXES:] if len(position_ids) >= NUM_AXES else position_ids[-1:]
    axes = axes.expand(NUM_AXES, *order.shape)
    return torch.stack([gather_rows(axis, order) for axis in axes]), axes[..., -1].amax(0) + 1
