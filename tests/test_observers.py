"""Observers of a call: they see every round, and change neither its text nor what is known of costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adversarial
import pytest
import tiny_models as tiny
import torch

import mmspec
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.loaded_model import LoadedModel
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.recorder import RoundRecorder
from mmspec.app.ui.worker import CancelSignal
from mmspec.interfaces import ObservedRound


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
    from mmspec.app.modeling.synthetic_images import draw_image

    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("MMSPEC_COST_CACHE", "1")
    store = ModelStore("tiny")
    loaded: LoadedModel = store.get("tiny")
    settings = RunSettings("tiny", drafter="hybrid", max_new_tokens=32, tree_size=8)
    image = draw_image(3)[0]

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "costs").glob("*")}

    runs = [ComparisonRun(store, image, (), "what is in it?", settings, CancelSignal(60)).run() for _ in range(3)]
    assert not files() and not runs[-1].mmspec.stats.fallback_calls
    request = loaded.kept_media.encode("", loaded.model, _inputs(loaded, image))[0]
    sampling: Any = {"max_new_tokens": 32, "do_sample": False}
    loaded.model.generate(**request, **sampling, mmspec={"drafter": loaded.get_drafter("hybrid"), "tree_size": 8})
    assert mmspec.stats(loaded.model, last=True).tau == runs[0].mmspec.stats.tau > 1
    drafter = loaded.get_drafter("hybrid")
    for _ in range(2):
        loaded.model.generate(**request, **sampling, mmspec={"drafter": drafter})
    known = files()
    mmspec.compare(loaded.model, request, repeats=2, **sampling, mmspec={"drafter": drafter})
    ComparisonRun(store, image, (), "what is in it?", settings, CancelSignal(60)).run()
    assert files() == known and known, "only the script has stored something"


def _inputs(loaded: LoadedModel, image: Any) -> Any:
    from mmspec.app.modeling.chat import build_inputs

    return build_inputs(loaded.model, loaded.processor, [image], ["what is in it?"], [()])
