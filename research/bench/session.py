"""One run of `research.bench`: loads the model, measures every batch size and prompt length, returns the rows."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from tqdm import tqdm

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.decode import ReadableRows
from mmspec.app.io.images import media_images
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.domain_check import warn_if_out_of_domain
from mmspec.app.versions import commit, mmspec_version, version
from mmspec.vision.video.decoder_pool import DecoderPool
from research.bench.config import BenchConfig
from research.bench.forced_tree import add_forced_tree, is_probe_needed, probe_forced_tree
from research.bench.measure import (
    MIN_ROUNDS,
    NO_DRAFT,
    WARM_UP_CALLS,
    Contestant,
    TimedRun,
    build_contestants,
    build_result_rows,
    run_rounds,
)
from research.bench.overview import overview_configs
from research.bench.processes import DeadProcessError, Part, run_in_processes
from research.bench.requests import build_requests, build_scene_requests, named_images, synthetic_images
from research.bench.rows import ResultRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

Requests = Sequence[Mapping[str, Any]]
Runs = dict[str, list[TimedRun]]


def measure_bench(
    config: BenchConfig,
    command: str,
    progress: bool | None = None,
    keep: Callable[[list[ResultRow]], None] = lambda rows: None,
) -> list[ResultRow]:
    """All rows, batch size by batch size and prompt length by prompt length.

    Args:
        command: the command line, for `run.command` of the rows.
        progress: show a progress bar; None for only if standard error is a terminal.
        keep: called with the rows so far, as they come; at an interruption also with those of whole rounds.

    Raises:
        UsageError: the model, a drafter or an image cannot be used.
    """
    with DecoderPool() as decoders:
        named = _named_rows(config, decoders)
        first = named.peek()[1] if named else None  # before the model is loaded
        if config.model == SCENES_MODEL and not config.task:
            shown = first or synthetic_images(1, config.seed)[0]
            warn_if_out_of_domain(shown, "what --images names" if named else "the synthetic image")
        model, processor, contestants = _contestants(config)
        captioner = Captioner(model, processor)
        images = _images(config, captioner, named)
    keys = ("model", "task", "scene_seed", "new_tokens", "temperature", "nodes")
    shared = {key: getattr(config, key) for key in keys}
    shared |= {"dtype": captioner.dtype, "run": provenance(command, model.device)}
    lengths = config.prompt_tokens or (0,)
    series = [(batch, length) for batch in config.batch_sizes for length in lengths]
    num_calls = len(contestants) * sum(config.rounds_of(batch) + WARM_UP_CALLS for batch, _ in series)
    is_hidden = not (sys.stderr.isatty() if progress is None else progress)
    rows: list[ResultRow] = []
    with tqdm(total=num_calls, desc="bench", unit="call", disable=is_hidden, file=sys.stderr) as bar:
        end = None if config.minutes is None else time.perf_counter() + 60 * config.minutes
        for number, (batch, length) in enumerate(series):
            requests = _build_requests(config, captioner, images, batch, length)
            about = {"prompt_tokens": requests[0]["input_ids"].shape[1]}
            deadline = share_of_time(end, len(series) - number)
            series_of = (batch, length)
            try:
                measured = _measure(config, contestants, requests, series_of, model, processor, bar.update, deadline)
            except (KeyboardInterrupt, DeadProcessError):
                keep(rows + [row | about | shared for row in rows_of_whole_rounds(contestants)])
                raise
            rows += [row | about | shared for row in measured]
            keep(rows)
    return rows


def measure_overview(
    config: BenchConfig,
    command: str,
    progress: bool | None = None,
    keep: Callable[[list[ResultRow]], None] = lambda rows: None,
) -> list[ResultRow]:
    """The rows of every part of `research.bench --overview`, each with its title in `setting`; see `measure_bench`."""
    rows: list[ResultRow] = []
    for title, part in overview_configs(config):

        def keep_part(new: list[ResultRow], title: str = title, done: Sequence[ResultRow] = tuple(rows)) -> None:
            keep([*done, *(row | {"setting": title} for row in new)])

        rows += [row | {"setting": title} for row in measure_bench(part, command, progress, keep_part)]
    return rows


def _build_requests(
    config: BenchConfig, captioner: Captioner, images: Sequence[Image.Image], batch: int, length: int
) -> Requests:
    """A warm-up request and one for each measured round."""
    count = config.rounds_of(batch)
    if config.task and config.scene_seed is not None:
        return build_scene_requests(captioner, config.task, config.scene_seed, batch, count)
    return build_requests(captioner, images, config.prompt, batch, length, count + 1, config.seed)


def _named_rows(config: BenchConfig, decoders: DecoderPool) -> ReadableRows | None:
    """What `--images` names; None without it."""
    return ReadableRows(config.images, config.source, decoders, "--images") if config.images else None


def _images(
    config: BenchConfig, captioner: Captioner, named: ReadableRows | None, quiet: bool = False
) -> list[Image.Image]:
    """The images of all requests, without a task."""
    count = max(config.batch_sizes) * (config.repeats + 1)
    if named is None:
        return [] if config.task else synthetic_images(count, config.seed)
    named.check = lambda item, media: captioner.checked_inputs(media_images(media)[:1], [config.prompt])
    return named_images(named, count, quiet)


def _contestants(config: BenchConfig) -> tuple[PreTrainedModel, ProcessorMixin, list[Contestant]]:
    """The model, its processor and all that are measured.

    Raises:
        UsageError: the model or a drafter cannot be used.
    """
    model, processor = load_model(config.model, config.dtype, config.device)
    try:
        contestants = build_contestants(model, config.drafters, processor, config.task is not None, config.nodes)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--model {config.model}: {one_line(error, 600)}") from error
    return model, processor, contestants


def measure_part(config: BenchConfig, series: tuple[int, int], seconds: float | None, part: Part) -> Runs:
    """In a process of its own: {name: runs} of its share of the rounds of one batch size and prompt length."""
    model, processor, contestants = _contestants(config)
    captioner = Captioner(model, processor)
    with DecoderPool() as decoders:
        images = _images(config, captioner, _named_rows(config, decoders), quiet=True)
    requests = part.of(_build_requests(config, captioner, images, *series))
    end, least = None if seconds is None else time.perf_counter() + seconds, math.ceil(MIN_ROUNDS / part.count)
    run_rounds(contestants, requests, config.new_tokens, config.temperature, config.seed, lambda: None, end, least)
    return {one.name: one.runs for one in contestants}


def _measure(
    config: BenchConfig,
    contestants: Sequence[Contestant],
    requests: Requests,
    series: tuple[int, int],
    model: PreTrainedModel,
    processor: ProcessorMixin,
    tick: Callable[[], object],
    deadline: float | None,
) -> list[ResultRow]:
    """Rows of one batch size and prompt length; a drafter that the controller left out is probed with a forced tree."""
    count = min(config.processes, len(requests) - 1)
    if count > 1:
        seconds = None if deadline is None else (deadline - time.perf_counter()) / count
        num_calls = len(contestants) * (len(requests) - 1) // count
        runs: Runs = {}
        try:
            run_in_processes(
                measure_part, (config, series, seconds), count, lambda: [tick() for _ in range(num_calls)], runs
            )
        finally:
            for one in contestants:
                one.runs = runs.get(one.name, [])
    else:
        run_rounds(contestants, requests, config.new_tokens, config.temperature, config.seed, tick, deadline)
    own = next(one for one in contestants if one.name == NO_DRAFT)
    rows = list(build_result_rows(contestants))
    for row in rows:
        forced = None
        if config.nodes is None and is_probe_needed(row):
            forced = probe_forced_tree(
                own,
                row["drafter"],
                processor,
                requests,
                config.new_tokens,
                config.temperature,
                config.seed,
                model=model,
                stop_at_eos=config.task is not None,
            )
        add_forced_tree(row, forced)
        row["repeats"] = len(own.runs)
    return rows


def rows_of_whole_rounds(contestants: Sequence[Contestant]) -> list[ResultRow]:
    """The rows of a series that was stopped: of the rounds in which all have run."""
    count = min(len(one.runs) for one in contestants)
    if not count:
        return []
    for one in contestants:
        del one.runs[count:]
    rows = list(build_result_rows(contestants))
    for row in rows:
        add_forced_tree(row, None)
        row["repeats"] = count
    return rows


def share_of_time(end: float | None, num_series: int) -> float | None:
    """When the next of `num_series` series has to end so that the others get as much; None if there is no end."""
    if end is None:
        return None
    now = time.perf_counter()
    return now + max(0.0, end - now) / num_series


def provenance(command: str, device: torch.device) -> ResultRow:
    """Versions, commit, command line and device (the one measured on) of a result."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": command,
        "mmspec": mmspec_version(),
        "commit": commit(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": card or device.type,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def processor_name() -> str:
    """Model name of the CPU where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
