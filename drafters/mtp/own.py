"""`OwnDrafter`: what the drafters that come with a target share: a reduced LM head, and a look at their acceptance.

A healthy head has its first token accepted in 60 to 90 of 100 rounds; far fewer mean that something about it is not as
it was trained, of which one warning is given.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.mtp.vocabulary import FrequentIds
from mmspec.forks import Locked
from mmspec.interfaces import Prompt, VerifyResult

logger = logging.getLogger("mmspec")

MIN_ACCEPTANCE, MIN_DRAFTS = 0.3, 100
"""Below this share of accepted first tokens after so many drafts, one warning."""


class FirstTokens(Locked):
    """How many first tokens of the drafts were accepted.

    Attributes:
        drafted: rows with a draft.
        accepted: of which the first token was accepted.
        is_reported: whether a warning was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drafted = self.accepted = 0
        self.is_reported = False

    def add(self, num_accepted: list[int]) -> float | None:
        """Count the rows of a round. Returns the acceptance, once, when it is known to be low."""
        with self.lock:
            self.drafted += len(num_accepted)
            self.accepted += sum(count > 0 for count in num_accepted)
            if self.is_reported or self.drafted < MIN_DRAFTS or self.accepted >= MIN_ACCEPTANCE * self.drafted:
                return None
            self.is_reported = True
            return self.accepted / self.drafted


class OwnDrafter(HeadDrafter):
    """A `HeadDrafter` of a head that comes with the target.

    Attributes:
        noun: what drafts, in a warning.
        description: what was found, for `mmspec env --model`.
        frequent_ids: chooses the ids of a reduced LM head, call by call; None for all ids, or those of `draft_ids`.
    """

    noun: ClassVar[str]

    def __init__(
        self,
        head: DraftHead,
        visual_mode: str,
        description: str,
        frequent_ids: FrequentIds | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            head: the head.
            visual_mode: see `HeadDrafter`.
            description: see the attributes.
            frequent_ids: see the attributes.
            options: of `HeadDrafter`.
        """
        super().__init__(head, visual_mode, **options)
        self.frequent_ids = frequent_ids
        self.description = description
        self._first_tokens = FirstTokens()

    def replicate(self) -> Self:
        """See `Drafter.replicate`: the weights are shared."""
        twin = copy.copy(self)
        memo = {id(self.head): self.head}
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def begin(self, prompt: Prompt) -> DraftState:
        """See `HeadDrafter.begin`; chooses the ids of a reduced LM head for this call."""
        if self.frequent_ids is not None:
            is_text = prompt.attention_mask & ~prompt.visual_mask
            self.frequent_ids.count(prompt.input_ids[is_text.to(prompt.input_ids.device)].tolist())
            self.draft_ids = self.frequent_ids.choose(prompt.vocab_size)
        return super().begin(prompt)

    def observe(self, state: DraftState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """See `HeadDrafter`; counts the first token, which no round has emitted."""
        if self.frequent_ids is not None and state.first_ids is None:
            self._count(result)
        super().observe(state, result, hidden_states)

    def _count(self, result: VerifyResult) -> None:
        if self.frequent_ids is not None:
            self.frequent_ids.count(token for row in result.emitted_ids for token in row)

    def _record_round(self, state: DraftState, result: VerifyResult) -> list[int]:
        """See `HeadDrafter`; counts the acceptance."""
        has_draft = state.num_levels > 0 and result.tree.num_nodes > 1
        counts = super()._record_round(state, result)
        self._count(result)
        num_accepted = [count - 1 for count in counts if count] if has_draft else []
        if (acceptance := self._first_tokens.add(num_accepted)) is not None:
            self._warn(acceptance)
        return counts

    def _warn(self, acceptance: float) -> None:
        logger.warning(
            "mmspec: the %s has %.0f%% of its first tokens accepted, a healthy one 60 to 90%%. Likely the target's "
            "weights were tuned or merged after its training, it is that of another checkpoint, or it reads another "
            "norm or visual input than in training. It drafts less now; drafter='hybrid' needs none",
            self.noun,
            100 * acceptance,
        )
