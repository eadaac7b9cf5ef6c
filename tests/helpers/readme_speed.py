"""Writes the speed table of docs/results/speed.json into docs/results/README.md.

mmspec bench --overview --json docs/results/speed.json
python tests/helpers/readme_speed.py
"""

from __future__ import annotations

import json
from pathlib import Path

from mmspec.app.bench.overview import overview_markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- speed.json -->\n", "\n<!-- end of speed.json -->"


def expected_block() -> str:
    """What stands between the marks."""
    return overview_markdown(json.loads((RESULTS / "speed.json").read_text(encoding="utf-8")))


def find_block(page: Path) -> str:
    """What stands between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    block, end, _ = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no block between {BEGIN.strip()} and {END.strip()}; it begins {before[:60]!r}")
    return block


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    old, new = (f"{BEGIN}{block}{END}" for block in (find_block(PAGE), expected_block()))
    PAGE.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
