"""`hybrid`: the union of prompt lookup and token recycling under one node budget."""

from __future__ import annotations

from mmspec.drafters.ngram.base import BestFirstDrafter
from mmspec.drafters.ngram.lookup import PromptLookup
from mmspec.drafters.ngram.recycling import SuccessorTable


def hybrid(table: SuccessorTable | None = None) -> BestFirstDrafter:
    """The drafter over both sources.

    Args:
        table: a table that was loaded or is shared; None for an empty one.
    """
    return BestFirstDrafter("hybrid", [PromptLookup(), SuccessorTable() if table is None else table])
