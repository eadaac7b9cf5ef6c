"""Runs a race, in the worker's thread: the model plainly, then with mmspec, then where the two part, if they do."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

import mmspec
from mmspec.app.bench.recorder import Recorder
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import check_length, encoded, inputs_of
from mmspec.app.modeling.load import synchronise
from mmspec.app.ui.cancel import criteria
from mmspec.app.ui.comparison import Difference, Race, Side
from mmspec.app.ui.loaded_model import Desk
from mmspec.app.ui.model_store import Choice
from mmspec.app.ui.worker import Halt
from mmspec.interfaces import Compressor


def run(race: Race) -> None:
    """See `Race.run`."""
    choice = race.choice
    if race.halt.asked:
        race.phase, race.cut = "done", True
        return
    race.phase = "loading"
    desk = race.desk = race.shelf.take(choice.model)
    recorder = race.recorder = Recorder(desk.drafter(choice.drafter))
    compressor = desk.compressor(choice.compressor)
    race.phase = "looking"
    race.look()
    inputs = inputs_of(desk.model, desk.processor, [race.shown], [race.question], [race.turns])
    race.prompt_tokens = inputs["input_ids"].shape[1]
    check_length(desk.model, inputs, choice.max_new_tokens)
    request, race.encode_s = encoded(desk.model, inputs)
    race.phase = "plain"
    with mmspec.disabled(desk.model):
        _generate(race, desk, request, race.plain)
    if not race.cut:
        race.phase = "mmspec"
        _speculate(race, desk, request, recorder, compressor)
        race.stats = mmspec.stats(desk.model, last=True)
        race.difference = _compare(race, desk, request)
    race.phase = "done"


def _speculate(
    race: Race, desk: Desk, request: dict[str, Any], recorder: Recorder, compressor: Compressor | None
) -> None:
    """Mmspec's side, with its drafter watched."""
    options = {"drafter": recorder, "compressor": compressor, "nodes": race.choice.nodes}
    try:
        _generate(race, desk, request, race.mmspec, mmspec=options)
    except ValueError as error:  # a drafter and a compressor that do not go together
        raise UsageError(one_line(error)) from error


def _generate(race: Race, desk: Desk, request: dict[str, Any], side: Side, **more: Any) -> None:
    choice, tape = race.choice, side.tape
    maker = Captioner(desk.model, desk.processor, choice.max_new_tokens, choice.temperature)
    torch.manual_seed(choice.seed)
    synchronise(desk.model.device)
    began = time.perf_counter()
    tape.start()
    options = maker.options() | more
    desk.model.generate(**_fresh(request), **options, streamer=tape, stopping_criteria=criteria(race.halt))
    synchronise(desk.model.device)
    side.total_s = time.perf_counter() - began
    race.cut = race.halt.asked


def _compare(race: Race, desk: Desk, request: dict[str, Any]) -> Difference | None:
    """Where the answers part, if they do within what both have said."""
    pairs = zip(race.plain.tape.ids, race.mmspec.tape.ids, strict=False)
    column = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if column is None:
        return None
    ours, theirs = race.mmspec.tape.ids[column], race.plain.tape.ids[column]
    return Difference(column, theirs, ours, margin(desk, request, race.choice, column, theirs, ours, race.halt))


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
            stopping_criteria=criteria(halt),
        )
    if len(again.logits) <= column:
        return math.nan
    logits = again.logits[column][0].float()
    return float(logits[mine] - logits[other])


__all__ = ["margin", "run"]
