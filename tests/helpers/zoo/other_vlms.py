"""Vision-language models with query tokens, image tokens of a vocabulary, or other connectors."""

from __future__ import annotations

from zoo.base import Family

ROWS: tuple[Family, ...] = ()
