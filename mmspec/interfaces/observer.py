"""What observers of a call receive: `ObservedRound`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmspec.interfaces.drafter import Prompt
from mmspec.interfaces.target import VerifyResult


@dataclass(frozen=True)
class ObservedRound:
    """One round of a call, or, as the first, its prompt with the first output tokens.

    Attributes:
        prompt: of the call, as drafters see it.
        result: what was scored, accepted and emitted.
        num_proposed: nodes that the drafter proposed, before a size was chosen; None if it was not called.
        state: the drafter's, before it observes the round.
    """

    prompt: Prompt
    result: VerifyResult
    num_proposed: int | None = None
    state: Any = None


Observer = Callable[[ObservedRound], None]
"""Called once a round, before the drafter observes it. An exception ends the call."""
