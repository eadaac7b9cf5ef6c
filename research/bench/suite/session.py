"""One run of a suite: loads the model, starts the peers, measures every series, returns what the reports need."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.load import load_model, load_text_model
from mmspec.app.modeling.random_models import SIZES
from mmspec.vision.video.decoder_pool import DecoderPool
from research.bench.bandwidth import WeightReading, measure_weight_reading
from research.bench.peers.base import EMBEDDINGS, MEDIA, TEXT, Peer, PeerError
from research.bench.peers.export import Exports
from research.bench.peers.registry import baseline_peer, build_patched_peers, build_peers
from research.bench.rows import ResultRow
from research.bench.session import provenance, share_of_time
from research.bench.suite.config import SuiteConfig
from research.bench.suite.items import (
    FILE,
    TEXT_TASKS,
    SuiteItem,
    choose_grouping,
    group_items,
    read_items,
    scene_items,
    select_categories,
)
from research.bench.suite.prompts import PromptBuilder
from research.bench.suite.runner import CallRecord, SuiteRun, make_batches
from research.bench.suite.summary import SuiteRow, summarise_calls

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class SuiteResult:
    """Everything that a report shows.

    Attributes:
        config: what was asked for. run: versions, commit, command, device.
        rows: of the summary. calls: every single call.
        skipped: {peer: why it did not run}. left_out: {peer: why it was left out on the way}.
        problems: {item: why it was not run}. notes: remarks in one line each.
        reading: weights and memory, before the calls and after them.
        versions: {peer: version of its engine}. is_stopped: by the user, before its end.
    """

    config: SuiteConfig
    run: ResultRow
    rows: list[SuiteRow] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reading: list[WeightReading] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    is_stopped: bool = False


Keep = Callable[[SuiteResult], None]
"""Writes what has been measured so far."""


def collect(result: SuiteResult, calls: Iterable[CallRecord], keep: Keep) -> None:
    """Add calls to a result as they are made; what was measured is kept, whatever stops the run."""
    for call in calls:
        result.calls.append(call)
        result.rows = summarise_calls(result.calls)
        keep(result)


def load_items(config: SuiteConfig) -> list[SuiteItem]:
    """The items of the suite, those of the wanted categories, each category in one piece.

    Raises:
        UsageError: the folder or a category is not there.
    """
    if config.suite == "scenes":
        return select_categories(
            scene_items(config.categories, config.limit or 1, config.scene_seed), config.categories, config.limit
        )
    items = read_items(TEXT_TASKS) if config.data is None else read_items(config.data / FILE, config.data)
    return select_categories(group_items(items, choose_grouping(items)), config.categories, config.limit)


def measure_suite(
    config: SuiteConfig, command: str, progress: bool | None = None, keep: Keep = lambda result: None
) -> SuiteResult:
    """Measure every series: in the given batch sizes, and in the text form for peers that read nothing else.

    Args:
        command: the command line, for the report.
        progress: show a progress bar; None for only if standard error is a terminal.
        keep: called with the rows so far after each prompt.

    Raises:
        UsageError: the model, a drafter or the folder cannot be used.
    """
    items = load_items(config)
    is_text = config.suite == "text" and config.model not in (*SIZES, "scenes")
    load: Callable[..., Any] = load_text_model if is_text else load_model
    model, processor = load(config.model, config.dtype, config.device)
    assistant = load_text_model(config.assistant, config.dtype, config.device)[0] if config.assistant else None
    tokenizer = getattr(processor, "tokenizer", processor)
    result = SuiteResult(config, provenance(command, model.device))
    result.run |= {"dtype": str(model.dtype).removeprefix("torch.")}
    result.problems = {item.id: item.problem for item in items if item.problem is not None}
    with ExitStack() as stack:
        exports = Exports(model, tokenizer)
        stack.callback(exports.close)
        decoders = stack.enter_context(DecoderPool())
        named = build_peers(config.peers, model, exports, pythons=config.peer_python, assistant=assistant)
        peers = start_peers(named, result, stack)
        try:
            peers += build_patched_peers(config.drafters, model, processor, config.nodes)
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"--model {config.model}: {one_line(error, 600)}") from error
        builder = PromptBuilder(model, processor, decoders, any(peer.reads == EMBEDDINGS for peer in peers))
        keep(result)  # what does not run at all
        suite = SuiteRun(baseline_peer(model), peers, builder, config.new_tokens)
        try:
            _measure_series(suite, items, config, model, result, progress, keep)
        except KeyboardInterrupt:
            result.is_stopped = True
            result.notes.append("stopped: the rows are of the prompts until then")
            result.left_out = suite.left_out
    result.rows = summarise_calls(result.calls)
    return result


def start_peers(named: Sequence[Peer], result: SuiteResult, stack: ExitStack) -> list[Peer]:
    """Those peers that are installed and start; the reasons of the others go to `result.skipped`."""
    started = []
    for peer in named:
        reason = peer.unavailable_reason()
        if reason is None:
            stack.callback(peer.close)
            try:
                peer.start()
            except PeerError as error:
                reason = f"does not start: {error}"
        if reason is not None:
            result.skipped[peer.name] = reason
            continue
        started.append(peer)
        if version := getattr(peer, "version", ""):
            result.versions[peer.name] = version
    return started


def _measure_series(
    suite: SuiteRun,
    items: Sequence[SuiteItem],
    config: SuiteConfig,
    model: PreTrainedModel,
    result: SuiteResult,
    progress: bool | None,
    keep: Keep,
) -> None:
    has_media = any(item.has_media for item in items)
    series = [(MEDIA if has_media else TEXT, batch) for batch in config.batch_sizes]
    if has_media and any(peer.reads == TEXT for peer in suite.peers):
        series.append((TEXT, 1))
    for _, batch in series:
        full = {item.category for group in make_batches(items, batch) for item in group}
        short = [name for name in dict.fromkeys(item.category for item in items) if name not in full]
        if short:
            result.notes.append(f"batch {batch}: too few items in {', '.join(short)}")
    is_hidden = not (sys.stderr.isatty() if progress is None else progress)
    total = sum(suite.count_calls(items, form, batch) for form, batch in series)
    with tqdm(total=total, desc="bench", unit="call", disable=is_hidden, file=sys.stderr) as bar:
        suite.tick = bar.update
        result.reading.append(measure_weight_reading(model))
        end = None if config.minutes is None else time.perf_counter() + 60 * config.minutes
        for number, (form, batch) in enumerate(series):
            deadline = share_of_time(end, len(series) - number)
            collect(result, suite.run_series(items, form, batch, deadline), keep)
        result.reading.append(measure_weight_reading(model))
    result.left_out = suite.left_out
    result.notes += suite.stopped
