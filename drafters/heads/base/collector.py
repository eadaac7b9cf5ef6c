"""Whole sequences of a call, prompt and output, collected for online learning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.drafters.heads.base.positions import prompt_axes
from mmspec.drafters.heads.base.visual_inputs import prompt_order
from mmspec.drafters.training.batch import TrainBatch
from mmspec.interfaces import Prompt, SharedEmbeddings

MAX_COLLECTED = 4096
"""Positions per row that are collected of a call."""


class SequenceCollector:
    """What a head reads at all positions of a call, and all tokens that the call emitted.

    A call of more positions than `MAX_COLLECTED`, prompt included, has no sequences.

    Attributes:
        tokens: emitted tokens of each row.
    """

    def __init__(self, prompt: Prompt, hidden_states: Tensor, shared_embeddings: SharedEmbeddings) -> None:
        """
        Args:
            prompt: of the call.
            hidden_states: [B, L, D] the target's states after its final norm.
            shared_embeddings: of the target.
        """
        self.tokens: list[list[int]] = [[] for _ in prompt.input_ids]
        self._prompt = prompt
        self._prompt_states = hidden_states
        self._shared_embeddings = shared_embeddings
        self._states: list[list[Tensor]] = [[] for _ in prompt.input_ids]
        self._length = prompt.input_ids.shape[1]

    @property
    def is_too_long(self) -> bool:
        """Whether it has outgrown the limit."""
        return self._length > MAX_COLLECTED

    def add(self, emitted_ids: Sequence[Sequence[int]], hidden_states: Tensor | None) -> None:
        """Record the tokens of a round.

        Args:
            emitted_ids: of each row.
            hidden_states: [B, A, D] the target's state before each of them; None for the first, which follows the
                prompt.
        """
        self._length += max(map(len, emitted_ids))
        if self.is_too_long:
            self._states = [[] for _ in self._states]
            return
        for row, (tokens, emitted) in enumerate(zip(self.tokens, emitted_ids, strict=True)):
            tokens.extend(emitted)
            if hidden_states is not None and len(emitted):
                self._states[row].append(hidden_states[row, : len(emitted)])

    @torch.no_grad()
    def sequences(self) -> list[TrainBatch]:
        """One batch of one sequence for each row with at least two tokens; the state of the last token is zeros."""
        if self.is_too_long:
            return []
        rows = [row for row, tokens in enumerate(self.tokens) if len(tokens) > 1 and self._states[row]]
        return [self._sequence(row) for row in rows]

    def _sequence(self, row: int) -> TrainBatch:
        prompt, mask = self._prompt, self._prompt.attention_mask[row]
        output = torch.tensor(self.tokens[row], device=mask.device)
        ids = torch.cat((prompt.input_ids[row][mask], output))
        states = torch.cat((self._prompt_states[row][mask], *self._states[row]))
        is_response = torch.arange(len(ids), device=mask.device) >= len(ids) - len(output)
        visual_mask = torch.zeros_like(is_response)
        visual_mask[: len(ids) - len(output)] = prompt.visual_mask[row][mask]
        embeds = prompt.hidden_states.get(0)  # heads without a context need none
        if embeds is None:
            merged = states.new_zeros(len(ids), 0)
        else:
            merged = torch.cat((embeds[row][mask], self._shared_embeddings.embed(output).to(embeds.dtype)))
        return TrainBatch(
            input_ids=ids[None],
            attention_mask=torch.ones_like(is_response)[None],
            visual_mask=visual_mask[None],
            response_mask=is_response[None],
            inputs_embeds=merged[None],
            hidden_states=torch.cat((states, states.new_zeros(len(ids) - len(states), states.shape[1])))[None],
            position_ids=self._positions(row, len(ids), len(output)),
        )

    def _positions(self, row: int, length: int, num_output: int) -> Tensor | None:
        """[1, 3, length] the target's position ids of a row, where it counts on several axes."""
        if self._prompt.position_ids.dim() == 2:
            return None
        axes, behind = prompt_axes(self._prompt, prompt_order(self._prompt, self._prompt.input_ids.shape[1]))
        following = (behind[row] + torch.arange(num_output, device=behind.device)).expand(len(axes), -1)
        return torch.cat((axes[:, row, : length - num_output], following), dim=1)[None]
