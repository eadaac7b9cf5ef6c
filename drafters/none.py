"""Drafter `none`: plain decoding through the speculative loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import Drafter, Prompt, VerifyResult


class NoDrafter(Drafter):
    """Proposes the root only."""

    name = "none"

    def begin(self, prompt: Prompt) -> Any:
        """No state."""
        return None

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """Node 0 of every row."""
        return root_only(len(active))

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Nothing to update."""
