"""Shape of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.eagle.config import EagleConfig


@dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Shape of an `Eagle3Head`.

    Attributes:
        norm_before_residual: whether the residual is the normalised hidden state.
        norm_before_fc: whether the hidden states are normalised before `fc`, all as one vector.
        fc_norm: whether each of them is (EAGLE-3.1).
        norm_output: whether the state that is carried on is the layer's output after the norm (EAGLE-3.1).
        target_hidden_size: size of the hidden states that `fc` reads, if it is not D; 0 if it is.
        num_hidden_layers: decoder layers; those after the first read the output of the one below alone.
        sliding_windows: positions that each layer sees, its own included; 0 for all; empty for no windows.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: int = 0
    num_hidden_layers: int = 1
    sliding_windows: tuple[int, ...] = ()

    @property
    def is_layered(self) -> bool:
        """Whether it has several layers, or windows."""
        return self.num_hidden_layers > 1 or any(self.sliding_windows)
