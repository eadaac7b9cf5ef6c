"""`python -m mmspec.app.studies.token_classes`: accepted draft tokens by class of word, on held-out scenes.

Every drafter decodes the same requests with trees of the same size, one request at a time, in turn and in rotating
order. A drafter is made once, so one that learns goes on learning. Intervals are over requests (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mmspec.app.bench.config import check_writable
from mmspec.app.bench.measure import Contestant, clone, gc_paused, phase_times_ms, run_once
from mmspec.app.bench.recorder import RecordingDrafter
from mmspec.app.bench.session import provenance
from mmspec.app.bench.specs import check_spec, get_drafter, patch_model, short_labels, weight_sizes
from mmspec.app.caption.command import parse_temperature, positive_int
from mmspec.app.caption.config import DEFAULT_MODEL
from mmspec.app.cli.deprecated import add_renamed
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.tasks import REQUEST_TASKS, generate_requests
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.studies.intervals import format_ci
from mmspec.app.studies.word_classes import CLASSES, AnswerCounts, count_answer, metric_interval

MAX_NEW_TOKENS = 160
"""New tokens of an answer."""
EPILOG = """\
drafters
  names, or folders of trained drafters; NAME@DEPTH drafts so many levels, NAME+COMPRESSOR shows fewer visual tokens

what is told, of each class of words
  guessed     share of its tokens that were drafted and kept, and so cost no forward of their own
  accepted    the same, where something was guessed at all
  tau         its tokens for each forward that one of them cost
  over D      the difference to drafter D (--against), request paired with request

examples
  python -m mmspec.app.studies.token_classes none hybrid msd flash --json words.json --plot words.png
  python -m mmspec.app.studies.token_classes out/msd out/eagle out/eagle-blind out/eagle-textual \\
      --against out/eagle-blind --markdown words.md
"""


@dataclass
class DrafterRun:
    """A contender, and its answers request by request."""

    contestant: Contestant
    answers: list[AnswerCounts] = field(default_factory=list)


@gc_paused()
def run_study(
    field_: Sequence[DrafterRun],
    processor: Any,
    task: str,
    first: int,
    count: int,
    warmth: float = 0.0,
    seed: int = 0,
    tick: Callable[[], Any] = lambda: None,
) -> None:
    """Decode `count` requests with everybody, at temperature `warmth`; request i is sampled with seed + i."""
    maker = Captioner(field_[0].contestant.model, processor)
    for number, one in enumerate(islice(generate_requests(task, first), count)):
        inputs = maker.build_inputs([one.images], [one.question])
        start = number % len(field_)
        for entry in (*field_[start:], *field_[:start]):
            recorder = RecordingDrafter(get_drafter(entry.contestant.model))
            entry.contestant.runs.append(
                run_once(entry.contestant, inputs, MAX_NEW_TOKENS, warmth, seed + number, drafter=recorder)
            )
            entry.answers.append(count_answer(recorder.rounds(), processor.tokenizer, maker.eos_ids))
            tick()


def build_row(entry: DrafterRun, against: DrafterRun | None = None) -> dict[str, Any]:
    """What is told of a drafter; values with an interval are [value, low, high]."""
    answers, runs = entry.answers, entry.contestant.runs
    row: dict[str, Any] = {"drafter": entry.contestant.name}
    for name in ("tau", *CLASSES):
        row[name] = metric_interval(answers, name)
        if against is not None:
            row[f"{name}_over"] = metric_interval(answers, name, against.answers)
    for kind in CLASSES:
        row[f"{kind}_accepted"] = metric_interval(answers, f"{kind}_accepted")
        if against is not None:
            row[f"{kind}_accepted_over"] = metric_interval(answers, f"{kind}_accepted", against.answers)
        row[f"{kind}_tau"] = metric_interval(answers, f"{kind}_tau")
    row |= {"count": len(runs), "tokens": sum(answer.tokens for answer in answers)}
    row["mean_tokens"] = round(row["tokens"] / len(runs), 1)
    row["tokens_min"] = min(run.min_row_tokens for run in runs)
    return row | phase_times_ms([run.stats for run in runs if run.stats]) | weight_sizes(entry.contestant.model)


def format_token_class_row(row: dict[str, Any]) -> str:
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


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as tables: what was guessed and what it cost, what was accepted, tau by class, differences."""

    def table(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
        lines = [[title, *headings], ["---"] * (1 + len(headings)), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def classes(title: str, suffix: str, names: Sequence[str] = CLASSES, sign: bool = False) -> str:
        return table(
            title, names, [[r["drafter"], *(format_ci(r[f"{n}{suffix}"], 3, sign) for n in names)] for r in rows]
        )

    def costs(row: dict[str, Any]) -> list[str]:
        times = [
            "-" if row[f"{name}_ms"] is None else f"{row[f'{name}_ms']:.1f}" for name in ("draft", "score", "overhead")
        ]
        return [row["drafter"], *times, f"{row['draft_mib']:.2f}", f"{row['of_target']:.1%}"]

    parts = [
        classes("share guessed", "", ("tau", *CLASSES)),
        classes("accepted of what was guessed at", "_accepted"),
        classes("tau", "_tau"),
        table("a round", ("draft ms", "score ms", "overhead ms", "MiB", "of the target"), [costs(row) for row in rows]),
    ]
    if rows and "against" in rows[0]:
        parts.append(classes(f"over {rows[0]['against']}", "_over", ("tau", *CLASSES), sign=True))
        parts.append(classes(f"accepted, over {rows[0]['against']}", "_accepted_over", sign=True))
    return "\n\n".join(parts) + "\n"


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m mmspec.app.studies.token_classes",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("drafters", nargs="+", metavar="D", help="names, or folders of trained drafters")
    add("--against", metavar="D", help="one of these: also tell how far the others are above it")
    add("--model", default=DEFAULT_MODEL)
    add("--task", choices=REQUEST_TASKS, default="describe")
    add_renamed(made, "--scene-seed", "--first-seed", type=int, default=FIRST_HELD_OUT_SEED, metavar="S")
    add("--count", type=positive_int, default=100, metavar="N", help="requests (default 100)")
    add("--nodes", type=positive_int, default=16, metavar="N", help="of every tree (default 16)")
    add("--temperature", type=parse_temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--seed", type=int, default=0, metavar="N", help="for sampling (default 0)")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE.md", help="the tables")
    add("--plot", metavar="FILE.png")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    try:
        rows = measure_token_classes(args, shlex.join(["python", "-m", "mmspec.app.studies.token_classes", *given]))
    except UsageError as error:
        parser().error(str(error))
    for row in rows:
        print(format_token_class_row(row))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(markdown(rows), encoding="utf-8")
    if args.plot:
        from mmspec.app.bench.plot import plot_token_classes

        plot_token_classes(rows, CLASSES, Path(args.plot))
    return 0


def measure_token_classes(args: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """All rows.

    Raises:
        UsageError: what was asked cannot be done.
    """
    from tqdm import tqdm

    names = list(dict.fromkeys(args.drafters))
    for name in names:
        check_spec(name)
    if args.against is not None and args.against not in names:
        raise UsageError(f"--against is one of the drafters, {', '.join(names)}; got {args.against!r}")
    for file in filter(None, (args.json, args.markdown, args.plot)):
        check_writable(file)
    model, processor = load_model(args.model)
    try:
        field_ = [
            DrafterRun(Contestant(name, patch_model(clone(model), name, processor, args.nodes))) for name in names
        ]
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(one_line(error, 600)) from error
    given = args.task, args.scene_seed, args.count, args.temperature, args.seed
    with tqdm(total=args.count * len(names), unit="answer", disable=not args.progress) as bar:
        run_study(field_, processor, *given, bar.update)
    short = dict(zip(names, short_labels(names), strict=True))
    against = next((entry for entry in field_ if entry.contestant.name == args.against), None)
    settings = ("model", "task", "scene_seed", "nodes", "temperature", "seed")
    shared: dict[str, Any] = {name: getattr(args, name) for name in settings}
    shared |= {"run": provenance(command, model.device)} | ({"against": short[args.against]} if against else {})
    return [build_row(entry, against) | {"drafter": short[entry.contestant.name]} | shared for entry in field_]


if __name__ == "__main__":
    raise SystemExit(main())
