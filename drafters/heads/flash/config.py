"""Shape of a FLASH head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.eagle.config import EagleConfig


@dataclass(frozen=True)
class FlashConfig(EagleConfig):
    """Shape of a `FlashHead`.

    Attributes:
        block_ffn_size: intermediate size of the block's feed-forward.
        markov_rank: rank of the correction by the token before (`MarkovHead`); 0: none.
    """

    block_ffn_size: int = 0
    markov_rank: int = 0
