"""`research.bench`: decoding speed against plain `generate`, as a table, as JSON and as a bar chart."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from mmspec.app.caption.option_fields import PROMPT
from mmspec.app.cli.arguments import (
    add_device_options,
    add_model_option,
    add_table_options,
    goes_with,
    hide_progress_bars,
    positive_int,
    split_commas,
)
from mmspec.app.cli.main import CommandParser, run_command
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.arguments import add_progress, add_sampling_options, positive_floats, positive_ints
from research.bench.config import DEFAULT_PROCESSES, DEFAULT_ROUNDS, BenchConfig
from research.bench.overview import overview_markdown
from research.bench.plot import plot_bench
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.suite import command as suite
from research.bench.ties import tie_lines
from research.scenes.tasks import add_scene_seed

TASKS = ("describe", "short", "answer", "clip")
"""`REQUEST_TASKS` of research.scenes.tasks, which is too slow to import here."""
MAX_DEPTH_COLUMNS = 5
"""Draft positions that the table has room for."""
COLUMNS = {
    "drafter": "drafter",
    "batch": "batch",
    "prompt_tokens": "prompt",
    "tau": "tau",
    "accepted_at_position": "accept %",
    "R": "R",
    "tokens_per_s": "tok/s",
    "speedup_hf": "x hf",
    "speedup_hf_lo": "min",
    "speedup_hf_hi": "max",
    "speedup_own": "x own",
    "speedup_e2e": "x e2e",
    "identical": "same",
    "score_ms": "score",
    "draft_ms": "draft",
    "overhead_ms": "over",
    "ttft_ms": "ttft ms",
}
"""Columns of the table: key of the row and heading."""

EPILOG = """\
rows
  hf            plain generate of transformers, on a model that was never patched; begins every round
  hf-again      the same once more at the end of the round: the noise of this machine (A/A)
  none          the loop of mmspec without drafts
  others        the loop with that drafter; NAME+COMPRESSOR gives it fewer visual tokens (msd+pool:49); NAME@DEPTH
                drafts that many levels in every round (msd@3, msd@3+pool:49), for drafters that draft level by level

columns
  x hf, x own   decode speed-up (first token to last) over hf and over none; x e2e: the whole call, image encoding and
                prefill included. Medians over rounds, to the mean of the two runs of hf in the same round; between
                them the others run once each, in rotating order.
  tau           tokens per forward of a row;  R: seconds of a round over those of none;  x own is about tau / R
  accept %      of 100 rounds, those that accepted at least 1, 2, 3, ... draft tokens
  same          all tokens equal to hf, in every run (in half precision near-ties may differ)
  score, draft, over: ms per round: target forward and sampling, drafting, everything else
  In the JSON besides: accepted_at_position (accept % in full), acceptance_by_depth, speedup_*_ci (95% limits of the
  medians, bootstrap over runs), speedup_e2e_pooled (all seconds of hf over all seconds), draft_mib and of_target
  (weights of drafter and compressor, and their share of the target's), block (tokens of one pass of the drafter),
  tokens_min (of the shortest answer), drafted_share (share of rounds that scored a draft), forced_tree, not_used, run
  (versions, commit, command).

  Without --nodes the controller drafts only in rounds where that pays. A drafter that is left out in most rounds gets a
  line "not used" below the table, with its tau and speed from a short probe with trees of one size.

With --task (the default for the scenes model) images and questions come from the scenes world, from seed --scene-seed
on, and rows end where the model ends them: describe (a long description), short (a caption), answer (where, how many,
is there, ...), clip (what happens in a clip). Seeds from 50,000,000 on were never trained on. tau is over all tokens.

Without --task every call has images and prompts of its own, so that a drafter that learns from call to call cannot know
the answers; give as many --images as the largest batch size times (repeats + 1). Such rows never end early: all produce
--new-tokens tokens. The text of a model past its natural end tends to repeat itself, which flatters drafters: choose
--new-tokens below the usual length of its answers.

Rows whose 95% intervals overlap are listed as ties. The default table takes about a minute and a half on two cores;
after three minutes no round begins once there are seven (--minutes).

examples
  python -m research.bench
  python -m research.bench --json first.json; python -m research.bench --against first.json          does it repeat?
  python -m research.bench --overview --json speed.json                                  the speed table of results/
  python -m research.bench --task answer --drafters auto,hybrid --count 100 --json answers.json
  python -m research.bench --drafters msd@3,msd@5,flash --nodes 16       trees of one size, whatever that costs
  python -m research.bench --model scenes --drafters none,auto --batch-sizes 1,8 --prompt-tokens 100,700 --json m.json
  python -m research.bench --model llava-hf/llava-1.5-7b-hf --images photos/ --dtype bfloat16 --plot speed.png
"""


def build_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="python -m research.bench",
        description="Measure decoding speed: plain generate, mmspec without drafts, and each drafter, interleaved.",
        epilog=f"{EPILOG}\n{suite.EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    add = parser.add_argument
    add_model_option(parser)
    add_device_options(parser)
    add("--drafters", type=split_commas, default=["none", "auto"], metavar="A,B", help="default none,auto")
    add("--nodes", type=positive_int, default=None, metavar="N", help="fixed tree size (default: what pays)")
    add("--batch-sizes", type=positive_ints, default=[1], metavar="N,N", help="default 1")
    padding_help = "pad prompts with words to this length"
    add("--prompt-tokens", type=positive_ints, default=None, metavar="N,N", help=padding_help)
    add("--task", choices=TASKS, default=None, help="question about generated scenes (default describe)")
    add_scene_seed(parser, None, str(FIRST_HELD_OUT_SEED))
    add("--count", type=positive_int, default=None, metavar="N", help="scenes (default: --repeats batches)")
    new_tokens_help = "per row (default 64; with --task at most, 160)"
    add("--new-tokens", type=positive_int, default=None, metavar="N", help=new_tokens_help)
    add_sampling_options(parser, "prompts, images and sampling")
    repeats_help = f"rounds after the warm-up (default {DEFAULT_ROUNDS}, fewer if --minutes are over)"
    add("--repeats", type=positive_int, default=None, metavar="N", help=repeats_help)
    processes_help = f"fresh processes that share the rounds (default {DEFAULT_PROCESSES} for scenes, else 1)"
    add("--processes", type=positive_int, default=None, metavar="N", help=processes_help)
    add("--images", nargs="+", default=[], metavar="PATH", help="as `mmspec caption` reads them (default: synthetic)")
    add("--prompt", default=None, metavar="TEXT", help=f"default {PROMPT!r}")
    add_result_options(
        parser,
        json_help="write the rows as a JSON list, with more columns",
        plot_help="write a bar chart (needs matplotlib)",
    )
    overview_help = "the speed table of research/results: five tasks of the toy world, as Markdown (about four minutes)"
    add("--overview", action="store_true", help=overview_help)
    suite.add_suite_options(parser)
    shape_help = (
        "random weights of a shape (smolvlm-500m, smolvlm2-2.2b, qwen3-vl-2b, llava-onevision-0.5b, llava-1.5-7b, "
        "qwen2.5-vl-7b, smollm2-135m, qwen3.5-0.8b, lfm2-1.2b, gemma4-e2b, tiny; "
        "with --contexts S,S), with simulated acceptance"
    )
    add("--shape", default=None, metavar="S", help=shape_help)
    contexts_help = "with --shape: time rounds behind so many positions, without prompts, on a CPU beside llama.cpp"
    contexts = add("--contexts", type=positive_ints, default=None, metavar="C,C", help=contexts_help)
    tau_help = "with --shape: simulated tokens per forward (default 1,2.6,3.6)"
    tau = add("--tau", type=positive_floats, default=None, metavar="T,T", help=tau_help)
    for action in (contexts, tau):
        goes_with(action, "--shape", lambda args: args.shape)
    add_progress(parser)
    add_table_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.command = shlex.join(["python", "-m", "research.bench", *arguments])
    return run_command(args)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.app.modeling.load import resolve_device
    from mmspec.economy.store import SWITCH
    from research.bench.against import bench_ratios, read_ratios
    from research.bench.drafter_specs import check_spec
    from research.bench.processes import DeadProcessError
    from research.bench.session import measure_bench, measure_overview
    from research.bench.suite.report import against_section

    os.environ.setdefault(SWITCH, "0")  # a measurement must not depend on those before it
    for name in [] if args.shape else args.drafters:
        check_spec(name)
    resolve_device(args.device)
    if args.shape:
        from research.bench.shape.session import run_shape

        return run_shape(args)
    if suite.is_suite(args):
        return suite.run_suite(args)
    config, files = BenchConfig.from_args(args), ResultFiles.from_args(args)
    files.check()
    earlier = read_ratios(args.against)
    hide_progress_bars(args.progress)
    kept: list[ResultRow] = []

    def keep(rows: list[ResultRow]) -> None:
        kept[:] = rows
        files.write(rows)

    try:
        rows = (measure_overview if args.overview else measure_bench)(config, args.command, args.progress, keep)
    except (KeyboardInterrupt, DeadProcessError):
        if kept:
            print(f"stopped; what was measured until then:\n{format_table(kept)}")
        raise
    if args.overview:
        report = overview_markdown(rows)
    else:
        report = "\n".join([format_table(rows), *not_used_lines(rows), *tie_lines(rows)])
    if earlier:
        report += f"\n\n{against_section(args.against.name, bench_ratios(rows), earlier)}"
    print(report)
    files.write(rows, plot=lambda file: plot_bench(rows, file))
    return 0


def not_used_lines(rows: Sequence[ResultRow]) -> list[str]:
    """A line for each row whose drafter the controller did not use."""
    from research.bench.forced_tree import format_not_used

    return [
        f"{row['drafter']} (batch {row['batch']}, prompt {row['prompt_tokens']}) {reason}"
        for row in rows
        if (reason := format_not_used(row))
    ]


def format_table(rows: Sequence[ResultRow]) -> str:
    """The rows as a table of aligned columns."""
    lines = [list(COLUMNS.values()), *([_cell(row[column]) for column in COLUMNS] for row in rows)]
    first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return " ".join(f"{100 * share:.0f}" for share in value[:MAX_DEPTH_COLUMNS]) or "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
