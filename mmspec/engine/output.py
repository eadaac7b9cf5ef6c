"""`OutputBuffer`: rows emit tokens at their own pace, callers see the output one step at a time.

transformers calls stopping criteria, the streamer and score collection once per step, on the whole batch. The buffer
does the same: step s is completed when every row has emitted it, with the tensors that transformers would pass. Tokens
beyond the completed steps are provisional and may be cut. With an eos criterion a finished row emits padding; without
one it goes on until the whole batch stops. Semantics of `GenerationMixin._sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.engine.criteria import CriterionInputs, StepCriteria
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.round_plan import RowState
from mmspec.interfaces import VerifyResult

INITIAL_STEPS = 256
"""Steps that are allocated at first."""
CONFIRMED_STEPS = 64
"""Steps by which a row may be ahead of the others where each step is confirmed."""
MAX_SLICED_ROWS = 4
"""Rows up to which emitted tokens are copied row by row; one scatter with its indices launches about eight kernels."""


@dataclass(frozen=True)
class ReturnFlags:
    """What `generate` returns besides the sequences. Finished rows must be part of it, so their padding is decoded."""

    scores: bool = False
    logits: bool = False
    cache: bool = False


@dataclass(frozen=True)
class UserCodeHooks:
    """Callbacks around user code, for a cache that user code can read and write.

    Attributes:
        before_user_code: called with the number of steps that transformers would have fed to the model by then.
        cache_was_written: whether user code wrote into the cache since.
    """

    before_user_code: Callable[[int], None] = lambda num_steps: None
    cache_was_written: Callable[[], bool] = lambda: False


class OutputBuffer:
    """The growing output of one call.

    Attributes:
        emitted: emitted ids of each row, the last ones provisional.
        steps: number of completed steps.
        sequences: [B, L + capacity + 1] int64, prompt, emitted tokens, padding; the last column is scratch memory.
        prompt_length: L.
        finished: per row, whether it emits padding from now on.
        stepwise: all rows emit one token per round, which some user code needs for exactness.
        max_steps: number of steps after which every row stops.
        stop_ids: [E] int64 ids that end a row, or None.
        sync_finished_rows: finished rows emit their padding before a step is complete.
        position_steps: of each row, emitted tokens from which on the model may refuse the last one; empty if none.
        confirm: makes the calls of user code before the token of a step is chosen, with its logits [B, V] (zeros for
            rows that have ended); whether speculation must end. None if there are none.
    """

    def __init__(
        self,
        input_ids: Tensor,
        criteria: StepCriteria,
        *,
        pad_token_id: int | None,
        noise: SamplingNoise | None,
        streamer: Any = None,
        returns: ReturnFlags | None = None,
        stepwise: bool = False,
        position_steps: Sequence[int] = (),
        hooks: UserCodeHooks | None = None,
        confirms: bool = False,
    ) -> None:
        """
        Args:
            input_ids: [B, L] int64 prompt.
            criteria: of the call.
            pad_token_id: id that finished rows emit; None if there is no eos criterion.
            noise: the call's noise, None for greedy decoding.
            streamer: the `streamer` argument of `generate`; it has received the prompt already.
            returns: what the call returns besides the sequences.
            stepwise: start with one token per row and round.
            position_steps: see the attribute.
            hooks: callbacks around user code.
            confirms: `confirm` is to be called, and needs the logits of all steps.
        """
        returns = returns or ReturnFlags()
        batch, self.prompt_length = input_ids.shape
        self.criteria = criteria
        self.streamer = streamer
        self.noise = noise
        self.hooks = hooks or UserCodeHooks()
        self.stepwise = stepwise
        self.pad_token_id = pad_token_id if pad_token_id is not None else 0
        self.position_steps = position_steps
        # Plain `generate` also ends where the padding of a finished row is refused.
        self.sync_finished_rows = returns.scores or returns.logits or returns.cache or stepwise
        self.sync_finished_rows |= len({*position_steps}) > 1
        self.max_steps = criteria.max_steps
        self.stop_ids = self.criteria.stop_ids
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        self.steps = 0
        self.finished = [False] * batch
        self._stopped = [False] * batch  # rows that the criteria stopped in a completed step
        self._stop_step: list[int | None] = [None] * batch  # tokens of a stopped row, padding excluded
        self.sequences = input_ids.long()
        self._grow(min(self.max_steps, INITIAL_STEPS) + 1)
        self.confirm: Callable[[Tensor], bool] | None = None
        self._returns = returns
        self._scores: list[Tensor] | None = [] if returns.scores else None
        self._logits: list[Tensor] | None = [] if returns.logits or confirms else None
        self._checks_rng = noise is not None and (streamer is not None or self.criteria.has_user_code)
        self._user_ids = input_ids  # `input_ids` of the last completed step that user code received; it may write there

    @property
    def num_emitted(self) -> list[int]:
        """Emitted tokens of each row."""
        return list(map(len, self.emitted))

    @property
    def cached_lengths(self) -> list[int]:
        """Positions after the prompt that the target's cache holds of each row: all emitted tokens but the last."""
        return [len(row) - 1 for row in self.emitted]

    def max_emit(self, num_nodes: int) -> list[int]:
        """Tokens that each row may emit in a round of `num_nodes` nodes; 0 makes a row wait.

        Rows wait at the length limit and at the end of the noise window. Finished rows emit padding up to the longest
        unfinished row where their padding is returned, else nothing.
        """
        lengths = self.num_emitted
        limit = self.max_steps
        if self.noise is not None:
            limit = min(limit, self.steps + self.noise.window)
        if self.confirm is not None:  # the logits of steps in flight are kept
            limit = min(limit, self.steps + CONFIRMED_STEPS)
        padded = 0
        if self.sync_finished_rows:
            padded = min(limit, max(self._unfinished_lengths(), default=max(lengths)) + num_nodes)
        ends = [padded if finished else limit for finished in self.finished]
        free = [max(0, min(num_nodes, end - length)) for end, length in zip(ends, lengths, strict=True)]
        if not self.position_steps:
            return free
        return [self._within_positions(*row) for row in zip(free, lengths, self.position_steps, strict=True)]

    def _within_positions(self, limit: int, length: int, end: int) -> int:
        """`limit`, so that no node behind the model's positions counts. `end` is of `position_steps`.

        The last of them, and the first token behind, which may end the call, wait for the other rows.
        """
        if length < end - 1:
            return min(limit, end - 1 - length)
        if length <= end:
            return min(limit, 1 if length <= self.steps else 0)
        return limit

    @property
    def padding_lag(self) -> int:
        """Steps by which the padding of finished rows is behind the unfinished rows."""
        if not self.sync_finished_rows or not any(self.finished):
            return 0
        target = min(self._unfinished_lengths(), default=max(self.num_emitted))
        padded = [length for length, finished in zip(self.num_emitted, self.finished, strict=True) if finished]
        return max(0, target - min(padded))

    def noise_end(self, num_nodes: int) -> int:
        """A round of `num_nodes` nodes uses the noise of steps below this one."""
        end = max(self.num_emitted) + num_nodes
        return end if self.noise is None else min(end, self.steps + self.noise.window)

    def noise_ahead(self, depth: int) -> Tensor:
        """Noise [B, depth, V] of the next steps of each row (`mmspec.interfaces.Prompt.noise`), a copy."""
        assert self.noise is not None
        return self.noise.ahead(self.num_emitted, depth, self.noise_end(depth)).clone()

    def row_state(self, num_nodes: int) -> RowState:
        """The rows before a round of `num_nodes` nodes."""
        root_ids = [row[-1] if row else 0 for row in self.emitted]
        finished = self.finished if self.sync_finished_rows and any(self.finished) else []
        limits = self.max_emit(num_nodes)
        return RowState(root_ids, self.num_emitted, limits, finished, self.sequences.device)

    @property
    def collects(self) -> bool:
        """Whether `emit` needs scores or logits."""
        return self._scores is not None or self._logits is not None

    def emit(
        self,
        result: VerifyResult,
        scores: Tensor | None = None,
        logits: Tensor | None = None,
        rows: RowState | None = None,
    ) -> None:
        """Append the tokens of a round.

        Args:
            result: the tokens.
            scores: [B, N, V] float32 processed scores; None unless `collects`.
            logits: [B, N, V] float32 raw logits; None unless `collects`.
            rows: the rows before the round; computed if None.
        """
        self._write(result, rows)
        if self._scores is not None:
            assert scores is not None
            self._collect(self._scores, scores, result)
        if self._logits is not None:
            assert logits is not None
            self._collect(self._logits, logits, result)
        for row, tokens in enumerate(result.emitted_ids):
            self.emitted[row].extend(tokens)
            if self.criteria.has_eos and tokens and tokens[-1] in self.criteria.stop_id_set:
                self.finished[row] = True

    def advance(self) -> bool:
        """Complete every step that all rows have emitted. Returns True when the whole batch has stopped."""
        while self.steps < self._num_complete():
            if self._complete_step(self.steps):
                return True
        return False

    def result(self) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """(sequences [B, L + steps], scores, logits) of the completed steps, as transformers returns them."""
        sequences = self.sequences[:, : self.prompt_length + self.steps].clone()
        logits = self._completed(self._logits) if self._returns.logits else None
        return sequences, self._completed(self._scores), logits

    def disable_speculation(self) -> None:
        """Drop the provisional tokens and go on one step at a time, with the errors that transformers would raise."""
        self.stepwise = self.sync_finished_rows = True  # all rows are at the same step
        if self.noise is not None:
            self.noise.disable_lookahead(self.steps - 1)
        for row, tokens in enumerate(self.emitted):
            self._truncate(row, self.steps)
            tokens += [self.pad_token_id] * (self.steps - len(tokens))  # finished rows that were not synchronised

    def user_input_ids(self) -> Tensor:
        """`input_ids` [B, L + steps] for processors: the same tensor that the criteria of this step received."""
        if self._user_ids.shape[1] != self.prompt_length + self.steps:
            self._user_ids = self._copy_ids(self.prompt_length + self.steps)
        return self._user_ids

    def apply_user_edits(self) -> bool:
        """Copy back what user code wrote into the `input_ids` that it received. Returns whether anything changed."""
        length = self._user_ids.shape[1]
        if torch.equal(self._user_ids.long(), self.sequences[:, :length]):
            return False
        self.sequences[:, :length] = self._user_ids
        for row, tokens in zip(self.emitted, self._user_ids[:, self.prompt_length :].tolist(), strict=True):
            row[: len(tokens)] = tokens  # also the padding of a row that has ended
        return True

    def reserve(self, num_nodes: int) -> None:
        """Allocate `sequences` for a round of `num_nodes` nodes."""
        self._grow(max(self.num_emitted) + num_nodes)

    def output_lengths(self) -> list[int]:
        """Tokens of each row in the output, without the padding after its end."""
        return [self.steps if end is None else min(end, self.steps) for end in self._stop_step]

    def _unfinished_lengths(self) -> list[int]:
        return [length for length, finished in zip(self.num_emitted, self.finished, strict=True) if not finished]

    def _num_complete(self) -> int:
        """Number of steps that all rows have emitted; padding counts only with `sync_finished_rows`."""
        lengths = self.num_emitted if self.sync_finished_rows else self._unfinished_lengths()
        return min(lengths) if lengths else max(self.num_emitted)

    def _complete_step(self, step: int) -> bool:
        """Call criteria and streamer for one step; True if the whole batch has stopped."""
        differs = self._confirm(step)
        self.steps = step + 1
        tokens = [row[step] if step < len(row) else self.pad_token_id for row in self.emitted]
        if self._checks_rng:
            assert self.noise is not None
            if not self.noise.immediate:
                self.noise.claim(step)
        self.hooks.before_user_code(step)
        for row, stopped in enumerate(self._run_criteria(step, tokens)):
            if stopped and not self._stopped[row]:
                self._stop_row(row, step + 1)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens, device="cpu"))
        edited = self.criteria.has_user_code and self.apply_user_edits()
        if edited or differs or self.hooks.cache_was_written():
            self.disable_speculation()  # the provisional tokens continue another text
            if self.criteria.has_eos:
                self.finished = list(self._stopped)
        if self._checks_rng:
            self._check_rng()
        if self.noise is not None:
            self.noise.release(step)
        return all(self._stopped)

    def _confirm(self, step: int) -> bool:
        """Let user code confirm the tokens of a step; whether speculation must end."""
        if self.confirm is None or self._logits is None:
            return False
        differs = not self.stepwise and self.confirm(self._logits[step])
        if not self._returns.logits:
            self._logits[step] = self._logits[step].new_empty(0)
        return differs

    def correct(self, ids: Sequence[int], scores: Tensor) -> bool:
        """Put ids and processed scores [B, V] of user code in place of the coming step; whether ids differ."""
        step, differs = self.steps, False
        for row, token in enumerate(ids):
            is_padding = self._stopped[row] and self.criteria.has_eos  # without one a row goes on
            if not is_padding and self.emitted[row][step] != token:
                self.emitted[row][step] = self.sequences[row, self.prompt_length + step] = token
                differs = True
        if self._scores is not None:
            self._scores[step] = scores
        return differs

    def _stop_row(self, row: int, length: int) -> None:
        """Stop a row after `length` tokens; with an eos criterion, replace what follows by padding."""
        self._stopped[row] = True
        if self.criteria.has_eos:
            self.finished[row] = True
            self._stop_step[row] = length
            self._truncate(row, length)

    def _run_criteria(self, step: int, tokens: list[int]) -> list[bool]:
        """The rows that the criteria stop at this step."""
        length = self.prompt_length + step + 1

        def build_inputs() -> CriterionInputs:
            self._user_ids = self._copy_ids(length)
            return self._user_ids, self._completed(self._scores)

        return self.criteria.stopped_rows(tokens, length, build_inputs)

    def _copy_ids(self, length: int) -> Tensor:
        """[B, length] a new tensor, since user code may keep or change it."""
        return self.sequences[:, :length].clone(memory_format=torch.contiguous_format)

    def _completed(self, collected: list[Tensor] | None) -> tuple[Tensor, ...] | None:
        return None if collected is None else tuple(collected[: self.steps])

    def _check_rng(self) -> None:
        """Fall back if user code drew from the generator: later steps must be drawn after that."""
        assert self.noise is not None
        if not self.noise.immediate and not self.noise.rng_contended and self.noise.rng_changed():
            self.disable_speculation()

    def _truncate(self, row: int, length: int) -> None:
        """Cut a row to `length` tokens."""
        tokens = self.emitted[row]
        del tokens[length:]
        self.sequences[row, self.prompt_length + len(tokens) :] = self.pad_token_id
        if not self._stopped[row]:
            self.finished[row] = self.criteria.has_eos and bool(tokens) and tokens[-1] in self.criteria.stop_id_set

    def _write(self, result: VerifyResult, rows: RowState | None) -> None:
        """Write the emitted tokens behind each row of `sequences`; its last column takes those that are not emitted."""
        lengths = self.num_emitted
        if len(set(lengths)) == 1 and all(len(tokens) == 1 for tokens in result.emitted_ids):
            self.sequences[:, self.prompt_length + lengths[0]] = result.tokens[:, 0]
            return
        if len(lengths) <= MAX_SLICED_ROWS:
            for row, (length, emitted) in enumerate(zip(lengths, result.emitted_ids, strict=True)):
                first = self.prompt_length + length
                if emitted:
                    self.sequences[row, first : first + len(emitted)] = result.tokens[row, : len(emitted)]
            return
        num_nodes = result.tokens.shape[1]
        offset = torch.arange(num_nodes, device=self.sequences.device)
        rows = self.row_state(num_nodes) if rows is None else rows
        start = rows.on_device.num_emitted[:, None] + self.prompt_length
        unused = self.sequences.shape[1] - 1
        index = torch.where(offset < result.counts[:, None], start + offset, unused)
        self.sequences.scatter_(1, index, result.tokens)

    def _collect(self, collected: list[Tensor], source: Tensor, result: VerifyResult) -> None:
        """Store the entries of `source` [B, N, V] at the accepted nodes: one tensor [B, V] per step."""
        for row, nodes in enumerate(result.accepted_nodes):
            for step, node in enumerate(nodes, start=len(self.emitted[row])):
                while len(collected) <= step:
                    collected.append(source.new_zeros(source.shape[0], source.shape[2]))
                collected[step][row] = source[row, node]

    def _grow(self, num_steps: int) -> None:
        """Allocate `num_steps` steps, and one column behind them for tokens that are not emitted."""
        capacity = self.sequences.shape[1] - self.prompt_length - 1
        if capacity < num_steps:
            num_new = max(num_steps, 2 * capacity) - capacity
            if capacity >= 0:
                self.sequences[:, -1] = self.pad_token_id
            shape = (self.sequences.shape[0], num_new + (capacity < 0))
            self.sequences = torch.cat([self.sequences, self.sequences.new_full(shape, self.pad_token_id)], dim=1)
