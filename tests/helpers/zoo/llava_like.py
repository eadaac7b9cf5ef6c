"""Model types with tiles and grids of any kind and 1-D positions, as LLaVA."""

from __future__ import annotations

from zoo.base import Family

ROWS: tuple[Family, ...] = ()
