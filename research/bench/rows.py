"""Rows of `research.bench --json` and of the studies: one dictionary per result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

ResultRow: TypeAlias = dict[str, Any]
"""One result: numbers, texts, lists of them and the run, by key; JSON can represent it."""


def num_drafter_tokens(row: Mapping[str, Any]) -> float:
    """Visual tokens of a row that the drafter sees: those after compression, or all."""
    return float(row["num_visual_tokens"] if row["num_compressed_tokens"] is None else row["num_compressed_tokens"])
