"""Observers of a call: they see every round, and change neither its text nor what is known of costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adversarial
import pytest
import tiny_models as tiny
import torch

import mmspec
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.ui.model import DemoModel
from mmspec.app.ui.rounds import RoundRecorder
from mmspec.app.ui.run import Run, RunSettings
from mmspec.interfaces import ObservedRound
from mmspec.metrics.stats import Stats


@pytest.mark.parametrize("drafter", ["hybrid", "own"])
def test_observers_see_every_round_and_change_nothing(drafter: str) -> None:
    spec = tiny.ModelSpec("llava", seed=4)
    model = tiny.build_model(spec)
    inputs = tiny.build_inputs(model, 3, 1, images=[1], padding="none")
    seen: list[ObservedRound] = []

    def draws(one: ObservedRound) -> None:
        seen.append(one)
        torch.rand(3)

    outputs, taus, recorder = [], [], RoundRecorder()
    for observers in ([], [draws, recorder]):
        mmspec.patch(model, adversarial.BranchingDrafter(1) if drafter == "own" else drafter, tree_size=4)
        torch.manual_seed(7)
        options: Any = {"observers": observers}
        outputs.append(model.generate(**inputs, max_new_tokens=12, do_sample=True, mmspec=options))
        taus.append(mmspec.stats(model, last=True).tau)
        mmspec.unpatch(model)
    assert torch.equal(*outputs) and taus[0] == taus[1]
    emitted = [token for one in recorder.rounds() for token in one.emitted]
    assert emitted == outputs[0][0, inputs["input_ids"].shape[1] :].tolist()
    assert seen[0].num_proposed is None and any(one.num_proposed for one in seen[1:])
    assert seen[0].prompt.input_ids.shape == inputs["input_ids"].shape


@pytest.mark.parametrize("observers", [print, [3], "ab"])
def test_what_is_no_observer_is_refused(observers: Any) -> None:
    model = mmspec.patch(tiny.build_model(tiny.ModelSpec("llava", seed=4)), "none")
    inputs = tiny.build_inputs(model, 3, 1, images=[1], padding="none")
    with pytest.raises(TypeError, match="observers must be a list of functions"):
        model.generate(**inputs, max_new_tokens=2, mmspec={"observers": observers})


def test_the_demo_and_compare_measure_what_a_script_does_and_store_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's tau is a script's, and what scripts have learned of costs stays as it is."""
    from research.synthetic_images import draw_image

    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("MMSPEC_COST_CACHE", "1")
    loaded = DemoModel("tiny")
    loaded.load()
    settings = RunSettings("hybrid", max_new_tokens=32, tree_size=8)
    image = draw_image(3)[0]

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "costs").glob("*")}

    def ask() -> Stats:
        run = Run(loaded, None, lambda: image, (), "what is in it?", settings)
        run.work(lambda: None)
        return run.mmspec.stats

    runs = [ask() for _ in range(3)]
    assert not runs[-1].fallback_calls
    before = files()
    request = build_inputs(loaded.model, loaded.processor, [image], ["what is in it?"], [()])
    sampling: Any = {"max_new_tokens": 32, "do_sample": False}
    loaded.model.generate(**request, **sampling, mmspec={"drafter": loaded.get_drafter("hybrid"), "tree_size": 8})
    assert mmspec.stats(loaded.model, last=True).tau == runs[0].tau > 1
    drafter = loaded.get_drafter("hybrid")
    for _ in range(2):
        loaded.model.generate(**request, **sampling, mmspec={"drafter": drafter})
    known = files()
    mmspec.compare(loaded.model, request, repeats=2, **sampling, mmspec={"drafter": drafter})
    ask()
    assert files() == known != before, "only the script has stored something"
