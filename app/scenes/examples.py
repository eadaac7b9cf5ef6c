"""The example images and clips in the package (`research/scenes/write_examples.py` made them)."""

from __future__ import annotations

from pathlib import Path

EXAMPLES_FOLDER = Path(__file__).parent / "data" / "examples"


def list_example_files() -> list[Path]:
    """Return the paths of the bundled examples, images first."""
    return sorted(EXAMPLES_FOLDER.glob("*.png")) + sorted(EXAMPLES_FOLDER.glob("*.mp4"))
