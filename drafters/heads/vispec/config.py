"""Shape of a ViSpec head."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.drafters.heads.eagle.config import EagleConfig


@dataclass(frozen=True)
class VispecConfig(EagleConfig):
    """Shape of a `VispecHead`.

    Attributes:
        num_queries: Q, learned queries of the visual adaptor.
    """

    num_queries: int = 2
