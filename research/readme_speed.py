"""Writes the speed table of research/results/speed.json into research/results/README.md.

python -m research.bench --overview --json research/results/speed.json
python -m research.readme_speed
"""

from __future__ import annotations

import json
from pathlib import Path

from research.bench.overview import overview_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "research" / "results"
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
