"""The logits of every node that a drafter expands, with the tokens that lead to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor


@dataclass
class WatchedNodes:
    """What the levels of a draft score.

    Attributes:
        levels: of each call of the expander's `logits` since `restart`, what it returned, [B, W, V], and the path of
            draft tokens to each of the W nodes, by row.
    """

    levels: list[tuple[Tensor, list[list[list[int]]]]] = field(default_factory=list)
    _paths: list[list[list[int]]] = field(default_factory=list)

    def restart(self, num_rows: int = 1) -> None:
        """A draft begins: the next level has the roots alone."""
        self.levels, self._paths = [], [[[]] for _ in range(num_rows)]


def watch_nodes(patch: pytest.MonkeyPatch, expander: type[Any]) -> WatchedNodes:
    """Watch the `embed`, `select_parents` and `logits` of a class of expanders."""
    watch = WatchedNodes()
    embed, select, logits = expander.embed, expander.select_parents, expander.logits

    def watched_embed(self: Any, tokens: Tensor) -> Tensor:
        watch._paths = [
            [[*path, token] for path, token in zip(paths * (len(row) // len(paths)), row, strict=True)]
            for paths, row in zip(watch._paths, tokens.tolist(), strict=True)
        ]
        return embed(self, tokens)  # type: ignore[no-any-return]

    def watched_select(self: Any, parent_index: Tensor) -> None:
        kept = zip(watch._paths, parent_index[..., 0].tolist(), strict=True)
        watch._paths = [[paths[index] for index in row] for paths, row in kept]
        select(self, parent_index)

    def watched_logits(self: Any, level: int, hidden: Tensor) -> Tensor:
        found: Tensor = logits(self, level, hidden)
        watch.levels.append((found, [list(row) for row in watch._paths]))
        return found

    for name, replaced in (("embed", watched_embed), ("select_parents", watched_select), ("logits", watched_logits)):
        patch.setattr(expander, name, replaced)
    return watch
