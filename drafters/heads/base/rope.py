"""Frequencies of a head's rotary embedding, and their scalings for long texts as transformers defines them.

Linear, Llama 3.1 ("llama3"), YaRN (arXiv 2309.00071), and rotations of the first part of a head only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> tuple[Tensor, float]:
    """Angles per position, and the factor of cosines and sines.

    Args:
        head_dim: d.
        rotary_dim: dimensions that are rotated; the others have frequency 0. They are the first of each half.
        theta: base.
        scaling: `rope_type`, a key of `SCALINGS`, and its settings; None for none.
        device: of the result.

    Returns:
        [d / 2] float32, and the factor.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    frequencies, factor = theta**-exponents, 1.0
    if scaling is not None:
        frequencies, factor = SCALINGS[scaling["rope_type"]](frequencies, rotary_dim, theta, scaling)
    if rotary_dim < head_dim:
        frequencies = torch.nn.functional.pad(frequencies, (0, (head_dim - rotary_dim) // 2))
    return frequencies, factor


def _linear(frequencies: Tensor, dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Long waves are slowed down, short ones stay, those between are mixed."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling["factor"]), 1.0


def _yarn(frequencies: Tensor, dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As "llama3" with a linear ramp over the dimensions, and a factor that sharpens the attention."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose wave turns that often within the original length."""
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    slowed = ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / scaling["factor"]), _yarn_factor(scaling)


def _proportional(frequencies: Tensor, dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """The first share of the frequencies; the other dimensions are not rotated (Gemma 4)."""
    number = int(scaling["partial_rotary_factor"] * dim // 2)
    is_turned = torch.arange(dim // 2, device=frequencies.device) < number
    return frequencies * is_turned / scaling.get("factor", 1.0), 1.0


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * scale * math.log(scaling["factor"]) + 1.0

    scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


SCALINGS: dict[str, Callable[[Tensor, int, float, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
"""`rope_type` -> (frequencies, dimensions, theta, settings) -> frequencies and factor."""
REQUIRED_SETTINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}
OPTIONAL_SETTINGS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Further numbers, most of them of "yarn"."""
