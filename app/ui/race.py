"""The same question twice: plain `generate`, then mmspec, on one picture that is looked at once.

The two never run at the same time, since on one machine that would falsify both. `Race.run` is for the worker's thread;
any other may look at its fields meanwhile. Knows no pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

import mmspec
from mmspec.app.asking import Turn, check_length, encoded, inputs_of
from mmspec.app.captioner import Captioner
from mmspec.app.errors import UsageError, one_line
from mmspec.app.images import Shown
from mmspec.app.measure import synchronise
from mmspec.app.rounds import Recorder, Round
from mmspec.app.ui.shelf import Desk, Shelf
from mmspec.app.ui.sight import Sight, sight_of
from mmspec.app.ui.tape import Tape
from mmspec.app.ui.worker import Halt, HaltCriterion
from mmspec.stats import Stats
from mmspec.vision.registry import make as make_compressor


@dataclass(frozen=True)
class Choice:
    """What may be chosen for one answer. `nodes` of every tree, the root counted; None lets the controller choose."""

    model: str
    drafter: str = "auto"
    compressor: str | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    nodes: int | None = None


@dataclass(frozen=True)
class Difference:
    """Where two answers part.

    Attributes:
        column: number of the token, from 0. plain, mmspec: the two ids.
        margin: how far the plain model's raw logit of its token was above the other's; nan if a stop came before it.
    """

    column: int
    plain: int
    mmspec: int
    margin: float


@dataclass
class Side:
    """One of the two runs. `total_s` is 0 until it is over."""

    tape: Tape = field(default_factory=Tape)
    total_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, or in all once it is over; 0 before it begins."""
        return self.total_s or self.tape.seconds

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.tape.times[0] if self.tape.times else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.tape.times[-1] - self.tape.times[0] if self.tape.times else 0.0


class Race:
    """One question, asked twice."""

    def __init__(
        self, shelf: Shelf, shown: Shown, turns: Sequence[Turn], question: str, choice: Choice, halt: Halt
    ) -> None:
        self.shelf, self.shown, self.turns, self.question = shelf, shown, tuple(turns), question
        self.choice, self.halt = choice, halt
        self.phase = "waiting"
        self.cut = False  # the run was stopped before its end
        self.plain, self.mmspec = Side(), Side()
        self.desk: Desk | None = None
        self.encode_s = 0.0
        self.prompt_tokens = 0
        self.stats = Stats()
        self.difference: Difference | None = None
        self._recorder: Recorder | None = None

    def run(self) -> Race:
        """Do it all. A run that is halted ends early and leaves what there is.

        Raises:
            UsageError: the model, the drafter or the length of the prompt does not do.
        """
        choice = self.choice
        if self.halt.asked:
            self.phase, self.cut = "done", True
            return self
        self.phase = "loading"
        desk = self.desk = self.shelf.take(choice.model)
        recorder = self._recorder = Recorder(desk.drafter(choice.drafter))
        self.phase = "looking"
        inputs = inputs_of(desk.model, desk.processor, [self.shown], [self.question], [self.turns])
        self.prompt_tokens = inputs["input_ids"].shape[1]
        check_length(desk.model, inputs, choice.max_new_tokens)
        request, self.encode_s = encoded(desk.model, inputs)
        self.phase = "plain"
        with mmspec.disabled(desk.model):
            self._generate(desk, request, self.plain)
        if not self.cut:
            self.phase = "mmspec"
            self._speculate(desk, request, recorder)
            self.stats = mmspec.stats(desk.model, last=True)
            self.difference = self._compare(desk, request)
        self.phase = "done"
        return self

    def _speculate(self, desk: Desk, request: dict[str, Any], recorder: Recorder) -> None:
        """Mmspec's side, with its drafter watched."""
        choice = self.choice
        compressor = make_compressor(choice.compressor) if choice.compressor else None
        options = {"drafter": recorder, "compressor": compressor, "nodes": choice.nodes}
        try:
            self._generate(desk, request, self.mmspec, mmspec=options)
        except ValueError as error:  # a drafter and a compressor that do not go together
            raise UsageError(one_line(error)) from error

    def _generate(self, desk: Desk, request: dict[str, Any], side: Side, **more: Any) -> None:
        choice, tape = self.choice, side.tape
        maker = Captioner(desk.model, desk.processor, choice.max_new_tokens, choice.temperature)
        criteria = StoppingCriteriaList([HaltCriterion(self.halt)])
        torch.manual_seed(choice.seed)
        synchronise(desk.model.device)
        began = time.perf_counter()
        tape.start()
        desk.model.generate(**_fresh(request), **maker.options(), **more, streamer=tape, stopping_criteria=criteria)
        synchronise(desk.model.device)
        side.total_s = time.perf_counter() - began
        self.cut = self.halt.asked

    def _compare(self, desk: Desk, request: dict[str, Any]) -> Difference | None:
        """Where the answers part, if they do within what both have said."""
        pairs = zip(self.plain.tape.ids, self.mmspec.tape.ids, strict=False)
        column = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if column is None:
            return None
        ours, theirs = self.mmspec.tape.ids[column], self.plain.tape.ids[column]
        return Difference(column, theirs, ours, margin(desk, request, self.choice, column, theirs, ours, self.halt))

    # what the pages ask

    @property
    def rounds(self) -> list[Round]:
        """What every round of mmspec's run decided so far."""
        return self._recorder.rounds() if self._recorder is not None else []

    @property
    def sight(self) -> Sight | None:
        """What the drafter was shown of the picture; None before it was asked."""
        if self._recorder is None or not self.mmspec.total_s:
            return None
        return sight_of(self._recorder, self.stats.shown[0] if self.stats.shown else None)

    @property
    def identical(self) -> bool | None:
        """Whether both said the same; of a halted run, as far as both have come; None if one said nothing."""
        if not self.plain.tape.ids or not self.mmspec.tape.ids:
            return None
        return self.difference is None

    @property
    def speedup_decode(self) -> float | None:
        """How many times as many tokens per second, from the first token to the last; None if that cannot be said."""
        plain, ours = self.plain.tape.rate, self.rate
        return ours / plain if plain and ours else None

    @property
    def speedup_e2e(self) -> float | None:
        """The same for the whole answer, looking at the picture counted on both sides; None if one was cut short."""
        if not self.mmspec.total_s or len(self.plain.tape.ids) != len(self.mmspec.tape.ids):
            return None
        return (self.encode_s + self.plain.total_s) / (self.encode_s + self.mmspec.total_s)

    @property
    def rate(self) -> float:
        """Tokens per second of mmspec's run, as `mmspec.stats` has it."""
        return self.mmspec.tape.rate if self.stats.plain_calls else self.stats.tokens_per_s

    @property
    def cost(self) -> float | None:
        """R: seconds of a round in plain steps. Decode speed-up = tau / R."""
        speedup = self.speedup_decode
        return self.stats.tau / speedup if speedup else None


def _fresh(request: dict[str, Any]) -> dict[str, Any]:
    """A copy whose dict of encoded pictures is its own: transformers may write into what it is given."""
    seen = request.get("mm_encoder_outputs")
    return request if seen is None else request | {"mm_encoder_outputs": dict(seen)}


def margin(
    desk: Desk, request: dict[str, Any], choice: Choice, column: int, mine: int, other: int, halt: Halt
) -> float:
    """How far the plain model's raw logit of `mine` is above that of `other` where the answers part; nan if halted."""
    maker = Captioner(desk.model, desk.processor, column + 1, choice.temperature)
    torch.manual_seed(choice.seed)
    with mmspec.disabled(desk.model):
        again = desk.model.generate(
            **_fresh(request),
            **maker.options(),
            return_dict_in_generate=True,
            output_logits=True,
            stopping_criteria=StoppingCriteriaList([HaltCriterion(halt)]),
        )
    if len(again.logits) <= column:
        return math.nan
    logits = again.logits[column][0].float()
    return float(logits[mine] - logits[other])


__all__ = ["Choice", "Difference", "Race", "Side", "margin"]
