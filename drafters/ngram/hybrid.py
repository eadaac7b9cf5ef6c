"""Several sources under one budget: what the text repeats, and what the target said after the same token before."""

from __future__ import annotations

from mmspec.drafters.ngram.base import BestFirst
from mmspec.drafters.ngram.lookup import CopyGuesser
from mmspec.drafters.ngram.recycling import TableGuesser


def fused(table: TableGuesser | None = None) -> BestFirst:
    """The union of `lookup` and `recycling`; `table` brings a table that was saved or is shared."""
    return BestFirst("fused", [CopyGuesser(), TableGuesser() if table is None else table])


__all__ = ["fused"]
