"""`mmspec caption --json-schema`: every caption is JSON that the schema describes, or an error row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import Fake, run_config
from json_words import needs_packages, write_signs
from test_app_caption_options import NOWHERE, config, folder, refused
from test_app_variants import rows

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.schema import column_values, fault_of, schema_columns
from mmspec.app.cli.main import main

__all__ = ["folder"]

SCHEMA = {
    "type": "object",
    "properties": {
        "what": {"enum": ["ball", "box", "tree"], "type": "string"},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "red": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["what", "count", "red", "sizes"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
GOOD = '{"what": "box", "count": 2, "red": false, "sizes": [1, 2]}'


class Answers(Fake):
    """A model with these answers, in turn."""

    texts = (GOOD, '{"what": "box", "count": 2', GOOD.replace("2,", "12345678901234567890123,"))

    def caption(self, media: Any, prompts: Any, seed: int, compare: Any = ()) -> Any:
        from dataclasses import replace

        found = super().caption(media, prompts, seed, compare)
        return [replace(one, caption=text) for one, text in zip(found, self.texts, strict=True)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_have_the_properties_as_columns_or_an_error(folder: Path, form: str) -> None:
    needs_packages()
    loose = {**SCHEMA, "properties": {**SCHEMA["properties"], "count": {"type": "integer"}}}
    (folder / "s.json").write_text(json.dumps(loose))
    name = "o.jsonl" if form == "jsonl" else "o.parquet"
    options = config("p", "--model", "m", "--json-schema", "s.json", "--out", name)
    assert run_config(options, Answers()) == 1
    if form == "jsonl":
        found = list(rows(Path(name)).values())
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(name)
        assert [str(table.schema.field(f"json.{one}").type) for one in SCHEMA["properties"]] == [
            "string", "int64", "bool", "string",
        ]  # fmt: skip
        found = table.to_pylist()
    good, cut, large = sorted(found, key=lambda row: row["index"])
    assert [good[f"json.{one}"] for one in SCHEMA["properties"]] == ["box", 2, False, "[1, 2]"]
    assert json.loads(good["caption"]) == json.loads(GOOD) and not good["error"]
    assert cut["caption"] is None and cut["error"]["type"] == "BadJson" and "no JSON" in cut["error"]["message"]
    assert "json.count is no integer of 64 bits" in large["error"]["message"] and large["json.what"] is None


def test_what_a_schema_does_not_describe() -> None:
    needs_packages()
    assert fault_of(TEXT, GOOD) is None
    for caption, reason in (
        ("[" * 100_000, "no JSON"),
        (GOOD.replace("box", "bax"), "$.what: 'bax' is not one of"),
        (GOOD.replace("2,", "77,"), "$.count: 77 is greater than"),
        ("[]", "$: [] is not of type 'object'"),
    ):
        assert reason in str(fault_of(TEXT, caption))
    assert "cannot judge" in str(fault_of('{"$ref": "http://localhost:9/schema"}', "1"))
    assert schema_columns(None) == schema_columns('{"type": "string"}') == {} and column_values("{}", "1") == {}
    assert schema_columns('{"properties": {"a": true, "b": {"type": ["string", "null"]}}}') == {
        "json.a": "text", "json.b": "text",
    }  # fmt: skip
    assert column_values('{"properties": {"n": {"type": "integer"}}}', '{"n": 2.0}') == {"json.n": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON schema: Expecting property name"),
        ("[1]", "must hold a JSON object, got [1]"),
        ("[" * 100_000, "is no JSON schema"),
        ('{"type": "objekt"}', "is no JSON schema: $.type: 'objekt' is not valid"),
        ('{"enum": []}', "cannot be made a grammar: enum array must not be empty"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "cannot be made a grammar: Invalid range"),
        ('{"type": "object", "properties": {"a": false}, "required": ["a"]}', "'false' cannot accept any value"),
        ('{"type": "object", "properties": {"a": {"$ref": "#/nope"}}}', "Cannot find field nope"),
    ],
)
def test_a_schema_that_is_none_is_one_line_before_the_model(
    folder: Path, content: str, message: str, capsys: Any
) -> None:
    needs_packages()
    (folder / "s.json").write_text(content)
    assert message in refused(capsys, "p", "--model", NOWHERE, "--json-schema", "s.json")


def test_what_does_not_go_with_a_schema(folder: Path, capsys: Any) -> None:
    (folder / "s.json").write_text(TEXT)
    for words in (["--stop", "a"], ["--start", "a"], ["--prefix", "a"], ["--suffix", "a"], ["--cut-loops"]):
        line = refused(capsys, "p", "--model", NOWHERE, "--json-schema", "s.json", *words)
        assert f"{words[0]} does not go with --json-schema" in line
    assert "No such file" in refused(capsys, "p", "--model", NOWHERE, "--json-schema", "none.json")
    plain, other = CaptionConfig((), "m"), CaptionConfig((), "m", json_schema=TEXT)
    assert plain.fingerprint(1) != other.fingerprint(1)
    assert config("--config", write_config(folder, other)).json_schema == TEXT


def write_config(folder: Path, options: CaptionConfig) -> Path:
    found = options.to_run_again()
    (folder / "c.toml").write_text(f"paths = ['p']\nmodel = 'm'\njson_schema = {json.dumps(found['json_schema'])}\n")
    return folder / "c.toml"


def test_a_job_of_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Random weights give answers that parse, those of plain `generate`; some tokenizers cannot write any."""
    needs_packages()
    (folder / "s.json").write_text(TEXT)
    words = ["--model", "tiny", "--json-schema", "s.json", "--no-progress", "--batch-size", "2"]
    assert "allows nothing that the model's tokenizer can write" in refused(capsys, "p", *words)
    write_signs(monkeypatch, folder)
    more = ["--max-new-tokens", "90", "--out", "o.jsonl", "--compare", "all", "--drafter", "hybrid"]
    assert main(["caption", "p", *words, *more]) == 0, capsys.readouterr().err
    found = list(rows(Path("o.jsonl")).values())
    assert len(found) == 3 and all(fault_of(TEXT, row["caption"]) is None and row["identical"] for row in found)
    assert all(row["json.what"] in ("ball", "box", "tree") for row in found)
    assert main(["caption", "p", *words, "--max-new-tokens", "3", "--out", "short.jsonl"]) == 1
    short = list(rows(Path("short.jsonl")).values())
    assert all(row["error"]["type"] == "BadJson" and "(cut after 3 tokens)" in row["error"]["message"] for row in short)
