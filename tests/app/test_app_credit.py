"""Where the demo says that the speed comes from, and its baseline; lanes, turns and refusals without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmspec.app.errors import UsageError
from mmspec.app.io.inputs import Inputs
from mmspec.app.modeling.chat import ChatTurn, build_inputs
from mmspec.app.modeling.synthetic_images import draw_image, write_images
from mmspec.app.ui import render
from mmspec.app.ui.batch import CaptionBatch
from mmspec.app.ui.comparison import AnswerLane, ComparisonRun
from mmspec.app.ui.credit import BASELINES, LOOP, PLAIN_GENERATE, Credit, explain_no_drafts, split_speedup
from mmspec.app.ui.gif import choose_lanes
from mmspec.app.ui.kept_media import KeptMedia
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.race import LiveLane, RacedTurn, lane_title, render_live_race, render_race
from mmspec.app.ui.refusals import REASONS, explain_refusal
from mmspec.app.ui.report import Report, TempStorage, build_report
from mmspec.app.ui.rounds import Round
from mmspec.app.ui.thumbnails import TimedImage
from mmspec.app.ui.worker import CancelSignal
from mmspec.metrics.stats import Stats
from mmspec.patching import patch_state

pytestmark = pytest.mark.pages


@pytest.fixture(scope="module")
def model_store() -> ModelStore:
    built = ModelStore("tiny")
    built.get("tiny")
    return built


@pytest.fixture
def space() -> Iterator[TempStorage]:
    built = TempStorage()
    yield built
    built.close()


def race(model_store: ModelStore, **chosen: Any) -> tuple[ComparisonRun, Report]:
    settings = RunSettings("tiny", **{"max_new_tokens": 24} | chosen)
    run = ComparisonRun(model_store, draw_image(3)[0], (), "what is it?", settings, CancelSignal(60), "a.png").run()
    return run, build_report(run)


# credit


def test_the_headline_is_the_loop_times_the_drafts(model_store: ModelStore) -> None:
    run, report = race(model_store, drafter="recycling", tree_size=8)
    credit = report.best.credit
    assert credit is not None and run.mmspec.stats.drafted_rounds > 0 and credit.reason == ""
    assert credit.loop == run.speedup_loop and run.loop.stats.num_draft_tokens == 0
    assert credit.loop * credit.drafts == pytest.approx(report.best.speedup)  # type: ignore[operator]
    assert run.loop.streamer.token_ids == run.plain.streamer.token_ids, "the loop decodes the same tokens"
    html = render_race(report)
    assert f"{credit.loop:.2f}x own loop \u00d7 {credit.drafts:.2f}x drafts" in html
    assert f"{run.mmspec.stats.drafted_rounds} of {run.mmspec.stats.rounds} rounds" in html
    assert report.metrics["speedup_loop"] == credit.loop and report.metrics["why_not_drafted"] is None


def test_where_nothing_was_drafted_the_headline_says_so_and_why(model_store: ModelStore) -> None:
    run, report = race(model_store, drafter="none")
    assert run.loop.streamer.token_ids == [], "nothing else to measure"
    html = render_race(report)
    assert "Nothing was drafted (0 of 23 rounds: this lane has no drafter); all of it is mmspec&#x27;s own loop" in html
    assert report.best.credit == Credit(
        report.best.speedup, report.best.speedup, 1.0, 0, 23, "this lane has no drafter"
    )


def rounds(*proposed: int | None) -> list[Round]:
    return [Round(0, (9,), (-1,), None, (0,), (5,), count) for count in proposed]


@pytest.mark.parametrize(
    ("stats", "proposed", "words"),
    [
        (Stats(rounds=17), (None,) * 17, "too short for a draft to pay"),
        (Stats(rounds=90), (None,) * 90, "recent drafts did not pay"),
        (Stats(rounds=17), (None, 4), "no proposal was expected to pay"),
        (Stats(rounds=17), (None, 1), "nothing to propose"),
        (Stats(rounds=0), (), "one forward gave the whole answer"),
        (Stats(fallback_calls=1, fallback_reason="beams"), (), "transformers answered alone, beams"),
    ],
)
def test_why_nothing_was_drafted(stats: Stats, proposed: tuple[int | None, ...], words: str) -> None:
    lane = AnswerLane("mmspec", "flash", stats=stats)
    assert words in explain_no_drafts(lane, rounds(*proposed))
    credit = split_speedup(lane, 3.1, None)
    assert ("no part of it is mmspec's" in credit.sentence) == bool(stats.fallback_calls)
    assert credit.drafts in (None, 1.0)


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_baseline_is_chosen_and_named(model_store: ModelStore, baseline: str) -> None:
    run, report = race(model_store, drafter="recycling", tree_size=8, baseline=baseline)
    html = render_race(report)
    other = next(name for name in BASELINES if name != baseline)
    assert f"over those of {baseline}, the baseline (the settings offer {other})" in html and report.identical
    assert lane_title(report.plain.drafter) == baseline and report.plain.round_lengths == (1,) * 23
    assert (run.speedup_loop == 1.0) == (baseline == LOOP) and report.metrics["choice"]["baseline"] == baseline
    assert run.plain.stats.num_draft_tokens == 0 and bool(run.plain.stats.rounds) == (baseline == LOOP)


def test_a_baseline_of_a_page_is_checked(model_store: ModelStore) -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui.context import Context

    context = Context(model_store, SimpleNamespace())  # type: ignore[arg-type]
    chosen = ("tiny", "auto", "none", 0, 0, 8, "automatic", [])
    assert (
        context.parse_settings(*chosen).baseline == PLAIN_GENERATE
        and context.parse_settings(*chosen, LOOP).baseline == LOOP
    )
    for wrong in ("", "mmspec", None, 3, ["plain generate"]):
        with pytest.raises(UsageError, match="no baseline"):
            context.parse_settings(*chosen, wrong)  # type: ignore[arg-type]
    context.worker.close()


def test_a_run_that_is_stopped_while_the_loop_is_measured_keeps_its_answers(model_store: ModelStore) -> None:
    halt = CancelSignal(60)
    settings = RunSettings("tiny", drafter="recycling", tree_size=8, max_new_tokens=24)
    run = ComparisonRun(model_store, draw_image(3)[0], (), "what is it?", settings, halt)
    record = run.loop.streamer.record
    run.loop.streamer.record = lambda ids: (record(ids), halt.cancel())[0]  # type: ignore[method-assign]
    report = build_report(run.run())
    assert report.identical and not run.cancelled and len(report.mmspec.token_texts) == 24
    assert report.best.credit is not None and report.best.credit.sentence == ""


# lanes and turns


def test_the_headline_names_the_fastest_lane_and_slow_ones_are_not_green(model_store: ModelStore) -> None:
    _, report = race(model_store, drafter="hybrid", more_drafters=("lookup", "recycling", "none"))
    speedups = (0.5, 2.0, 0.99, 1.5)
    lanes = tuple(replace(lane, speedup=value) for lane, value in zip(report.lanes, speedups, strict=True))
    changed = replace(report, lanes=lanes)
    html = render_race(changed)
    assert (
        'data-ratio="2.0000" data-lane="mm-mmspec-2">2.0x<' in html and "of the fastest lane, mmspec, lookup," in html
    )
    slow = re.findall(r'<section class="mm-side mm-lane mm-slower" id="mm-([^"]+)"', html)
    assert slow == ["mmspec", "mmspec-3"] and html.count("mm-lane-ratio mm-slower") == 2
    last = replace(changed, lanes=(*lanes[:3], replace(lanes[3], speedup=3.0)))
    assert choose_lanes(last)[-1] is last.best, "and it is drawn"


def test_a_lane_is_called_by_a_short_name() -> None:
    assert lane_title("/home/me/my-drafter") == "mmspec, my-drafter" and lane_title("none") == LOOP
    assert lane_title(None) == PLAIN_GENERATE and lane_title("") == "mmspec"


def test_earlier_turns_keep_their_speed_up_and_the_picture_its_place(model_store: ModelStore) -> None:
    _, report = race(model_store)
    turns = (RacedTurn("what?", "a car", 2.345), ChatTurn("how many?", "two"))
    picture = [TimedImage("data:image/jpeg;base64,AA")]
    for html in (
        render_race(replace(report, media=tuple(picture)), turns),
        render_live_race(turns, "which?", [LiveLane("plain", None)], picture),
    ):
        assert html.count("<img") == 1 and html.index("<img") < html.index("what?") < html.index("how many?")
        assert html.count("mm-kept") == 1 and "2.3x" in html


def test_a_lane_that_is_recorded_says_so_and_shows_its_last_words() -> None:
    text = " ".join(f"word{number}" for number in range(40))
    html = render_live_race((), "q", [LiveLane("plain", None, text, note="recording 1 of 2")])
    assert "recording 1 of 2" in html and "word39" in html and "word1 " not in html


# refusals


@pytest.mark.parametrize("kind", [*REASONS, "SomethingNew"])
def test_every_refusal_is_in_words_for_a_visitor(kind: str) -> None:
    reason = explain_refusal(kind, "it is odd")
    assert reason.startswith(("it is", "it has", "it cannot", "it needs", "it takes", "this server"))


def test_pixels_are_megapixels() -> None:
    assert "50 megapixels (10000 x 5000); 40 megapixels" in explain_refusal(
        "TooLarge", "10000 x 5000 is more than 40000000 pixels; raise --max-pixels if you trust it"
    )
    assert "too many pixels; 1.5 megapixels" in explain_refusal("TooLarge", "more than 1500000 pixels")
    assert "HEIC" in explain_refusal("NotAnImage", "not an image: a HEIC image (pip install pillow-heif)")


@pytest.mark.parametrize("name", ["list.jsonl", "list.json", "list.csv", "list.txt"])
def test_a_list_that_cannot_be_read_is_one_row(
    model_store: ModelStore, space: TempStorage, tmp_path: Path, name: str
) -> None:
    paths = write_images(tmp_path / "p", 2)
    (tmp_path / name).write_bytes(b"\xff\xfe\x00{" * 9)
    files = [paths[0], tmp_path / name, paths[1]]
    settings = RunSettings("tiny", max_new_tokens=4)
    batch = CaptionBatch(model_store, files, None, settings, Limits(), space.new_folder())
    batch.run(CancelSignal(60))
    assert batch.total == 3 and [row["error"] is None for row in batch.rows] == [False, True, True]
    table = render.render_captions(batch.rows, batch.thumbnails)
    assert table.count("mm-failed") == 1 and str(space.root) not in table
    assert {row["file_name"] for row in batch.rows} == {name, *(path.name for path in paths)}


def test_a_list_of_too_many_files_is_refused_without_reading_them_all(
    model_store: ModelStore, space: TempStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    rows = Inputs.rows

    def count(self: Inputs, skip: Any) -> Iterator[Any]:
        nonlocal read
        for item in rows(self, skip):
            read += 1
            yield item

    monkeypatch.setattr(Inputs, "rows", count)
    write_images(tmp_path, 1)
    name = next(tmp_path.glob("*.png")).name
    lines = "".join(f'{{"id": "{number}", "file_name": "{name}"}}\n' for number in range(5000))
    (tmp_path / "list.jsonl").write_text(lines)
    files, settings, limits = [tmp_path / name, tmp_path / "list.jsonl"], RunSettings("tiny"), Limits()
    with pytest.raises(UsageError, match=f"names more than {limits.max_files} files, which is the limit"):
        CaptionBatch(model_store, files, None, settings, limits, space.new_folder())
    assert read < 5000


def test_the_table_of_a_batch_says_why_in_the_same_words() -> None:
    error = {"type": "BrokenImage", "message": "cannot be decoded: b'\\x00' at 0x7f"}
    row = {"id": "a", "file_name": "a.png", "caption": None, "error": error}
    assert REASONS["BrokenImage"] in render.render_captions([row]) and "0x7f" not in render.render_captions([row])


# what a conversation reuses


def ask(
    store: ModelStore, visitor: str, *turns: ChatTurn, halt: CancelSignal | None = None, **chosen: Any
) -> ComparisonRun:
    settings = RunSettings("tiny", **{"max_new_tokens": 8, "drafter": "hybrid", "tree_size": 4} | chosen)
    question = f"what is it, {len(turns)}?"
    signal = halt or CancelSignal(60)
    run = ComparisonRun(store, draw_image(3)[0], turns, question, settings, signal, "a.png", visitor).run()
    assert run.identical or run.cancelled
    return run


def turn(run: ComparisonRun) -> ChatTurn:
    return ChatTurn(run.question, build_report(run).plain.text)


def reused(run: ComparisonRun) -> list[int]:
    return [lane.stats.reused_positions for lane in (run.plain, *run.lanes)]


def num_kept(store: ModelStore) -> int:
    loaded = store.get("tiny")
    return len(patch_state(loaded.model).prefixes.rows) + len(loaded.kept_media._kept)


def test_a_second_turn_reuses_the_picture_and_says_so(model_store: ModelStore) -> None:
    """In the lanes of mmspec, each what it computed itself; the encoded picture is that of both sides."""
    assert num_kept(model_store) == 0, "the warm-up leaves nothing"
    for baseline in BASELINES:
        chosen: dict[str, Any] = {"more_drafters": ("lookup",), "baseline": baseline}
        first = ask(model_store, "ann", **chosen)
        assert reused(first) == [0, 0, 0] and first.encode_s > 0, "no lane runs on what another has left"
        assert "reused" not in render_race(build_report(first))
        second = ask(model_store, "ann", turn(first), **chosen)
        counts = reused(second)
        assert counts[0] == 0 and min(counts[1:]) > 16 and second.encode_s == 0
        report = build_report(second)
        words = f"Picture reused: {counts[1]} of {second.prompt_tokens} prompt tokens were computed before, first token"
        html = render_race(report)
        assert f'<p class="mm-reused">{words}' in html and f"; {baseline} computes all of them, " in html
        assert "that of the turn before" in render.render_headline(report) and report.metrics["vision_reused"]
        credit = report.best.credit
        assert credit is not None and credit.num_reused in counts and credit.loop and credit.drafts
        assert credit.loop * credit.drafts == pytest.approx(report.best.speedup)  # type: ignore[operator]
    model_store.forget("ann")
    assert num_kept(model_store) == 0


def test_conversations_of_visitors_have_nothing_in_common(model_store: ModelStore) -> None:
    first = ask(model_store, "ann")
    for visitor in ("bob", "", "ann hybrid", "an"):
        other = ask(model_store, visitor, turn(first))
        assert reused(other) == [0, 0] and other.encode_s > 0
    kept = num_kept(model_store)
    model_store.forget("bob")
    assert num_kept(model_store) == kept - 2
    assert max(reused(ask(model_store, "ann", turn(first)))) > 16
    assert reused(ask(model_store, "ann")) == [0, 0], "a new conversation begins without the last"
    for visitor in ("ann", "ann hybrid", "an", "nobody"):
        model_store.forget(visitor)
    assert num_kept(model_store) == 0


def test_a_page_that_is_closed_during_its_run_leaves_nothing(model_store: ModelStore) -> None:
    halt = CancelSignal(60)
    first = ask(model_store, "ann")

    def close(run: ComparisonRun) -> None:
        model_store.forget("ann")
        halt.cancel()

    settings = RunSettings("tiny", drafter="hybrid", max_new_tokens=8)
    run = ComparisonRun(model_store, draw_image(3)[0], (turn(first),), "why?", settings, halt, "a.png", "ann")
    record = run.lanes[0].streamer.record
    run.lanes[0].streamer.record = lambda ids: (record(ids), close(run))[0]  # type: ignore[method-assign]
    assert run.run().cancelled and num_kept(model_store) == 0


def test_half_precision_reuses_no_prompt() -> None:
    store = ModelStore("tiny", dtype="bfloat16")
    first = ask(store, "ann")
    second = ask(store, "ann", turn(first))
    assert reused(second) == [0, 0] and second.encode_s == 0, "the encoded picture is the same bits"


def test_encoded_pictures_have_a_limit(model_store: ModelStore) -> None:
    loaded = model_store.get("tiny")
    inputs = build_inputs(loaded.model, loaded.processor, [draw_image(3)[0]], ["what?"])
    kept = KeptMedia()
    kept.encode("a", loaded.model, inputs)
    kept.max_bytes = 2 * kept._kept["a"].nbytes
    for visitor in ("b", "a", "c"):
        kept.encode(visitor, loaded.model, inputs)
    assert list(kept._kept) == ["a", "c"], "what was used longest ago goes first"
    request, seconds = kept.encode("a", loaded.model, inputs)
    assert seconds == 0 and "pixel_values" not in request
    other = build_inputs(loaded.model, loaded.processor, [draw_image(4)[0]], ["what?"])
    assert kept.encode("a", loaded.model, other)[1] > 0
