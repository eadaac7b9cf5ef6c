"""The work behind the pages of `mmspec demo`, without a browser and without gradio where that is possible."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import ChatTurn, build_inputs, encode_media
from mmspec.app.modeling.synthetic_images import draw_image, write_images
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import race, render, tree_view
from mmspec.app.ui.batch import CaptionBatch, clean_name, link_files, sanitize_file_name, unique_names, write_parquet
from mmspec.app.ui.comparison import ComparisonRun, Difference
from mmspec.app.ui.gradio_import import skip_stub_generation
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.recorder import RoundRecorder
from mmspec.app.ui.refusals import FileRefusedError
from mmspec.app.ui.report import Report, TempStorage, build_report
from mmspec.app.ui.rounds import ACCEPTED, CORRECTED, NOT_DRAFTED, Round, classify_tokens
from mmspec.app.ui.run_comparison import measure_logit_margin
from mmspec.app.ui.streamer import IncrementalDetokenizer, TimingStreamer, detokenize
from mmspec.app.ui.worker import CancelSignal, Client, SessionRegistry, Worker
from mmspec.vision.registry import build_compressor

pytestmark = pytest.mark.pages

NASTY = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'> **bold** ${1+1} {{value}}"


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


def build_comparison(
    model_store: ModelStore,
    halt: CancelSignal | None = None,
    turns: Any = (),
    question: str = "what is in it?",
    **chosen: Any,
) -> ComparisonRun:
    choice = RunSettings("tiny", **{"max_new_tokens": 32} | chosen)
    return ComparisonRun(model_store, draw_image(3)[0], turns, question, choice, halt or CancelSignal(60))


def report(model_store: ModelStore, **chosen: Any) -> Report:
    return build_report(build_comparison(model_store, **chosen).run())


# tapes and pieces


def test_a_tape_leaves_the_prompt_out() -> None:
    tape = TimingStreamer()
    tape.put(torch.tensor([[5, 6, 7]]))
    for token in (8, 9, 10):
        tape.put(torch.tensor([token]))
    assert tape.token_ids == [8, 9, 10] and sorted(tape.token_times) == tape.token_times
    assert tape.tokens_per_s == pytest.approx(2 / (tape.token_times[2] - tape.token_times[0]))


class Bytes:
    """A tokenizer whose tokens are bytes, so that one character takes several."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_make_up_the_text_and_never_show_half_a_character() -> None:
    text = "a Hügel, 日本 ☃ end"
    pieces = detokenize(Bytes(), list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_of_a_growing_text_stay_as_they_were(model_store: ModelStore) -> None:
    tokenizer = model_store.get("tiny").processor.tokenizer
    ids = tokenizer("describe the dog, please.", add_special_tokens=False).input_ids
    pieces = IncrementalDetokenizer(tokenizer)
    grown = [list(pieces.decode(ids[:end])) for end in range(len(ids) + 1)]
    assert all(more[: len(less)] == less for less, more in itertools.pairwise(grown))
    assert "".join(grown[-1]) == tokenizer.decode(ids, skip_special_tokens=True)


# races


@pytest.mark.parametrize(
    "chosen", [{}, {"tree_size": 8, "temperature": 0.8, "seed": 4}, {"drafter": "recycling", "tree_size": 8}]
)
def test_both_sides_say_the_same_and_the_figures_are_those_of_stats(
    model_store: ModelStore, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComparisonRun, "needs_loop", False)  # the last call is then that of the lane
    comparison = build_comparison(model_store, **chosen).run()
    built = build_report(comparison)
    assert comparison.plain.streamer.token_ids == comparison.mmspec.streamer.token_ids and built.identical
    assert built.verdict == "Outputs identical: all 32 tokens"
    stats = mmspec.stats(model_store.get("tiny").model, last=True)
    ours = built.metrics["sides"]["mmspec"]
    assert (ours["n_tokens"], ours["tokens_per_s"], ours["ttft_s"]) == (stats.tokens, stats.tokens_per_s, stats.ttft_s)
    assert built.metrics["tau"] == stats.tau and built.metrics["stats"] == stats.as_dict()
    plain = comparison.plain.streamer
    assert built.metrics["speedup_decode"] == pytest.approx(
        stats.tokens_per_s * (plain.token_times[-1] - plain.token_times[0]) / 31
    )
    assert built.metrics["speedup_decode"] == pytest.approx(stats.tau / built.metrics["R"])
    assert f"{stats.tau:.2f}" in render.render_results(built)
    assert sum(stats.accept_length_hist.values()) == stats.rounds == len(built.mmspec.round_lengths)
    assert sum(built.mmspec.round_lengths) == 31 and built.plain.round_lengths == (1,) * 31
    assert built.plain.text == built.mmspec.text and len(built.mmspec.token_times) == 32


def test_rounds_tell_what_was_emitted(model_store: ModelStore) -> None:
    comparison = build_comparison(model_store, drafter="recycling", tree_size=8, max_new_tokens=60).run()
    assert [token for one in comparison.mmspec.rounds for token in one.emitted] == comparison.mmspec.streamer.token_ids
    for one in comparison.mmspec.rounds:
        assert one.parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(one.parents) if node)
        assert [one.tokens[node] for node in one.accepted_nodes[1:]] == list(one.emitted[:-1])
        assert all(one.parents[b] == a for a, b in itertools.pairwise(one.accepted_nodes))
    kinds = classify_tokens(comparison.mmspec.rounds, 60)
    assert kinds.count(ACCEPTED) == comparison.mmspec.stats.num_accepted_tokens > 0 and CORRECTED in kinds
    assert sum(one.num_draft_tokens for one in comparison.mmspec.rounds) == comparison.mmspec.stats.num_draft_tokens


def test_kinds_of_tokens() -> None:
    tree = Round(1, (9, 5, 6, 7), (-1, 0, 0, 1), None, (0, 1), (5, 8))
    assert tree.token_kinds == (ACCEPTED, CORRECTED)
    assert replace(tree, accepted_nodes=(0, 2), emitted=(6, 8)).token_kinds == (
        ACCEPTED,
        NOT_DRAFTED,
    )  # nothing hung below it
    assert Round(0, (9,), (-1,), None, (0,), (5,)).token_kinds == (NOT_DRAFTED,)
    assert classify_tokens([tree], 3) == [ACCEPTED, CORRECTED, NOT_DRAFTED] and classify_tokens([tree], 1) == [ACCEPTED]


def test_the_picture_is_looked_at_once(model_store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    base, calls = model_store.get("tiny").model.base_model, []
    see = base.get_image_features

    def counted(pixel_values: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return see(pixel_values=pixel_values, **kwargs)

    monkeypatch.setattr(base, "get_image_features", counted)
    comparison = build_comparison(model_store).run()
    assert len(calls) == 1 and comparison.encode_s > 0 and comparison.identical


def test_a_race_is_what_the_model_says_alone(model_store: ModelStore) -> None:
    comparison = build_comparison(model_store).run()
    loaded_model = model_store.get("tiny")
    inputs = build_inputs(loaded_model.model, loaded_model.processor, [draw_image(3)[0]], ["what is in it?"])
    with mmspec.disabled():
        alone = loaded_model.model.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert alone[0, inputs["input_ids"].shape[1] :].tolist() == comparison.plain.streamer.token_ids


def test_no_run_learns_from_another(model_store: ModelStore) -> None:
    first, second = (build_comparison(model_store, drafter="recycling", tree_size=8).run() for _ in range(2))
    assert first.mmspec.stats.num_accepted_tokens == second.mmspec.stats.num_accepted_tokens


@pytest.mark.parametrize(("num_tokens", "plain", "ours"), [(0, 0, 0), (9, 9, 0), (43, 32, 11)])
def test_stopping_stops_generate(
    model_store: ModelStore, monkeypatch: pytest.MonkeyPatch, num_tokens: int, plain: int, ours: int
) -> None:
    halt = CancelSignal(60)
    counted: list[int] = []
    record = TimingStreamer.record

    def record_and_count(streamer: TimingStreamer, token_ids: list[int]) -> None:
        record(streamer, token_ids)
        counted.extend(token_ids)
        if len(counted) >= num_tokens:
            halt.cancel()

    monkeypatch.setattr(TimingStreamer, "record", record_and_count)
    if not num_tokens:
        halt.cancel()
    comparison = build_comparison(model_store, halt).run()
    assert comparison.cancelled and comparison.phase == "done"
    assert (
        abs(len(comparison.plain.streamer.token_ids) - plain) <= 1
        and abs(len(comparison.mmspec.streamer.token_ids) - ours) <= 2
    )
    if num_tokens:
        summary = build_report(comparison)
        assert ("identical up to token" in summary.verdict) == (ours > 0) and summary.metrics["speedup_e2e"] is None
        assert summary.identical is (True if ours else None)


def test_a_difference_is_told_with_its_margin(model_store: ModelStore) -> None:
    comparison = build_comparison(model_store).run()
    loaded_model, ids = model_store.get("tiny"), comparison.plain.streamer.token_ids
    inputs = build_inputs(loaded_model.model, loaded_model.processor, [draw_image(3)[0]], ["what is in it?"])
    with mmspec.disabled():
        again = loaded_model.model.generate(
            **inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    first, second = again.logits[5][0].topk(2)
    wanted = float(first[0] - first[1])
    assert int(second[0]) == ids[5]
    request, _ = encode_media(loaded_model.model, inputs)
    margin_arguments = (loaded_model, request, comparison.settings, 5, ids[5], int(second[1]))
    assert measure_logit_margin(*margin_arguments, CancelSignal(60)) == pytest.approx(wanted, abs=1e-4)
    stopped = CancelSignal(60)
    stopped.cancel()
    assert math.isnan(measure_logit_margin(*margin_arguments, stopped)), "a run that is stopped meanwhile"
    comparison.mmspec.difference = Difference(5, ids[5], int(second[1]), wanted)
    summary = build_report(comparison)
    assert (
        summary.identical is False
        and "differ from token 6 on" in summary.verdict
        and f"{wanted:.2e}" in summary.verdict
    )
    assert "mm-differs" in race.render_verdict(summary) and "mm-differs" in race.render_race(summary)
    comparison.mmspec.difference = replace(comparison.mmspec.difference, margin=math.nan)
    assert (
        "not measured" in build_report(comparison).verdict
        and build_report(comparison).metrics["difference"]["margin"] is None
    )


def test_a_prompt_beyond_the_positions_is_refused(model_store: ModelStore) -> None:
    with pytest.raises(UsageError, match="4096 positions"):
        build_comparison(model_store, question="x " * 2500).run()


# what the drafter saw


def test_a_drafter_without_eyes_says_so(model_store: ModelStore) -> None:
    built = report(model_store)
    assert "text alone" in built.metrics["visible_tokens"]["summary"] and built.image_uris == ()


@pytest.mark.parametrize(
    ("kind", "compressor", "num_visible", "num_selected"),
    [
        ("decoupled", None, 16, 16),
        ("placeholder", None, 0, 0),
        ("coupled", "stride:4", 4, 4),
        ("decoupled", "relevant:5", 5, 5),
        ("decoupled", "pool:4", 4, None),
        ("coupled", "drop", 0, 0),
    ],
)
def test_tokens_that_a_trained_drafter_saw_are_marked(
    model_store: ModelStore,
    monkeypatch: Any,
    kind: str,
    compressor: str | None,
    num_visible: int,
    num_selected: int | None,
) -> None:
    import tiny_heads as heads

    spec = SimpleNamespace(hidden=64, heads=4, kv_heads=2, vocab=384, layers=2)
    drafter = heads.build_drafter(kind, spec)  # type: ignore[arg-type]
    monkeypatch.setitem(model_store.get("tiny")._drafters, "auto", drafter)
    comparison = build_comparison(model_store, compressor=compressor, tree_size=4).run()
    built = build_report(comparison)
    summary = built.metrics["visible_tokens"]
    assert built.identical and summary["num_visible"] == num_visible and summary["num_total"] == 16
    assert (summary["visible_indices"] if num_selected is None else len(summary["visible_indices"])) == num_selected
    assert len(built.image_uris) == (1 if num_selected else 0) and (
        "<img" in render.render_visible_tokens(built)
    ) == bool(num_selected)


def test_a_drafter_that_brings_its_own_compressor_is_told(model_store: ModelStore, monkeypatch: Any) -> None:
    import tiny_heads as heads

    spec = SimpleNamespace(hidden=64, heads=4, kv_heads=2, vocab=384, layers=2)
    drafter = heads.build_drafter("decoupled", spec)  # type: ignore[arg-type]
    drafter.compressor = build_compressor("pool:4")
    monkeypatch.setitem(model_store.get("tiny")._drafters, "auto", drafter)
    for chosen, num_visible in ((None, 4), ("relevant:5", 5)):
        summary = build_report(build_comparison(model_store, compressor=chosen, tree_size=4).run()).metrics[
            "visible_tokens"
        ]
        assert summary["num_visible"] == num_visible and summary["num_total"] == 16


# conversations


@pytest.mark.parametrize("template", [True, False])
def test_a_conversation_holds_what_was_said_and_one_picture(
    model_store: ModelStore, template: bool, monkeypatch: Any
) -> None:
    loaded_model = model_store.get("tiny")
    if not template:
        monkeypatch.setattr(loaded_model.processor, "chat_template", None)
    turns = (ChatTurn("what is it?", "a red car"), ChatTurn("how many?", "two"))
    inputs = build_inputs(loaded_model.model, loaded_model.processor, [draw_image(3)[0]], ["which colour?"], [turns])
    ids = inputs["input_ids"][0]
    text = loaded_model.processor.tokenizer.decode(ids, skip_special_tokens=True)
    assert int((ids == 4).sum()) == 16 and inputs["pixel_values"].shape[0] == 1
    places = [text.find(part) for part in ("what is it", "red car", "how many", "two", "which colour")]
    assert places == sorted(places) and -1 not in places
    comparison = build_comparison(model_store, turns=turns, question="which colour?").run()
    assert comparison.identical and comparison.prompt_tokens == len(ids)


def test_a_clip_is_several_pictures(model_store: ModelStore) -> None:
    num_visible = Limits().load_media(next(path for path in list_example_files() if path.suffix == ".mp4"))
    comparison = ComparisonRun(
        model_store, num_visible, (), "what moves?", RunSettings("tiny", max_new_tokens=8), CancelSignal(60)
    ).run()
    assert comparison.identical and comparison.prompt_tokens > 16 * 4


# what is refused


def test_questions() -> None:
    limits = Limits()
    assert limits.check_question("  hello \n") == "hello"
    for bad, summary in ((" \n", "write a question"), (None, "write a question"), ("x" * 10_000, "10000 characters")):
        with pytest.raises(UsageError, match=summary):
            limits.check_question(bad)
    assert limits.check_question(NASTY) == NASTY


def test_a_word_that_stands_for_a_picture_is_refused_wherever_it_comes_from(
    model_store: ModelStore, space: TempStorage, tmp_path: Path
) -> None:
    summary = "must not contain <image>"
    with pytest.raises(UsageError, match=summary):
        build_comparison(model_store, question="what <image> is").run()
    paths = write_images(tmp_path / "p", 2)
    with pytest.raises(UsageError, match=summary):
        CaptionBatch(
            model_store, paths, "see <image>", RunSettings("tiny", max_new_tokens=4), Limits(), space.new_folder()
        ).run(CancelSignal(60))
    rows = [{"file_name": paths[0].name, "prompt": "see <image>"}, {"file_name": paths[1].name}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batch = batch_of(model_store, space, [*paths, tmp_path / "list.jsonl"]).run(CancelSignal(60))
    first, second = sorted(batch.rows, key=lambda row: row["index"])
    assert summary in first["error"]["message"] and second["error"] is None


def test_numbers() -> None:
    assert Limits().check_number("Seed", 3, 0, 9) == 3
    for bad in (10, -1, float("nan"), float("inf"), "3", None, True):
        with pytest.raises(UsageError, match="Seed must be a number from 0 to 9"):
            Limits().check_number("Seed", bad, 0, 9)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("av")
    import video_files as footage

    limits = Limits()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.png").touch()
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(200_000_000)
    Image.new("1", (10_000, 5_000)).save(tmp_path / "fifty.png")
    footage.write_audio_only(tmp_path / "song.mp4")
    footage.write_empty_video(tmp_path / "nothing.mp4")
    (tmp_path / "no.mp4").write_bytes(b"nothing of a video")
    summary = {
        "broken.png": "it is damaged or incomplete",
        "text.jpg": "it is not a picture .* save it as PNG, JPEG",
        "empty.png": "it is empty",
        "huge.png": "more than 100 MB",
        "fifty.png": r"50 megapixels \(10000 x 5000\); 40 megapixels is the limit.$",
        "song.mp4": "song.mp4 cannot be used: there is no moving picture in it",
        "nothing.mp4": "nothing.mp4 cannot be used: there is no moving picture in it",
        "no.mp4": "no.mp4 cannot be used: it is not a clip",
    }
    for name, text in summary.items():
        with pytest.raises(UsageError, match=text) as caught:
            limits.load_media(tmp_path / name)
        message = str(caught.value)
        assert str(tmp_path) not in message and "\n" not in message
        assert isinstance(caught.value, FileRefusedError), "its preview goes"
        assert not re.search(r"pyav|ffmpeg|pillow|decoder|0x|b'|\\\\x|\d{5,} ?pixels|bytes", message, re.IGNORECASE)
    with pytest.raises(UsageError, match="choose a picture"):
        limits.load_media(None)


def test_only_what_is_on_the_lists_can_be_chosen(model_store: ModelStore, tmp_path: Path) -> None:
    model_store.check_names("tiny", "auto")
    for wrong in ((str(tmp_path), "auto"), ("tiny", str(tmp_path)), ("tiny", "someone/drafter")):
        with pytest.raises(UsageError, match="choose one of"):
            model_store.check_names(*wrong)
    with pytest.raises(UsageError, match="compressor"):
        build_comparison(model_store, compressor="../x").run()


# one worker, many pages


def follow(worker: Worker, work: Any) -> None:
    """Follow a job to its end."""
    for _ in worker.submit_and_poll(work, CancelSignal()):
        pass


def test_jobs_run_one_after_the_other() -> None:
    worker, running, most = Worker(), [0], [0]

    def work() -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        return most[0]

    threads = [threading.Thread(target=lambda: follow(worker, work)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    worker.close()


def test_who_stops_looking_ends_the_run() -> None:
    worker, halt = Worker(), CancelSignal(60)

    def work() -> str:
        while not halt.should_stop:
            time.sleep(0.005)
        return "ended"

    steps = worker.submit_and_poll(work, halt, interval_s=0.01)
    next(steps)
    assert not halt.should_stop
    steps.close()
    assert halt.should_stop and worker.submit(lambda: "next").result(timeout=5) == "next"
    worker.close()


def test_the_deadline_follows_the_signal() -> None:
    halt, deadlines = CancelSignal(lease_s=60), list[float]()
    halt.on_deadline(deadlines.append)
    assert time.time() + 50 < deadlines[-1] <= time.time() + 60
    halt.cancel()
    halt.renew()
    assert deadlines[1:] == [-math.inf, -math.inf]


def test_a_fallback_is_recorded_with_its_times(model_store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundRecorder, "__call__", lambda self, one: None)
    comparison = build_comparison(model_store).run()
    assert comparison.mmspec.streamer.token_ids == comparison.plain.streamer.token_ids and comparison.identical
    assert len(comparison.mmspec.streamer.token_times) == 32


def test_a_run_that_nobody_looks_at_ends_by_itself() -> None:
    halt = CancelSignal(lease_s=0.05)
    assert not halt.should_stop
    time.sleep(0.06)
    assert halt.should_stop
    halt.renew()
    assert not halt.should_stop


def test_errors_of_a_job_reach_who_waits() -> None:
    worker = Worker()

    def work() -> None:
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="work itself"):
        follow(worker, work)
    worker.close()


def test_a_page_has_one_run_at_a_time() -> None:
    sessions = SessionRegistry()
    first = sessions.begin("a")
    with pytest.raises(UsageError, match="still active"):
        sessions.begin("a")
    other = sessions.begin("b")
    assert sessions.get_signal("a") is first
    first._renewed_at -= 1000  # in the queue nobody looks at it
    with pytest.raises(UsageError, match="still active"):
        sessions.begin("a")
    sessions.cancel("a")
    sessions.cancel("nobody")
    assert first.should_stop and not other.should_stop
    sessions.end("a")
    assert not sessions.begin("a").should_stop


# drawing


def test_nothing_that_was_written_becomes_html(model_store: ModelStore) -> None:
    built = replace(report(model_store, tree_size=8), question=NASTY)
    built = replace(
        built,
        lanes=(replace(built.mmspec, token_texts=(NASTY,) * 32, drafter=NASTY),),
        token_labels=dict.fromkeys(built.token_labels, NASTY),
    )
    turns = (ChatTurn(NASTY, NASTY),)
    row = {
        "id": "a",
        "file_name": NASTY,
        "caption": NASTY,
        "error": None,
        "n_new_tokens": 1,
        "tau": 1.0,
        "seconds": 0.1,
    }
    failed = row | {"error": {"type": "X", "message": NASTY}}
    drawn = [
        race.render_race(built, turns, media=False),
        race.render_live_race(turns, NASTY, [race.LiveLane("plain", NASTY, NASTY, NASTY, 1.0, "running")]),
        race.render_verdict(replace(built, verdict=NASTY, identical=None)),
        render.render_sentence(NASTY, NASTY, NASTY),
        render.render_captions([row, failed]),
        render.render_status(NASTY),
        *(render.render_round(built, number) for number in range(len(built.rounds))),
    ]
    for html in drawn:
        assert "<script" not in html and "<img" not in html
    assert all("window.hacked=1&lt;/script&gt;" in html for html in drawn)


def test_trees_are_drawn_without_overlaps(model_store: ModelStore) -> None:
    depths, lines = tree_view.layout_tree([-1, 0, 0, 1, 1, 2, 3])
    assert depths == [0, 1, 1, 2, 2, 2, 3]
    assert len(set(zip(depths, lines, strict=True))) == 7 and lines[0] == (lines[1] + lines[2]) / 2
    built = report(model_store, drafter="recycling", tree_size=16, max_new_tokens=40)
    roots = [tree_view.list_nodes(one, built.token_labels)[0].label for one in built.rounds]
    assert roots[0] == "prompt" and "prompt" not in roots[1:]
    for one in built.rounds:
        drawn = tree_view.render_tree(one, built.token_labels)
        nodes = xml.fromstring(drawn).findall(".//{http://www.w3.org/2000/svg}rect")
        boxes = [tuple(float(node.get(key, "")) for key in ("x", "y", "width", "height")) for node in nodes]
        assert len(boxes) == len(one.tokens) + 1 and drawn.count("<li>") == len(boxes)
        for (x, y, width, height), (other_x, other_y, *_) in itertools.permutations(boxes, 2):
            assert not (x <= other_x < x + width and y <= other_y < y + height)


def test_a_report_is_json_and_complete(model_store: ModelStore, space: TempStorage) -> None:
    built = report(model_store, tree_size=8)
    read = json.loads(space.write_report(built).read_text(encoding="utf-8"))
    assert read["mmspec"]["answer"] == built.mmspec.text and len(read["plain"]["tokens"]) == 32
    assert read["identical"] is True and read["choice"]["drafter"] == "auto" and read["run"]["dtype"] == "float32"
    assert [token for one in read["rounds"] for token in one["emitted"]] and set(read["stats"]) >= {"tau", "rounds"}
    times = [token["t"] for token in read["mmspec"]["tokens"]]
    assert times == sorted(times)


def test_old_files_are_swept_and_all_in_the_end() -> None:
    space = TempStorage(max_age_s=100)
    old, new = space.new_folder(), space.new_folder()
    os.utime(old, (0, 0))
    space.remove_expired()
    assert not old.exists() and new.exists()
    space.close()
    assert not space.root.exists()


# batches


def batch_of(model_store: ModelStore, space: TempStorage, paths: list[Path], **chosen: Any) -> CaptionBatch:
    choice = RunSettings("tiny", **{"max_new_tokens": 12} | chosen)
    return CaptionBatch(model_store, paths, None, choice, Limits(), space.new_folder())


def test_a_batch_is_the_job_of_mmspec_caption(model_store: ModelStore, space: TempStorage, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "p", 5)
    (tmp_path / "p" / "zz_broken.png").write_bytes(b"no")
    batch = batch_of(model_store, space, [*paths, tmp_path / "p" / "zz_broken.png"]).run(CancelSignal(60))
    out = tmp_path / "cli.jsonl"
    main(
        [
            "caption",
            str(tmp_path / "p"),
            "--model",
            "tiny",
            "--max-new-tokens",
            "12",
            "--out",
            str(out),
            "--no-progress",
        ]
    )
    theirs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["caption"] for row in batch.rows] == [row["caption"] for row in theirs]
    assert [row["file_name"] for row in batch.rows] == [Path(row["file_name"]).name for row in theirs]
    assert batch.rows[-1]["error"]["type"] == "NotAnImage" and batch.total == 6 and not batch.cancelled
    assert [json.loads(line) for line in batch.output_file.read_text().splitlines()] == batch.rows
    assert not batch.input_folder.exists()
    assert str(tmp_path) not in batch.output_file.read_text() and str(space.root) not in batch.output_file.read_text()


def test_a_stopped_batch_keeps_whole_rows(
    model_store: ModelStore, space: TempStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt, calls, caption = CancelSignal(60), itertools.count(1), Captioner.caption

    def cancel_in_second_call(captioner: Captioner, *args: Any) -> Any:
        if next(calls) == 2:  # of three
            halt.cancel()
        return caption(captioner, *args)

    monkeypatch.setattr(Captioner, "caption", cancel_in_second_call)
    batch = batch_of(model_store, space, write_images(tmp_path / "p", 9))
    batch.run(halt)
    assert batch.cancelled and len(batch.rows) == 4 and all(row["n_new_tokens"] == 12 for row in batch.rows)
    assert len(batch.output_file.read_text().splitlines()) == 4 and not batch.input_folder.exists()


def test_a_list_names_uploaded_files_and_no_others(model_store: ModelStore, space: TempStorage, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "p", 2)
    rows = [{"file_name": path.name, "prompt": f"which {number}?"} for number, path in enumerate(reversed(paths))]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batch = batch_of(model_store, space, [*paths, tmp_path / "list.jsonl"]).run(CancelSignal(60))
    assert [row["file_name"] for row in batch.rows] == [path.name for path in reversed(paths)]
    for name in ("/etc/passwd", "../../../etc/passwd"):
        (tmp_path / "list.txt").write_text(name)
        with pytest.raises(UsageError) as caught:
            batch_of(model_store, space, [tmp_path / "list.txt"])
        assert str(space.root) not in str(caught.value)


def test_a_list_names_files_as_the_visitor_sees_them(
    model_store: ModelStore, space: TempStorage, tmp_path: Path
) -> None:
    """Gradio stores uploads under names without brackets, signs and quotes."""
    names = ["photo (1).png", "cat@2x.png", "it's.png", "plain.png", ".hidden.png"]
    stored = ["photo 1.png", "cat2x.png", "its.png", "plain.png", ".hidden.png"]
    pictures = write_images(tmp_path / "p", len(names))
    for number, (path, name) in enumerate(zip(pictures, stored, strict=True)):
        pictures[number] = path.rename(path.with_name(name))
    (tmp_path / "list.csv").write_text("file_name\n" + "".join(f'"{name}"\n' for name in names[:4]))
    files, settings = [*pictures, tmp_path / "list.csv"], RunSettings("tiny", max_new_tokens=4)
    given = [*names, "a (list).csv"]
    batch = CaptionBatch(model_store, files, None, settings, Limits(), space.new_folder(), given).run(CancelSignal(60))
    assert [(row["file_name"], row["error"]) for row in batch.rows] == [(name, None) for name in names[:4]]
    folder = tmp_path / "out"
    folder.mkdir()
    odd = ["../x.png", "a/b.png", ".x.png", "x.svg", "x" * 300 + ".png", "\ud800.png"]
    linked = link_files([pictures[0]] * len(odd), folder, odd)
    assert {path.name for path in linked} == {"photo 1.png", *(f"photo 1_{number}.png" for number in range(2, 7))}


def test_rows_have_the_given_names_and_small_pictures(
    model_store: ModelStore, space: TempStorage, tmp_path: Path
) -> None:
    paths = write_images(tmp_path / "p", 3)
    names = ["Ü [1]*?.png", "a/b\\Ü [1]*?.png", "x\x1b[31m\n.png"]
    settings = RunSettings("tiny", max_new_tokens=4)
    batch = CaptionBatch(model_store, paths, None, settings, Limits(), space.new_folder(), names)
    batch.run(CancelSignal(60))
    assert [row["file_name"] for row in batch.rows] == ["x[31m.png", "Ü [1]*?.png", "Ü [1]*?_2.png"]
    assert [json.loads(line)["file_name"] for line in batch.output_file.read_text().splitlines()] == [
        row["file_name"] for row in batch.rows
    ]
    assert batch.thumbnails.keys() == {row["id"] for row in batch.rows}
    table = render.render_captions(batch.rows, batch.thumbnails)
    assert table.count("data:image/jpeg;base64,") == 3 and table.count("stopped at the limit of 4 tokens") == 3
    assert clean_name("..\\..\\") == "file" and unique_names(["a.b", "a.b", "a.b"]) == ["a.b", "a_2.b", "a_3.b"]


def test_rows_are_written_as_parquet(model_store: ModelStore, space: TempStorage, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra app installs pyarrow")
    (tmp_path / "broken.png").write_bytes(b"no")
    batch = batch_of(model_store, space, [*write_images(tmp_path / "p", 2), tmp_path / "broken.png"])
    batch.run(CancelSignal(60))
    write_parquet(batch.rows, tmp_path / "rows.parquet")
    read = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["caption"] for row in read] == [row["caption"] for row in batch.rows]
    assert sum(row["error"] is not None for row in read) == 1


def test_names_of_uploads(tmp_path: Path) -> None:
    assert sanitize_file_name("<b>x*?[1].png") == "_b_x___1_.png" and sanitize_file_name("..") == "file"
    assert sanitize_file_name("-rf.png") == "-rf.png" and sanitize_file_name("日本.jpg") == "日本.jpg"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_text(folder)
    (tmp_path / "out").mkdir()
    built = link_files([tmp_path / "a" / "x.png", tmp_path / "b" / "x.png"], tmp_path / "out")
    assert [(path.name, path.read_text()) for path in built] == [("x.png", "a"), ("x_2.png", "b")]


# the command


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0 and "127.0.0.1" in capsys.readouterr().out
    assert main(["demo", "--drafter", "nonsense"]) == 2
    with pytest.raises(SystemExit):
        main(["demo", "--port", "99999"])
    assert "0 to 65535" in capsys.readouterr().err


def test_without_gradio_it_says_what_to_install(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo"]) == 2
    assert "[app]'" in capsys.readouterr().err


# with gradio, without a browser


def test_pages_are_served_before_torch_is_imported() -> None:
    """It takes longer than all else; whoever opens the page meanwhile can choose a picture."""
    pytest.importorskip("gradio")
    code = """
import inspect, sys
find = inspect.getfile
from mmspec.app.ui.server import build_app
from mmspec.app.ui.context import Context
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.model_store import ModelStore
space = TempStorage()
build_app(Context(ModelStore(), space))
space.close()
assert inspect.getfile is find, "the replacement during the import of gradio is undone"
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert run.returncode == 0, run.stderr
    assert "gradio" in run.stdout.split() and not {"torch", "transformers"} & set(run.stdout.split())


def test_only_the_files_of_gradio_are_not_found() -> None:
    gr = pytest.importorskip("gradio")
    with skip_stub_generation():
        assert inspect.getfile(Path) and inspect.getfile(ModelStore)
        with pytest.raises(OSError, match="no stub"):
            inspect.getfile(gr.Textbox)
    assert inspect.getfile(gr.Textbox).endswith("textbox.py")


def test_errors_are_one_sentence_without_html() -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui.context import to_gradio_error

    assert to_gradio_error(UsageError("<b>bad</b>")).message == "&lt;b&gt;bad&lt;/b&gt;"
    assert to_gradio_error(UsageError("it's bad"), str).message == "it's bad", "programs read no HTML"
    summary = to_gradio_error(RuntimeError("secret /path\nmore"))
    assert "secret" not in summary.message and not summary.print_exception
    assert "memory" in to_gradio_error(RuntimeError("CUDA out of memory")).message


def test_steps_of_a_conversation(model_store: ModelStore, space: TempStorage) -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui.comparison_stream import Conversation, stream_comparison
    from mmspec.app.ui.context import Context
    from mmspec.app.ui.tabs.compare import CompareComponents, build_final_updates
    from mmspec.app.ui.tabs.results import ResultComponents

    context = Context(model_store, space)
    results = ResultComponents(*ResultComponents.__dataclass_fields__)
    parts = CompareComponents(*list(CompareComponents.__dataclass_fields__)[:-1], results)
    chosen = ("tiny", "auto", "none", 0, 0, 16, "automatic")
    path = str(list_example_files()[0])

    def ask(
        question: str, talk: Conversation, path: str | None = path, chosen: tuple[Any, ...] = chosen
    ) -> dict[Any, Any]:
        last = list(stream_comparison(context, path, question, talk, chosen, Client("me")))[-1]
        num_visible = build_final_updates(context, parts, "run", context.sessions.take_result("me"))
        assert context.sessions.take_result("me") is None, "once"
        assert last[1].count("mm-turn-question") == num_visible["race"].count("mm-turn-question"), "live as at the end"
        return num_visible

    first = ask("what is it?", Conversation())
    assert first["conversation"].path == path and [turn.question for turn in first["conversation"].turns] == [
        "what is it?"
    ]
    context.sessions.end("me")
    second = ask("how many?", first["conversation"])
    assert len(second["conversation"].turns) == 2 and "what is it?" in second["race"]
    context.sessions.end("me")
    again = ask("how many?", second["conversation"])
    assert len(again["conversation"].turns) == 2, "a question asked again replaces its answer"
    context.sessions.end("me")
    other = ask("and here?", second["conversation"], str(list_example_files()[1]))
    assert len(other["conversation"].turns) == 1 and "how many?" not in other["race"]
    context.sessions.end("me")
    for wrong in (("nobody", *chosen[1:]), (*chosen[:3], -1, *chosen[4:]), (*chosen[:5], 10**9, "automatic")):
        with pytest.raises(UsageError):
            ask("what?", Conversation(), path, wrong)
    with pytest.raises(UsageError, match="which is the limit"):
        ask("what?", Conversation(path, (ChatTurn("q", "a"),) * 16))
    context.worker.close()


def test_what_the_pages_cost_is_measured(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("gradio")
    from mmspec.app.ui import bench_overhead as overhead

    file = tmp_path / "o.json"
    assert (
        overhead.main(
            ["--model", "tiny", "--drafter", "hybrid", "--count", "1", "--new-tokens", "8", "--json", str(file)]
        )
        == 0
    )
    rows = json.loads(file.read_text())
    assert {"plain decode", "mmspec whole call"} <= set(rows) and rows["plain decode"]["median"] > 0
    assert "plain decode" in capsys.readouterr().out
