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

from mmspec.engine.sampler import Noise
from mmspec.interfaces import Verdict


class ColumnClock:
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
        pad: int | None,
        noise: Noise | None,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        keep_cache: bool = False,
        lockstep: bool = False,
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
        batch, self.base = input_ids.shape
        self.criteria, self.streamer, self.noise, self.lockstep = list(criteria), streamer, noise, lockstep
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad = pad if pad is not None else 0
        self.waits = keep_scores or keep_logits or keep_cache or lockstep
        self.limit = self._limit()
        ends = [c.eos_token_id.flatten() for c in self.criteria if type(c) is EosTokenCriteria]
        self.stops = torch.cat(ends).to(input_ids.device) if ends else None
        self._ends = frozenset(self.stops.tolist()) if self.stops is not None else frozenset()
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.columns = 0
        self.retreated = False
        self.ended = [False] * batch
        self._finished = [False] * batch
        self._end: list[int | None] = [None] * batch  # columns of real tokens, once finished and padded
        self.sequences = input_ids.long()
        self._grow(min(self.limit, 256) + 1)
        self._scores: list[Tensor] | None = [] if keep_scores else None
        self._logits: list[Tensor] | None = [] if keep_logits else None
        self._foreign = any(map(foreign, self.criteria))
        self._guarded = noise is not None and (streamer is not None or self._foreign)
        self.show, self.written = show, written
        self._held = input_ids  # what user code is given of the last closed column; it may write into it

    @property
    def lengths(self) -> list[int]:
        """Tokens emitted per row."""
        return [len(row) for row in self.rows]

    def limits(self, nodes: int) -> list[int]:
        """How many tokens each row may emit in a round of `nodes` nodes; 0 makes a row wait.

        Rows wait at the length limit, and when they would outrun the noise window. Finished rows are fed padding and
        keep up with the fastest, so that none of them holds up a column.
        """
        lengths = self.lengths
        most = self.limit
        if self.noise is not None:
            most = min(most, self.columns + self.noise.window)
        fastest = max((n for n, ended in zip(lengths, self.ended, strict=True) if not ended), default=max(lengths))
        tops = [min(most, fastest + nodes) if ended else most for ended in self.ended]
        return [max(0, min(nodes, top - length)) for top, length in zip(tops, lengths, strict=True)]

    @property
    def lag(self) -> int:
        """Columns by which the padding of finished rows holds up the others."""
        if not self.waits or not any(self.ended):
            return 0
        goal = min((n for n, ended in zip(self.lengths, self.ended, strict=True) if not ended), default=None)
        goal = max(self.lengths) if goal is None else goal
        return max(0, goal - min(n for n, ended in zip(self.lengths, self.ended, strict=True) if ended))

    def horizon(self, nodes: int) -> int:
        """Columns whose noise a round of `nodes` nodes may ask for: those below it."""
        most = max(self.lengths) + nodes
        return most if self.noise is None else min(most, self.columns + self.noise.window)

    def noise_ahead(self, depth: int) -> Tensor:
        """See `mmspec.interfaces.Prompt.noise`."""
        assert self.noise is not None
        return self.noise.ahead(self.lengths, depth, self.horizon(depth))

    def emit(self, verdict: Verdict, scores: Tensor, logits: Tensor) -> None:
        """Take in what a round emitted. scores, logits: [B, N, V] processed and raw, float32."""
        self._write(verdict)
        for kept, source in ((self._scores, scores), (self._logits, logits)):
            if kept is not None:
                self._keep(kept, source, verdict)
        for row, tokens in enumerate(verdict.rows):
            self.rows[row].extend(tokens)
            if self.pads and tokens and tokens[-1] in self._ends:
                self.ended[row] = True

    def advance(self) -> bool:
        """Close every column that all rows have reached. True when the whole batch has stopped."""
        while self.columns < self._reached():
            if self._close(self.columns):
                return True
        return False

    def output(self) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """(sequences [B, L + columns], scores, logits) of the closed columns, as transformers returns them."""
        scores, logits = (
            None if kept is None else tuple(kept[: self.columns]) for kept in (self._scores, self._logits)
        )
        return self.sequences[:, : self.base + self.columns].clone(), scores, logits

    def retreat(self) -> None:
        """Give up what is provisional and go on one column at a time, as transformers does, errors included."""
        self.lockstep = self.retreated = True
        if self.noise is not None:
            self.noise.give_up(self.columns - 1)
        for row, tokens in enumerate(self.rows):
            self._cut(row, self.columns)
            tokens += [self.pad] * (self.columns - len(tokens))  # finished rows that nobody waited for

    def history(self) -> Tensor:
        """[B, L + columns] as transformers hands it to processors: the very tensor that criteria were given before."""
        if self._held.shape[1] != self.base + self.columns:
            self._held = self._seen(self.base + self.columns)
        return self._held

    def absorb(self) -> bool:
        """Take over what user code has written into the ids it was given; whether it has."""
        length = self._held.shape[1]
        if torch.equal(self._held.long(), self.sequences[:, :length]):
            return False
        self.sequences[:, :length] = self._held
        for row, tokens in zip(self.rows, self._held[:, self.base :].tolist(), strict=True):
            row[: len(tokens)] = tokens[: len(row)]
        return True

    def reserve(self, nodes: int) -> None:
        """Make room in `sequences` for what a round of `nodes` nodes may look at and emit."""
        self._grow(max(self.lengths) + nodes)

    def ends(self) -> list[int]:
        """Tokens per row in the output, padding after its end not counted."""
        return [self.columns if end is None else min(end, self.columns) for end in self._end]

    def _reached(self) -> int:
        lengths = [n for n, ended in zip(self.lengths, self.ended, strict=True) if self.waits or not ended]
        return min(lengths) if lengths else max(self.lengths)

    def _close(self, column: int) -> bool:
        self.columns = column + 1
        tokens = [row[column] if column < len(row) else self.pad for row in self.rows]
        if self._guarded:
            assert self.noise is not None
            if not self.noise.live:
                self.noise.settle(column)
        self.show(column)
        done = self._judge(column, tokens)
        for row, stopped in enumerate(done):
            if stopped and not self._finished[row]:
                self._finished[row] = True
                if self.pads:
                    self.ended[row] = True
                    self._end[row] = column + 1
                    self._cut(row, column + 1)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens, device="cpu"))
        if (self._foreign and self.absorb()) or self.written():
            self.retreat()  # what was decoded ahead followed another text
            if self.pads:
                self.ended = list(self._finished)
        if self._guarded:
            self._check_generator(column)
        if self.noise is not None:
            self.noise.release(column)
        return all(self._finished)

    def _judge(self, column: int, tokens: list[int]) -> list[bool]:
        """Which rows the criteria stop at this column. Every criterion is called, as transformers does."""
        length = self.base + column + 1
        done = [False] * len(tokens)
        told: list[Any] = []
        seen: Tensor | None = None
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                if seen is not None and self._foreign:
                    tokens = seen[:, -1].tolist()
                done = [d or token in self._ends for d, token in zip(done, tokens, strict=True)]
            elif type(criterion) is MaxLengthCriteria and not _reminds(criterion, length):
                if length >= criterion.max_length:
                    done = [True] * len(tokens)
            elif type(criterion) is MaxTimeCriteria:
                if time.time() - criterion.initial_timestamp > criterion.max_time:
                    done = [True] * len(tokens)
            else:
                if seen is None:  # one for all, since what one of them writes the next ones read
                    seen = self._held = self._seen(length)
                told.append(criterion(seen, self._recorded(self._scores)))
        return _joined(done, told, self.sequences.device) if told else done

    def _seen(self, length: int) -> Tensor:
        """[B, length] a fresh tensor, since user code may hold or change it."""
        return self.sequences[:, :length].clone(memory_format=torch.contiguous_format)

    def _recorded(self, kept: list[Tensor] | None) -> tuple[Tensor, ...] | None:
        return None if kept is None else tuple(kept[: self.columns])

    def _check_generator(self, column: int) -> None:
        """If user code drew from the generator, later columns must be drawn after it: give up looking ahead."""
        assert self.noise is not None
        if not self.noise.live and not self.noise.shared and self.noise.touched():
            self.retreat()

    def _cut(self, row: int, length: int) -> None:
        del self.rows[row][length:]
        self.sequences[row, self.base + len(self.rows[row]) :] = self.pad
        if not self._finished[row]:
            self.ended[row] = self.pads and bool(self.rows[row]) and self.rows[row][-1] in self._ends

    def _write(self, verdict: Verdict) -> None:
        """Scatter the emitted tokens behind each row; the last column of the buffer takes what is not emitted."""
        lengths = self.lengths
        if len(set(lengths)) == 1 and all(len(tokens) == 1 for tokens in verdict.rows):
            self.sequences[:, self.base + lengths[0]] = verdict.tokens[:, 0]
            return
        step = torch.arange(verdict.tokens.shape[1], device=self.sequences.device)
        start = torch.tensor(lengths, device=self.sequences.device)[:, None] + self.base
        trash = self.sequences.shape[1] - 1
        place = torch.where(step < verdict.counts[:, None], start + step, trash)
        self.sequences.scatter_(1, place, verdict.tokens)

    def _keep(self, kept: list[Tensor], source: Tensor, verdict: Verdict) -> None:
        for row, nodes in enumerate(verdict.walked):
            for step, node in enumerate(nodes):
                column = len(self.rows[row]) + step
                while len(kept) <= column:
                    kept.append(source.new_zeros(source.shape[0], source.shape[2]))
                kept[column][row] = source[row, node]

    def _grow(self, room: int) -> None:
        """Make room for `room` columns and the trash column behind them."""
        have = self.sequences.shape[1] - self.base - 1
        if have < room:
            more = max(room, 2 * have) - have
            if have >= 0:
                self.sequences[:, -1] = self.pad
            filler = self.sequences.new_full((self.sequences.shape[0], more + (have < 0)), self.pad)
            self.sequences = torch.cat([self.sequences, filler], dim=1)

    def _limit(self) -> int:
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return max(1, math.ceil(min(lengths)) - self.base) if lengths else 1 << 40


def _reminds(criterion: MaxLengthCriteria, length: int) -> bool:
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


def foreign(criterion: Any) -> bool:
    """Whether a criterion is user code, which may do anything, drawing random numbers included."""
    return type(criterion) not in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
