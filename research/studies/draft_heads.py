"""`python -m research.studies.draft_heads`: draft heads of equal budget, greedy and sampled, at several batch sizes.

Every head decodes the same held-out requests in rotating order, beside plain `generate` and the loop without drafts, as
`research.bench` measures. A table per temperature and batch size: tau, round cost R, milliseconds a token, speed, with
95% intervals over requests (bootstrap).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from mmspec.app.cli.arguments import add_model_option, parse_temperature, positive_int, split_commas
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.metrics.stats import Stats
from research.arguments import add_progress, config_from_args, module_parser, positive_ints
from research.bench.drafter_specs import check_spec
from research.bench.measure import (
    NO_DRAFT,
    WARM_UP_CALLS,
    Contestant,
    bootstrap_interval,
    build_contestants,
    build_result_rows,
    median_ci,
    run_rounds,
)
from research.bench.requests import build_scene_requests
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.bench.specs import short_labels
from research.scenes.tasks import REQUEST_TASKS, add_scene_seed
from research.studies.intervals import format_ci

MAX_ANSWER_TOKENS = 160
"""New tokens of an answer at most."""
HEAD_HEADINGS = ["head", "tau", "R", "ms a token", "x none", "x generate", "MiB", "same"]
EPILOG = """\
columns
  tau         tokens per forward of a row, over all requests
  R           seconds of a round over those of a round without drafts: medians of pairs
  ms a token  decoding, first token to last: median over requests
  x none, x generate   decode speed-up over the loop without drafts and over plain generate: medians of pairs

examples
  mmspec train --drafter msd,flash,eagle3,dspark --count 960 --steps 350 --out run
  python -m research.studies.draft_heads run/msd run/flash run/eagle3 run/dspark --json heads.json --markdown heads.md
"""


@dataclass(frozen=True)
class DraftHeadsConfig:
    """Options of the study, named like its flags.

    Attributes:
        drafters: specs as `research.bench.drafter_specs.parse_spec` reads them, without repetitions.
        temperatures: each a series of measurements; 0 is greedy.
        batch_sizes: each a series of measurements.
        task: one of `REQUEST_TASKS`. scene_seed: of the first scene. count: requests of each series.
        nodes: size of every tree at each batch size; None lets the controller choose.
        seed: request i is sampled with seed + i.
    """

    drafters: tuple[str, ...]
    model: str
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    task: str
    scene_seed: int
    count: int
    nodes: tuple[int | None, ...]
    seed: int
    progress: bool | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> DraftHeadsConfig:
        """Validate the parsed options.

        Raises:
            UsageError: an unknown drafter, or too few requests for a batch.
        """
        for name in args.drafters:
            check_spec(name)
        if args.count < max(args.batch_sizes):
            raise UsageError(f"--count {args.count} does not fill a batch of {max(args.batch_sizes)}")
        sizes = len(args.batch_sizes)
        nodes = args.nodes * sizes if len(args.nodes) == 1 else args.nodes
        if len(nodes) != sizes:
            raise UsageError(f"--nodes takes one size, or one for each of {sizes} --batch-sizes; got {len(nodes)}")
        drafters = tuple(dict.fromkeys(args.drafters))
        return config_from_args(cls, args, drafters=drafters, temperatures=tuple(args.temperatures), nodes=tuple(nodes))


def measure_draft_heads(
    config: DraftHeadsConfig, command: str, on_series: Callable[[list[ResultRow]], None] = lambda rows: None
) -> list[ResultRow]:
    """Rows of `research.bench` with intervals of tau and of the milliseconds a token, series by series.

    Args:
        config: what to measure.
        command: the command line, for `run.command` of the rows.
        on_series: called with all rows so far after each series.

    Raises:
        UsageError: the model or a drafter cannot be used.
    """
    model, processor = load_model(config.model)
    try:
        lineups = {
            nodes: build_contestants(model, config.drafters, processor, stop_at_eos=True, nodes=nodes)
            for nodes in dict.fromkeys(config.nodes)
        }
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(one_line(error, 600)) from error
    captioner = Captioner(model, processor)
    labels = dict(zip(config.drafters, short_labels(config.drafters), strict=True))
    shared: ResultRow = {name: getattr(config, name) for name in ("model", "task", "scene_seed", "count", "seed")}
    shared["run"] = provenance(command, model.device)
    rounds = [config.count // batch for batch in config.batch_sizes]
    num_contestants = len(lineups[config.nodes[0]])
    num_calls = len(config.temperatures) * num_contestants * sum(WARM_UP_CALLS + number for number in rounds)
    is_hidden = not (sys.stderr.isatty() if config.progress is None else config.progress)
    rows: list[ResultRow] = []
    with tqdm(total=num_calls, unit="call", disable=is_hidden, file=sys.stderr) as bar:
        for batch, number, nodes in zip(config.batch_sizes, rounds, config.nodes, strict=True):
            contestants = lineups[nodes]
            requests = build_scene_requests(captioner, config.task, config.scene_seed, batch, number)
            for temperature in config.temperatures:
                run_rounds(contestants, requests, MAX_ANSWER_TOKENS, temperature, config.seed, bar.update)
                for row, contestant in zip(build_result_rows(contestants), contestants, strict=True):
                    row["drafter"] = labels.get(row["drafter"], row["drafter"])
                    rows.append(
                        row | interval_columns(contestant) | {"temperature": temperature, "nodes": nodes} | shared
                    )
                on_series(rows)
    return rows


def interval_columns(contestant: Contestant) -> ResultRow:
    """`tau_ci` and `ms_per_token`, each [value, low, high]; tau is 1 for plain `generate`."""
    runs = contestant.runs

    def tau(indices: Sequence[int]) -> float:
        whole = Stats()
        for index in indices:
            if (stats := runs[index].stats) is not None:
                whole.add(stats)
        return whole.tau

    has_stats = runs[0].stats is not None
    times = sorted(1e3 * run.decode_s / max(1, run.num_tokens - len(run.output_ids)) for run in runs)
    middle = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
    return {
        "tau_ci": [round(value, 4) for value in bootstrap_interval(tau, len(runs))] if has_stats else [1.0, 1.0, 1.0],
        "ms_per_token": [round(value, 4) for value in (middle, *median_ci(times))],
    }


def format_draft_heads(rows: Sequence[ResultRow]) -> str:
    """A table in Markdown for each temperature and batch size."""
    series: dict[tuple[int, float], list[ResultRow]] = {}
    for row in rows:
        series.setdefault((row["batch"], row["temperature"]), []).append(row)
    parts = []
    for (batch, temperature), group in series.items():
        lines = [HEAD_HEADINGS, ["---"] * len(HEAD_HEADINGS), *map(_cells, group)]
        kind = f"temperature {temperature:g}" if temperature else "greedy"
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"**batch {batch}, {kind}**\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _cells(row: ResultRow) -> list[str]:
    return [
        row["drafter"],
        format_ci(row["tau_ci"]),
        "-" if row["R"] is None else f"{row['R']:.2f}",
        format_ci(row["ms_per_token"]),
        format_ci((row["speedup_own"], *row["speedup_own_ci"])),
        format_ci((row["speedup_hf"], *row["speedup_hf_ci"])),
        "-" if row["draft_mib"] is None else f"{row['draft_mib']:.1f}",
        "yes" if row["identical"] else "NO",
    ]


def _parse_temperatures(text: str) -> list[float]:
    """Comma-separated temperatures."""
    return [parse_temperature(part) for part in split_commas(text)]


def _parse_nodes(text: str) -> list[int | None]:
    """Comma-separated tree sizes; "auto" is None."""
    return [None if part == "auto" else positive_int(part) for part in split_commas(text)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = module_parser("research.studies.draft_heads", __doc__, EPILOG)
    add = parser.add_argument
    add("drafters", nargs="+", metavar="D", help=f"folders of trained heads, or names ({NO_DRAFT} is always measured)")
    add_model_option(parser)
    add("--temperatures", type=_parse_temperatures, default=[0.0, 1.0], metavar="T,T", help="default 0,1")
    add("--batch-sizes", type=positive_ints, default=[1, 8], metavar="N,N", help="default 1,8")
    add("--task", choices=REQUEST_TASKS, default="describe", help="of the requests (default describe)")
    add_scene_seed(parser, FIRST_HELD_OUT_SEED, str(FIRST_HELD_OUT_SEED))
    add("--count", type=positive_int, default=24, metavar="N", help="requests of each series (default 24)")
    nodes_help = 'size of every tree, or one for each batch size; "auto" lets the controller choose (default)'
    add("--nodes", type=_parse_nodes, default=[None], metavar="N,N", help=nodes_help)
    add("--seed", type=int, default=0, metavar="N")
    add_result_options(parser, json_help="write the rows", markdown_help="write the tables")
    add_progress(parser)
    args = parser.parse_args(arguments)
    files = ResultFiles.from_args(args)
    try:
        config = DraftHeadsConfig.from_args(args)
        files.check()
        command = f"{parser.prog} {shlex.join(arguments)}"
        rows = measure_draft_heads(config, command, lambda rows: files.write(rows, format_draft_heads(rows)))
    except UsageError as error:
        parser.error(str(error))
    print(format_draft_heads(rows), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
