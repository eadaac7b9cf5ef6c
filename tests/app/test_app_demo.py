"""The demo without a server: an answer and its shape, what the page says equals what a script measures, refusals."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import mmspec
from mmspec.app.errors import UsageError
from mmspec.app.modeling.chat import ChatTurn, build_inputs
from mmspec.app.scenes import load_scenes_model
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import model as demo_model
from mmspec.app.ui.demo import Demo
from mmspec.app.ui.drafter_table import DrafterTable, Row, ranked
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model import COMPRESSORS, DemoModel
from mmspec.app.ui.refusals import REASONS, explain_refusal
from mmspec.app.ui.rounds import CORRECTED, DRAFTED, OWN, UNDRAFTED, Round, classify_tokens
from mmspec.app.ui.run import Run, RunSettings, split_speedup
from mmspec.app.ui.streamer import TimingStreamer
from mmspec.app.ui.uploads import StoredFile, clean_name
from mmspec.app.ui.worker import CancelSignal, Worker
from mmspec.vision.registry import build_compressor
from research.synthetic_images import draw_image

CLIP = next(path for path in list_example_files() if path.suffix == ".mp4")
NASTY = "<img src=x onerror='hacked=1'> \"\"\" ''' {x} \\ \u2028"


@pytest.fixture(scope="module")
def model() -> DemoModel:
    loaded = DemoModel("tiny")
    loaded.load()
    return loaded


@pytest.fixture
def demo(model: DemoModel) -> Iterator[Demo]:
    running = Demo(model)
    yield running
    running.close()


def ask(model: DemoModel, question: str = "what is in it?", turns: Any = (), seed: int = 3, **chosen: Any) -> Run:
    options = {"max_new_tokens": 32, "drafter": "recycling", "tree_size": 8, **chosen}
    return Run(model, None, lambda: draw_image(seed)[0], turns, question, RunSettings(**options))


def answer(run: Run) -> dict[str, Any]:
    run.work(lambda: None)
    return run.as_dict()


def test_the_toy_says_what_it_is_on_the_page_and_in_stats() -> None:
    words, loaded = "a toy that knows drawn scenes; other questions get nonsense", load_scenes_model()[0]
    mmspec.patch(loaded)
    shown = DemoModel()
    assert shown.description == words and words in str(mmspec.stats(loaded))
    shown.model = loaded
    assert shown.description == f"{words} (21 million parameters, float32)"


def test_ten_requests_through_the_page_are_those_of_a_script() -> None:
    """Tau, rounds and tokens."""
    model, page = DemoModel("tiny"), []
    model.load()
    for seed in range(10):
        lane = answer(ask(model, f"what is thing {seed}?", seed=seed, max_new_tokens=16))["lanes"][0]
        page.append((lane["tau"], lane["num_rounds"], lane["num_drafted"], lane["tokens"]))
    script, processor = model.model, model.processor
    mmspec.unpatch(script)
    found = []
    for seed in range(10):
        mmspec.patch(script, "recycling", processor=processor, tree_size=8)
        inputs = build_inputs(script, processor, [draw_image(seed)[0]], [f"what is thing {seed}?"])
        output = script.generate(**inputs, max_new_tokens=16, do_sample=False)
        stats = mmspec.stats(script, last=True)
        found.append((stats.tau, stats.rounds, stats.drafted_rounds, output[0, inputs["input_ids"].shape[1] :]))
        mmspec.unpatch(script)
    assert [one[:3] for one in page] == [one[:3] for one in found] and any(one[0] > 1 for one in found)
    for (*_, tokens), (*_, ids) in zip(page, found, strict=True):
        assert "".join(token[0] for token in tokens) == processor.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_drafters_of_a_model_are_compared_once_each(model: DemoModel) -> None:
    """By its own name, whatever it is offered as; none twice, and none that copies the model before it is chosen."""
    table = DrafterTable(ask(model, max_new_tokens=12, compressor="drop"))
    table.work()
    names = [row["name"] for row in table.rows]
    offered = {name: choice for choice in model.comparable("recycling") for name in [model.get_drafter(choice).name]}
    assert sorted(names) == sorted(["plain generate", *offered]) and not {"self", "quantized"} & set(names)
    assert table.num_done == table.num_calls == 4 * len(names)
    assert all(row["identical"] for row in table.rows) and table.rows[0]["is_tied"]
    chosen = [choice for row in table.rows for choice in row["choices"]]
    assert sorted(chosen) == sorted(model.comparable("recycling"))
    assert {row["name"]: row["tau"] for row in table.rows}["none"] == 1
    stopped = DrafterTable(ask(model))
    stopped.run.signal.cancel()
    stopped.work()
    assert stopped.rows == []


@pytest.mark.parametrize(
    ("rates", "tied"),
    [
        ({"a": [100, 101, 99], "b": [60, 61, 62]}, ["a"]),
        ({"a": [100, 101, 99], "b": [96, 99, 97]}, ["a", "b"]),
        ({"a": [100, 60, 100], "b": [90, 90, 90], "c": [50, 50, 50]}, ["a", "b"]),
        ({"a": [140, 100, 100], "b": [100, 140, 100]}, ["a", "b"]),
        ({"a": [100, 90, 100], "b": [80, 80, 80], "c": [60, 88, 60]}, ["a", "b", "c"]),
        ({"a": [0, 0, 0], "b": [0, 0, 0]}, ["a", "b"]),
    ],
)
def test_what_no_measurement_tells_apart_is_a_tie(rates: dict[str, list[float]], tied: list[str]) -> None:
    """The first pass, which warms up, is not counted."""
    rows = ranked([Row(name, [name], [1000.0 * (name == "c"), *passes]) for name, passes in rates.items()])
    assert [row["name"] for row in rows if row["is_tied"]] == tied and rows[0]["is_tied"]
    assert [row["tokens_per_s"] for row in rows] == sorted((row["tokens_per_s"] for row in rows), reverse=True)


def test_one_shape_holds_both_answers(model: DemoModel) -> None:
    run = ask(model)
    report = answer(run)
    ours, plain = report["lanes"]
    assert report["identical"] is True and report["num_equal"] == 32 == len(ours["tokens"]) == len(plain["tokens"])
    assert [token[0] for token in ours["tokens"]] == [token[0] for token in plain["tokens"]]
    assert ours["tau"] == run.mmspec.stats.tau == report["stats"]["tau"] and plain["tau"] == 1
    assert ours["tokens_per_s"] == run.mmspec.stats.tokens_per_s and report["encode_s"] > 0
    assert json.loads(json.dumps(report)) == report, "plain data"
    rounds = report["rounds"]
    assert len(rounds) == ours["num_rounds"] + 1 and sum(len(one["emitted"]) for one in rounds) == 32
    assert [token[3] for token in ours["tokens"]] == [index for index, one in enumerate(rounds) for _ in one["emitted"]]
    assert sum(one["num_accepted"] for one in rounds) == run.mmspec.stats.num_accepted_tokens > 0
    assert all(one["ms"] > 0 and len(one["shares"]) == len(one["parents"]) == len(one["labels"]) for one in rounds)
    times = [token[1] for token in ours["tokens"]]
    assert times == sorted(times) and times[-1] <= ours["seconds"]


def test_parts_of_a_stream_are_the_whole(model: DemoModel) -> None:
    run = ask(model)
    answer(run)
    whole = run.mmspec.as_dict(model.tokenizer)["tokens"]
    parts = [run.mmspec.as_dict(model.tokenizer, first)["tokens"] for first in (0, 10, 32)]
    assert [len(part) for part in parts] == [32, 22, 0] and whole == parts[0] and parts[0][10:] == parts[1]


def test_four_kinds_of_tokens() -> None:
    tree = Round(1, (9, 5, 6, 7), (-1, 0, 0, 1), None, (0, 1), (5, 8))
    assert tree.token_kinds == (DRAFTED, CORRECTED) and tree.num_accepted_tokens == 1
    assert replace(tree, accepted_nodes=(0, 2), emitted=(6, 8)).token_kinds == (DRAFTED, OWN), "nothing hung below it"
    assert replace(tree, accepted_nodes=(0,), emitted=(5,)).token_kinds == (DRAFTED,), "cut after a draft"
    assert Round(0, (9,), (-1,), None, (0,), (5,)).token_kinds == (UNDRAFTED,)
    assert classify_tokens([tree], 3) == [DRAFTED, CORRECTED, UNDRAFTED] and classify_tokens([tree], 1) == [DRAFTED]


@pytest.mark.parametrize(
    ("ratios", "tau", "drafts"),
    [((1.8, 2.0, 2.2), 3.0, 2.0), ((1.8, 2.0, 2.2), 1.5, 1.5), ((0.99, 1.2, 1.3), 3.0, None), ((1.0,) * 3, 1.0, None)],
)
def test_drafts_give_at_most_tau_and_nothing_within_noise(
    ratios: tuple[float, ...], tau: float, drafts: float | None
) -> None:
    split = split_speedup(ratios, 6.0, tau)
    assert (split and split["drafts"]) == drafts and (split is None or split["loop"] * split["drafts"] == 6.0)


def test_a_follow_up_shares_the_prompt_and_starts_with_fresh_drafts(model: DemoModel) -> None:
    """Six questions in a row, then the first again: its rounds are those of the first time."""
    demo = Demo(model)
    taus, after = [], None
    for number in range(6):
        run = ask(model, "what is it?", [] if after is None else [ChatTurn("a", "b")] * number)
        run.page, run.kept = "me", demo.kept
        taus.append(answer(run)["lanes"][0])
        after = run.id
    assert taus[1]["num_reused"] > 0 == taus[0]["num_reused"] and run.is_media_reused
    again = ask(model, "what is it?")
    again.page, again.kept = "me", demo.kept
    lane = answer(again)["lanes"][0]
    assert (lane["tau"], lane["num_rounds"]) == (taus[0]["tau"], taus[0]["num_rounds"]) and not lane["num_reused"]
    demo.close()


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_stopping_stops_generate(model: DemoModel, monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    record, signal = TimingStreamer.record, CancelSignal()

    def record_and_stop(streamer: TimingStreamer, token_ids: list[int]) -> None:
        record(streamer, token_ids)
        if len(streamer.token_ids) >= num_tokens:
            signal.cancel()

    monkeypatch.setattr(TimingStreamer, "record", record_and_stop)
    run = ask(model, max_new_tokens=500)
    run.signal = signal
    if not num_tokens:
        run.signal.cancel()
    report = answer(run)
    assert report["identical"] is None and len(report["lanes"][0]["tokens"]) <= num_tokens + 16
    assert report["lanes"][1]["tokens"] == [] and report["split"] is None


def test_a_conversation_goes_on_from_a_stored_answer(demo: Demo) -> None:
    asked = {"question": "what is it?", "file": "cart_rainbow.png", "max_new_tokens": 8}
    first = demo.parse(asked)
    first.work(lambda: demo.store(first))
    second = demo.parse({"question": "and now?", "after": first.id, "max_new_tokens": 8})
    text = "".join(token[0] for token in demo.reports[first.id]["lanes"][0]["tokens"])
    assert second.turns == [ChatTurn("what is it?", text)] and second.file_id == "cart_rainbow.png"
    second.work(lambda: demo.store(second))
    assert demo.reports[second.id]["after"] == first.id and demo.reports[second.id]["identical"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "JSON object"),
        ({"question": " "}, "write a question"),
        ({"question": None}, "write a question"),
        ({"question": "x" * 5000}, "5000 characters"),
        ({"file": "../../etc/passwd"}, "choose a picture"),
        ({"file": {"path": "http://192.0.2.1/a.png"}}, "choose a picture"),
        ({"file": None}, "choose a picture"),
        ({"drafter": "/etc"}, "no drafter '/etc'"),
        ({"drafter": ["none"]}, "no drafter"),
        ({"compressor": "pool:0"}, "no compressor"),
        ({"temperature": float("nan")}, "Temperature must be a number"),
        ({"temperature": "1"}, "Temperature must be a number"),
        ({"max_new_tokens": 10**9}, "Max new tokens must be a number"),
        ({"max_new_tokens": True}, "Max new tokens must be a number"),
        ({"after": "nothing"}, "no longer kept"),
        ({"after": 3}, "no longer kept"),
    ],
)
def test_what_a_page_may_not_ask(demo: Demo, wrong: Any, words: str) -> None:
    good = {"question": "what is it?", "file": "cart_rainbow.png"}
    assert demo.parse(good).settings.drafter == "auto"
    with pytest.raises(UsageError, match=words):
        demo.parse(good | wrong if isinstance(wrong, dict) else wrong)


def test_what_cannot_run_here_is_not_offered(model: DemoModel) -> None:
    assert {"auto", "none", "hybrid", "recycling", "lookup"} <= set(model.drafters)
    assert not {"mtp", "assistant", "msd", "flash"} & set(model.drafters)


def test_a_word_that_stands_for_a_picture_is_refused(model: DemoModel) -> None:
    with pytest.raises(UsageError, match="must not contain <image>"):
        answer(ask(model, "what <image> is"))
    with pytest.raises(UsageError, match="4096 positions"):
        answer(ask(model, "x " * 2500))


def test_a_compressor_is_told(model: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_heads as heads

    spec = SimpleNamespace(hidden=64, heads=4, kv_heads=2, vocab=384, layers=2)
    drafter = heads.build_drafter("decoupled", spec)  # type: ignore[arg-type]
    monkeypatch.setitem(model._built, "auto", drafter)
    report = answer(ask(model, drafter="auto", compressor="relevant:16", tree_size=4))
    assert report["identical"] and report["visual_tokens"] == [16, 16]
    with pytest.raises(UsageError):
        answer(ask(model, drafter="auto", compressor="pool:x", tree_size=4))


def test_a_fallback_is_told(model: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ask(model)
    options = run.options
    monkeypatch.setattr(run, "options", lambda name: options(name) | {"enabled": False})
    report = answer(run)
    assert report["identical"] and len(report["lanes"][0]["tokens"]) == 32 and not report["split"]


# files


async def _chunks(*parts: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(pause_s)
        yield part


def test_uploads_have_limits(monkeypatch: pytest.MonkeyPatch, demo: Demo) -> None:
    from mmspec.app.ui import uploads

    store = demo.uploads
    store.max_file_bytes = 1000
    file_id = asyncio.run(store.save(_chunks(b"x" * 900), "../../a\x1b[31m b.PNG"))
    found = store.find(file_id)
    assert found.name == "a[31m b.PNG" and found.path.parent == store.folder and found.path.suffix == ".png"
    with pytest.raises(UsageError, match="has more than"):
        asyncio.run(store.save(_chunks(b"x" * 900, b"x" * 900), "big.png"))
    monkeypatch.setattr(uploads, "MAX_STORED_BYTES", 9100)
    with pytest.raises(UsageError, match="as many files as it may"):
        asyncio.run(store.save(_chunks(b"x" * 200), "b.png"))
    monkeypatch.setattr(uploads, "IDLE_S", 0.05)
    with pytest.raises(UsageError, match="too slowly"):
        asyncio.run(store.save(_chunks(b"x", pause_s=0.5), "c.png"))
    assert [path.name for path in store.folder.iterdir()] == [found.path.name], "nothing of them is left"
    monkeypatch.setattr(uploads, "MAX_AGE_S", -1.0)
    store._remove_old()
    with pytest.raises(UsageError, match="no longer there"):
        store.find(file_id)
    assert not list(store.folder.iterdir()) and store.find("cart_rainbow.png").path.exists()


def test_names_of_files() -> None:
    assert clean_name("C:\\x\\photo (1).png") == "photo (1).png" and clean_name("/") == "file"
    assert clean_name("cat@2x.png") == "cat@2x.png" and len(clean_name("x" * 900)) == 200


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "2.jpg").write_text("hello")
    Image.new("1", (10_000, 5_000)).save(tmp_path / "3.png")
    words = {
        "1.png": "it is damaged or incomplete",
        "2.jpg": "it is not a picture .* save it as PNG, JPEG",
        "3.png": r"50 megapixels \(10000 x 5000\); 40 megapixels is the limit.$",
    }
    for name, text in words.items():
        with pytest.raises(UsageError, match=f"^photo.png cannot be used: .*{text}") as caught:
            Limits().load_media(StoredFile(tmp_path / name, "photo.png", 0.0))
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("kind", [*REASONS, "Other"])
def test_every_refusal_is_in_words_for_a_visitor(kind: str) -> None:
    reason = explain_refusal(kind, "the message")
    assert reason == ("the message" if kind == "Other" else REASONS[kind])


# models that cannot be used, and text models


@pytest.mark.parametrize("name", ["missing/", "./missing", "/nowhere/at/all"])
def test_a_missing_folder_is_told_before_the_page_opens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mmspec.app.cli.main import main

    pytest.importorskip("gradio")
    assert main(["demo", "--model", name, "--port", "0"]) == 1
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "no folder with a model" in told.err and told.out == ""


def test_a_text_model_is_asked_without_a_picture(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<unk>", "</s>", *(f"w{number}" for number in range(94))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    text = DemoModel(str(tmp_path))
    assert text.is_text and text.name == tmp_path.name
    text.load()
    demo = Demo(text)
    run = demo.parse({"question": "w3 w4 w5", "max_new_tokens": 16})
    run.work(lambda: demo.store(run))
    report = demo.reports[run.id]
    assert report["identical"] and report["images"] == [] and str(tmp_path) not in json.dumps([report, demo.state()])
    assert "load_text_model(" in demo.script(run.id)
    demo.close()


@pytest.mark.parametrize("kind", ["vit", "nothing"])
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError, match="generates no text"):
        demo_model.DemoModel(str(tmp_path))


# the device's queue


def test_a_page_waits_for_other_pages_only() -> None:
    worker, gate = Worker(), threading.Event()
    worker.submit(lambda: gate.wait(30), CancelSignal())
    own = worker.submit(lambda: None, CancelSignal(), "me")
    assert worker.num_ahead(own) == 0, "loading the model is nobody's question"
    other = worker.submit(lambda: None, CancelSignal(), "you")
    assert worker.num_ahead(other) == 1
    later = worker.submit(lambda: None, CancelSignal(), "me")
    assert own.signal.should_stop and worker.num_ahead(later) == 1 and worker.num_ahead(other) == 0
    gate.set()
    assert later.done.wait(10)
    worker.close()


def test_the_queue_has_an_end_and_errors_stay_with_their_job() -> None:
    worker, gate = Worker(), threading.Event()
    for number in range(21):
        worker.submit(lambda: gate.wait(30), CancelSignal(), f"page {number}")
    with pytest.raises(UsageError, match="20 questions are waiting"):
        worker.submit(lambda: None, CancelSignal(), "late")
    gate.set()
    time.sleep(0.1)
    failed = worker.submit(lambda: 1 / 0, CancelSignal(), "x")  # type: ignore[arg-type,return-value]
    assert failed.done.wait(10) and isinstance(failed.error, ZeroDivisionError)
    worker.close()


# the code of an answer


@pytest.mark.parametrize("file", ["cart_rainbow.png", CLIP.name])
def test_the_script_repeats_the_answer(demo: Demo, capsys: pytest.CaptureFixture[str], file: str) -> None:
    run = demo.parse({"question": f"what? {NASTY}", "file": file, "max_new_tokens": 12})
    run.work(lambda: demo.store(run))
    code = demo.script(run.id)
    assert str(demo.uploads.folder) not in code and "mmspec.patch(model, drafter='auto', processor=processor)" in code
    exec(compile(code, "run.py", "exec"), {})
    text, said = "".join(token[0] for token in demo.reports[run.id]["lanes"][0]["tokens"]), capsys.readouterr().out
    assert f"mmspec {text}" in said and f"plain generate {text}" in said


def test_every_compressor_that_the_page_offers_is_one() -> None:
    assert [build_compressor(name).name for name in COMPRESSORS[1:]] == ["drop", "pool", "relevant"]
