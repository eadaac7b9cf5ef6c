"""Model types with a mask per layer type, bidirectional images, shared keys and values, or cross-attention."""

from __future__ import annotations

from zoo.base import Family

ROWS: tuple[Family, ...] = ()
