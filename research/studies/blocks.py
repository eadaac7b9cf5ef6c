"""`python -m research.studies.blocks`: block drafters against one pass per token, from files of `research.bench`.

Measures nothing. Rows of one setting (batch size, temperature, tree size) make a table and a row of panels: tau,
milliseconds of drafting per round, and decode speed-up over plain `generate`, against the tokens per pass or, for a
drafter of one token per pass, the levels that it drafts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mmspec.app.errors import UsageError
from research.arguments import module_parser
from research.bench.drafter_specs import parse_spec
from research.bench.plot import plot_blocks
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.specs import short_labels
from research.studies.intervals import format_ci

REQUIRED_KEYS = (
    "drafter",
    "batch",
    "temperature",
    "nodes",
    "block",
    "tau",
    "draft_ms",
    "R",
    "speedup_hf",
    "speedup_hf_ci",
    "accepted_at_position",
)
MAX_POSITIONS = 8
"""Positions of a draft that a table shows."""
BLOCK_HEADINGS = ["drafter", "tau", "of", "accept % at position 1, 2, ...", "draft ms", "of", "score ms", "R"]
BLOCK_HEADINGS += ["x own", "x hf", "of", "same"]
EPILOG = """\
examples
  python -m research.bench --drafters msd@3,msd@5,k2/flash,k5/flash --count 24 --repeats 24 --json one.json
  python -m research.bench --drafters msd@3,msd@5,k2/flash,k5/flash --batch-sizes 8 --count 96 --json eight.json
  python -m research.studies.blocks one.json eight.json --against msd@5 --markdown blocks.md --plot blocks.png
"""


class BenchSetting(NamedTuple):
    """What rows of one table have in common.

    Attributes:
        nodes: size of every tree; None if the controller chose it.
    """

    batch: int
    temperature: float
    nodes: int | None

    def __str__(self) -> str:
        trees = "tree size chosen by the controller" if self.nodes is None else f"trees of {self.nodes} nodes"
        return f"batch {self.batch}, {f'temperature {self.temperature:g}' if self.temperature else 'greedy'}, {trees}"


def read_bench_rows(file: Path) -> list[ResultRow]:
    """The rows of a file of `research.bench`, without those of plain `generate`.

    Raises:
        UsageError: it cannot be read, or is not such a file.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from error
    is_list = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    missing = [name for row in rows for name in REQUIRED_KEYS if name not in row] if is_list else ["rows"]
    if missing:
        raise UsageError(f"{file} is not of `research.bench --json`, or of an older one: no {missing[0]!r}")
    return [row for row in rows if row["drafter"] not in ("hf", "hf-again")]


def group_by_setting(rows: Sequence[ResultRow]) -> dict[BenchSetting, list[ResultRow]]:
    """Rows by setting, each with a short `name`, and with the `kind` (line) and `size` (x value) of its point."""
    groups: dict[BenchSetting, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(BenchSetting(row["batch"], row["temperature"], row["nodes"]), []).append(row)
    for group in groups.values():
        for row, name in zip(group, short_labels([row["drafter"] for row in group]), strict=True):
            spec, is_single = parse_spec(row["drafter"]), row["block"] == 1
            num_passes = "" if is_single or spec.depth is None else f"@{spec.depth}"
            row |= {"name": name, "kind": f"{Path(spec.drafter).name}{num_passes}"}
            row["size"] = spec.depth if is_single else row["block"]
    return groups


def comparison_table(rows: Sequence[ResultRow], against: str) -> str:
    """A table in Markdown; the columns "of" are shares of the values of the row called `against`.

    Raises:
        UsageError: there is no such row.
    """
    base = next((row for row in rows if row["name"] == against), None)
    if base is None:
        raise UsageError(f"--against is one of {', '.join(row['name'] for row in rows)}; got {against!r}")
    lines = [BLOCK_HEADINGS, ["---"] * len(BLOCK_HEADINGS), *([row["name"], *_cells(row, base)] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: ResultRow, base: ResultRow) -> list[str]:
    acceptance = " ".join(f"{100 * share:.0f}" for share in row["accepted_at_position"][:MAX_POSITIONS])
    return [
        f"{row['tau']:.2f}",
        _share(row, base, "tau"),
        acceptance or "-",
        f"{row['draft_ms']:.1f}",
        _share(row, base, "draft_ms"),
        f"{row['score_ms']:.1f}",
        f"{row['R']:.2f}",
        f"{row['speedup_own']:.2f}",
        format_ci((row["speedup_hf"], *row["speedup_hf_ci"])),
        _share(row, base, "speedup_hf"),
        "yes" if row["identical"] else "NO",
    ]


def _share(row: ResultRow, base: ResultRow, name: str) -> str:
    return f"{row[name] / base[name]:.2f}" if base[name] else "-"


def format_block_tables(groups: Mapping[BenchSetting, Sequence[ResultRow]], against: str) -> str:
    """All tables as Markdown, each under its setting."""
    parts = [f"**{setting}**\n\n{comparison_table(rows, against)}" for setting, rows in groups.items()]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = module_parser("research.studies.blocks", __doc__, EPILOG)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="of `research.bench --json`")
    against_help = "drafter whose values the shares refer to (default msd@5)"
    parser.add_argument("--against", default="msd@5", metavar="NAME", help=against_help)
    add_result_options(parser, markdown_help="write the tables", plot_help="write the panels (needs matplotlib)")
    args = parser.parse_args(argv)
    files = ResultFiles.from_args(args)
    try:
        groups = group_by_setting([row for file in args.files for row in read_bench_rows(file)])
        tables = format_block_tables(groups, args.against)
        files.check()
    except UsageError as error:
        parser.error(str(error))
    print(tables, end="")
    by_title = {str(setting): rows for setting, rows in groups.items()}
    files.write([], tables, lambda file: plot_blocks(by_title, file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
