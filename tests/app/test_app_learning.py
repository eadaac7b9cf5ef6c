"""The Learning tab without a browser: a run, its curves, and that nothing of it is stored; axes of the plots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("gradio")

from mmspec.app.errors import UsageError
from mmspec.app.ui.context import Context
from mmspec.app.ui.learning import LearningRun, empty_cache_folder, moving_means, pool_calls
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.tabs.learning import STEPS, format_learning_progress, render_learning, stream_learning
from mmspec.app.ui.worker import CancelSignal, Client
from mmspec.files import CACHE_VARIABLE
from mmspec.learning.stats import CurvePoint


def test_a_drafter_learns_beside_one_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    settings = RunSettings("tiny", "instant", max_new_tokens=12)
    run = LearningRun(ModelStore("tiny"), settings, 3).run(CancelSignal(600))
    assert run.num_done == run.num_identical == 3 and run.text and not run.cancelled
    assert run.learning.enabled and run.learning.drafter and not run.learning.resumed
    assert len(run.learning.curve) == len(run.baseline) == 3
    assert os.environ[CACHE_VARIABLE] == str(tmp_path) and not (tmp_path / "learned").exists(), "nothing is stored"
    page = render_learning(run)
    assert (
        "3 of 3" in page
        and run.text in page
        and format_learning_progress(run, False) == "3 of 3 pictures, described twice."
    )


def test_a_run_that_is_stopped(tmp_path: Path) -> None:
    halt = CancelSignal(600)
    halt.cancel()
    run = LearningRun(ModelStore("tiny"), RunSettings("tiny", "instant"), 3).run(halt)
    assert run.cancelled and run.num_done == 0 and render_learning(run) == STEPS
    assert format_learning_progress(run, False) == "0 of 3 pictures; stopped."


def test_what_cannot_learn_is_refused() -> None:
    context = Context(ModelStore("tiny"), TempStorage())
    for model, drafter, total, message in (
        ("tiny", "lookup", 3, "learn"),
        ("tiny", "nobody", 3, "no drafter"),
        ("nobody", "instant", 3, "no model"),
        ("tiny", "instant", 10**6, "from 1 to 120"),
    ):
        with pytest.raises(UsageError, match=message):
            list(stream_learning(context, model, drafter, total, 0, Client(f"{drafter} {total}")))
    context.worker.close()
    context.temp_storage.close()


def test_the_cache_folder_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    with empty_cache_folder():
        folder = Path(os.environ[CACHE_VARIABLE])
        assert folder.is_dir() and not any(folder.iterdir())
    assert CACHE_VARIABLE not in os.environ and not folder.exists()


def test_means_weight_calls_by_their_forwards() -> None:
    points = [CurvePoint(number, number, tokens, 10, 1.0) for number, tokens in enumerate((10, 20, 30), 1)]
    assert moving_means(points) == [1.0, 1.5, 2.0] and moving_means([]) == [] and pool_calls([]) is None


def test_axes_of_counts_have_whole_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    from mmspec.app.ui.plots import count_axis, value_limits

    few = count_axis(pandas.DataFrame({"x": [1, 2, 3, 1], "y": [1.0, 2.0, 3.0, 4.0]}), "x")
    assert few["sort"] == ["1", "2", "3"] and list(few["value"]["x"]) == ["1", "2", "3", "1"] and few["x_lim"] is None
    many = count_axis(pandas.DataFrame({"x": range(1, 31)}), "x")
    assert many["x_lim"] == [1, 30] and many["sort"] is None
    assert value_limits([0.4, 2.3]) == [0, 3] and value_limits([], 4) == [0, 4]
