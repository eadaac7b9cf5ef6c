"""Drafters and compressors of the user, whose random draws must not change sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.engine.draws import PrivateDraws
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, VerifyResult


def is_builtin(part: object) -> bool:
    """Whether a drafter or compressor is part of mmspec."""
    return type(part).__module__.startswith("mmspec.")


class RngIsolatedDrafter:
    """A user's drafter, which draws from generators of its own, so that it cannot change sampled tokens."""

    def __init__(self, drafter: Drafter, private_draws: PrivateDraws) -> None:
        self.drafter = drafter
        self.private_draws = private_draws
        self.name = drafter.name
        self.requirements = drafter.requirements
        self.vocab_size = drafter.vocab_size

    def begin(self, prompt: Prompt) -> Any:
        """See `mmspec.interfaces.Drafter`."""
        with self.private_draws:
            return self.drafter.begin(prompt)

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """See `mmspec.interfaces.Drafter`."""
        with self.private_draws:
            return self.drafter.propose(state, max_nodes, active)

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """See `mmspec.interfaces.Drafter`."""
        with self.private_draws:
            self.drafter.observe(state, result, hidden_states)
