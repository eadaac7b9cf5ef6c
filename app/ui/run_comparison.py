"""Runs a comparison in the worker's thread: the baseline, then mmspec with each drafter, then its loop without any."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

import mmspec
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import build_inputs, check_length
from mmspec.app.modeling.load import synchronize
from mmspec.app.modeling.sampling import Sampling
from mmspec.app.ui.cancel import build_stopping_criteria
from mmspec.app.ui.comparison import AnswerLane, ComparisonRun, Difference
from mmspec.app.ui.credit import NO_DRAFTS
from mmspec.app.ui.loaded_model import LoadedModel
from mmspec.app.ui.model_store import RunSettings
from mmspec.app.ui.recorder import RoundRecorder
from mmspec.app.ui.streamer import TimingStreamer
from mmspec.app.ui.worker import CancelSignal
from mmspec.control.cost_store import unchanged_costs

LOOP_TOKENS = 64
"""Tokens at most that the loop without drafts decodes to be measured."""


def run_comparison(comparison: ComparisonRun) -> None:
    with unchanged_costs():
        _run(comparison)


def _run(comparison: ComparisonRun) -> None:
    settings = comparison.settings
    if comparison.cancel_signal.should_stop:
        comparison.phase, comparison.cancelled = "done", True
        return
    comparison.phase = "loading"
    loaded = comparison.loaded_model = comparison.model_store.get(settings.model)
    for lane in (comparison.plain, *comparison.lanes):
        if lane.drafter is None:
            continue
        lane.used = loaded.get_drafter(lane.drafter or settings.drafter)
        lane.recorder = RoundRecorder(lane.streamer.record)
    compressor = loaded.get_compressor(settings.compressor)
    comparison.phase = "encoding"
    comparison.load_media()
    inputs = build_inputs(loaded.model, loaded.processor, [comparison.media], [comparison.question], [comparison.turns])
    comparison.prompt_tokens = inputs["input_ids"].shape[1]
    check_length(loaded.model, inputs, settings.max_new_tokens)
    if not comparison.turns:
        loaded.forget(comparison.visitor)  # a first question is measured without what others have computed
    request, comparison.encode_s = loaded.kept_media.encode(comparison.visitor, loaded.model, inputs)
    comparison.is_media_reused = "mm_encoder_outputs" in request and not comparison.encode_s
    comparison.phase = "answering"
    if comparison.plain.drafter is None:
        with mmspec.disabled(loaded.model):
            _generate(comparison, loaded, request, comparison.plain, streamer=comparison.plain.streamer)
    else:
        _speculate(comparison, loaded, request, comparison.plain, {})
    for lane in comparison.lanes:
        if not comparison.cancelled:
            shared = loaded.prompt_options(comparison.visitor, lane.drafter)
            _speculate(comparison, loaded, request, lane, {"compressor": compressor, **shared})
    if comparison.needs_loop:
        _measure_loop(comparison, loaded, request)
    if not comparison.cancelled:
        comparison.model_store.answer_seconds[settings.model] = comparison.encode_s + comparison.mmspec.total_s
    comparison.phase, comparison.lane = "done", None


def _measure_loop(comparison: ComparisonRun, loaded: LoadedModel, request: dict[str, Any]) -> None:
    """Decode the start of the answer without drafts, so that the speed of the loop is known apart from theirs.

    The answers are complete by then: a run that is stopped here has all of them, and no split.
    """
    lane = comparison.loop
    lane.used, lane.recorder = loaded.get_drafter(NO_DRAFTS), RoundRecorder(lane.streamer.record)
    count = min(LOOP_TOKENS, len(comparison.plain.streamer.token_ids))
    _generate(comparison, loaded, request, lane, count, mmspec={"drafter": lane.used, "observers": [lane.recorder]})
    lane.stats = mmspec.stats(loaded.model, last=True)
    if comparison.cancelled:
        comparison.cancelled, comparison.loop = False, AnswerLane(lane.name, lane.drafter)


def _speculate(
    comparison: ComparisonRun,
    loaded: LoadedModel,
    request: dict[str, Any],
    lane: AnswerLane,
    options: dict[str, Any],
) -> None:
    """Generate the answer of a lane of mmspec. The baseline has no `options`: it computes all of its prompt."""
    options = {"drafter": lane.used, "tree_size": comparison.settings.tree_size, **options}
    try:
        token_ids = _generate(comparison, loaded, request, lane, mmspec=options | {"observers": [lane.recorder]})
        lane.streamer.truncate(len(token_ids))  # a cancelled run drops the rest of its last round
        if lane.streamer.token_ids != token_ids:  # a fallback, of which no round is observed
            lane.streamer = TimingStreamer()
            _generate(comparison, loaded, request, lane, mmspec=options, streamer=lane.streamer)
    except ValueError as error:  # the drafter does not take this compressor
        raise UsageError(one_line(error)) from error
    lane.stats = mmspec.stats(loaded.model, last=True)
    lane.difference = _find_difference(comparison, loaded, request, lane)


def _generate(
    comparison: ComparisonRun,
    loaded: LoadedModel,
    request: dict[str, Any],
    lane: AnswerLane,
    max_new_tokens: int | None = None,
    **extra_options: Any,
) -> list[int]:
    """Run `generate`, timed; returns the new token ids. `max_new_tokens` replaces that of the settings."""
    settings = comparison.settings
    count = max_new_tokens or settings.max_new_tokens
    captioner = Captioner(loaded.model, loaded.processor, count, Sampling(settings.temperature))
    comparison.lane = lane
    torch.manual_seed(settings.seed)
    synchronize(loaded.model.device)
    start_time = time.perf_counter()
    lane.streamer.start()
    options = captioner.generation_kwargs() | extra_options
    output = loaded.model.generate(
        **copy_request(request),
        **options,
        stopping_criteria=build_stopping_criteria(comparison.cancel_signal),
    )
    synchronize(loaded.model.device)
    lane.total_s = time.perf_counter() - start_time
    comparison.cancelled = comparison.cancel_signal.should_stop
    token_ids: list[int] = output[0, request["input_ids"].shape[1] :].tolist()
    return token_ids


def _find_difference(
    comparison: ComparisonRun, loaded: LoadedModel, request: dict[str, Any], lane: AnswerLane
) -> Difference | None:
    """The first difference within the length of the shorter answer, with its logit margin."""
    pairs = zip(comparison.plain.streamer.token_ids, lane.streamer.token_ids, strict=False)
    index = next((index for index, (plain, ours) in enumerate(pairs) if plain != ours), None)
    if index is None:
        return None
    plain, ours = comparison.plain.streamer.token_ids[index], lane.streamer.token_ids[index]
    margin = measure_logit_margin(loaded, request, comparison.settings, index, plain, ours, comparison.cancel_signal)
    return Difference(index, plain, ours, margin)


def copy_request(request: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy with its own dict of encoder outputs, into which transformers may write."""
    outputs = request.get("mm_encoder_outputs")
    return request if outputs is None else request | {"mm_encoder_outputs": dict(outputs)}


def measure_logit_margin(
    loaded_model: LoadedModel,
    request: dict[str, Any],
    settings: RunSettings,
    index: int,
    token_id: int,
    other_id: int,
    cancel_signal: CancelSignal,
) -> float:
    """Raw logit of `token_id` minus that of `other_id` at `index` of the plain answer; nan if cancelled.

    Args:
        loaded_model: the model of the run.
        request: inputs of `generate`, with encoded pictures.
        settings: of the run.
        index: of the token in the answer.
        token_id: token of the plain answer.
        other_id: token of the other answer.
        cancel_signal: of the run.
    """
    captioner = Captioner(loaded_model.model, loaded_model.processor, index + 1, Sampling(settings.temperature))
    torch.manual_seed(settings.seed)
    with mmspec.disabled(loaded_model.model):
        output = loaded_model.model.generate(
            **copy_request(request),
            **captioner.generation_kwargs(),
            return_dict_in_generate=True,
            output_logits=True,
            stopping_criteria=build_stopping_criteria(cancel_signal),
        )
    if len(output.logits) <= index:
        return math.nan
    logits = output.logits[index][0].float()
    return float(logits[token_id] - logits[other_id])
