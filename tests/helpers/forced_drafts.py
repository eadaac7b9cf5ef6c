"""Rounds that draft whatever drafts cost, or that do not, in place of what the chooser of a call plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmspec.economy.chooser import Chooser


def planned(drafts: bool | Callable[[Chooser], bool] = True, levels: int | None = None, last: bool = False) -> Any:
    """In place of `Chooser.plan`: drafts of the first source (or the last one), by all levels or so many."""

    def plan(self: Chooser) -> bool:
        self.source = None
        if not self.sources or not (drafts(self) if callable(drafts) else drafts):
            return False
        self._take_offer()
        self.source = self.sources[-1 if last else 0]
        self.levels = levels or self.source.max_levels
        return True

    return plan


def choose_all(self: Chooser, tree: Any, *args: Any) -> int:
    """In place of `Chooser.choose_size`: the whole tree."""
    return int(tree.num_nodes)


def only_fixed(chooser: Chooser) -> bool:
    """Whether the size of trees is fixed, which drafts in each round."""
    return chooser.fixed_tree_size is not None
