"""The race of `mmspec demo` without a browser: lanes, the race that pages open with, and what it is shared as."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmspec.app.errors import UsageError
from mmspec.app.io.images import Video
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.modeling.synthetic_images import draw_image
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.gif import TEMPOS, choose_tempo, format_tempo, write_gif
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.race import render_race
from mmspec.app.ui.repeat_code import build_code
from mmspec.app.ui.report import Report, TempStorage, build_report, settings_to_dict
from mmspec.app.ui.share import render_share_page
from mmspec.app.ui.thumbnails import draw_media, frame_times
from mmspec.app.ui.worker import CancelSignal, Worker

pytestmark = pytest.mark.pages

NASTY = "'''\"\"\" <script>window.hacked=1</script>\n{0} {{value}} \\"


@pytest.fixture(scope="module")
def model_store() -> ModelStore:
    built = ModelStore("tiny")
    built.get("tiny")
    return built


def run(
    model_store: ModelStore,
    question: str = "what is it?",
    media: Any = None,
    *,
    file: str | Path = "a.png",
    chosen_turns: tuple[ChatTurn, ...] = (),
    **chosen: Any,
) -> Report:
    settings = RunSettings("tiny", **{"max_new_tokens": 24} | chosen)
    media = draw_image(3)[0] if media is None else media
    turns = chosen_turns
    return build_report(ComparisonRun(model_store, media, turns, question, settings, CancelSignal(60), file).run())


# lanes


def test_every_drafter_has_a_lane_and_the_same_answer(model_store: ModelStore) -> None:
    report = run(model_store, drafter="hybrid", more_drafters=("lookup", "none"), tree_size=4)
    assert [lane.name for lane in report.lanes] == ["mmspec", "mmspec-2", "mmspec-3"]
    assert [lane.drafter for lane in report.lanes] == ["hybrid", "lookup", "none"]
    assert report.identical and {lane.text for lane in report.lanes} == {report.plain.text}
    assert all(sum(lane.round_lengths) == 23 for lane in report.lanes) and report.lanes[2].round_lengths == (1,) * 23
    html = render_race(report)
    assert [re.search(f'id="mm-{name}"', html) is not None for name in ("plain", "mmspec", "mmspec-3")] == [True] * 3
    data = report.as_dict()
    assert [lane["drafter"] for lane in data["more_lanes"]] == ["lookup", "none"] and data["mmspec"]["n_tokens"] == 24


def test_further_lanes_of_a_page_are_checked(model_store: ModelStore) -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui.context import Context

    context = Context(model_store, SimpleNamespace())  # type: ignore[arg-type]
    chosen = ("tiny", "auto", "none", 0, 0, 8, "automatic")
    assert context.parse_settings(*chosen, ["lookup", "auto", "lookup"]).more_drafters == ("lookup",)
    assert context.parse_settings(*chosen, None).more_drafters == ()
    for wrong in (["/etc"], "lookup", ["lookup"] * 5, [["lookup"]], {"a": 1}):
        with pytest.raises(UsageError):
            context.parse_settings(*chosen, wrong)
    context.worker.close()


# the race that pages open with


def test_a_visitor_ends_what_runs_in_the_background() -> None:
    worker, signal = Worker(), CancelSignal(60)
    gate = threading.Event()
    background = worker.submit_background(lambda: gate.wait(5) and signal.should_stop, signal)
    steps = worker.submit_and_poll(lambda: "done", CancelSignal(60), yield_first=True)
    next(steps)
    assert signal.should_stop
    gate.set()
    assert list(steps) is not None and background.result(timeout=5) is True
    worker.close()


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_the_opening_race(model_store: ModelStore, is_cut_short: bool) -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui.context import Context
    from mmspec.app.ui.opening import OPENING_IMAGE, Opening

    context = Context(model_store, TempStorage())
    opening = Opening(context)
    assert asyncio.run(opening.wait()) is None, "not recorded"
    if is_cut_short:
        opening.stop()
    opening.start()
    result = asyncio.run(opening.wait())
    if is_cut_short:
        assert result is None
    else:
        assert result is not None and result.report.identical and result.report.file_name == OPENING_IMAGE.name
    context.temp_storage.close()
    context.worker.close()


# sharing


def test_the_shared_page_loads_nothing_and_holds_the_whole_race(model_store: ModelStore) -> None:
    page = render_share_page(replace(run(model_store), question=NASTY))
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and "url(" not in page and "@import" not in page
    assert page.count("<script>") == 1 and "&lt;script&gt;window.hacked=1" in page
    assert page.count("data-t=") == 48 and "default-src 'none'" in page and "identical, token for token" in page


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("is_clip", [False, True])
def test_the_code_repeats_the_run_in_an_empty_folder(
    model_store: ModelStore, tmp_path: Path, is_clip: bool, template: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With the input in it, and without anything of the app; `random_model` stands for `from_pretrained`."""
    clip = next(path for path in list_example_files() if path.suffix == ".mp4")
    file = clip if is_clip else tmp_path / "a.png"
    draw_image(3)[0].save(tmp_path / "a.png")
    processor = model_store.get("tiny").processor
    if not template:
        monkeypatch.setattr(processor, "chat_template", None)
    turns = (ChatTurn('it\'s "what"?', "a\nb"),)
    options = {"drafter": "hybrid", "temperature": 0.7, "seed": 5, "max_new_tokens": 8}
    media = Limits().load_media(file)
    report = run(model_store, "what 'is' it?", media, file=file, chosen_turns=turns, **options)
    code = build_code(report)
    allowed = r"from mmspec\.(app\.modeling\.random_models|vision[.\w]*) |import mmspec$|mmspec\.(patch|stats)\("
    used = [line for line in code.splitlines() if "mmspec." in line or line.endswith("import mmspec")]
    assert all(re.search(allowed, line) for line in used), used
    if not template:
        code = code.replace("mmspec.patch(", "processor.chat_template = None\nmmspec.patch(", 1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    exec(compile(code, "shared", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count(report.plain.text) == 2 and list((tmp_path / "empty").iterdir()) == []


def test_the_code_holds_what_visitors_wrote_as_literals(model_store: ModelStore) -> None:
    report = run(model_store)
    for text in (None, NASTY):
        request = replace(report.request, question=NASTY, text=text)
        code = build_code(replace(report, request=request, turns=(ChatTurn(NASTY, NASTY),), file_name=NASTY))
        compile(code, "shared", "exec")
        assert code.count(repr(NASTY)) == (4 if text is None else 2)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("scenes", "from mmspec.app.scenes import load_scenes_model"),
        ("llava-hf/llava-1.5-7b-hf", "AutoProcessor.from_pretrained('llava-hf/llava-1.5-7b-hf')"),
    ],
)
def test_the_code_loads_models_with_public_functions(model_store: ModelStore, model: str, line: str) -> None:
    report = run(model_store)
    metrics = report.metrics | {"choice": report.metrics["choice"] | {"model": model}}
    code = build_code(replace(report, metrics=metrics))
    compile(code, "shared", "exec")
    assert line in code and "random_models" not in code and "mmspec.app.modeling" not in code


def test_hub_ids_are_kept_and_folders_shortened(tmp_path: Path) -> None:
    for name, shown in (
        ("llava-hf/llava-1.5-7b-hf", "llava-hf/llava-1.5-7b-hf"),
        (str(tmp_path), tmp_path.name),
        ("/home/me/model", "model"),
        ("scenes", "scenes"),
    ):
        assert settings_to_dict(RunSettings(name, drafter=name))["model"] == shown


def test_a_gif_shows_the_race_from_start_to_end(model_store: ModelStore, tmp_path: Path) -> None:
    report = run(model_store, more_drafters=("lookup", "none", "recycling"))
    slow = replace(report, plain=replace(report.plain, token_times=tuple(0.01 * n for n in range(24))))
    write_gif(replace(slow, question=NASTY * 30), tmp_path / "race.gif")
    with Image.open(tmp_path / "race.gif") as gif:
        assert gif.n_frames > 20 and gif.size[0] == 760
        seconds = sum(gif.seek(number) or gif.info["duration"] for number in range(gif.n_frames)) / 1000
    assert 4 < seconds < 13 and (tmp_path / "race.gif").stat().st_size < 1_000_000


def test_the_tempo_of_a_gif_is_stated() -> None:
    assert choose_tempo(6) == 1 and format_tempo(1) == "in real time"
    assert choose_tempo(1.5) == 4 and format_tempo(4) == "4 times slower than recorded"
    assert choose_tempo(60) == 0.1 and format_tempo(0.1) == "10 times faster than recorded"
    assert choose_tempo(1e-4) == TEMPOS[-1] and choose_tempo(1e6) == TEMPOS[0]


# pictures


def test_frames_have_the_times_at_which_they_were_read() -> None:
    clip = next(path for path in list_example_files() if path.suffix == ".mp4")
    media = Limits().load_media(clip)
    assert isinstance(media, Video)
    times = [image.time_s for image in draw_media(media)]
    assert times[0] == 0 and times == sorted(times) and len(times) == len(media.frames)  # type: ignore[type-var]
    assert frame_times(Video(media.frames, {"fps": None, "frames_indices": [0]})) == []
    assert [image.time_s for image in draw_media(draw_image(3)[0])] == [None]


@pytest.fixture
def space() -> Iterator[TempStorage]:
    built = TempStorage()
    yield built
    built.close()
