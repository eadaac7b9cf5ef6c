"""Several sources under one budget: what the text repeats, and what the target said after the same token before."""

from __future__ import annotations

from mmspec.drafters.ngram.base import BestFirstDrafter
from mmspec.drafters.ngram.lookup import PromptLookup
from mmspec.drafters.ngram.recycling import SuccessorTable


def hybrid(table: SuccessorTable | None = None) -> BestFirstDrafter:
    """The union of `lookup` and `recycling`; `table` brings a table that was saved or is shared."""
    return BestFirstDrafter("fused", [PromptLookup(), SuccessorTable() if table is None else table])


__all__ = ["hybrid"]
