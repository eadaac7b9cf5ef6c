"""`ModelDrafter`: a smaller language model drafts, from the text of the prompt and of the output.

Classic speculative decoding (arXiv 2211.17192) with the verification of this project: the draft model's probabilities
only rank its tokens. It reads no pictures: visual tokens are left out of its prompt, or one placeholder stands for each
run of them. Text-only draft models are known to draft well for vision-language targets (arXiv 2404.08856).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmspec.drafters.model.chain import ChainDrafter, ChainInputs, ChainState
from mmspec.economy.known import Source
from mmspec.interfaces import DrafterRequirements, DraftModelSource, DraftTarget, Prompt

VISUAL = -1
"""Stands for a run of visual tokens."""
UNLIMITED_TOKENS = 1 << 20
"""Stands for `Prompt.max_new_tokens` of None."""


@dataclass
class ModelState(ChainState):
    """State of one call.

    Attributes:
        target: the draft model behind its cache; None before the first draft.
        is_closed: the draft model cannot serve this call.
        cached_ids: ids behind the prompt in the draft model's cache, of each row.
    """

    target: DraftTarget | None = None
    is_closed: bool = False
    cached_ids: list[list[int]] = field(default_factory=list)


class ModelDrafter(ChainDrafter):
    """Drafts with another model that has the target's tokenizer.

    Attributes:
        source: opens the model.
        model: the model itself, whose linear layers run on the CPU's fastest kernels like the target's.
        placeholder_id: id that stands for each run of visual tokens; None leaves them out.
    """

    requirements = DrafterRequirements()

    def __init__(self, source: DraftModelSource, placeholder_id: int | None = None, max_length: int = 6) -> None:
        """
        Args:
            source: opens the model.
            placeholder_id: id that stands for each run of visual tokens; None leaves them out.
            max_length: largest number of tokens of a draft.

        Raises:
            ValueError: the model cannot read `placeholder_id`.
        """
        super().__init__(max_length)
        if placeholder_id is not None and not 0 <= placeholder_id < source.num_embeddings:
            last = source.num_embeddings - 1
            raise ValueError(f"placeholder_id must be an id of the draft model, 0 to {last}; got {placeholder_id}.")
        self.source = source
        self.model = source.model
        self.name = source.name
        self.placeholder_id = placeholder_id

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelDrafter:
        return self.replicate()

    def replicate(self) -> ModelDrafter:
        """See `Drafter.replicate`: the weights are shared."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    # --- hooks of ChainDrafter ----------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ModelState:
        """See `ChainDrafter.begin`. The model reads the prompt before the first draft."""
        state = ModelState(**vars(super().begin(prompt)))
        if prompt.chooser is not None:
            prompt.chooser.sources = [Source(self.name, self.name, *self.prior(state, 0), self.max_length)]
        return state

    def variants(self, state: ChainState) -> Sequence[Hashable]:
        """The one model, once it has read the prompt."""
        assert isinstance(state, ModelState)
        if state.target is None and not state.is_closed:
            self._read_prompt(state)
        return () if state.is_closed else (self.name,)

    def open_chain(self, state: ChainState, variant: Hashable, active: Sequence[bool]) -> ChainInputs:
        """The model, cropped to what it has read of the output and of rejected drafts that agree with it."""
        assert isinstance(state, ModelState) and state.target is not None
        tokens, kept = [], []
        for row, is_active in enumerate(active):
            cached = state.cached_ids[row]
            wanted = self.output_ids(state, row) if is_active else cached
            keep = min(_common_length(cached, wanted), len(wanted) - is_active)
            tokens.append(wanted[keep:])
            kept.append(keep)
        state.target.crop(kept)
        state.cached_ids = [ids[:keep] for ids, keep in zip(state.cached_ids, kept, strict=True)]
        return ChainInputs(state.target, tokens)

    def close_chain(self, state: ChainState, chain: ChainInputs) -> None:
        """Remember what is in the cache; the draft's part only where reading it on the host costs nothing."""
        assert isinstance(state, ModelState)
        rows = [ids + more for ids, more in zip(state.cached_ids, chain.tokens, strict=True)]
        if state.logit_bias.device.type == "cpu" and chain.drafted:
            rows = [ids + more for ids, more in zip(rows, torch.cat(chain.drafted, 1).tolist(), strict=True)]
        lengths = [min(len(ids), cached) for ids, cached in zip(rows, chain.target.cached_lengths, strict=True)]
        chain.target.crop(lengths)  # an exception may have come before a commit
        state.cached_ids = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]

    # --- what the model reads -----------------------------------------------------------------------------------------

    def prompt_ids(self, prompt: Prompt) -> list[list[int]]:
        """Ids of the draft model for the text of each row of the prompt."""
        rows = []
        for row in text_rows(prompt, None if self.placeholder_id is None else VISUAL):
            rows.append([self.placeholder_id or 0 if token == VISUAL else self.readable(token) for token in row])
        return rows

    def output_ids(self, state: ModelState, row: int) -> list[int]:
        """Ids of the draft model for the output of a row so far."""
        return [self.readable(token) for token in state.output_ids[row]]

    def readable(self, token: int) -> int:
        """The id, or 0 where the draft model has no embedding for it."""
        return token if token < self.source.num_embeddings else 0

    def _read_prompt(self, state: ModelState) -> None:
        """Open the model with the prompt, padded on the left."""
        rows = [row or [0] for row in self.prompt_ids(state.prompt)]
        length = max(map(len, rows))
        device = state.logit_bias.device
        input_ids = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        max_new_tokens = state.prompt.max_new_tokens or UNLIMITED_TOKENS
        state.target = self.source.open(input_ids, mask, max_new_tokens)
        state.is_closed = state.target is None
        state.cached_ids = [[] for _ in rows]


def text_rows(prompt: Prompt, placeholder: int | None = None) -> list[list[int]]:
    """The ids of each row of a prompt without padding; `placeholder` (None: nothing) for each run of visual tokens."""
    rows = []
    columns = prompt.input_ids.tolist(), prompt.attention_mask.tolist(), prompt.visual_mask.tolist()
    for ids, is_real, is_visual in zip(*columns, strict=True):
        row: list[int] = []
        in_run = False
        for token, real, visual in zip(ids, is_real, is_visual, strict=True):
            if not real:
                continue
            if not visual:
                row.append(token)
            elif placeholder is not None and not in_run:
                row.append(placeholder)
            in_run = visual
        rows.append(row)
    return rows


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)
