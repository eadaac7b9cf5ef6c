"""Writes the tables of files in research/results into research/results/README.md, each between marks with its name.

python -m research.bench --overview --json research/results/speed.json
python -m research.linears --json research/results/linears.json
python -m research.readme_tables
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from research.bench.overview import overview_markdown
from research.linears import linears_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "research" / "results"
PAGE = RESULTS / "README.md"
TABLES: dict[str, Callable[[Any], str]] = {"speed.json": overview_markdown, "linears.json": linears_markdown}
"""{file: its table}"""


def marks(name: str) -> tuple[str, str]:
    """Before and behind the table of a file."""
    return f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"


def expected_block(name: str) -> str:
    """What stands between the marks of a file."""
    return TABLES[name](json.loads((RESULTS / name).read_text(encoding="utf-8")))


def find_block(page: Path, name: str) -> str:
    """What stands between the marks of a file in a page."""
    begin, end = marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    block, found, _ = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no block between {begin.strip()} and {end.strip()}; it begins {before[:60]!r}")
    return block


def main() -> None:
    for name in TABLES:
        begin, end = marks(name)
        old, new = (f"{begin}{block}{end}" for block in (find_block(PAGE, name), expected_block(name)))
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
