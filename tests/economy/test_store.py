"""Measured costs on disk: what is restored, what is ignored, and that nothing is written where it should not be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch

import mmspec
from mmspec.app.cli.env import describe_drafter
from mmspec.app.cli.main import main
from mmspec.costs import cost_key
from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Economy, Source
from mmspec.economy.store import FORMAT, CostStore
from mmspec.files import cache_folder
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

SOURCE = Source("head", None, 0.75, 0.1, 6)
KEY = {"target": ["llava", 2], "drafter": "flash"}


def measured(accepted: int = 2) -> Economy:
    """Costs with which drafting pays if two tokens are accepted."""
    economy = Economy()
    chooser = Chooser(economy, 1, sources=[SOURCE])
    for number in range(60):
        chooser.source = SOURCE if number % 2 else None
        chooser.levels = 3
        size = 8 if number % 2 else 1
        times = {"draft_s": 0.1, "score_s": 1 + size / 100, "overhead_s": 0.01}
        chooser.record(size, **times, num_accepted=[accepted * (size > 1)])
    return economy


def restored(folder: Path) -> tuple[bool, Economy]:
    economy = Economy()
    return CostStore(KEY, folder).read(economy.restore), economy


def test_a_new_process_makes_the_same_choices(tmp_path: Path) -> None:
    economy = measured()
    CostStore(KEY, tmp_path).write(economy.snapshot())
    found, loaded = restored(tmp_path)
    assert found and loaded.snapshot()["rounds"] == economy.snapshot()["rounds"]
    assert loaded.draft_s(SOURCE, 1, 3) == pytest.approx(economy.draft_s(SOURCE, 1, 3))
    pays = Chooser(loaded, 1, sources=[SOURCE])
    assert pays.plan() and max(pays.options(1.0), key=lambda one: one.rate).tokens == pytest.approx(3, abs=0.3)
    assert [one.name for one in loaded.sources()] == ["head"] and loaded.sources()[0].max_levels == 6


def test_what_did_not_pay_is_tried_again_since_texts_differ(tmp_path: Path) -> None:
    CostStore(KEY, tmp_path).write(measured(accepted=0).snapshot())
    chooser = Chooser(restored(tmp_path)[1], 1, sources=[SOURCE])
    assert chooser.options(1.0)[0].tokens < 1.5
    planned = []
    for _ in range(4):
        planned.append(chooser.plan())
        chooser.record(1, draft_s=0.1, score_s=1.01, overhead_s=0.01, num_accepted=[0])
    assert any(planned)


def test_costs_of_a_loaded_machine_do_not_stop_drafting(tmp_path: Path) -> None:
    economy = measured()
    for size in (2, 4, 8, 16):  # one node was measured while the machine was idle
        for _ in range(20):
            economy.rounds_s.add("score", 1, size, 50.0)
    CostStore(KEY, tmp_path).write(economy.snapshot())
    _, loaded = restored(tmp_path)
    gains = [0.9 * node for node in range(8)]
    for one, is_drafted in ((economy, False), (loaded, True)):
        chooser = Chooser(one, 1, sources=[SOURCE])
        chooser.source, chooser.rate = SOURCE, 1.0
        assert (chooser.choose_nodes(gains, 1) > 1) is is_drafted


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one value of the file, by its path."""

    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is None:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return change


CHANGES = {
    "foreign": _set("format", value="other"),
    "another target": _set("key", value="{}"),
    "nan": _set("rounds", 0, 3, value=float("nan")),
    "negative": _set("drafts", 0, 3, value=-1.0),
    "text": _set("rounds", 0, 3, value="fast"),
    "no rows": _set("rounds", 0, 1, value=0),
    "a list as a name": _set("rounds", 0, 0, value=["score"]),
    "no yields": _set("yields", value=None),
    "a yield of no depth": _set("yields", 0, 1, value=[1]),
    "counts as text": _set("yields", 0, 3, value="1"),
    "no sources": _set("sources", value=None),
    "a source of a size that is none": _set("sources", 0, 1, value="3"),
    "tokens as text": _set("sources", 0, 3, value="3"),
    "an object": _set("yields", value={"a": 1}),
}
CONTENTS = {"empty": b"", "not JSON": b"\xff\x00PK\x03\x04", "nested": b"[" * 100_000, "another type": b"[1, 2]"}


@pytest.mark.parametrize("fault", ["truncated", *CHANGES, *CONTENTS])
def test_a_file_that_cannot_be_used_is_ignored(tmp_path: Path, fault: str) -> None:
    store = CostStore(KEY, tmp_path)
    store.write(measured().snapshot())
    content = json.loads(store.path.read_text())
    if fault in CHANGES:
        CHANGES[fault](content)
    store.path.write_bytes(CONTENTS.get(fault, json.dumps(content).encode()[: -20 if fault == "truncated" else None]))
    found, economy = restored(tmp_path)
    assert not found
    assert economy.snapshot() == Economy().snapshot(), "nothing of it was taken over"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CostStore(KEY, tmp_path / "file" / "costs")
    store.write(measured().snapshot())
    assert restored(tmp_path / "file" / "costs")[0] is False


def test_what_cannot_be_used_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mmspec")
    store, blocked = CostStore(KEY, tmp_path), CostStore(KEY, tmp_path / "file" / "costs")
    store.write(measured().snapshot())
    store.path.write_bytes(store.path.read_bytes()[:-20])
    (tmp_path / "file").write_text("")
    for _ in range(3):
        restored(tmp_path)
        blocked.write(measured().snapshot())
    assert [one.levelname for one in caplog.records] == ["INFO", "INFO"]
    assert "is ignored" in caplog.text and "cannot be written" in caplog.text


@pytest.mark.parametrize("what", ["target", "dtype", "attention", "device", "drafter", "torch"])
def test_costs_are_of_one_machine_model_and_version(tmp_path: Path, what: str) -> None:
    """Those of another one lie in another file, and are refused where they were copied to this one."""
    adapter = find_adapter(tiny.build_model(tiny.ModelSpec("llava", seed=4)))
    here = cost_key(resolve_drafter("lookup", adapter, None), adapter)
    store, other = CostStore(here, tmp_path), CostStore(here | {what: "another"}, tmp_path)
    assert store.path != other.path
    other.write(measured().snapshot())
    other.path.rename(store.path)
    economy = Economy()
    assert not store.read(economy.restore) and economy.snapshot() == Economy().snapshot()


def test_a_file_that_two_processes_share(tmp_path: Path) -> None:
    """Each finds what one of them has written, whole."""
    found: list[bool] = []

    def work(accepted: int) -> None:
        content = measured(accepted).snapshot()
        for _ in range(20):
            CostStore(KEY, tmp_path).write(content)
            found.append(restored(tmp_path)[0])

    workers = [threading.Thread(target=work, args=(accepted,)) for accepted in (0, 2)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert found == [True] * 40 and [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_reader_never_finds_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads while one has written half, and after one was killed there."""
    CostStore(KEY, tmp_path).write(measured().snapshot())
    found: list[bool] = []

    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        found.append(restored(tmp_path)[0])
        raise OSError("killed")

    monkeypatch.setattr(Path, "write_text", write_half)
    CostStore(KEY, tmp_path).write(measured().snapshot())
    assert found == [True] and restored(tmp_path)[0]


def test_env_tells_the_next_round_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("MMSPEC_COST_CACHE", "1")
    adapter = find_adapter(tiny.build_model(tiny.ModelSpec("llava", seed=4)))
    drafter = resolve_drafter("lookup", adapter, None)
    assert (
        "nothing was measured here yet (float32, " in dict(describe_drafter("lookup", adapter, None))["the next round"]
    )
    CostStore(cost_key(drafter, adapter)).write(measured().snapshot())
    first, second = [line for line in describe_drafter("lookup", adapter, None) if "tokens/s" in line[1]]
    assert first[0] == "the next round" and "a draft by head: 2.70 tokens in " in first[1]
    lines = dict(describe_drafter("lookup", adapter, None))
    assert (
        lines["measured here"].startswith("a token in 1.02e+03 ms (float32, ")
        and "8 together in 1.0" in lines["measured here"]
    )
    assert "a copy in few bits" not in lines
    assert second == ("rather than", "plain decoding: 1.00 tokens in 1.02e+03 ms, 1.0 tokens/s")


@pytest.mark.parametrize("switch", ["0", "1"])
def test_costs_of_a_patched_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("MMSPEC_COST_CACHE", switch)
    spec = tiny.ModelSpec("llava", seed=4)

    def decode(num_calls: int) -> tuple[Any, list[Any]]:
        model = tiny.build_model(spec)
        drafter = heads.build_drafter("decoupled", spec)
        mmspec.patch(model, drafter)
        inputs = tiny.build_inputs(model, 3, 1, images=[1], padding="none")
        outputs = [model.generate(**inputs, max_new_tokens=12, do_sample=False) for _ in range(num_calls)]
        return drafter, outputs

    _, texts = decode(5)
    files = [path for path in tmp_path.rglob("*.json") if "rounds" in path.read_text()]  # not that of the kernels
    assert len(files) == int(switch)
    _, again = decode(1)
    assert all(torch.equal(text, texts[0]) for text in texts + again)
    if files:
        content = json.loads(files[0].read_text())
        assert content["format"] == FORMAT
        assert content["rounds"] and content["drafts"]


def test_the_cache_command_lists_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    CostStore(KEY).write(measured().snapshot())
    foreign = tmp_path / "costs" / "notes.json"
    foreign.write_text("{}")
    assert main(["cache", "list"]) == 0
    assert f"1 files of measured costs in {tmp_path / 'costs'}" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert list((tmp_path / "costs").iterdir()) == [foreign], "files of others stay"


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MMSPEC_CACHE")
    assert cache_folder() == tmp_path / "mmspec"
