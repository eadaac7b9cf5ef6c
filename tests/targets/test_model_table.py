"""The table of model types in `docs/models.md` is that of the rows in `tests/helpers/zoo`, and complete."""

from __future__ import annotations

import json
from types import SimpleNamespace

import model_table
import pytest
import tiny_models as tiny
import zoo

from mmspec.cpu.c_kernel import load_kernel


def test_the_table_has_every_model_type() -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rows = [model_table.Row(**row) for row in values["rows"]]
    assert {row.model_type for row in rows} == {*tiny.FAMILIES, *zoo.ALL}
    assert model_table.markdown_table(rows) in model_table.DOCUMENT.read_text(encoding="utf-8")
    assert len(rows) >= 40, "model types"
    for row in rows:
        assert row.cases >= 100 and row.identical == row.cases and not row.error, row.model_type
        assert row.selftest == "passed" or row.selftest.startswith("not run"), row.model_type


def test_the_table_of_rounds_is_that_of_the_rows() -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rows = [model_table.Row(**row) for row in values["rows"]]
    assert model_table.rounds_table(rows) in model_table.DOCUMENT.read_text(encoding="utf-8")
    assert {row.model_type for row in rows if not row.rounds} <= {*zoo.ALL} - {*zoo.ROWS}


@pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
@pytest.mark.every(25)
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *zoo.ROWS])
def test_what_computes_rounds_is_what_the_table_says(family: str) -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rounds = {row["model_type"]: row["rounds"] for row in values["rows"]}
    assert model_table.measure_rounds(family) == rounds[family]


def test_a_row_is_measured() -> None:
    """The command itself, with one case."""
    inline = SimpleNamespace(imap=lambda function, values, chunksize: map(function, values))
    row = model_table.measure("llava", 1, inline)
    assert (row.cases, row.identical, row.selftest, row.error) == (1, 1, "passed", "")
    assert set(row.heads) == set(model_table.HEADS)
