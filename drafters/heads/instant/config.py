"""Shape of an instant head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.base.config import HeadConfig


@dataclass(frozen=True)
class InstantConfig(HeadConfig):
    """Shape of an `InstantHead`.

    Attributes:
        block_ffn_size: number of features behind SiLU; `intermediate_size` is that of linear ones (0: the 2 D inputs).
        markov_rank: rank of the `MarkovHead`; 0: none.
    """

    block_ffn_size: int = 0
    markov_rank: int = 0
