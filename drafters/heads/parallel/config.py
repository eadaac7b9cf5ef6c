"""Shape of a ParallelSpec head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.eagle.config import EagleConfig


@dataclass(frozen=True)
class ParallelConfig(EagleConfig):
    """Shape of a `ParallelHead`.

    Attributes:
        block_ffn_size: intermediate size of the `TokenCorrection`; 0: none.
    """

    block_ffn_size: int = 0
