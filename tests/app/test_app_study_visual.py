"""The study of compressors: who decodes what, what a drafter's prefill costs, and the table."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.app.bench.specs import get_drafter, patch_model
from mmspec.app.modeling.random_models import random_model
from mmspec.app.studies import chooser_report as choices
from mmspec.app.studies import prefill as study_prefill
from mmspec.app.studies import visual as study_visual
from mmspec.app.studies import visual_report
from mmspec.app.studies.scenarios import SCENARIOS, fit_to_context, generate_scenario
from mmspec.app.studies.visual import build_rows, build_runs, plan_runs, run_contest
from mmspec.app.studies.word_classes import AnswerCounts, metric_ratio_interval
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head, tokenizer_fingerprint
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.vision.compressors.elastic import Elastic


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine`, and `chosen`, which comes with an elastic compressor."""
    _, processor = random_model("tiny")
    config = HeadConfig(64, 128, 4, 2, 384)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head, elastic = EagleHead(config), Elastic(64, 8)
    place = tmp_path_factory.mktemp("heads")
    with_elastic = {"name": "elastic", "max_tokens": 8}, elastic.state_dict()
    for name, compressor in (("mine", None), ("chosen", with_elastic)):
        made = HeadMetadata(
            config, "decoupled", 2, "llava", tokenizer_fingerprint(processor.tokenizer), compressor=compressor
        )
        save_head(place / name, head, made)
    return place


@pytest.fixture(scope="module")
def folder(folders: Path) -> Path:
    return folders / "mine"


def test_what_is_shown() -> None:
    for shape, pictures in SCENARIOS.items():
        if shape == "clip32":  # takes seconds to draw
            continue
        one, two = islice(generate_scenario(shape, 0), 2)
        assert len(one.images) == len(two.images) == pictures
        again = next(generate_scenario(shape, 0))
        assert again.question == one.question and again.images[0].tobytes() == one.images[0].tobytes()
    four = list(islice(generate_scenario("four", 0), 2))
    assert len({picture.tobytes() for one in four for picture in one.images}) == 8, "eight different pictures"


def test_the_ways() -> None:
    assert plan_runs(["d", "e"], ["pool", "own"], [2, 16, 0], 64) == {
        "d": [], "e": [], "d+pool:32": [2], "d+pool:4": [16], "d+pool:1": [0], "d+own:32": [2], "d+own:4": [16],
        "d+own:1": [0],
    }  # fmt: skip
    assert plan_runs(["d"], ["pool"], [16, 0], 8) == {"d": [], "d+pool:1": [16, 0]}, "no way twice, at least one token"


def test_from_the_command_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    files = [f"--{kind}={tmp_path / name}" for kind, name in (("json", "v.json"), ("plot", "v.png"))]
    files += [f"--markdown={tmp_path / 'v.md'}", "--no-progress"]
    given = [str(folder), f"{folder}+drop", "--model", "tiny", "--compressors", "pool", "--shares", "4", "--count", "2"]
    assert study_visual.main([*given, "--shapes", "one,clip8", "--max-new-tokens", "8", *files]) == 0
    rows = json.loads((tmp_path / "v.json").read_text())
    assert [row["way"] for row in rows] == [
        *("none", "mine", "mine+drop", "mine+pool:4"), *("none", "mine", "mine+drop", "mine+pool:32")
    ]  # fmt: skip
    assert all(row["identical"] and row["requests"] == 2 for row in rows)
    none, whole, drop, pool = rows[4:]
    assert none["tau"] == [1.0, 1.0, 1.0] and "prefill_ms" not in none
    assert (whole["kept"], drop["kept"], pool["kept"], whole["visual"]) == (None, 0, 32, 8 * 16)
    assert whole["prefill_over"] == whole["kv_over"] == 1
    config = HeadConfig(64, 128, 4, 2, 384)
    assert [row["share"] for row in rows[4:]] == [None, 1.0, 0.0, 0.25]
    assert whole["mflops_over"] == 1 and drop["mflops_over"] < pool["mflops_over"] < 1
    assert all(len(row["seconds"]) == len(row["forwards"]) == 2 and row["run"]["torch"] for row in rows)
    each = 2 * config.num_key_value_heads * config.head_dim * 4 / 1024
    assert pool["kv_kib"] - drop["kv_kib"] == pytest.approx(32 * each)
    assert whole["kv_kib"] - drop["kv_kib"] == pytest.approx(128 * each)
    # Of rows that are not asked only keys and values are made: 2 * D * (2 * kv heads * size) operations each, and
    # visual tokens are not fused with states.
    assert 1e6 * (whole["mflops"] - pool["mflops"]) == pytest.approx(96 * 2 * 64 * 2 * 2 * config.head_dim)
    assert all(row["base"] == "mine" for row in rows)
    assert whole["speedup_decode_ci"] == whole["speedup_e2e_ci"] == [1, 1]
    assert all(row[f"{name}_ci"][0] <= row[name] <= row[f"{name}_ci"][1] for row in rows for name in SPEEDS)
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG") and "mine+pool:32" in capsys.readouterr().out
    one, clip = (tmp_path / "v.md").read_text().split("\n\n**")
    assert one.startswith("**one: 16 visual tokens, 2 requests; over: in multiples of what mine has**")
    lines = [line[2:-2].split(" | ") for line in clip.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == ["way", "---", "none", "mine", "mine+drop", "mine+pool:32"]
    assert {len(line) for line in lines} == {len(visual_report.HEADINGS)} and {line[-1] for line in lines[2:]} == {
        "yes"
    }
    assert [line[1] for line in lines[2:]] == ["-", "128 (100.0%)", "0 (0.0%)", "32 (25.0%)"]
    told = dict(zip(lines[0], lines[5], strict=True))  # of columns of one name the last, the caches
    assert told["operations over"] == f"{pool['mflops_over']:.3f}" and told["over"] == f"{pool['kv_over']:.3f}"
    speed = "{:.2f} [{:.2f}, {:.2f}]".format(pool["speedup_decode"], *pool["speedup_decode_ci"])
    assert told["decode speed over"] == speed and lines[2][6:11] == ["-"] * 5


def test_rows_of_earlier_runs_go_first(folder: Path, tmp_path: Path) -> None:
    given = [str(folder), "--model", "tiny", "--count", "1", "--max-new-tokens", "4", "--no-progress"]
    first, both = tmp_path / "first.json", tmp_path / "both.json"
    assert study_visual.main([*given, "--shapes", "one", "--json", str(first)]) == 0
    more = ["--shapes", "clip2", "--also", str(first), "--json", str(both), "--markdown", str(tmp_path / "v.md")]
    assert study_visual.main([*given, *more]) == 0
    rows = json.loads(both.read_text())
    assert rows[:2] == json.loads(first.read_text()) and [row["shape"] for row in rows] == ["one"] * 2 + ["clip2"] * 2
    assert rows[0]["run"]["command"] != rows[2]["run"]["command"]
    assert [part[:6] for part in (tmp_path / "v.md").read_text().split("**")[1::2]] == ["one: 1", "clip2:"]


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ("{", "cannot be read"), ("[1]", "is none")])
def test_files_that_are_not_of_the_study(text: str | None, words: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "v.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        study_visual.main(["d", "--also", str(file)])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


SPEEDS = ("speedup_decode", "speedup_e2e")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """{way: the models that were patched for it}."""
    found: dict[str, list[Any]] = {}

    def noted(model: Any, name: str, *given: Any) -> Any:
        found.setdefault(Path(name).name, []).append(patch_model(model, name, *given))
        return found[Path(name).name][-1]

    monkeypatch.setattr(study_visual, "patch_model", noted)
    return found


def test_operations_are_of_the_way_that_was_used_and_are_not_learned_from(
    folder: Path, made: dict[str, list[Any]]
) -> None:
    model, processor = random_model("tiny")
    field_ = build_runs(model, processor, {str(folder): [], f"{folder}+cost-based": []})
    run_contest(field_, processor, "one", 0, 2, 40, lambda done: None)
    whole, chose = field_[2:]
    kept = [run.stats.num_compressed_tokens for run in chose.contestant.runs if run.stats]
    assert kept == [16, 4], "all, then fewer, to see what that costs"
    each = 2 * 64 * 2 * 2 * whole.drafter.head.config.head_dim  # type: ignore[union-attr]
    saved = [a.flops - b.flops for a, b in zip(whole.prefill_costs, chose.prefill_costs, strict=True)]
    assert saved == [0, 12 * each] and whole.prefill_costs[0].flops > 0
    assert get_drafter(made["mine+cost-based"][0]).cost_model.by_batch[1].num_prompts == 3, (
        "the calls, and nothing else"
    )
    told = {row["way"]: row for row in build_rows(field_, "one", str(folder))}
    mine, others = told["mine+cost-based"], told["mine"]
    assert 1e6 * (others["mflops"] - mine["mflops"]) == pytest.approx(6 * each), "in the mean over requests"


def test_who_is_named_lives_through_all_shapes(folder: Path, made: dict[str, list[Any]]) -> None:
    given = [str(folder), f"{folder}+cost-based", "--model", "tiny", "--compressors", "pool", "--shares", "4"]
    given += ["--count", "1", "--max-new-tokens", "6", "--no-progress"]
    assert study_visual.main([*given, "--shapes", "one,clip3,short"]) == 0
    assert {name: len(models) for name, models in made.items()} == {
        "none": 1, "mine": 1, "mine+cost-based": 1, "mine+pool:4": 2, "mine+pool:12": 1
    }  # fmt: skip
    assert get_drafter(made["mine+cost-based"][0]).cost_model.by_batch[1].num_prompts == 6


def test_figures_of_one_shape_are_not_those_of_another(folder: Path) -> None:
    model, processor = random_model("tiny")
    first = build_runs(model, processor, {str(folder): []})
    run_contest(first, processor, "one", 0, 1, 4, lambda done: None)
    again = build_runs(model, processor, {str(folder): []}, before=first)
    assert [way.contestant.model for way in again] == [way.contestant.model for way in first]
    assert [way.drafter for way in again] == [way.drafter for way in first]
    assert not any(way.contestant.runs or way.answers or way.prefill_costs for way in again)


def test_tau_is_told_over_that_of_the_first_drafter(folder: Path) -> None:
    model, processor = random_model("tiny")
    field_ = build_runs(model, processor, {str(folder): [], f"{folder}+drop": []})
    run_contest(field_, processor, "one", 0, 2, 4, lambda done: None)
    field_[2].answers, field_[3].answers = (
        [AnswerCounts(20, 10)] * 2,
        [AnswerCounts(20, 4, {"names": 6}, {"names": 3})] * 2,
    )
    drop = list(build_rows(field_, "one", str(folder)))[-1] | {"visual": 16}
    assert (drop["tau"], drop["tau_over"], drop["names_tau"]) == ((5,) * 3, (2.5,) * 3, (2,) * 3)
    table = visual_report.markdown([drop])
    assert "| 5.00 [5.00, 5.00] | 2.50 [2.50, 2.50] | 50% | 2.00 [2.00, 2.00] |" in table
    assert "tau 5.00 [5.00, 5.00], x2.50 [2.50, 2.50]  names 0.50, tau 2.00" in visual_report.format_row(drop)


def test_tau_over_is_of_all_tokens_by_all_forwards_of_the_same_requests() -> None:
    base = [AnswerCounts(10 * n, 5) for n in range(1, 9)]
    mine = [AnswerCounts(10 * n, 2) for n in range(1, 9)]
    assert metric_ratio_interval(mine, "tau", base) == pytest.approx((2.5, 2.5, 2.5)), "request paired with request"
    mine[0] = AnswerCounts(10, 26)  # eight requests, 40 forwards each: a mean of ratios would differ
    value, low, high = metric_ratio_interval(mine, "tau", base)
    assert value == pytest.approx(1.0) and low < 1 < high
    nothing = [AnswerCounts(0, 0)] * 3
    assert metric_ratio_interval(nothing, "tau", nothing) == (1, 1, 1), "answers of one token"


def test_ways_that_choose_are_told_against_fixed_ones(folders: Path, tmp_path: Path, capsys: Any) -> None:
    given = [str(folders / "mine"), str(folders / "chosen"), f"{folders / 'chosen'}+own:2", "--compressors", "pool"]
    given += ["--model", "tiny", "--shares", "4", "--count", "2", "--shapes", "one,clip3", "--max-new-tokens", "6"]
    assert study_visual.main([*given, "--nodes", "8", "--json", str(tmp_path / "v.json"), "--no-progress"]) == 0
    rows = {(row["shape"], row["way"]): row for row in json.loads((tmp_path / "v.json").read_text())}
    assert rows["clip3", "chosen"]["family"] == "elastic" and rows["clip3", "chosen+own:2"]["kept"] <= 2
    told = rows["one", "chosen"]["against"]["chosen"]
    assert told == rows["clip3", "chosen"]["against"]["chosen"] and "against" not in rows["one", "mine"]
    assert told["requests"] == 4 and told["best_fixed"] in ("mine", "mine+pool at 1/4")
    assert told["over_best_each_forwards"][0] <= 1 and "chosen+own:2: over" in capsys.readouterr().out


def row(way: str, family: str, seconds: list[float], forwards: list[int], **more: Any) -> dict[str, Any]:
    figures = {"shape": "one", "shares": [], "kept": 4, "visual": 16, "prefill_ms": 1.0}
    return figures | {"way": way, "family": family, "seconds": seconds, "forwards": forwards} | more


def test_the_best_fixed_way_and_the_best_way_for_each_request() -> None:
    rows = [
        row("d", "identity", [4.0, 4.0], [10, 20], kept=None),
        row("d+pool:4", "pool", [2.0, 2.0], [12, 16], shares=[4]),
        row("d+pool:1", "pool", [3.0, 3.0], [9, 16], shares=[16, 0], kept=1),
        row("e", "elastic", [1.0, 2.0], [10, 20]),
        row("none", "identity", [0.1, 0.1], [1, 1]) | {"prefill_ms": None},
    ]
    del rows[-1]["prefill_ms"]
    told = choices.compare_adaptive(rows)["e"]
    assert told["best_fixed"] == "d+pool at 1/4" and told["over_best_fixed"][0] == 4 / 3
    assert told["over_best_fixed_forwards"][0] == 28 / 30
    assert told["over_best_each_forwards"][0] == 25 / 30, "9 and, of two with 16, the one that is shown less"
    assert told["over_best_each"][0] == 2.0 and told["over_optimistic_bound"][0] == 4 / 3
    assert choices.run_names(rows[2]) == ["d+pool at 1/16", "d+pool:1"]
    other = [one | {"shape": "two"} for one in rows if one["way"] != "d+pool:4"]
    assert choices.compare_adaptive([*rows, *other])["e"]["best_fixed"] == "d+pool at 1/16", (
        "only what was run on every shape"
    )
    assert choices.compare_adaptive(rows[:3]) == {}


def test_long_answers_do_not_outweigh_short_ones() -> None:
    rows = [
        row("d", "identity", [0.4, 0.4], [5, 5]),
        row("d+pool:1", "pool", [0.2, 0.6], [5, 5], shares=[0]),
        row("e", "elastic", [0.2, 0.2], [5, 5]),
        row("d", "identity", [30.0, 50.0], [5, 5], shape="clip"),
        row("d+pool:1", "pool", [50.0, 50.0], [5, 5], shares=[0], shape="clip"),
        row("e", "elastic", [50.0, 50.0], [5, 5], shape="clip"),
        row("d+drop", "drop", [0.2, 0.2], [5, 5]),
        row("d+drop", "drop", [100.0, 100.0], [5, 5], shape="clip"),
    ]
    told = choices.compare_adaptive(rows)["e"]
    assert told["best_fixed"] == "d" and told["over_best_fixed"][0] == pytest.approx(80.8 / 100.4)
    assert told["best_fixed_by_shape"] == "d", "0.4 * 40 is less than 0.4 * 50"
    value, low, high = told["over_best_fixed_by_shape"]
    assert value == pytest.approx((2 * 0.8) ** 0.5) and low == pytest.approx(1.2**0.5)
    assert high == pytest.approx(2**0.5), "each shape keeps its requests when they are drawn anew"
    assert told["over_optimistic_bound"][0] == pytest.approx(80.4 / 100.4), "of each request the least"
    rows[0]["seconds"] = [0.6, 0.6]
    told = choices.compare_adaptive(rows)["e"]
    assert told["best_fixed"] == "d" and told["best_fixed_by_shape"] != "d", "seconds of clips alone made it the best"
    said = choices.format_comparison("e", told)
    assert "the best fixed way in the mean over shapes: seconds x" in said and "an optimistic bound: seconds x" in said


def test_clips_are_as_long_as_the_model_has_positions() -> None:
    model, processor = random_model("tiny")
    text = model.config.get_text_config(decoder=True)
    assert (
        fit_to_context("clip32", model, processor, 128) == "clip32"
        and fit_to_context("one", model, processor, 9999) == "one"
    )
    length = 46 + 9 * 17  # of ten frames and such a question
    text.max_position_embeddings = length + 8 + 20
    assert (
        fit_to_context("clip32", model, processor, 8) == "clip10"
        and fit_to_context("clip4", model, processor, 8) == "clip4"
    )
    with pytest.raises(ValueError, match="two frames alone are a prompt of"):
        fit_to_context("clip32", model, processor, length)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["mine+drop", "--compressors", "pool"], "--compressors go with the first drafter"),
        (["mine+own:4"], "comes with no compressor"),
        (["fused"], "a trained one"),
    ],
)
def test_what_cannot_be_compared_is_refused(folders: Path, given: list[str], words: str, capsys: Any) -> None:
    first = given[0] if given[0] == "fused" else str(folders / given[0])
    with pytest.raises(SystemExit) as stopped:
        study_visual.main([first, *given[1:], "--model", "tiny", "--shapes", "one", "--no-progress"])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--shapes", "five"], ["--shapes", "clip1"], ["--shares", "a"], ["--shares", "-1"]])
def test_wrong_words_are_named(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        study_visual.main(["d", *words])
    assert stopped.value.code == 2 and words[1] in capsys.readouterr().err


# --- reading alone ----------------------------------------------------------------------------------------------------

SMALL = ["--hidden=32", "--heads=4", "--kv-heads=2", "--ffn=48", "--grid=4", "--text=8", "--repeats=2"]


def test_what_reading_a_prompt_costs_a_head_of_any_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    out = tmp_path / "prefill.json"
    assert study_prefill.main([*SMALL, "--frames", "1,4", "--compressors", "pool:4,drop", "--json", str(out)]) == 0
    assert torch.equal(torch.get_rng_state(), before) and len(capsys.readouterr().out.splitlines()) == 6
    rows = {(row["frames"], row["way"]): row for row in json.loads(out.read_text())}
    assert {row["visual"] for row in rows.values()} == {16, 64}
    for frames, shown in ((1, 16), (4, 64)):
        whole, few, none = (rows[frames, way] for way in ("-", "pool:4", "drop"))
        assert whole["prefill_over"][0] == whole["kv_over"] == whole["flops_over"] == 1
        assert few["kv_over"] == (8 + 4) / (8 + shown) and none["kv_over"] == 8 / (8 + shown)
        assert 0 < none["flops_over"] < few["flops_over"] < 1 and few["run"]["command"].endswith(str(out))
        # Keys and values of two heads of eight numbers, four bytes each.
        assert whole["kv_mib"] * 2**20 == (8 + shown) * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--compressors", "squeeze:3"], "unknown compressor 'squeeze:3'"),
        (["--frames", "1,0"], "must be a whole number above 0, got '0'"),
        (["--heads", "3"], "--hidden must be a multiple of --heads"),
        (["--device", "abacus"], "abacus"),
        (["--json", "/nowhere/a.json"], "/nowhere"),
    ],
)
def test_reading_that_cannot_be_measured(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        study_prefill.main([*SMALL, *flags])
    assert left.value.code == 2 and told in capsys.readouterr().err
