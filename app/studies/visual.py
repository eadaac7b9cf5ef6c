"""`python -m mmspec.app.studies.visual`: what it costs and what it brings to show a drafter fewer visual tokens.

Each way decodes the same held-out requests, in an order drawn anew: one picture, four pictures, clips. Reports
tau, overall and on names of things; the time, the work and the memory of the drafter's own prefill; and the time of
decoding and of whole calls, as ratios of paired runs. Intervals are over requests (bootstrap). The drafters that are
named live through all shapes, so one that learns goes on learning.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from mmspec.app.bench.config import check_writable
from mmspec.app.bench.measure import (
    HF,
    NO_DRAFT,
    Contestant,
    TimedRun,
    clone,
    gc_paused,
    median_ci,
    run_once,
    share_kernel_timings,
)
from mmspec.app.bench.session import provenance
from mmspec.app.bench.specs import check_spec, get_compressor, get_drafter, parse_spec, patch_model, short_labels
from mmspec.app.caption.command import positive_int
from mmspec.app.caption.config import DEFAULT_MODEL
from mmspec.app.cli.deprecated import add_renamed
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.studies import chooser_report as choices
from mmspec.app.studies.prefill_recorder import PrefillCost, PrefillRecorder
from mmspec.app.studies.scenarios import (
    SCENARIOS,
    count_prompt_tokens,
    fit_to_context,
    generate_scenario,
    parse_shapes,
    parse_shares,
    split_commas,
)
from mmspec.app.studies.visual_report import format_row, markdown
from mmspec.app.studies.word_classes import AnswerCounts, count_answer, metric_interval, metric_ratio_interval
from mmspec.interfaces import Drafter
from mmspec.metrics.stats import Stats

EPILOG = """\
shapes
  short    a picture and a short question     one      a picture to describe
  four     four pictures to describe          clip8, clip32, clipN   a clip of so many frames, or of as many as the
                                              model has positions for

compressors
  as for mmspec.patch; own is the one that a drafter was trained with, which then keeps fewer tokens: --compressors own
  cost-based depends on the measured cost of prefill here, and so does not work with --nodes

rows
  *_over are multiples of what the first drafter takes (tau_over: of its tau), speedup_* of its speed, speedup_hf* of
  that of plain generate, *_ci their 95% intervals; names is the share of their tokens that was guessed, names_tau their
  tokens for each forward that one of them cost. Without --nodes tau follows a controller that goes by measured times.
  Ways that choose for each prompt (elastic, cost-based) are compared with the best fixed way, by the sum of all seconds
  and by the mean over shapes, and against the best way for each request: by forwards, and by seconds (a bound that is
  too good, picked after the fact from noisy times).

examples
  python -m mmspec.app.studies.visual out/msd --compressors pool,stride,relevant --json study.json --markdown study.md
  python -m mmspec.app.studies.visual out/msd out/msd+cost-based out/msd-latent --shapes short,one,clip8
  python -m mmspec.app.studies.visual out/msd-latent --compressors own --nodes 16
"""


@dataclass
class CompressorRun:
    """A drafter, perhaps with a compressor, and what was measured of it, request by request.

    Attributes:
        shares: 1/share of the visual tokens were asked for (0: one token); empty for a way that was named.
    """

    name: str
    contestant: Contestant
    drafter: Drafter | None = None
    shares: Sequence[int] = ()
    answers: list[AnswerCounts] = field(default_factory=list)
    prefill_costs: list[PrefillCost] = field(default_factory=list)


def plan_runs(
    names: Sequence[str], compressors: Sequence[str], shares: Sequence[int], visual: int
) -> dict[str, list[int]]:
    """Every drafter alone, then the first with each compressor; {name: 1/shares of the tokens it keeps (0: one)}."""
    ways: dict[str, list[int]] = {name: [] for name in names}
    for what in compressors:
        for share in shares:
            size = 1 if not share else max(1, visual // share)
            ways.setdefault(f"{names[0]}+{what}:{size}", []).append(share)
    return ways


def build_runs(
    model: Any,
    processor: Any,
    ways: Mapping[str, Sequence[int]],
    nodes: int | None = None,
    before: Sequence[CompressorRun] = (),
) -> list[CompressorRun]:
    """Plain `generate`, our loop without drafts, and each way, on clones that share their weights.

    Args:
        before: the field of the shape before; who was in it under the same name stays, with what it has learned.
    """
    models = {way.name: way.contestant.model for way in before}
    plain = models[HF] if before else clone(model)
    made = [CompressorRun(HF, Contestant(HF, plain))]
    for name in dict.fromkeys((NO_DRAFT, *ways)):
        ours = models[name] if name in models else patch_model(clone(model), name, processor, nodes)
        made.append(CompressorRun(name, Contestant(name, ours), get_drafter(ours), ways.get(name, ())))
    share_kernel_timings([way.contestant.model for way in made])
    return made


@gc_paused()
def run_contest(
    field_: Sequence[CompressorRun],
    processor: Any,
    shape: str,
    first: int,
    count: int,
    most: int,
    tick: Callable[[int], Any],
) -> None:
    """Everybody on the same requests; the first request warms up."""
    maker = Captioner(field_[0].contestant.model, processor)
    for number, one in enumerate(islice(generate_scenario(shape, first), count + 1)):
        inputs = maker.build_inputs([one.images], [one.question])
        for way in random.Random(number).sample(field_, len(field_)):  # so that nobody always follows the same one
            run, reader = _once(way, inputs, most)
            tick(1)
            if not number:
                continue
            way.contestant.runs.append(run)
            if reader is not None:
                reader.count_flops()
                way.answers.append(count_answer(reader.rounds(), processor.tokenizer, maker.eos_ids))
                way.prefill_costs.append(reader.cost)


def _once(way: CompressorRun, inputs: Mapping[str, Any], most: int) -> tuple[TimedRun, PrefillRecorder | None]:
    """One call, with the drafter watched."""
    if way.drafter is None:
        return run_once(way.contestant, inputs, most, 0.0, 0), None
    reader = PrefillRecorder(way.drafter, way.contestant.model.device)
    return run_once(way.contestant, inputs, most, 0.0, 0, drafter=reader), reader


def build_rows(field_: Sequence[CompressorRun], shape: str, base: str) -> Iterator[dict[str, Any]]:
    """A row per way; times of prefill, decoding and calls as ratios to those of `base`, run by run.

    `*_over` are multiples of what the base takes (below 1 is less), `speedup_*` of its speed (above 1 is faster).
    """
    by_name = {way.name: way for way in field_}
    ours = [way.name for way in field_ if way.name != HF]
    short = dict(zip(ours, short_labels(ours), strict=True))
    plain, whole = by_name[HF].contestant.runs, by_name[base]
    for way in field_:
        if way.name == HF:
            continue
        runs, stats = way.contestant.runs, [run.stats for run in way.contestant.runs if run.stats]
        row: dict[str, Any] = {"shape": shape, "way": short[way.name], "base": short[base], "requests": len(runs)}
        row |= {"drafter": short[way.name].partition("+")[0], "family": _family(way), "shares": list(way.shares)}
        row |= dict(zip(("kept", "share"), _kept(way, stats), strict=True))
        row |= {name: metric_interval(way.answers, name) for name in ("tau", "names", "names_tau")}
        row["tau_over"] = metric_ratio_interval(way.answers, "tau", whole.answers)
        row |= _reading(way.prefill_costs, whole.prefill_costs)
        pairs = list(zip(runs, whole.contestant.runs, plain, strict=True))
        ratios = {
            "speedup_decode": [w.decode_s / max(r.decode_s, 1e-9) for r, w, _ in pairs],
            "speedup_e2e": [w.total_s / r.total_s for r, w, _ in pairs],
            "speedup_hf": [p.decode_s / max(r.decode_s, 1e-9) for r, _, p in pairs],
            "speedup_hf_e2e": [p.total_s / r.total_s for r, _, p in pairs],
        }
        for name, values in ratios.items():
            row |= {name: median(values), f"{name}_ci": median_ci(values)}
        row["total_s"] = mean(run.total_s for run in runs)
        row["seconds"] = [round(run.total_s, 5) for run in runs]
        row["forwards"] = [answer.forwards for answer in way.answers]
        row["identical"] = all(torch.equal(r.output_ids, p.output_ids) for r, _, p in pairs)
        yield row


def _reading(mine: Sequence[PrefillCost], whole: Sequence[PrefillCost]) -> dict[str, float]:
    """What reading prompts costs; nothing of a drafter that reads none."""
    if not any(one.kv_bytes for one in mine):
        return {}
    pairs = list(zip(mine, whole, strict=True))
    return {
        "prefill_ms": 1e3 * median(one.seconds for one in mine),
        "prefill_over": median(one.seconds / other.seconds for one, other in pairs),
        "kv_kib": mean(one.kv_bytes for one in mine) / 1024,
        "kv_over": median(one.kv_bytes / other.kv_bytes for one, other in pairs),
        "mflops": mean(one.flops for one in mine) / 1e6,
        "mflops_over": median(one.flops / other.flops for one, other in pairs),
    }


def _kept(way: CompressorRun, stats: Sequence[Stats]) -> tuple[float | None, float | None]:
    """Visual tokens that the drafter was shown, in the mean, and their share; (None, ...) if it was shown all."""
    if visual := sum(one.num_visual_tokens for one in stats):
        kept = sum(one.num_compressed_tokens for one in stats)
        return kept / len(stats), kept / visual
    if getattr(way.drafter, "visual_mode", None) == "text_only":
        return 0.0, 0.0
    return None, 1.0 if any(reading.kv_bytes for reading in way.prefill_costs) else None


def _family(way: CompressorRun) -> str:
    """What shows the drafter fewer visual tokens, without their number."""
    shows = get_compressor(way.contestant.model)
    return "identity" if shows is None else str(shows.name)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m mmspec.app.studies.visual",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("drafters", nargs="+", metavar="D", help="trained drafters; the first is what others are compared with")
    add("--compressors", type=split_commas, default=[], metavar="C,C", help="with the first drafter, at every share")
    add("--shares", type=parse_shares, default=[2, 4, 8, 16, 0], metavar="N,N", help="1/N of the tokens; 0: one token")
    add("--shapes", type=parse_shapes, default=["one", "clip8"], metavar="S,S", help=f"of {', '.join(SCENARIOS)}")
    add("--model", default=DEFAULT_MODEL)
    add_renamed(made, "--scene-seed", "--first-seed", type=int, default=FIRST_HELD_OUT_SEED, metavar="S")
    add("--count", type=positive_int, default=12, metavar="N", help="requests of each shape (default 12)")
    add("--nodes", type=positive_int, default=None, metavar="N", help="score trees of N nodes (default: what pays)")
    add("--max-new-tokens", type=positive_int, default=128, metavar="N")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE.md", help="the tables")
    add("--plot", metavar="FILE.png", help="tau against tokens kept")
    add("--also", nargs="+", default=[], metavar="FILE", help="JSON of earlier runs, whose rows go before these")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    try:
        earlier = [row for file in args.also for row in read_earlier_rows(file)]
        rows = measure_visual(args, shlex.join(["python", "-m", "mmspec.app.studies.visual", *given]))
    except UsageError as error:
        parser().error(str(error))
    for way, figures in choices.compare_adaptive(rows).items():
        print(choices.format_comparison(way, figures))
        for row in (row for row in rows if way in choices.run_names(row)):
            row.setdefault("against", {})[way] = figures
    rows = [*earlier, *rows]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(markdown(rows), encoding="utf-8")
    if args.plot:
        from mmspec.app.bench.plot import plot_compression

        plot_compression(rows, Path(args.plot))
    return 0


def read_earlier_rows(file: str) -> list[dict[str, Any]]:
    """What an earlier run wrote to --json.

    Raises:
        UsageError: it did not write that.
    """
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--also takes files of --json; {file} cannot be read: {one_line(error)}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "shape" in row for row in rows):
        raise UsageError(f"--also takes files of --json of this command; {file} is none")
    return [row | ({"scene_seed": row.pop("first_seed")} if "first_seed" in row else {}) for row in rows]


def measure_visual(args: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """All rows, printed as they come.

    Raises:
        UsageError: what was asked cannot be done.
    """
    from tqdm import tqdm

    first = args.drafters[0]
    if args.compressors and (parse_spec(first).compressor or parse_spec(first).own_tokens):
        raise UsageError(f"--compressors go with the first drafter, which has one: {first!r}; put it later")
    for name in (*args.drafters, *(f"{first}+{what}:1" for what in args.compressors)):
        check_spec(name)
    for file in filter(None, (args.json, args.markdown, args.plot)):
        check_writable(file)
    model, processor = load_model(args.model)
    shared = {name: getattr(args, name) for name in ("model", "scene_seed", "max_new_tokens", "nodes")}
    shared["run"] = provenance(command, model.device)
    rows: list[dict[str, Any]] = []
    field_: list[CompressorRun] = []
    for wanted in args.shapes:
        try:
            shape = fit_to_context(wanted, model, processor, args.max_new_tokens)
            visual, _ = count_prompt_tokens(model, processor, next(generate_scenario(shape, args.scene_seed)))
            ways = plan_runs(args.drafters, args.compressors, args.shares, visual)
            field_ = build_runs(model, processor, ways, args.nodes, field_)
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(one_line(error, 600)) from error
        if not hasattr(next(way.drafter for way in field_ if way.name == args.drafters[0]), "sync"):
            raise UsageError(
                f"the first drafter is to be a trained one, which reads its prompt; got {args.drafters[0]!r}"
            )
        given = shape, args.scene_seed, args.count, args.max_new_tokens
        with tqdm(total=(args.count + 1) * len(field_), desc=shape, disable=not args.progress) as bar:
            run_contest(field_, processor, *given, bar.update)
        for row in build_rows(field_, shape, first):
            row |= {"visual": visual} | shared
            rows.append(row)
            print(format_row(row), flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
