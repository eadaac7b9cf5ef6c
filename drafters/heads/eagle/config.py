"""Shape of an EAGLE head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.base.config import HeadConfig


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Shape of an `EagleHead`.

    Attributes:
        bias: whether `fc` has a bias.
        input_norm: whether the layer normalises its input (EAGLE's does not).
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        final_norm: whether the layer's output is normalised (NeMo Automodel).
    """

    bias: bool = True
    input_norm: bool = False
    qk_norm: bool = False
    final_norm: bool = False
