"""The table of model types in `docs/models.md` is that of the rows in `tests/helpers/zoo`, and complete."""

from __future__ import annotations

import json
from types import SimpleNamespace

import model_speed
import model_table
import pytest
import tiny_models as tiny
import transformers
import zoo
from packaging.version import Version

from mmspec.cpu.c_kernel import load_kernel


def test_the_table_has_every_model_type() -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rows = [model_table.Row(**row) for row in values["rows"]]
    assert {row.model_type for row in rows} == {*tiny.FAMILIES, *zoo.ALL}
    assert model_table.markdown_table(rows) in model_table.DOCUMENT.read_text(encoding="utf-8")
    assert f"{len(rows)} model types were tested" in (model_table.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(rows) >= 40, "model types"
    for row in rows:
        assert row.cases >= 100 and row.identical == row.cases and not row.error, row.model_type
        assert row.selftest == "passed" or row.selftest.startswith("not run"), row.model_type


def test_the_table_of_rounds_is_that_of_the_rows() -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rows = [model_table.Row(**row) for row in values["rows"]]
    assert model_table.rounds_table(rows) in model_table.DOCUMENT.read_text(encoding="utf-8")
    assert {row.model_type for row in rows if not row.rounds} <= {*zoo.ALL} - {*zoo.ROWS}


def test_every_image_text_type_has_a_row_or_a_reason() -> None:
    """Of the transformers that the rows were measured with."""
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    rows, others = {row["model_type"]: row["transformers"] for row in values["rows"]}, values["others"]
    assert model_table.others_table(others) in model_table.DOCUMENT.read_text(encoding="utf-8")
    assert all(others.values()) and not rows.keys() & others.keys()
    if transformers.__version__ == max(rows.values(), key=Version):
        assert {*model_table.image_text_types()} <= {*rows, *others}


@pytest.mark.every(12)
@pytest.mark.parametrize("model_type", sorted(json.loads(model_table.RESULT.read_text(encoding="utf-8"))["others"]))
def test_the_reason_is_that_of_the_table(model_type: str) -> None:
    values = json.loads(model_table.RESULT.read_text(encoding="utf-8"))
    if model_type not in model_table.image_text_types():
        pytest.skip("this transformers does not have the model type")
    assert model_table.reason_of(model_type) == values["others"][model_type]


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


@pytest.mark.parametrize(("least", "status"), [("0", 0), ("1000", 1)])
def test_the_speed_of_a_type_is_measured(least: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--family", "llama", "--family", "blip-2", "--tokens", "2", "--repeats", "1", "--least", least]
    assert model_speed.main(given) == status
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in capsys.readouterr().out.splitlines()[2:]]
    reasons = {name: reason for name, ratio, reason in rows if float(ratio) > 0}
    assert reasons.keys() == {"`llama`", "`blip-2`"} and reasons["`llama`"] == "-"
    assert "a generate of its own" in reasons["`blip-2`"]
