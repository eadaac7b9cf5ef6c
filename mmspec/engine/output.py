"""The column clock: rows run ahead at their own pace, the outside world sees one output column at a time.

transformers calls stopping criteria, streamers and score collection once per step, on the whole batch. So do we: column
c is closed when every row has reached it, with the tensors that transformers would have passed. Tokens of faster rows
are provisional until then and may be cut. A finished row emits padding from then on, if there is an eos criterion; if
there is none it goes on emitting until the whole batch stops. All that as `GenerationMixin._sample` does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from mmspec.engine.sampler import SamplingNoise
from mmspec.interfaces import VerifyResult


class OutputBuffer:
    """Output of one call as it grows.

    Attributes:
        rows: tokens emitted by each row, the last ones provisional. columns: how many columns are closed.
        sequences: [B, L + room] int64, prompt, emitted tokens, then padding.
        ended: rows that emit padding from now on. lockstep: rows must move one column at a time, for exactness.
        retreated: provisional tokens were given up, after which drafts are over for this call.
        limit: number of columns after which every row stops, if known.
        stops: [E] int64 ids that end a row at once, or None.
    """

    def __init__(
        self,
        input_ids: Tensor,
        criteria: Sequence[Any],
        *,
        pad_token_id: int | None,
        noise: SamplingNoise | None,
        streamer: Any = None,
        return_scores: bool = False,
        return_logits: bool = False,
        return_cache: bool = False,
        stepwise: bool = False,
        show: Callable[[int], None] = lambda columns: None,
        written: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            input_ids: [B, L] int64 prompt. criteria: as transformers built them. pad: id that finished rows emit.
            noise: the call's noise when sampling. streamer: as given to `generate`, prompt already put.
            keep_scores, keep_logits, keep_cache: what the caller will return, which finished rows must be part of.
            show: called before user code runs, with the number of columns that transformers would have fed by then.
            written: whether user code has written into the cache since.
        """
        batch, self.prompt_length = input_ids.shape
        self.criteria, self.streamer, self.noise, self.stepwise = list(criteria), streamer, noise, stepwise
        self.pads_finished_rows = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad_token_id = pad_token_id if pad_token_id is not None else 0
        self.sync_finished_rows = return_scores or return_logits or return_cache or stepwise
        self.max_steps = self._limit()
        ends = [c.eos_token_id.flatten() for c in self.criteria if type(c) is EosTokenCriteria]
        self.stop_ids = torch.cat(ends).to(input_ids.device) if ends else None
        self._stop_id_set = frozenset(self.stop_ids.tolist()) if self.stop_ids is not None else frozenset()
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        self.steps = 0
        self.fell_back = False
        self.finished = [False] * batch
        self._stopped = [False] * batch
        self._stop_step: list[int | None] = [None] * batch  # columns of real tokens, once finished and padded
        self.sequences = input_ids.long()
        self._grow(min(self.max_steps, 256) + 1)
        self._scores: list[Tensor] | None = [] if return_scores else None
        self._logits: list[Tensor] | None = [] if return_logits else None
        self._foreign = any(map(is_user_code, self.criteria))
        self._guarded = noise is not None and (streamer is not None or self._foreign)
        self.show, self.written = show, written
        self._held = input_ids  # what user code is given of the last closed column; it may write into it

    @property
    def num_emitted(self) -> list[int]:
        """Tokens emitted per row."""
        return [len(row) for row in self.emitted]

    def max_emit(self, nodes: int) -> list[int]:
        """How many tokens each row may emit in a round of `nodes` nodes; 0 makes a row wait.

        Rows wait at the length limit, and when they would outrun the noise window. Finished rows are fed padding and
        keep up with the fastest, so that none of them holds up a column.
        """
        lengths = self.num_emitted
        most = self.max_steps
        if self.noise is not None:
            most = min(most, self.steps + self.noise.window)
        fastest = max((n for n, ended in zip(lengths, self.finished, strict=True) if not ended), default=max(lengths))
        tops = [min(most, fastest + nodes) if ended else most for ended in self.finished]
        return [max(0, min(nodes, top - length)) for top, length in zip(tops, lengths, strict=True)]

    @property
    def padding_lag(self) -> int:
        """Columns by which the padding of finished rows holds up the others."""
        if not self.sync_finished_rows or not any(self.finished):
            return 0
        goal = min((n for n, ended in zip(self.num_emitted, self.finished, strict=True) if not ended), default=None)
        goal = max(self.num_emitted) if goal is None else goal
        return max(0, goal - min(n for n, ended in zip(self.num_emitted, self.finished, strict=True) if ended))

    def noise_end(self, nodes: int) -> int:
        """Columns whose noise a round of `nodes` nodes may ask for: those below it."""
        most = max(self.num_emitted) + nodes
        return most if self.noise is None else min(most, self.steps + self.noise.window)

    def noise_ahead(self, depth: int) -> Tensor:
        """See `mmspec.interfaces.Prompt.noise`."""
        assert self.noise is not None
        return self.noise.lookahead(self.num_emitted, depth, self.noise_end(depth))

    def emit(self, verdict: VerifyResult, scores: Tensor, logits: Tensor) -> None:
        """Take in what a round emitted. scores, logits: [B, N, V] processed and raw, float32."""
        self._write(verdict)
        for kept, source in ((self._scores, scores), (self._logits, logits)):
            if kept is not None:
                self._collect(kept, source, verdict)
        for row, tokens in enumerate(verdict.emitted_ids):
            self.emitted[row].extend(tokens)
            if self.pads_finished_rows and tokens and tokens[-1] in self._stop_id_set:
                self.finished[row] = True

    def advance(self) -> bool:
        """Close every column that all rows have reached. True when the whole batch has stopped."""
        while self.steps < self._complete_steps():
            if self._complete_step(self.steps):
                return True
        return False

    def result(self) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """(sequences [B, L + columns], scores, logits) of the closed columns, as transformers returns them."""
        scores, logits = (None if kept is None else tuple(kept[: self.steps]) for kept in (self._scores, self._logits))
        return self.sequences[:, : self.prompt_length + self.steps].clone(), scores, logits

    def fall_back_to_stepwise(self) -> None:
        """Give up what is provisional and go on one column at a time, as transformers does, errors included."""
        self.stepwise = self.fell_back = True
        if self.noise is not None:
            self.noise.disable_lookahead(self.steps - 1)
        for row, tokens in enumerate(self.emitted):
            self._cut(row, self.steps)
            tokens += [self.pad_token_id] * (self.steps - len(tokens))  # finished rows that nobody waited for

    def history(self) -> Tensor:
        """[B, L + columns] as transformers hands it to processors: the very tensor that criteria were given before."""
        if self._held.shape[1] != self.prompt_length + self.steps:
            self._held = self._input_ids(self.prompt_length + self.steps)
        return self._held

    def absorb(self) -> bool:
        """Take over what user code has written into the ids it was given; whether it has."""
        length = self._held.shape[1]
        if torch.equal(self._held.long(), self.sequences[:, :length]):
            return False
        self.sequences[:, :length] = self._held
        for row, tokens in zip(self.emitted, self._held[:, self.prompt_length :].tolist(), strict=True):
            row[: len(tokens)] = tokens[: len(row)]
        return True

    def reserve(self, nodes: int) -> None:
        """Make room in `sequences` for what a round of `nodes` nodes may look at and emit."""
        self._grow(max(self.num_emitted) + nodes)

    def output_lengths(self) -> list[int]:
        """Tokens per row in the output, padding after its end not counted."""
        return [self.steps if end is None else min(end, self.steps) for end in self._stop_step]

    def _complete_steps(self) -> int:
        lengths = [
            n for n, ended in zip(self.num_emitted, self.finished, strict=True) if self.sync_finished_rows or not ended
        ]
        return min(lengths) if lengths else max(self.num_emitted)

    def _complete_step(self, column: int) -> bool:
        self.steps = column + 1
        tokens = [row[column] if column < len(row) else self.pad_token_id for row in self.emitted]
        if self._guarded:
            assert self.noise is not None
            if not self.noise.immediate:
                self.noise.restore_rng(column)
        self.show(column)
        done = self._run_criteria(column, tokens)
        for row, stopped in enumerate(done):
            if stopped and not self._stopped[row]:
                self._stopped[row] = True
                if self.pads_finished_rows:
                    self.finished[row] = True
                    self._stop_step[row] = column + 1
                    self._cut(row, column + 1)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens, device="cpu"))
        if (self._foreign and self.absorb()) or self.written():
            self.fall_back_to_stepwise()  # what was decoded ahead followed another text
            if self.pads_finished_rows:
                self.finished = list(self._stopped)
        if self._guarded:
            self._check_generator(column)
        if self.noise is not None:
            self.noise.release(column)
        return all(self._stopped)

    def _run_criteria(self, column: int, tokens: list[int]) -> list[bool]:
        """Which rows the criteria stop at this column. Every criterion is called, as transformers does."""
        length = self.prompt_length + column + 1
        done = [False] * len(tokens)
        told: list[Any] = []
        seen: Tensor | None = None
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                if seen is not None and self._foreign:
                    tokens = seen[:, -1].tolist()
                done = [d or token in self._stop_id_set for d, token in zip(done, tokens, strict=True)]
            elif type(criterion) is MaxLengthCriteria and not _warns(criterion, length):
                if length >= criterion.max_length:
                    done = [True] * len(tokens)
            elif type(criterion) is MaxTimeCriteria:
                if time.time() - criterion.initial_timestamp > criterion.max_time:
                    done = [True] * len(tokens)
            else:
                if seen is None:  # one for all, since what one of them writes the next ones read
                    seen = self._held = self._input_ids(length)
                told.append(criterion(seen, self._recorded(self._scores)))
        return _joined(done, told, self.sequences.device) if told else done

    def _input_ids(self, length: int) -> Tensor:
        """[B, length] a fresh tensor, since user code may hold or change it."""
        return self.sequences[:, :length].clone(memory_format=torch.contiguous_format)

    def _recorded(self, kept: list[Tensor] | None) -> tuple[Tensor, ...] | None:
        return None if kept is None else tuple(kept[: self.steps])

    def _check_generator(self, column: int) -> None:
        """If user code drew from the generator, later columns must be drawn after it: give up looking ahead."""
        assert self.noise is not None
        if not self.noise.immediate and not self.noise.rng_contended and self.noise.rng_changed():
            self.fall_back_to_stepwise()

    def _cut(self, row: int, length: int) -> None:
        del self.emitted[row][length:]
        self.sequences[row, self.prompt_length + len(self.emitted[row]) :] = self.pad_token_id
        if not self._stopped[row]:
            self.finished[row] = (
                self.pads_finished_rows and bool(self.emitted[row]) and self.emitted[row][-1] in self._stop_id_set
            )

    def _write(self, verdict: VerifyResult) -> None:
        """Scatter the emitted tokens behind each row; the last column of the buffer takes what is not emitted."""
        lengths = self.num_emitted
        if len(set(lengths)) == 1 and all(len(tokens) == 1 for tokens in verdict.emitted_ids):
            self.sequences[:, self.prompt_length + lengths[0]] = verdict.tokens[:, 0]
            return
        step = torch.arange(verdict.tokens.shape[1], device=self.sequences.device)
        start = torch.tensor(lengths, device=self.sequences.device)[:, None] + self.prompt_length
        trash = self.sequences.shape[1] - 1
        place = torch.where(step < verdict.counts[:, None], start + step, trash)
        self.sequences.scatter_(1, place, verdict.tokens)

    def _collect(self, kept: list[Tensor], source: Tensor, verdict: VerifyResult) -> None:
        for row, nodes in enumerate(verdict.accepted_nodes):
            for step, node in enumerate(nodes):
                column = len(self.emitted[row]) + step
                while len(kept) <= column:
                    kept.append(source.new_zeros(source.shape[0], source.shape[2]))
                kept[column][row] = source[row, node]

    def _grow(self, room: int) -> None:
        """Make room for `room` columns and the trash column behind them."""
        have = self.sequences.shape[1] - self.prompt_length - 1
        if have < room:
            more = max(room, 2 * have) - have
            if have >= 0:
                self.sequences[:, -1] = self.pad_token_id
            filler = self.sequences.new_full((self.sequences.shape[0], more + (have < 0)), self.pad_token_id)
            self.sequences = torch.cat([self.sequences, filler], dim=1)

    def _limit(self) -> int:
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return max(1, math.ceil(min(lengths)) - self.prompt_length) if lengths else 1 << 40


def _warns(criterion: MaxLengthCriteria, length: int) -> bool:
    """Whether the criterion has something to say besides its verdict (a reminder beyond the model's positions)."""
    most = criterion.max_position_embeddings
    return most is not None and length > most


def _joined(done: list[bool], told: list[Any], device: torch.device) -> list[bool]:
    """The verdicts of all criteria, put together as transformers does, whatever shape and type they come in."""
    stop = torch.tensor(done, device=device)
    for verdict in told:
        stop = stop | verdict
    ones = torch.ones(len(done), dtype=torch.long, device=device)
    return [not going for going in (ones & ~stop).tolist()]


def is_user_code(criterion: Any) -> bool:
    """Whether a criterion is user code, which may do anything, drawing random numbers included."""
    return type(criterion) not in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
