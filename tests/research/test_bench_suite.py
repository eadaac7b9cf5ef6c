"""`research.bench --suite` and `--peers`: items, rounds, rows, reports, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.errors import UsageError
from research.bench import bandwidth
from research.bench.command import main
from research.bench.peers.base import MEDIA, TEXT, PeerError, PeerPrompt, PeerRun
from research.bench.suite.items import TEXT_TASKS, SuiteItem, choose_grouping, read_items, select_categories
from research.bench.suite.runner import CallRecord, SuiteRun, make_batches
from research.bench.suite.summary import find_ties, percentile, summarise_calls
from research.synthetic_images import draw_image

pytestmark = pytest.mark.research


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three items in the form of the benchmark: two turns, one turn, and an image that is not there."""
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    draw_image(0)[0].save(data / "images" / "a.png")
    rows = [
        {"id": 1, "image": "a.png", "turns": ["what is it", "and where"], "category": "x", "topic": "general vqa"},
        {"id": 2, "image": "images/a.png", "turns": ["describe the image"], "category": "y", "topic": "general vqa"},
        {"id": 3, "image": "b.png", "turns": ["what is it"], "category": "z", "topic": "chart"},
    ]
    (data / "mmspec.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def test_a_folder_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**20)
    report = tmp_path / "report"
    args = ["--model", "tiny", "--suite", "mmspec", "--data", str(folder), "--new-tokens", "5", "--batch-sizes", "1,2"]
    args += ["--drafters", "lookup", "--peers", "hf-static,hf-assisted", "--report", str(report)]
    assert main([*args]) == 0
    printed = capsys.readouterr().out
    assert printed == (report / "report.md").read_text() + "\n"
    for text in ("no image b.png", "hf-assisted skipped: no assistant model", "Batch sweep", "Prefill and image"):
        assert text in printed
    result = json.loads((report / "results.json").read_text())
    overall = {(row["peer"], row["batch"]): row for row in result["rows"] if row["category"] == "all"}
    assert {peer for peer, _ in overall} == {"hf", "hf-again", "hf-static", "none", "lookup"}
    for (_, batch), row in overall.items():
        assert row["calls"] == row["same"] == (3 if batch == 1 else 2) and not row["failed"]
        assert row["latency_s"]["50"] > 0 and row["ms_per_token"] > 0
    assert overall["none", 1]["tau"] == 1.0 and overall["hf", 1]["speedup_decode"] == 1.0
    assert result["run"]["date"] and result["run"]["processor"] and len(result["read_weights"]) == 2

    again = f"--suite mmspec --data {folder} --new-tokens 3 --drafters none --categories chart".split()
    assert main(["--model", "tiny", *again, "--against", str(report / "results.json")]) == 1  # nothing to run
    assert main(["--model", "tiny", *again, "--against", str(folder / "mmspec.jsonl")]) == 2
    assert "--against names the JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": 1}', '{"id": 1, "turns": []}', '{"turns": ["a"]}', '{"id":1,"turns":"a"}']
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "mmspec.jsonl").write_text('{"id": 0, "turns": ["a"]}\n' + line)
    with pytest.raises(UsageError, match=r"line 2"):
        read_items(tmp_path / "mmspec.jsonl", tmp_path)


def test_grouping_and_selection() -> None:
    tasks = read_items(TEXT_TASKS)
    assert len(tasks) == 10 and choose_grouping(tasks) == "category" and not tasks[0].has_media
    by_topic = [SuiteItem("a", ("q",), "one picture", "chart"), SuiteItem("b", ("q",), "another", "chart")]
    assert choose_grouping(by_topic) == "topic" and choose_grouping([SuiteItem("a", ("q",), "c")]) == "category"
    assert [one.id for one in select_categories(tasks, ["extract"], 1)] == ["extract-1"]
    batches = make_batches([SuiteItem(str(i), ("q",), "ab"[i > 2]) for i in range(7)], 2)
    assert [[one.id for one in batch] for batch in batches] == [["0", "1"], ["3", "4"], ["5", "6"]]


@dataclass
class ScriptedPeer:
    """Takes a given time per token, or fails."""

    name: str
    ms: Callable[[], float]
    reads: str = MEDIA
    fails: bool = False
    max_batch: int | None = None
    warm_up_calls: int = 1
    prompts: list[Any] = field(default_factory=list)

    def unavailable_reason(self) -> str | None:
        return None

    def start(self) -> None: ...

    def close(self) -> None: ...

    def generate(self, prompt: PeerPrompt, max_new_tokens: int) -> PeerRun:
        self.prompts.append(prompt)
        if self.fails:
            raise PeerError("broken")
        seconds = self.ms() / 1e3 * 9
        text = [list(range(10))] if self.name != "other" else [[1]]
        return PeerRun(text, 1 + seconds, 1.0, seconds, 9)


class ScriptedBuilder:
    """Prompts that name their item, turn and history."""

    def build(self, items: list[SuiteItem], histories: list[Any], turn: int, form: str) -> Any:
        return (items[0].id, turn, histories[0], form)

    def decode(self, ids: list[int]) -> str:
        return f"{len(ids)} tokens"


def test_the_baseline_brackets_every_prompt_and_failures_are_counted() -> None:
    times = iter([10.0] + [10.0, 30.0] * 40)  # the warm-up, then before and after each prompt
    peers = [ScriptedPeer("fast", lambda: 5.0), ScriptedPeer("broken", lambda: 1.0, fails=True)]
    peers += [ScriptedPeer("other", lambda: 20.0), ScriptedPeer("text", lambda: 1.0, reads=TEXT)]
    base = ScriptedPeer("hf", lambda: next(times))
    items = [SuiteItem(str(i), ("a", "b"), "c", images=(draw_image(0)[0],)) for i in range(4)]
    run = SuiteRun(base, peers, ScriptedBuilder(), 10)  # type: ignore[arg-type]
    calls = list(run.run_series(items, MEDIA, 1))
    rows = {row.peer: row for row in summarise_calls(calls)}
    assert rows["fast"].speedup_decode == pytest.approx(4.0) and rows["fast"].calls == 8
    assert rows["hf"].speedup_decode == 1.0 and rows["hf-again"].speedup_decode == pytest.approx(1 / 3)
    assert rows["broken"].failed == 1 and rows["broken"].error == "broken" and run.left_out == {"broken": "broken"}
    assert rows["other"].same == 0 and rows["other"].speedup_decode_ci == [1.0, 1.0] and "text" not in rows
    assert base.prompts[3][1:3] == (1, ((base.prompts[3][2][0]),)) and base.prompts[3][2][0].answer == "10 tokens"
    assert {call.form for call in run.run_series(items, TEXT, 1)} == {TEXT}
    many = [SuiteItem(str(i), ("a",), "c", images=items[0].images) for i in range(9)]
    times = iter([10.0] * 40)
    assert len({call.item for call in run.run_series(many, MEDIA, 1, deadline=0.0)}) == 7
    assert run.stopped == ["images, batch 1: 7 of 9 prompts, then time was up"]


def test_ties_are_overlapping_intervals() -> None:
    def record(peer: str, ms: float) -> CallRecord:
        return CallRecord(peer, TEXT, 1, "c", "i", 0, None, PeerRun([[1, 2]], 1, 0, ms / 1e3, 1), 10.0, 1.0, True)

    calls = [record("hf-again", ms) for ms in (9, 10, 11)] + [record("a", ms) for ms in (4, 5, 6)]
    calls += [record("b", ms) for ms in (5, 6, 7)] + [record("c", ms) for ms in (2.0, 2.1, 2.2)]
    rows = summarise_calls(calls)
    assert find_ties(rows) == [("a", "b")] and [row.tie for row in rows] == [True, False, False, False]
    assert percentile([1, 2, 3, 4], 50) == 2.5 and percentile([1.0], 99) == 1.0
