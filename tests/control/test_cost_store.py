"""Measured costs on disk: what is restored, what is ignored, and that nothing is written where it should not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch

import mmspec
from mmspec.app.cli.main import main
from mmspec.control.cost_store import FORMAT, CostStore
from mmspec.control.depth import DepthController
from mmspec.control.round_cost import RoundCostModel
from mmspec.control.tree_size import TreeSizeController
from mmspec.engine.tree import DraftTree
from mmspec.files import cache_folder

KEY = {"target": ["llava", 2], "drafter": "flash"}


def measured() -> tuple[RoundCostModel, DepthController]:
    """Costs with which drafting pays at one row and does not at two."""
    costs, depth = RoundCostModel(), DepthController(4)
    for batch, accepted in ((1, 2), (2, 0)):
        controller = TreeSizeController(costs, batch, drafts=True)
        for _ in range(30):
            for size in (1, 8):
                controller._num_active = batch if size > 1 else 0
                controller.record(
                    size, draft_s=0.1 * (size > 1), score_s=1 + size / 100, overhead_s=0.01, num_accepted=accepted
                )
        for _ in range(50):
            depth.record(batch, 4, [accepted] * batch, 0.5, 1.0)
    costs.calibrate(0.4)
    return costs, depth


def restored(folder: Path) -> tuple[bool, RoundCostModel, DepthController]:
    costs, depth = RoundCostModel(), DepthController(4)
    return CostStore(KEY, folder).load(costs, depth), costs, depth


def test_a_new_process_makes_the_same_choices(tmp_path: Path) -> None:
    costs, depth = measured()
    CostStore(KEY, tmp_path).save(costs, depth)
    found, loaded, loaded_depth = restored(tmp_path)
    assert found
    assert loaded.score_s == costs.score_s
    assert loaded.overhead_s == {key: seconds for key, seconds in costs.overhead_s.items() if key[1] == 1}
    assert loaded.calibration == max(0.5, costs.calibration) and loaded.num_calibrations <= 4
    assert [loaded_depth.choose(batch) for batch in (1, 2)] == [depth.choose(batch) for batch in (1, 2)]
    assert loaded.draft_net_cost[1].mean_s == pytest.approx(costs.draft_net_cost[1].mean_s)
    assert costs.draft_net_cost[2].mean_s > 0
    assert TreeSizeController(loaded, 2, drafts=True).should_draft, "what did not pay is tried again"
    assert not loaded.draft_net_cost[1].measured_sizes, "the first use of a size is slow in every process"


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


def test_costs_of_a_loaded_machine_do_not_stop_drafting(tmp_path: Path) -> None:
    costs, depth = measured()
    costs.score_s |= {(1, size): 50.0 for size in (2, 4, 8, 16)}  # one node was measured while the machine was idle
    CostStore(KEY, tmp_path).save(costs, depth)
    _, loaded, _ = restored(tmp_path)
    tree = DraftTree(
        torch.zeros(1, 8, dtype=torch.long),
        torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6]]),
        torch.ones(1, 8, dtype=torch.bool),
        torch.full((1, 8), 0.9),
    )
    assert TreeSizeController(costs, 1, drafts=True).choose_size(tree, 1) == 1
    assert TreeSizeController(loaded, 1, drafts=True).choose_size(tree, 1) > 1


CHANGES = {
    "foreign": _set("format", value="other"),
    "another target": _set("key", value="{}"),
    "nan": _set("rounds", "score_s", 0, 2, value=float("nan")),
    "negative": _set("rounds", "overhead_s", 0, 2, value=-1.0),
    "text": _set("rounds", "score_s", 0, 2, value="fast"),
    "no savings": _set("rounds", "savings", value=None),
    "no calibration": _set("rounds", "calibration", value=None),
    "other levels": _set("depth", "1", "num_accepted", value=[1.0]),
    "nothing reached": _set("depth", "1", "num_reached", value=[0.0] * 4),
    "text in a list": _set("depth", "1", "num_accepted", value=["1"] * 4),
    "a list": _set("depth", "1", "level_s", value=[1.0]),
}
CONTENTS = {"empty": b"", "not JSON": b"\xff\x00PK\x03\x04", "nested": b"[" * 100_000, "another type": b"[1, 2]"}


@pytest.mark.parametrize("fault", ["truncated", *CHANGES, *CONTENTS])
def test_a_file_that_cannot_be_used_is_ignored(tmp_path: Path, fault: str) -> None:
    store = CostStore(KEY, tmp_path)
    store.save(*measured())
    content = json.loads(store.path.read_text())
    if fault in CHANGES:
        CHANGES[fault](content)
    store.path.write_bytes(CONTENTS.get(fault, json.dumps(content).encode()[: -20 if fault == "truncated" else None]))
    found, costs, depth = restored(tmp_path)
    assert not found
    assert (costs.score_s, costs.calibration, depth.by_batch) == ({}, 1.0, {}), "nothing of it was taken over"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CostStore(KEY, tmp_path / "file" / "costs")
    store.save(*measured())
    assert restored(tmp_path / "file" / "costs")[0] is False


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
    second, again = decode(1)
    assert all(torch.equal(text, texts[0]) for text in texts + again)
    if files:
        content = json.loads(files[0].read_text())
        assert content["format"] == FORMAT
        assert content["rounds"]["score_s"]
        assert second.depth_controller.by_batch[1].rounds > content["depth"]["1"]["rounds"] > 0


def test_the_cache_command_lists_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    CostStore(KEY).save(*measured())
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
