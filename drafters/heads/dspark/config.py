"""Shape of a DSpark head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.base.config import HeadConfig


@dataclass(frozen=True)
class DsparkConfig(HeadConfig):
    """Shape of a `DsparkHead`.

    Attributes:
        num_hidden_layers: decoder layers, one to four.
        markov_rank: rank of the bias by the token before (`BigramHead`); 0: none.
        layer_mixture: whether the hidden states are added with learned weights before `fc`, not concatenated.
        confidence_head: whether the head estimates the acceptance of each position.
        sample_from_anchor: whether the first position of a block predicts a token too; if not, a block has one position
            more than `block_size` (DFlash).
        sliding_windows: positions that each layer sees, its own included; 0 for all; empty for no windows (DFlash).
        causal_layers: whether the positions of a block see no later ones, in each layer (DFlash); empty: no.
    """

    num_hidden_layers: int = 1
    markov_rank: int = 0
    layer_mixture: bool = False
    confidence_head: bool = False
    sample_from_anchor: bool = True
    sliding_windows: tuple[int, ...] = ()
    causal_layers: tuple[bool, ...] = ()
