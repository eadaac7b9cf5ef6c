"""`MTPDrafter`: drafts with the head that the target's checkpoint brings along.

One layer drafts as many tokens as pay: it is repeated on its own output, by measured costs and running acceptance
(`DepthController`). After every round it reads the accepted tokens again with the target's hidden states, as all heads
here do (`HeadDrafter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from mmspec.drafters.heads.base.expand import AutoregressiveExpander, expand_levels
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.base.visual_inputs import DraftInputs
from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.mtp.switched import SwitchedDrafter
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import OwnHead, Prompt

CHAIN_TOP_K = 1
"""Children of a node where the target scores chains only."""


class MTPExpander(AutoregressiveExpander):
    """Levels of repetitions of the head; what each carries on is up to the family."""

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        drafter = self.drafter
        assert isinstance(drafter, MTPDrafter)
        return super().expand(level, inputs_embeds, drafter.carried(parent_hidden))


class MTPDrafter(SwitchedDrafter):
    """Drafts with an `MTPHead`.

    Attributes:
        carry: "post" or "pre", see `HeadRule`.
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
            {"carry": rule.carries, "visual_mode": rule.visual_modes},
            parts.description,
            num_layers=parts.num_layers,
            name="mtp",
            max_depth=max_depth,
            top_k=CHAIN_TOP_K if parts.chains_only else top_k,
        )
        self.carry = rule.carries[0]

    @property
    def settings(self) -> tuple[str, ...]:
        return (self.visual_mode, self.carry)

    def apply(self, values: Mapping[str, str]) -> None:
        self.carry, self.visual_mode = values["carry"], values["visual_mode"]

    def applicable(self, prompt: Prompt) -> list[str]:
        """See `SwitchedDrafter`: in text all visual modes are one."""
        return ["carry", "visual_mode"] if bool(prompt.visual_mask.any()) else ["carry"]

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
