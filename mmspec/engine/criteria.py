"""`StepCriteria`: the stopping criteria of a call, evaluated once per output step on the whole batch.

The result is that of `StoppingCriteriaList` in transformers. Criteria that depend on the last token, the length or the
time alone are computed on the host, without a transfer from the device; all others are called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as hf

CriterionInputs = tuple[Tensor, tuple[Tensor, ...] | None]
"""The arguments of a criterion: `input_ids` [B, length], and the processed scores of each step if they are returned."""
UNLIMITED_STEPS = 1 << 40
"""Length limit of a call without a length criterion."""
_WITHOUT_SIDE_EFFECTS = (hf.EosTokenCriteria, hf.MaxLengthCriteria, hf.MaxTimeCriteria, hf.StopStringCriteria)


class StepCriteria:
    """The stopping criteria of one call.

    Attributes:
        criteria: as transformers built them.
        device: device of the output.
        max_steps: number of steps after which every row stops by a length criterion, at least 1.
        stop_ids: [E] int64 ids that end a row, on `device`, or None.
        stop_id_set: the same ids on the host.
        has_eos: whether a criterion has stop ids; finished rows emit padding then, as in transformers.
        has_user_code: whether a criterion is user code, which may have any side effect, also draw random numbers.
    """

    def __init__(self, criteria: Sequence[Any], prompt: Tensor) -> None:
        """
        Args:
            criteria: see the attributes.
            prompt: [B, L] int64 of the call.
        """
        self.criteria = list(criteria)
        self.device = device = prompt.device
        lengths = [c.max_length for c in self.criteria if type(c) is hf.MaxLengthCriteria]
        self.max_steps = max_steps(lengths, prompt.shape[-1])
        eos_ids = [c.eos_token_id.flatten() for c in self.criteria if type(c) is hf.EosTokenCriteria]
        self.stop_ids = torch.cat(eos_ids).to(device) if eos_ids else None
        self.stop_id_set = frozenset(self.stop_ids.tolist()) if self.stop_ids is not None else frozenset()
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.has_user_code = any(type(criterion) not in _WITHOUT_SIDE_EFFECTS for criterion in self.criteria)

    def stopped_rows(self, tokens: list[int], length: int, build_inputs: Callable[[], CriterionInputs]) -> list[bool]:
        """The rows that the criteria stop at one step. Every criterion is called, as in transformers.

        Args:
            tokens: the token of each row at this step.
            length: prompt and output up to this step.
            build_inputs: builds the arguments of the criteria that are called; not called if there are none.
        """
        stopped = [False] * len(tokens)
        results: list[Any] = []
        inputs: CriterionInputs | None = None
        for criterion in self.criteria:
            if type(criterion) is hf.EosTokenCriteria:
                if inputs is not None and self.has_user_code:
                    tokens = inputs[0][:, -1].tolist()
                stopped = [done or token in self.stop_id_set for done, token in zip(stopped, tokens, strict=True)]
            elif type(criterion) is hf.MaxLengthCriteria and not _exceeds_positions(criterion, length):
                if length >= criterion.max_length:
                    stopped = [True] * len(tokens)
            elif type(criterion) is hf.MaxTimeCriteria:
                if time.time() - criterion.initial_timestamp > criterion.max_time:
                    stopped = [True] * len(tokens)
            else:
                if inputs is None:  # one tensor for all: what one criterion writes the next ones read
                    inputs = build_inputs()
                results.append(criterion(*inputs))
        return _combine(stopped, results, self.device) if results else stopped


def max_steps(max_lengths: Sequence[Any], prompt_length: int) -> int:
    """Number of steps after which every row reaches a length limit, at least 1. Infinite ones and nan are none."""
    lengths = [math.ceil(length) for length in max_lengths if length < UNLIMITED_STEPS]
    return max(1, min(lengths) - prompt_length) if lengths else UNLIMITED_STEPS


def _exceeds_positions(criterion: hf.MaxLengthCriteria, length: int) -> bool:
    """Whether the criterion warns at this length, so that it must be called: the model's positions are exceeded."""
    limit = criterion.max_position_embeddings
    return limit is not None and length > limit


def _combine(stopped: list[bool], results: list[Any], device: torch.device) -> list[bool]:
    """The results of all criteria, combined as transformers does, whatever their dtypes.

    Raises:
        ValueError: a result does not have one entry per row.
    """
    stop = torch.tensor(stopped, device=device)
    for result in results:
        stop = stop | result
    unfinished = torch.ones(len(stopped), dtype=torch.long, device=device) & ~stop
    if unfinished.numel() != len(stopped):
        raise ValueError(
            f"a stopping criterion must return one bool per row, a tensor of shape [{len(stopped)}]; all results "
            f"together have shape {list(unfinished.shape)}."
        )
    return [not row for row in unfinished.flatten().tolist()]
