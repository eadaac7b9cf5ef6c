"""`python -m research.studies.visual`: costs and benefits of a drafter that sees fewer visual tokens.

Each contestant decodes the same held-out requests, in a random order: one image, four images, clips. Reports tau,
overall and on names of objects; time, operations and memory of the drafter's own prefill; and the time of decoding and
of whole calls, as ratios of paired runs. Intervals are over requests (bootstrap). The drafters that the command line
names persist over all shapes, so one that adapts continues to adapt.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import research.compressors  # noqa: F401  - by name
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone, load_model
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.interfaces import Drafter
from research.bench.drafter_specs import patch_model
from research.bench.measure import (
    HF,
    NO_DRAFT,
    Contestant,
    TimedRun,
    gc_paused,
    median_ci,
    run_once,
)
from research.bench.plot import plot_compression
from research.bench.results import ResultFiles
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.bench.specs import get_compressor, get_drafter, short_labels
from research.studies.chooser_report import compare_adaptive, format_comparison, run_names
from research.studies.prefill_recorder import PrefillCost, PrefillRecorder
from research.studies.scenarios import count_prompt_tokens, fit_to_context, generate_scenario
from research.studies.visual_config import CompressorStudyConfig, build_study_parser
from research.studies.visual_report import format_compressor_row, format_compressor_tables
from research.studies.word_classes import AnswerCounts, count_answer, metric_interval, metric_ratio_interval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


@dataclass
class CompressorRun:
    """A drafter, perhaps with a compressor, and its measurements, request by request.

    Attributes:
        name: spec of the drafter; `HF` for plain `generate`.
        shares: budgets: 1/share of the visual tokens (0: one token); empty for a drafter of the command line.
    """

    name: str
    contestant: Contestant
    drafter: Drafter | None = None
    shares: Sequence[int] = ()
    answers: list[AnswerCounts] = field(default_factory=list)
    prefill_costs: list[PrefillCost] = field(default_factory=list)


def plan_runs(
    names: Sequence[str], compressors: Sequence[str], shares: Sequence[int], num_visual_tokens: int
) -> dict[str, list[int]]:
    """Every drafter alone, then the first one with each compressor.

    Returns:
        {spec: its shares: 1/share of the visual tokens are its budget (0: one token)}.
    """
    plan: dict[str, list[int]] = {name: [] for name in names}
    for compressor in compressors:
        for share in shares:
            budget = 1 if not share else max(1, num_visual_tokens // share)
            plan.setdefault(f"{names[0]}+{compressor}:{budget}", []).append(share)
    return plan


def build_runs(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    plan: Mapping[str, Sequence[int]],
    nodes: int | None = None,
    previous: Sequence[CompressorRun] = (),
) -> list[CompressorRun]:
    """Plain `generate`, our loop without drafts, and each spec of `plan`, on clones that share their weights.

    Args:
        previous: runs of the shape before; a spec that is among them keeps its model, with all that it has adapted.
    """
    models = {run.name: run.contestant.model for run in previous}
    plain = models[HF] if previous else clone(model)
    runs = [CompressorRun(HF, Contestant(HF, plain))]
    for name in dict.fromkeys((NO_DRAFT, *plan)):
        patched = models[name] if name in models else patch_model(clone(model), name, processor, nodes)
        runs.append(CompressorRun(name, Contestant(name, patched), get_drafter(patched), plan.get(name, ())))
    return runs


@gc_paused()
def run_contest(
    runs: Sequence[CompressorRun],
    processor: ProcessorMixin,
    shape: str,
    scene_seed: int,
    count: int,
    max_new_tokens: int,
    tick: Callable[[int], object],
) -> None:
    """Decode the same requests with every contestant; the first request warms up."""
    captioner = Captioner(runs[0].contestant.model, processor)
    for number, request in enumerate(islice(generate_scenario(shape, scene_seed), count + 1)):
        inputs = captioner.build_inputs([request.images], [request.question])
        for run in random.Random(number).sample(runs, len(runs)):  # so that no contestant always follows the same one
            timed, recorder = _run_recorded(run, inputs, max_new_tokens)
            tick(1)
            if not number:
                continue
            run.contestant.runs.append(timed)
            if recorder is not None:
                run.answers.append(count_answer(recorder.rounds(), processor.tokenizer, captioner.eos_ids))
                run.prefill_costs.append(recorder.measure())


def _run_recorded(
    run: CompressorRun, inputs: Mapping[str, Any], max_new_tokens: int
) -> tuple[TimedRun, PrefillRecorder | None]:
    """One greedy call, with the drafter recorded if there is one."""
    if run.drafter is None:
        return run_once(run.contestant, inputs, max_new_tokens, 0.0, 0), None
    recorder = PrefillRecorder(run.drafter, run.contestant.model.device)
    return run_once(run.contestant, inputs, max_new_tokens, 0.0, 0, observer=recorder), recorder


def build_rows(runs: Sequence[CompressorRun], shape: str, base: str) -> Iterator[ResultRow]:
    """A row per spec; times of prefill, decoding and calls as ratios to those of `base`, request by request.

    `*_over` are ratios of costs (below 1 is less), `speedup_*` ratios of speed (above 1 is faster).
    """
    by_name = {run.name: run for run in runs}
    speculative = [run for run in runs if run.name != HF]
    names = [run.name for run in speculative]
    labels = dict(zip(names, short_labels(names), strict=True))
    plain_runs, base_run = by_name[HF].contestant.runs, by_name[base]
    for run in speculative:
        timed_runs = run.contestant.runs
        label = labels[run.name]
        row: ResultRow = {"shape": shape, "spec": label, "base": labels[base], "requests": len(timed_runs)}
        row |= {"drafter": label.partition("+")[0], "family": _family(run), "shares": list(run.shares)}
        row["num_compressed_tokens"], row["share"] = _compression(run)
        row |= {name: metric_interval(run.answers, name) for name in ("tau", "names", "names_tau")}
        row["tau_over"] = metric_ratio_interval(run.answers, "tau", base_run.answers)
        row |= _prefill_ratios(run.prefill_costs, base_run.prefill_costs)
        row |= _speedups(timed_runs, base_run.contestant.runs, plain_runs)
        row["total_s"] = mean(timed.total_s for timed in timed_runs)
        row["seconds"] = [round(timed.total_s, 5) for timed in timed_runs]
        row["forwards"] = [answer.forwards for answer in run.answers]
        pairs = zip(timed_runs, plain_runs, strict=True)
        row["identical"] = all(torch.equal(timed.output_ids, plain.output_ids) for timed, plain in pairs)
        yield row


def _speedups(runs: Sequence[TimedRun], base_runs: Sequence[TimedRun], plain_runs: Sequence[TimedRun]) -> ResultRow:
    """Medians of the paired ratios of speed, to the base and to plain `generate`, with their intervals."""
    triples = list(zip(runs, base_runs, plain_runs, strict=True))
    ratios = {
        "speedup_decode": [base.decode_s / max(run.decode_s, 1e-9) for run, base, _ in triples],
        "speedup_e2e": [base.total_s / run.total_s for run, base, _ in triples],
        "speedup_hf": [plain.decode_s / max(run.decode_s, 1e-9) for run, _, plain in triples],
        "speedup_hf_e2e": [plain.total_s / run.total_s for run, _, plain in triples],
    }
    row: ResultRow = {}
    for name, values in ratios.items():
        row |= {name: median(values), f"{name}_ci": median_ci(values)}
    return row


def _prefill_ratios(costs: Sequence[PrefillCost], base_costs: Sequence[PrefillCost]) -> dict[str, float]:
    """Costs of the drafter's prefill, and their ratios to those of the base; empty for a drafter without one."""
    if not any(cost.kv_bytes for cost in costs):
        return {}
    pairs = list(zip(costs, base_costs, strict=True))
    return {
        "prefill_ms": 1e3 * median(cost.seconds for cost in costs),
        "prefill_over": median(cost.seconds / base.seconds for cost, base in pairs),
        "kv_kib": mean(cost.kv_bytes for cost in costs) / 1024,
        "kv_over": median(cost.kv_bytes / base.kv_bytes for cost, base in pairs),
        "mflops": mean(cost.flops for cost in costs) / 1e6,
        "mflops_over": median(cost.flops / base.flops for cost, base in pairs),
    }


def _compression(run: CompressorRun) -> tuple[float | None, float | None]:
    """Mean number of visual tokens after compression, and their share; (None, ...) without a compressor."""
    if num_visual := sum(cost.num_visual_tokens for cost in run.prefill_costs):
        num_compressed = sum(cost.num_compressed_tokens for cost in run.prefill_costs)
        return num_compressed / len(run.prefill_costs), num_compressed / num_visual
    if isinstance(run.drafter, EagleDrafter) and run.drafter.visual_mode == "text_only":
        return 0.0, 0.0
    return None, 1.0 if any(cost.kv_bytes for cost in run.prefill_costs) else None


def _family(run: CompressorRun) -> str:
    """Name of the compressor without its budget."""
    compressor = get_compressor(run.contestant.model)
    return "identity" if compressor is None else str(compressor.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_study_parser(__doc__)
    args = parser.parse_args(arguments)
    files = ResultFiles.from_args(args)
    try:
        earlier = [row for file in args.also for row in read_earlier_rows(file)]
        config = CompressorStudyConfig.from_args(args)
        files.check()
        rows = measure_compressors(config, f"{parser.prog} {shlex.join(arguments)}")
    except UsageError as error:
        parser.error(str(error))
    for spec, comparison in compare_adaptive(rows).items():
        print(format_comparison(spec, comparison))
        for row in (row for row in rows if spec in run_names(row)):
            row.setdefault("against", {})[spec] = comparison
    rows = [*earlier, *rows]
    files.write(rows, format_compressor_tables(rows), lambda file: plot_compression(rows, file))
    return 0


def read_earlier_rows(file: str) -> list[ResultRow]:
    """The rows that an earlier run wrote to --json.

    Raises:
        UsageError: the file cannot be read, or is not of this study.
    """
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--also takes files of --json; {file} cannot be read: {one_line(error)}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "shape" in row for row in rows):
        raise UsageError(f"--also takes files of --json of this command; {file} is none")
    return rows


def measure_compressors(config: CompressorStudyConfig, command: str) -> list[ResultRow]:
    """All rows, printed as they are measured; `command` is the command line, for `run.command` of the rows.

    Raises:
        UsageError: the model or a drafter cannot be used; the first drafter is not a trained one.
    """
    model, processor = load_model(config.model)
    shared: ResultRow = {name: getattr(config, name) for name in ("model", "scene_seed", "max_new_tokens", "nodes")}
    shared["run"] = provenance(command, model.device)
    is_hidden = not (sys.stderr.isatty() if config.progress is None else config.progress)
    rows: list[ResultRow] = []
    runs: list[CompressorRun] = []
    for wanted in config.shapes:
        try:
            shape = fit_to_context(wanted, model, processor, config.max_new_tokens)
            request = next(generate_scenario(shape, config.scene_seed))
            num_visual_tokens, _ = count_prompt_tokens(model, processor, request)
            plan = plan_runs(config.drafters, config.compressors, config.shares, num_visual_tokens)
            runs = build_runs(model, processor, plan, config.nodes, runs)
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(one_line(error, 600)) from error
        if not isinstance(next(run.drafter for run in runs if run.name == config.base), EagleDrafter):
            raise UsageError(f"the first drafter must be a trained one, with a prefill; got {config.base!r}")
        with tqdm(total=(config.count + 1) * len(runs), desc=shape, disable=is_hidden) as bar:
            run_contest(runs, processor, shape, config.scene_seed, config.count, config.max_new_tokens, bar.update)
        for row in build_rows(runs, shape, config.base):
            row |= {"num_visual_tokens": num_visual_tokens} | shared
            rows.append(row)
            print(format_compressor_row(row), flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
