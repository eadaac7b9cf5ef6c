"""The study of the time to the first token runs."""

from __future__ import annotations

import pytest

from research.studies import prompt_time

pytestmark = pytest.mark.research


def test_a_row_for_each_shape_and_type() -> None:
    lines: list[str] = []
    arguments = ["--shapes", "smollm2-135m", "--dtypes", "float32", "--lengths", "4,6", "--repeats", "1"]
    assert prompt_time.main(arguments, lines.append) == 0
    assert len(lines) == 2 and lines[1].count("|") == 4 and lines[1].startswith("| smollm2-135m, float32 |")
