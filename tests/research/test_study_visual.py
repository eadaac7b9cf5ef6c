"""The study of compressors: contestants, costs of the drafter's prefill, comparisons and tables."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_drafts import planned

from mmspec.app.modeling.random_models import random_model
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head, tokenizer_fingerprint
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.economy.chooser import Chooser
from mmspec.vision.compressors.elastic import Elastic
from research.bench.drafter_specs import patch_model
from research.studies import chooser_report, visual_report
from research.studies import visual as study_visual
from research.studies.scenarios import SCENARIOS, fit_to_context, generate_scenario
from research.studies.visual import build_rows, build_runs, plan_runs, run_contest
from research.studies.word_classes import AnswerCounts, metric_ratio_interval

pytestmark = pytest.mark.research


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round, whatever drafts of tiny models cost here."""
    monkeypatch.setattr(Chooser, "plan", planned())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, and `adaptive`, which comes with an elastic compressor."""
    _, processor = random_model("tiny")
    config = EagleConfig(64, 128, 4, 2, 384)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head, elastic = EagleHead(config), Elastic(64, 8)
    folder = tmp_path_factory.mktemp("heads")
    with_elastic = {"name": "elastic", "max_tokens": 8}, elastic.state_dict()
    for name, compressor in (("plain", None), ("adaptive", with_elastic)):
        metadata = HeadMetadata(
            config, "decoupled", 2, "llava", tokenizer_fingerprint(processor.tokenizer), compressor=compressor
        )
        save_head(folder / name, head, metadata)
    return folder


@pytest.fixture(scope="module")
def folder(folders: Path) -> Path:
    return folders / "plain"


def test_images_of_a_scenario() -> None:
    for shape, num_images in SCENARIOS.items():
        if shape == "clip32":  # takes seconds to draw
            continue
        one, two = islice(generate_scenario(shape, 0), 2)
        assert len(one.images) == len(two.images) == num_images
        again = next(generate_scenario(shape, 0))
        assert again.question == one.question and again.images[0].tobytes() == one.images[0].tobytes()
    four = list(islice(generate_scenario("four", 0), 2))
    assert len({image.tobytes() for one in four for image in one.images}) == 8, "eight different images"


def test_the_plan_of_runs() -> None:
    assert plan_runs(["d", "e"], ["pool", "own"], [2, 16, 0], 64) == {
        "d": [], "e": [], "d+pool:32": [2], "d+pool:4": [16], "d+pool:1": [0], "d+own:32": [2], "d+own:4": [16],
        "d+own:1": [0],
    }  # fmt: skip
    assert plan_runs(["d"], ["pool"], [16, 0], 8) == {"d": [], "d+pool:1": [16, 0]}, "no spec twice, at least one token"


def test_the_study_from_the_command_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    files = [f"--{kind}={tmp_path / name}" for kind, name in (("json", "v.json"), ("plot", "v.png"))]
    files += [f"--markdown={tmp_path / 'v.md'}", "--no-progress"]
    options = f"{folder} {folder}+drop --model tiny --compressors pool --shares 4 --count 2".split()
    assert study_visual.main([*options, "--shapes", "one,clip8", "--max-new-tokens", "8", *files]) == 0
    rows = json.loads((tmp_path / "v.json").read_text())
    assert [row["spec"] for row in rows] == [
        *("none", "plain", "plain+drop", "plain+pool:4"), *("none", "plain", "plain+drop", "plain+pool:32")
    ]  # fmt: skip
    assert all(row["identical"] and row["requests"] == 2 for row in rows)
    none, whole, drop, pool = rows[4:]
    assert none["tau"] == [1.0, 1.0, 1.0] and "prefill_ms" not in none
    assert [row["num_compressed_tokens"] for row in (whole, drop, pool)] == [None, 0, 32]
    assert whole["num_visual_tokens"] == 8 * 16
    assert whole["prefill_over"] == whole["kv_over"] == 1
    config = EagleConfig(64, 128, 4, 2, 384)
    assert [row["share"] for row in rows[4:]] == [None, 1.0, 0.0, 0.25]
    assert whole["mflops_over"] == 1 and drop["mflops_over"] < pool["mflops_over"] < 1
    assert all(len(row["seconds"]) == len(row["forwards"]) == 2 and row["run"]["torch"] for row in rows)
    each = 2 * config.num_key_value_heads * config.head_dim * 4 / 1024
    assert pool["kv_kib"] - drop["kv_kib"] == pytest.approx(32 * each)
    assert whole["kv_kib"] - drop["kv_kib"] == pytest.approx(128 * each)
    # Positions without a query need only keys and values: 2 * D * (2 * kv heads * size) operations each, and visual
    # tokens are not fused with hidden states.
    assert 1e6 * (whole["mflops"] - pool["mflops"]) == pytest.approx(96 * 2 * 64 * 2 * 2 * config.head_dim)
    assert all(row["base"] == "plain" for row in rows)
    assert whole["speedup_decode_ci"] == whole["speedup_e2e_ci"] == [1, 1]
    assert all(row[f"{name}_ci"][0] <= row[name] <= row[f"{name}_ci"][1] for row in rows for name in SPEEDS)
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG") and "plain+pool:32" in capsys.readouterr().out
    one, clip = (tmp_path / "v.md").read_text().split("\n\n**")
    assert one.startswith("**one: 16 visual tokens, 2 requests; over: ratio to plain**")
    lines = [line[2:-2].split(" | ") for line in clip.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == ["drafter", "---", "none", "plain", "plain+drop", "plain+pool:32"]
    assert {len(line) for line in lines} == {len(visual_report.COMPRESSOR_HEADINGS)} and {
        line[-1] for line in lines[2:]
    } == {"yes"}
    assert [line[1] for line in lines[2:]] == ["-", "128 (100.0%)", "0 (0.0%)", "32 (25.0%)"]
    cells = dict(zip(lines[0], lines[5], strict=True))  # of the columns "over" the last, that of the KV cache
    assert cells["operations over"] == f"{pool['mflops_over']:.3f}" and cells["over"] == f"{pool['kv_over']:.3f}"
    speed = "{:.2f} [{:.2f}, {:.2f}]".format(pool["speedup_decode"], *pool["speedup_decode_ci"])
    assert cells["decode speed over"] == speed and lines[2][6:11] == ["-"] * 5


def test_rows_of_earlier_runs_go_first(folder: Path, tmp_path: Path) -> None:
    options = [str(folder), "--model", "tiny", "--count", "1", "--max-new-tokens", "4", "--no-progress"]
    first, both = tmp_path / "first.json", tmp_path / "both.json"
    assert study_visual.main([*options, "--shapes", "one", "--json", str(first)]) == 0
    more = ["--shapes", "clip2", "--also", str(first), "--json", str(both), "--markdown", str(tmp_path / "v.md")]
    assert study_visual.main([*options, *more]) == 0
    rows = json.loads(both.read_text())
    assert rows[:2] == json.loads(first.read_text()) and [row["shape"] for row in rows] == ["one"] * 2 + ["clip2"] * 2
    assert rows[0]["run"]["command"] != rows[2]["run"]["command"]
    assert [part[:6] for part in (tmp_path / "v.md").read_text().split("**")[1::2]] == ["one: 1", "clip2:"]


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("{", "cannot be read"), ("[1]", "is none")])
def test_a_file_that_the_study_has_not_written_is_refused(
    text: str | None, message: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "v.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as exited:
        study_visual.main(["d", "--also", str(file)])
    assert exited.value.code == 2 and message in capsys.readouterr().err


SPEEDS = ("speedup_decode", "speedup_e2e")


@pytest.fixture
def patched_models(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """{spec: the models that the study patches with it}."""
    models: dict[str, list[Any]] = {}

    def record_model(model: Any, name: str, *args: Any) -> Any:
        models.setdefault(Path(name).name, []).append(patch_model(model, name, *args))
        return models[Path(name).name][-1]

    monkeypatch.setattr(study_visual, "patch_model", record_model)
    return models


def test_counting_operations_repeats_the_compression(folder: Path) -> None:
    model, processor = random_model("tiny")
    runs = build_runs(model, processor, {str(folder): [], f"{folder}+pool:4": []})
    run_contest(runs, processor, "one", 0, 2, 40, lambda done: None)
    whole, pooled = runs[2:]
    num_tokens = [timed.stats.num_compressed_tokens for timed in pooled.contestant.runs if timed.stats]
    assert num_tokens == [4, 4]
    each = 2 * 64 * 2 * 2 * whole.drafter.head.config.head_dim  # type: ignore[union-attr]
    saved = [a.flops - b.flops for a, b in zip(whole.prefill_costs, pooled.prefill_costs, strict=True)]
    assert saved == [12 * each] * 2 and whole.prefill_costs[0].flops > 0
    rows = {row["spec"]: row for row in build_rows(runs, "one", str(folder))}
    assert 1e6 * (rows["plain"]["mflops"] - rows["plain+pool:4"]["mflops"]) == pytest.approx(12 * each), (
        "in the mean over requests"
    )


def test_drafters_of_the_command_line_persist_over_all_shapes(
    folder: Path, patched_models: dict[str, list[Any]]
) -> None:
    options = [str(folder), f"{folder}+drop", "--model", "tiny", "--compressors", "pool", "--shares", "4"]
    options += ["--count", "1", "--max-new-tokens", "6", "--no-progress"]
    assert study_visual.main([*options, "--shapes", "one,clip3,short"]) == 0
    assert {name: len(models) for name, models in patched_models.items()} == {
        "none": 1, "plain": 1, "plain+drop": 1, "plain+pool:4": 2, "plain+pool:12": 1
    }  # fmt: skip


def test_measurements_of_one_shape_are_not_those_of_another(folder: Path) -> None:
    model, processor = random_model("tiny")
    first = build_runs(model, processor, {str(folder): []})
    run_contest(first, processor, "one", 0, 1, 4, lambda done: None)
    again = build_runs(model, processor, {str(folder): []}, previous=first)
    assert [run.contestant.model for run in again] == [run.contestant.model for run in first]
    assert [run.drafter for run in again] == [run.drafter for run in first]
    assert not any(run.contestant.runs or run.answers or run.prefill_costs for run in again)


def test_tau_over_is_relative_to_the_first_drafter(folder: Path) -> None:
    model, processor = random_model("tiny")
    runs = build_runs(model, processor, {str(folder): [], f"{folder}+drop": []})
    run_contest(runs, processor, "one", 0, 2, 4, lambda done: None)
    runs[2].answers, runs[3].answers = (
        [AnswerCounts(20, 10)] * 2,
        [AnswerCounts(20, 4, {"names": 6}, {"names": 3})] * 2,
    )
    drop = list(build_rows(runs, "one", str(folder)))[-1] | {"num_visual_tokens": 16}
    assert (drop["tau"], drop["tau_over"], drop["names_tau"]) == ((5,) * 3, (2.5,) * 3, (2,) * 3)
    table = visual_report.format_compressor_tables([drop])
    assert "| 5.00 [5.00, 5.00] | 2.50 [2.50, 2.50] | 50% | 2.00 [2.00, 2.00] |" in table
    assert "tau 5.00 [5.00, 5.00], x2.50 [2.50, 2.50]  names 0.50, tau 2.00" in visual_report.format_compressor_row(
        drop
    )


def test_tau_over_is_of_all_tokens_by_all_forwards_of_the_same_requests() -> None:
    base = [AnswerCounts(10 * n, 5) for n in range(1, 9)]
    answers = [AnswerCounts(10 * n, 2) for n in range(1, 9)]
    assert metric_ratio_interval(answers, "tau", base) == pytest.approx((2.5, 2.5, 2.5)), "request paired with request"
    answers[0] = AnswerCounts(10, 26)  # eight requests, 40 forwards each: a mean of ratios would differ
    value, low, high = metric_ratio_interval(answers, "tau", base)
    assert value == pytest.approx(1.0) and low < 1 < high
    nothing = [AnswerCounts(0, 0)] * 3
    assert metric_ratio_interval(nothing, "tau", nothing) == (1, 1, 1), "answers of one token"


def test_adaptive_compressors_are_compared_with_fixed_ones(folders: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [*(str(folders / spec) for spec in ("plain", "adaptive", "adaptive+own:2")), "--compressors", "pool"]
    arguments += ["--model", "tiny", "--shares", "4", "--count", "2", "--shapes", "one,clip3", "--max-new-tokens", "6"]
    assert study_visual.main([*arguments, "--nodes", "8", "--json", str(tmp_path / "v.json"), "--no-progress"]) == 0
    rows = {(row["shape"], row["spec"]): row for row in json.loads((tmp_path / "v.json").read_text())}
    assert (
        rows["clip3", "adaptive"]["family"] == "elastic"
        and rows["clip3", "adaptive+own:2"]["num_compressed_tokens"] <= 2
    )
    comparison = rows["one", "adaptive"]["against"]["adaptive"]
    assert comparison == rows["clip3", "adaptive"]["against"]["adaptive"] and "against" not in rows["one", "plain"]
    assert comparison["requests"] == 4 and comparison["best_fixed"] in ("plain", "plain+pool at 1/4")
    assert comparison["over_best_each_forwards"][0] <= 1 and "adaptive+own:2: over" in capsys.readouterr().out


def build_row(spec: str, family: str, seconds: list[float], forwards: list[int], **values: Any) -> dict[str, Any]:
    """A row of the study, with the keys that the comparison reads."""
    row = {"shape": "one", "shares": [], "num_compressed_tokens": 4, "num_visual_tokens": 16, "prefill_ms": 1.0}
    return row | {"spec": spec, "family": family, "seconds": seconds, "forwards": forwards} | values


def test_the_best_fixed_compressor_and_the_best_one_for_each_request() -> None:
    rows = [
        build_row("d", "identity", [4.0, 4.0], [10, 20], num_compressed_tokens=None),
        build_row("d+pool:4", "pool", [2.0, 2.0], [12, 16], shares=[4]),
        build_row("d+pool:1", "pool", [3.0, 3.0], [9, 16], shares=[16, 0], num_compressed_tokens=1),
        build_row("e", "elastic", [1.0, 2.0], [10, 20]),
        build_row("none", "identity", [0.1, 0.1], [1, 1]) | {"prefill_ms": None},
    ]
    del rows[-1]["prefill_ms"]
    comparison = chooser_report.compare_adaptive(rows)["e"]
    assert comparison["best_fixed"] == "d+pool at 1/4" and comparison["over_best_fixed"][0] == 4 / 3
    assert comparison["over_best_fixed_forwards"][0] == 28 / 30
    assert comparison["over_best_each_forwards"][0] == 25 / 30, (
        "9 and, of two with 16, the one with fewer visual tokens"
    )
    assert comparison["over_best_each"][0] == 2.0 and comparison["over_optimistic_bound"][0] == 4 / 3
    assert chooser_report.run_names(rows[2]) == ["d+pool at 1/16", "d+pool:1"]
    other = [one | {"shape": "two"} for one in rows if one["spec"] != "d+pool:4"]
    assert chooser_report.compare_adaptive([*rows, *other])["e"]["best_fixed"] == "d+pool at 1/16", (
        "only what was run on every shape"
    )
    assert chooser_report.compare_adaptive(rows[:3]) == {}


def test_long_answers_do_not_outweigh_short_ones() -> None:
    rows = [
        build_row("d", "identity", [0.4, 0.4], [5, 5]),
        build_row("d+pool:1", "pool", [0.2, 0.6], [5, 5], shares=[0]),
        build_row("e", "elastic", [0.2, 0.2], [5, 5]),
        build_row("d", "identity", [30.0, 50.0], [5, 5], shape="clip"),
        build_row("d+pool:1", "pool", [50.0, 50.0], [5, 5], shares=[0], shape="clip"),
        build_row("e", "elastic", [50.0, 50.0], [5, 5], shape="clip"),
        build_row("d+drop", "drop", [0.2, 0.2], [5, 5]),
        build_row("d+drop", "drop", [100.0, 100.0], [5, 5], shape="clip"),
    ]
    comparison = chooser_report.compare_adaptive(rows)["e"]
    assert comparison["best_fixed"] == "d" and comparison["over_best_fixed"][0] == pytest.approx(80.8 / 100.4)
    assert comparison["best_fixed_by_shape"] == "d", "0.4 * 40 is less than 0.4 * 50"
    value, low, high = comparison["over_best_fixed_by_shape"]
    assert value == pytest.approx((2 * 0.8) ** 0.5) and low == pytest.approx(1.2**0.5)
    assert high == pytest.approx(2**0.5), "a resample has the same requests of each shape"
    assert comparison["over_optimistic_bound"][0] == pytest.approx(80.4 / 100.4), "the minimum of each request"
    rows[0]["seconds"] = [0.6, 0.6]
    comparison = chooser_report.compare_adaptive(rows)["e"]
    assert comparison["best_fixed"] == "d" and comparison["best_fixed_by_shape"] != "d", (
        "it is the best by the seconds of clips alone"
    )
    text = chooser_report.format_comparison("e", comparison)
    assert "the best fixed compressor in the mean over shapes: seconds x" in text
    assert "an optimistic bound: seconds x" in text


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
    ("arguments", "message"),
    [
        (["plain+drop", "--compressors", "pool"], "--compressors apply to the first drafter"),
        (["plain+own:4"], "comes with no compressor"),
        (["hybrid"], "must be a trained one"),
    ],
)
def test_drafters_that_cannot_be_compared_are_refused(
    folders: Path, arguments: list[str], message: str, capsys: Any
) -> None:
    first = arguments[0] if arguments[0] == "hybrid" else str(folders / arguments[0])
    with pytest.raises(SystemExit) as exited:
        study_visual.main([first, *arguments[1:], "--model", "tiny", "--shapes", "one", "--no-progress"])
    assert exited.value.code == 2 and message in capsys.readouterr().err
