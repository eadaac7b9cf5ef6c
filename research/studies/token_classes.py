"""`python -m research.studies.token_classes`: accepted draft tokens by class of word, on held-out scenes.

Every drafter decodes the same requests with trees of the same size, one request at a time, in turn and in rotating
order. A drafter is built once, so one that adapts continues to adapt. Intervals are over requests (bootstrap).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from tqdm import tqdm

from mmspec.app.cli.arguments import add_model_option, positive_int
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone, load_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.ui.rounds import RoundRecorder
from research.arguments import add_progress, add_sampling_options, config_from_args, module_parser
from research.bench.drafter_specs import check_spec, patch_model
from research.bench.measure import Contestant, gc_paused, phase_times_ms, run_once
from research.bench.plot import plot_token_classes
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.bench.specs import short_labels, weight_sizes
from research.scenes.tasks import REQUEST_TASKS, add_scene_seed, generate_requests
from research.studies.intervals import format_ci
from research.studies.word_classes import CLASSES, AnswerCounts, count_answer, metric_interval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

MAX_NEW_TOKENS = 160
"""New tokens of an answer."""
EPILOG = """\
drafters
  names, or folders of trained drafters; NAME@DEPTH drafts that many levels, NAME+COMPRESSOR compresses visual tokens

columns, for each class of words
  share       of its tokens that were accepted drafts, and so cost no forward of their own
  accepted    the same among the tokens for which something was drafted (acceptance rate)
  tau         its tokens for each forward that one of them cost
  over D      the difference to drafter D (--against), request paired with request

examples
  python -m research.studies.token_classes none hybrid msd flash --json words.json --plot words.png
  python -m research.studies.token_classes out/msd out/eagle out/eagle-placeholder out/eagle-text-only \\
      --against out/eagle-placeholder --markdown words.md
"""


@dataclass(frozen=True)
class TokenClassConfig:
    """Options of the study, named like its flags.

    Attributes:
        drafters: specs as `research.bench.drafter_specs.parse_spec` reads them, without repetitions.
        against: the one of them that the others are compared with; None for no comparison.
        task: one of `REQUEST_TASKS`. scene_seed: of the first scene. count: requests.
        nodes: size of every tree, the root included.
        temperature: 0 is greedy. seed: request i is sampled with seed + i.
        progress: show a progress bar; None for only if standard error is a terminal.
    """

    drafters: tuple[str, ...]
    against: str | None
    model: str
    task: str
    scene_seed: int
    count: int
    nodes: int
    temperature: float
    seed: int
    progress: bool | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TokenClassConfig:
        """Validate the parsed options.

        Raises:
            UsageError: an unknown drafter, or `--against` is none of the drafters.
        """
        drafters = tuple(dict.fromkeys(args.drafters))
        for name in drafters:
            check_spec(name)
        if args.against is not None and args.against not in drafters:
            raise UsageError(f"--against is one of the drafters, {', '.join(drafters)}; got {args.against!r}")
        return config_from_args(cls, args, drafters=drafters)


@dataclass
class DrafterRun:
    """A contestant, and the counts of its answers, request by request."""

    contestant: Contestant
    answers: list[AnswerCounts] = field(default_factory=list)


@gc_paused()
def run_study(
    runs: Sequence[DrafterRun],
    processor: ProcessorMixin,
    config: TokenClassConfig,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Decode all requests with every drafter; `tick` is called after each answer."""
    captioner = Captioner(runs[0].contestant.model, processor)
    requests = islice(generate_requests(config.task, config.scene_seed), config.count)
    for number, request in enumerate(requests):
        inputs = captioner.build_inputs([request.images], [request.question])
        start = number % len(runs)
        for run in (*runs[start:], *runs[:start]):
            recorder = RoundRecorder()
            timed = run_once(
                run.contestant, inputs, MAX_NEW_TOKENS, config.temperature, config.seed + number, observer=recorder
            )
            run.contestant.runs.append(timed)
            run.answers.append(count_answer(recorder.rounds(), processor.tokenizer, captioner.eos_ids))
            tick()


def build_row(run: DrafterRun, against: DrafterRun | None = None) -> ResultRow:
    """The results of a drafter; values with an interval are [value, low, high]."""
    answers, timed_runs = run.answers, run.contestant.runs
    row: ResultRow = {"drafter": run.contestant.name}
    for name in ("tau", *CLASSES):
        row[name] = metric_interval(answers, name)
        if against is not None:
            row[f"{name}_over"] = metric_interval(answers, name, against.answers)
    for kind in CLASSES:
        row[f"{kind}_accepted"] = metric_interval(answers, f"{kind}_accepted")
        if against is not None:
            row[f"{kind}_accepted_over"] = metric_interval(answers, f"{kind}_accepted", against.answers)
        row[f"{kind}_tau"] = metric_interval(answers, f"{kind}_tau")
    row |= {"count": len(timed_runs), "tokens": sum(answer.tokens for answer in answers)}
    row["mean_tokens"] = round(row["tokens"] / len(timed_runs), 1)
    row["tokens_min"] = min(timed.min_row_tokens for timed in timed_runs)
    stats = [timed.stats for timed in timed_runs if timed.stats]
    return row | phase_times_ms(stats) | weight_sizes(run.contestant.model)


def format_token_class_row(row: ResultRow) -> str:
    """A row as it is printed."""
    cells = [f"tau {format_ci(row['tau'], 3)}"]
    cells += [f"{kind} {format_ci(row[kind], 3)} (accepted {row[f'{kind}_accepted'][0]:.3f})" for kind in CLASSES]
    if row["draft_ms"] is not None:
        cells.append("draft {draft_ms:.1f} ms, score {score_ms:.1f}, overhead {overhead_ms:.1f}".format(**row))
    cells.append(f"{row['draft_mib']:.1f} MiB ({row['of_target']:.1%} of the target)")
    lines = [f"{row['drafter']:<16} " + "  ".join(cells)]
    if "against" in row:
        over = "  ".join(f"{name} {format_ci(row[f'{name}_over'], 3, sign=True)}" for name in ("tau", *CLASSES))
        lines.append(f"{'':<16} over {row['against']}: {over}")
    return "\n".join(lines)


def format_token_class_tables(rows: Sequence[ResultRow]) -> str:
    """The rows as Markdown tables: accepted share, acceptance rate, tau by class, costs of a round, differences."""

    def table(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
        lines = [[title, *headings], ["---"] * (1 + len(headings)), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def classes(title: str, suffix: str, names: Sequence[str] = CLASSES, sign: bool = False) -> str:
        cells = [[row["drafter"], *(format_ci(row[f"{n}{suffix}"], 3, sign) for n in names)] for row in rows]
        return table(title, names, cells)

    def costs(row: ResultRow) -> list[str]:
        times = [row[f"{phase}_ms"] for phase in ("draft", "score", "overhead")]
        cells = ["-" if time_ms is None else f"{time_ms:.1f}" for time_ms in times]
        return [row["drafter"], *cells, f"{row['draft_mib']:.2f}", f"{row['of_target']:.1%}"]

    parts = [
        classes("share accepted", "", ("tau", *CLASSES)),
        classes("acceptance rate", "_accepted"),
        classes("tau", "_tau"),
        table("a round", ("draft ms", "score ms", "overhead ms", "MiB", "of the target"), [costs(row) for row in rows]),
    ]
    if rows and "against" in rows[0]:
        parts.append(classes(f"over {rows[0]['against']}", "_over", ("tau", *CLASSES), sign=True))
        parts.append(classes(f"acceptance rate, over {rows[0]['against']}", "_accepted_over", sign=True))
    return "\n\n".join(parts) + "\n"


def _build_parser() -> argparse.ArgumentParser:
    parser = module_parser("research.studies.token_classes", __doc__, EPILOG)
    add = parser.add_argument
    add("drafters", nargs="+", metavar="D", help="names, or folders of trained drafters")
    add("--against", metavar="D", help="one of these: also report the difference of the others to it")
    add_model_option(parser)
    add("--task", choices=REQUEST_TASKS, default="describe", help="of the requests (default describe)")
    add_scene_seed(parser, FIRST_HELD_OUT_SEED, str(FIRST_HELD_OUT_SEED))
    add("--count", type=positive_int, default=100, metavar="N", help="requests (default 100)")
    add("--nodes", type=positive_int, default=16, metavar="N", help="size of every tree (default 16)")
    add_sampling_options(parser)
    add_result_options(
        parser,
        json_help="write the rows",
        markdown_help="write the tables",
        plot_help="write the figure (needs matplotlib)",
    )
    add_progress(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args = parser.parse_args(arguments)
    files = ResultFiles.from_args(args)
    try:
        config = TokenClassConfig.from_args(args)
        files.check()
        rows = measure_token_classes(config, f"{parser.prog} {shlex.join(arguments)}")
    except UsageError as error:
        parser.error(str(error))
    for row in rows:
        print(format_token_class_row(row))
    files.write(rows, format_token_class_tables(rows), lambda file: plot_token_classes(rows, CLASSES, file))
    return 0


def measure_token_classes(config: TokenClassConfig, command: str) -> list[ResultRow]:
    """All rows; `command` is the command line, for `run.command` of the rows.

    Raises:
        UsageError: the model or a drafter cannot be used.
    """
    model, processor = load_model(config.model)
    try:
        runs = [_build_run(model, processor, name, config.nodes) for name in config.drafters]
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(one_line(error, 600)) from error
    is_hidden = not (sys.stderr.isatty() if config.progress is None else config.progress)
    with tqdm(total=config.count * len(runs), unit="answer", disable=is_hidden) as bar:
        run_study(runs, processor, config, bar.update)
    labels = dict(zip(config.drafters, short_labels(config.drafters), strict=True))
    against = next((run for run in runs if run.contestant.name == config.against), None)
    settings = ("model", "task", "scene_seed", "nodes", "temperature", "seed")
    shared: ResultRow = {name: getattr(config, name) for name in settings}
    shared["run"] = provenance(command, model.device)
    if against is not None:
        shared["against"] = labels[against.contestant.name]
    return [build_row(run, against) | {"drafter": labels[run.contestant.name]} | shared for run in runs]


def _build_run(model: PreTrainedModel, processor: ProcessorMixin, name: str, nodes: int) -> DrafterRun:
    return DrafterRun(Contestant(name, patch_model(clone(model), name, processor, nodes)))


if __name__ == "__main__":
    raise SystemExit(main())
