"""Runs a race, in the worker's thread: the model plainly, then with mmspec, then where the two part, if they do."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

import mmspec
from mmspec.app.bench.recorder import RecordingDrafter
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import build_inputs, check_length, encode_media
from mmspec.app.modeling.load import synchronize
from mmspec.app.ui.cancel import build_stopping_criteria
from mmspec.app.ui.comparison import ComparisonRun, ComparisonSide, Difference
from mmspec.app.ui.loaded_model import LoadedModel
from mmspec.app.ui.model_store import RunSettings
from mmspec.app.ui.worker import CancelSignal
from mmspec.interfaces import Compressor


def run_comparison(comparison: ComparisonRun) -> None:
    """See `Race.run`."""
    choice = comparison.settings
    if comparison.cancel_signal.should_stop:
        comparison.phase, comparison.cancelled = "done", True
        return
    comparison.phase = "loading"
    desk = comparison.loaded_model = comparison.model_store.get(choice.model)
    recorder = comparison.recorder = RecordingDrafter(desk.get_drafter(choice.drafter))
    compressor = desk.get_compressor(choice.compressor)
    comparison.phase = "looking"
    comparison.load_media()
    inputs = build_inputs(desk.model, desk.processor, [comparison.media], [comparison.question], [comparison.turns])
    comparison.prompt_tokens = inputs["input_ids"].shape[1]
    check_length(desk.model, inputs, choice.max_new_tokens)
    request, comparison.encode_s = encode_media(desk.model, inputs)
    comparison.phase = "plain"
    with mmspec.disabled(desk.model):
        _generate(comparison, desk, request, comparison.plain)
    if not comparison.cancelled:
        comparison.phase = "mmspec"
        _speculate(comparison, desk, request, recorder, compressor)
        comparison.stats = mmspec.stats(desk.model, last=True)
        comparison.difference = _find_difference(comparison, desk, request)
    comparison.phase = "done"


def _speculate(
    race: ComparisonRun,
    desk: LoadedModel,
    request: dict[str, Any],
    recorder: RecordingDrafter,
    compressor: Compressor | None,
) -> None:
    """Mmspec's side, with its drafter watched."""
    options = {"drafter": recorder, "compressor": compressor, "tree_size": race.settings.tree_size}
    try:
        _generate(race, desk, request, race.mmspec, mmspec=options)
    except ValueError as error:  # a drafter and a compressor that do not go together
        raise UsageError(one_line(error)) from error


def _generate(
    race: ComparisonRun, desk: LoadedModel, request: dict[str, Any], side: ComparisonSide, **more: Any
) -> None:
    choice, tape = race.settings, side.streamer
    maker = Captioner(desk.model, desk.processor, choice.max_new_tokens, choice.temperature)
    torch.manual_seed(choice.seed)
    synchronize(desk.model.device)
    began = time.perf_counter()
    tape.start()
    options = maker.generation_kwargs() | more
    desk.model.generate(
        **_copy_request(request),
        **options,
        streamer=tape,
        stopping_criteria=build_stopping_criteria(race.cancel_signal),
    )
    synchronize(desk.model.device)
    side.total_s = time.perf_counter() - began
    race.cancelled = race.cancel_signal.should_stop


def _find_difference(race: ComparisonRun, desk: LoadedModel, request: dict[str, Any]) -> Difference | None:
    """Where the answers part, if they do within what both have said."""
    pairs = zip(race.plain.streamer.token_ids, race.mmspec.streamer.token_ids, strict=False)
    column = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if column is None:
        return None
    ours, theirs = race.mmspec.streamer.token_ids[column], race.plain.streamer.token_ids[column]
    return Difference(
        column,
        theirs,
        ours,
        measure_logit_margin(desk, request, race.settings, column, theirs, ours, race.cancel_signal),
    )


def _copy_request(request: dict[str, Any]) -> dict[str, Any]:
    """A copy whose dict of encoded pictures is its own: transformers may write into what it is given."""
    seen = request.get("mm_encoder_outputs")
    return request if seen is None else request | {"mm_encoder_outputs": dict(seen)}


def measure_logit_margin(
    loaded_model: LoadedModel,
    request: dict[str, Any],
    settings: RunSettings,
    index: int,
    token_id: int,
    other_id: int,
    cancel_signal: CancelSignal,
) -> float:
    """How far the plain model's raw logit of `mine` is above that of `other` where the answers part; nan if halted."""
    maker = Captioner(loaded_model.model, loaded_model.processor, index + 1, settings.temperature)
    torch.manual_seed(settings.seed)
    with mmspec.disabled(loaded_model.model):
        again = loaded_model.model.generate(
            **_copy_request(request),
            **maker.generation_kwargs(),
            return_dict_in_generate=True,
            output_logits=True,
            stopping_criteria=build_stopping_criteria(cancel_signal),
        )
    if len(again.logits) <= index:
        return math.nan
    logits = again.logits[index][0].float()
    return float(logits[token_id] - logits[other_id])


__all__ = ["measure_logit_margin", "run_comparison"]
