"""The Learning tab without a browser: a run, its curves, and that nothing of it is stored; axes of the plots."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("gradio")

from mmspec.app.errors import UsageError
from mmspec.app.ui.charts import MAX_X_LABELS, Line, bar_chart, line_chart
from mmspec.app.ui.context import Context
from mmspec.app.ui.learning import LearningRun, empty_cache_folder, moving_means, pool_calls
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.tabs.learning import (
    format_learning_progress,
    format_plan,
    render_learning,
    render_steps,
    stream_learning,
)
from mmspec.app.ui.worker import CancelSignal, Client
from mmspec.files import CACHE_VARIABLE
from mmspec.learning.stats import CurvePoint

pytestmark = pytest.mark.pages


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
    assert run.cancelled and run.num_done == 0 and render_learning(run) == ""
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


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17, 60, 119, 500, 1024])
def test_axes_of_counts_have_few_whole_numbers(count: int) -> None:
    chart = line_chart("T", ("x", "y"), [Line("a & b", "red", [1.5] * count)], "<said>", lowest=1, top=2)
    numbers = [int(text) for text in re.findall(r'<span style="left:[0-9.]+%">(\d+)</span>', chart)]
    assert (
        numbers[0] == 1
        and len(numbers) <= MAX_X_LABELS + 1
        and numbers == sorted(set(numbers))
        and numbers[-1] <= count
    )
    places = [float(one) for one in re.findall(r"left:([0-9.]+)%", chart)]
    assert all(0 <= one <= 100 for one in places) and all(b - a >= 6 for a, b in itertools.pairwise(places))
    points = re.findall(r"([0-9.]+),([0-9.]+)", re.search(r'points="([^"]+)"', chart)[1])  # type: ignore[index]
    assert all(0 <= float(value) <= 100 for point in points for value in point) and len(points) == max(2, count)
    assert "a &amp; b" in chart and "&lt;said&gt;" in chart


def test_bars_reach_their_values() -> None:
    chart = bar_chart("T", ("x", "y"), [("one", 2.0), ("two", 0.0), ("three", 4.0)], "red", "said")
    heights = [float(one) for one in re.findall(r'<rect [^>]* height="([0-9.]+)"', chart)]
    assert heights[1] == 0 and heights[2] == pytest.approx(2 * heights[0]) and heights[2] <= 100
    assert bar_chart("T", ("x", "y"), [], "red", "said").count("<rect") == 0


def test_what_will_happen_and_how_long() -> None:
    assert "60 pictures, each of them twice; after a few it says how long" in format_plan(None, 60)
    assert "about 60 s, as the last answer took 0.5 s" in format_plan(0.5, 60)
    assert "describes 8 pictures" in format_plan(None, 8) and "about 4 minutes" in format_plan(2.0, 60)
    for wrong in (None, "x", 0, 10**9, float("nan"), [3]):
        assert "60 pictures" in format_plan(None, wrong)
    assert "first 30 to 60" in render_steps(ModelStore("scenes")) and "<img" in render_steps(ModelStore("scenes"))
    assert "first 30" not in render_steps(ModelStore("somebody/model")), "that holds for the bundled model"
