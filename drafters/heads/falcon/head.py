"""The network of Falcon (arXiv 2412.12639): EAGLE's, whose outputs predict the token k positions ahead."""

from __future__ import annotations

from mmspec.drafters.heads.eagle.config import EagleConfig
from mmspec.drafters.heads.eagle.head import EagleHead


class FalconHead(EagleHead):
    """EAGLE's head; `block_size` is how many positions ahead each of its outputs predicts."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.block_size < 2:
            raise ValueError(f"a Falcon head needs block_size of at least 2; got {config.block_size}.")
