"""`MTPDrafter`: drafts with the head that the target's checkpoint brings along.

One layer drafts as many tokens as pay: it is repeated on its own output, by measured costs and running acceptance
(`DepthController`). After every round it reads the accepted tokens again with the target's hidden states, as all heads
here do (`HeadDrafter`). A healthy head has its first token accepted in 60 to 90 of 100 rounds; far fewer mean that
something about it is not as it was trained, of which one warning is given.

Where sources disagree on a switch, both of its values are tried for `TRIAL_ROUNDS` rounds, and the better one stays.
"""

from __future__ import annotations

import copy
import logging
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mmspec.drafters.eagle.base import HeadDrafter
from mmspec.drafters.eagle.expand import AutoregressiveExpander, expand_levels
from mmspec.drafters.eagle.state import DraftState
from mmspec.drafters.eagle.visual_inputs import DraftInputs
from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.mtp.switches import Switches
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import OwnHead, Prompt, VerifyResult

logger = logging.getLogger("mmspec")

MIN_ACCEPTANCE, MIN_DRAFTS = 0.3, 100
"""Below this share of accepted first tokens after so many drafts, one warning."""
CHAIN_TOP_K = 1
"""Children of a node where the target scores chains only."""


@dataclass
class FirstTokens:
    """How many first tokens of the drafts were accepted.

    Attributes:
        drafted: rows with a draft.
        accepted: of which the first token was accepted.
        is_reported: whether a warning was given.
    """

    drafted: int = 0
    accepted: int = 0
    is_reported: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstTokens:
        return FirstTokens(self.drafted, self.accepted, self.is_reported)

    def add(self, num_accepted: list[int]) -> float | None:
        """Count the rows of a round. Returns the acceptance, once, when it is known to be low."""
        with self.lock:
            self.drafted += len(num_accepted)
            self.accepted += sum(count > 0 for count in num_accepted)
            if self.is_reported or self.drafted < MIN_DRAFTS or self.accepted >= MIN_ACCEPTANCE * self.drafted:
                return None
            self.is_reported = True
            return self.accepted / self.drafted


class MTPExpander(AutoregressiveExpander):
    """Levels of repetitions of the head; what each carries on is up to the family."""

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`."""
        drafter = self.drafter
        assert isinstance(drafter, MTPDrafter)
        return super().expand(level, inputs_embeds, drafter.carried(parent_hidden))


class MTPDrafter(HeadDrafter):
    """Drafts with an `MTPHead`.

    Attributes:
        switches: of the family on which sources disagree: "carry" and "visual_mode".
        carry: "post" or "pre", see `HeadRule`.
        description: what was found, for `mmspec env --model`.
    """

    head: MTPHead

    def __init__(self, parts: OwnHead, *, max_depth: int = 6, top_k: int | None = None) -> None:
        """
        Args:
            parts: of the head, with its weights.
            max_depth: largest number of tokens of a draft.
            top_k: see `HeadDrafter`; 1 where the target scores chains only.
        """
        rule = parts.rule
        super().__init__(
            MTPHead(parts),
            rule.visual_modes[0],
            num_layers=parts.num_layers,
            name="mtp",
            max_depth=max_depth,
            top_k=CHAIN_TOP_K if parts.chains_only else top_k,
        )
        self.switches = Switches({"carry": rule.carries, "visual_mode": rule.visual_modes})
        self.carry = rule.carries[0]
        self.description = parts.description
        self.records_drafts = parts.is_static
        self._first_tokens = FirstTokens()

    def replicate(self) -> MTPDrafter:
        """See `mmspec.interfaces.ReplicableDrafter`: the weights are shared."""
        twin = copy.copy(self)
        memo = {id(self.head): self.head}
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    @property
    def label(self) -> str:
        """The name in `Stats.drafter`, with the values of switches once their trials are over."""
        names = [name for name, values in self.switches.values.items() if len(values) > 1]
        decided = [f"{name}={self.switches.value(name)}" for name in names if self.switches.is_decided(name)]
        return f"{self.name} ({', '.join(decided)})" if decided else self.name

    @property
    def settings(self) -> tuple[str, ...]:
        """See `HeadDrafter`."""
        return (self.visual_mode, self.carry)

    def begin(self, prompt: Prompt) -> DraftState:
        """See `HeadDrafter.begin`; chooses the values of the switches for this call."""
        applicable = ["carry", "visual_mode"] if bool(prompt.visual_mask.any()) else ["carry"]
        trial = self.switches.next_trial(applicable)
        tried = dict((trial,)) if trial is not None else {}
        self.carry = tried.get("carry", self.switches.value("carry"))
        self.visual_mode = tried.get("visual_mode", self.switches.value("visual_mode"))
        state = super().begin(prompt)
        state.trial = trial
        return state

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """Repeat the head on its own output, the `top_k` most likely nodes of each level."""
        top_k = min(self.top_k_on(state.last_hidden.device), state.logit_bias.shape[0])
        return expand_levels(state, MTPExpander(self, state, top_k), top_k, max_nodes=max_nodes, num_levels=num_levels)

    def carried(self, states: Tensor) -> Tensor:
        """[..., D] outputs of the head -> what the next draft token reads in place of the target's hidden state."""
        carried: Tensor = self.head.output_norm(states) if self.carry == "post" else states
        return carried

    def prompt_inputs(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """See `HeadDrafter`; families whose first row reads no embedding get zeros there."""
        if self.head.rule.zeroes_first and inputs.position_ids is not None:
            is_first = (inputs.position_ids == 0)[..., None]
            zeroed = inputs.next_embeds.masked_fill(is_first, 0)
            inputs = replace(inputs, next_embeds=zeroed, visual_mask=inputs.visual_mask & ~is_first[..., 0])
        return super().prompt_inputs(state, inputs)

    def _record_round(self, state: DraftState, result: VerifyResult) -> list[int]:
        """See `HeadDrafter`; counts the acceptance, and what the switches on trial bring."""
        has_draft = state.num_levels > 0 and result.tree.num_nodes > 1
        counts = super()._record_round(state, result)
        num_accepted = [count - 1 for count in counts if count] if has_draft else []
        if state.trial is not None:
            self.switches.record(state.trial, num_accepted)
        acceptance = self._first_tokens.add(num_accepted)
        if acceptance is not None:
            self._warn(acceptance)
        return counts

    def _warn(self, acceptance: float) -> None:
        logger.warning(
            "mmspec: the checkpoint's head has %.0f%% of its first tokens accepted, a healthy one 60 to 90%%. Likely "
            "the target's weights were tuned or merged after its head was trained, or its input differs from training. "
            "It drafts less now; drafter='hybrid' needs no head",
            100 * acceptance,
        )


__all__ = ["FirstTokens", "MTPDrafter", "MTPExpander"]
