"""`python -m mmspec.app.studies.blocks`: block drafters against one pass per token, from files of `mmspec bench`.

Measures nothing. Rows of one setting (batch size, temperature, size of trees) make a table and a row of panels: tau,
milliseconds of drafting in a round, and decode speed-up over plain `generate`, against the tokens that a pass says or,
for a drafter that says one, the levels that it drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.app.bench.config import check_writable
from mmspec.app.bench.rows import current_keys
from mmspec.app.bench.specs import parse_spec, short_labels
from mmspec.app.errors import UsageError

Row = dict[str, Any]
SETTING_KEYS = ("batch", "temperature", "nodes")
REQUIRED_KEYS = (
    "drafter",
    *SETTING_KEYS,
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
EPILOG = """\
examples
  mmspec bench --drafters msd@3,msd@5,k2/flash,k5/flash --count 24 --repeats 24 --json one.json
  mmspec bench --drafters msd@3,msd@5,k2/flash,k5/flash --batch-sizes 8 --count 96 --json eight.json
  python -m mmspec.app.studies.blocks one.json eight.json --against msd@5 --markdown blocks.md --plot blocks.png
"""


def read_rows(file: Path) -> list[Row]:
    """The rows of a file of `mmspec bench`.

    Raises:
        UsageError: it cannot be read, or is not such a file.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from error
    whole = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    rows = [current_keys(row) for row in rows] if whole else rows
    missing = [name for row in rows for name in REQUIRED_KEYS if name not in row] if whole else ["rows"]
    if missing:
        raise UsageError(f"{file} is not of `mmspec bench --json`, or of an older one: no {missing[0]!r}")
    return [row for row in rows if row["drafter"] not in ("hf", "hf-again")]


def group_by_setting(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by setting, with their names made short; `kind` and `size` are what the panels are drawn by."""
    apart: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        apart.setdefault(tuple(row[name] for name in SETTING_KEYS), []).append(row)
    for part in apart.values():
        for row, name in zip(part, short_labels([row["drafter"] for row in part]), strict=True):
            wanted, one = parse_spec(row["drafter"]), row["block"] == 1
            passes = "" if one or wanted.depth is None else f"@{wanted.depth}"
            row |= {"name": name, "kind": f"{Path(wanted.drafter).name}{passes}"}
            row["size"] = wanted.depth if one else row["block"]
    return apart


def format_setting(setting: Sequence[Any]) -> str:
    """A setting in words."""
    batch, warmth, nodes = setting
    trees = "trees as the controller has them" if nodes is None else f"trees of {nodes} nodes"
    return f"batch {batch}, {f'temperature {warmth:g}' if warmth else 'greedy'}, {trees}"


def comparison_table(rows: Sequence[Row], against: str) -> str:
    """A table in Markdown; the columns "of" are shares of what the row called `against` has.

    Raises:
        UsageError: there is no such row.
    """
    base = next((row for row in rows if row["name"] == against), None)
    if base is None:
        raise UsageError(f"--against is one of {', '.join(row['name'] for row in rows)}; got {against!r}")
    headings = ["drafter", "tau", "of", "kept at place 1, 2, ...", "draft ms", "of", "score ms", "R"]
    lines = [[*headings, "x own", "x hf", "of", "same"]]
    lines.append(["---"] * len(lines[0]))
    lines += [[row["name"], *_cells(row, base)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row, base: Row) -> list[str]:
    low, high = row["speedup_hf_ci"]
    places = " ".join(f"{100 * share:.0f}" for share in row["accepted_at_position"][:MAX_POSITIONS])
    return [
        f"{row['tau']:.2f}",
        _share(row, base, "tau"),
        places or "-",
        f"{row['draft_ms']:.1f}",
        _share(row, base, "draft_ms"),
        f"{row['score_ms']:.1f}",
        f"{row['R']:.2f}",
        f"{row['speedup_own']:.2f}",
        f"{row['speedup_hf']:.2f} [{low:.2f}, {high:.2f}]",
        _share(row, base, "speedup_hf"),
        "yes" if row["identical"] else "NO",
    ]


def _share(row: Row, base: Row, name: str) -> str:
    return f"{row[name] / base[name]:.2f}" if base[name] else "-"


def markdown(apart: Mapping[tuple[Any, ...], Sequence[Row]], against: str) -> str:
    """All tables, each under its setting."""
    return (
        "\n\n".join(
            f"**{format_setting(setting)}**\n\n{comparison_table(rows, against)}" for setting, rows in apart.items()
        )
        + "\n"
    )


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m mmspec.app.studies.blocks",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.json", help="of `mmspec bench --json`")
    add("--against", default="msd@5", metavar="NAME", help="what shares are of (default msd@5)")
    add("--markdown", metavar="FILE.md")
    add("--plot", metavar="FILE.png")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(argv)
    try:
        apart = group_by_setting([row for file in args.files for row in read_rows(file)])
        told = markdown(apart, args.against)
        for file in filter(None, (args.markdown, args.plot)):
            check_writable(file)
    except UsageError as error:
        parser().error(str(error))
    print(told, end="")
    if args.markdown:
        Path(args.markdown).write_text(told, encoding="utf-8")
    if args.plot:
        from mmspec.app.bench.plot import plot_blocks

        plot_blocks({format_setting(setting): rows for setting, rows in apart.items()}, Path(args.plot))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
