"""The studies of token classes and of block drafters: word classes, counts of answers, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.ui.rounds import Round
from research.bench.drafter_specs import patch_model
from research.scenes.build_model import train_tokenizer
from research.scenes.data import generate_corpus
from research.studies import blocks as study_blocks
from research.studies import copies, draft_heads, first_answers, prefill, visual
from research.studies import token_classes as study
from research.studies.visual import read_earlier_rows
from research.studies.word_classes import (
    CLASSES,
    AnswerCounts,
    classify_word,
    count_answer,
    metric_interval,
    word_class_per_token,
)

pytestmark = pytest.mark.research


def test_classes() -> None:
    kinds = {"dog": "names", "Dogs": "names", "upper": "positions", "striped": "attributes", "waits": "other"}
    kinds |= {"Large": "attributes", "the": "function", "A": "function", "In": "function"}
    kinds |= dict.fromkeys(("STAR", "DOG", "RED", "LEFT", "NO"), "other")  # words of signs
    assert {word: classify_word(word) for word in kinds} == kinds


def test_a_word_of_several_tokens_is_one_word() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    ids = tokenizer(" In the upper left waits a small flamingo, smaller.", add_special_tokens=False).input_ids
    found = dict(zip(map(tokenizer.decode, ids), word_class_per_token(tokenizer, ids), strict=True))
    assert found[" upper"] == found[" left"] == "positions"
    assert found[" small"] == found[" smaller"] == "attributes"
    assert found[" the"] == "function" and found[","] == found["."] == "other"
    name = [kind for token, kind in found.items() if len(token.strip()) > 1 and token.strip() in "flamingo"]
    assert name and set(name) == {"names"}


def build_round(emitted: list[int], has_draft: bool = True) -> Round:
    """A round whose draft is a chain with one rejected token at its end, or a round without a draft."""
    tokens = (0, *emitted[:-1], -1)[: len(emitted) + has_draft]
    return Round(0, tokens, tuple(range(-1, len(tokens) - 1)), None, tuple(range(len(emitted))), tuple(emitted))


def test_what_counts_as_accepted() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    ids = tokenizer(" In the left a dog waits", add_special_tokens=False).input_ids
    kinds = word_class_per_token(tokenizer, ids)
    assert [tokenizer.decode(i) for i in ids][:4] == [" In", " the", " left", " a"] and len(ids) >= 6
    rounds = [build_round(ids[:1], has_draft=False), build_round(ids[1:4]), build_round([])]
    rounds += [build_round(ids[4:], has_draft=False), build_round([2])]
    counts = count_answer(rounds, tokenizer, [2])
    assert (counts.tokens, counts.forwards) == (len(ids), 3)
    assert counts.total["positions"] == counts.accepted["positions"] == 1, "in the middle of a round"
    assert counts.total["other"] == kinds[1:].count("other") and counts.accepted["other"] <= counts.total["other"]
    assert sum(counts.total.values()) == len(ids) - 1, "neither the prompt's token nor the end"
    assert sum(counts.accepted.values()) == 2 + len(ids) - 5
    assert dict(counts.corrected)["function"] == sum(counts.corrected.values()) == 1, "no draft for the last token"


def test_intervals_hold_the_value() -> None:
    answers = [AnswerCounts(10 + n % 3, 5, {"names": 4}, {"names": n % 5}) for n in range(40)]
    for name in ("tau", "names", "names_tau"):
        value, low, high = metric_interval(answers, name)
        assert low < value < high
    assert metric_interval(answers, "tau")[0] == pytest.approx(sum(10 + n % 3 for n in range(40)) / 200)
    assert metric_interval(answers, "names")[0] == 80 / 160 and metric_interval(answers, "names_tau")[0] == 160 / 80


def test_the_acceptance_rate_counts_only_tokens_with_a_draft() -> None:
    answers = [AnswerCounts(9, 5, {"names": 8}, {"names": 3}, {"names": 1})] * 4
    assert (
        metric_interval(answers, "names") == (3 / 8,) * 3 and metric_interval(answers, "names_accepted") == (3 / 4,) * 3
    )


def test_differences_are_of_the_same_requests() -> None:
    first = [AnswerCounts(10, 5, {"names": 10}, {"names": n % 10}) for n in range(40)]
    other = [AnswerCounts(10, 5, {"names": 10}, {"names": n % 10 + 1}) for n in range(40)]
    value, low, high = metric_interval(other, "names", first)
    assert value == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    assert metric_interval(first, "names", first) == (0, 0, 0)


def test_the_study_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    names = {"json": "s.json", "plot": "s.png", "markdown": "s.md"}
    files = [f"--{kind}={tmp_path / name}" for kind, name in names.items()]
    sampling = ["--temperature", "0.9", "--seed", "3"]
    options = ["none", "hybrid", "--model", "tiny", "--count", "2", "--task", "answer", "--against", "none", *sampling]
    assert study.main([*options, "--no-progress", *files]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())
    assert [row["drafter"] for row in rows] == ["none", "hybrid"] and rows[0]["tau"] == [1.0, 1.0, 1.0]
    assert set(CLASSES) <= set(rows[0]) and rows[0]["tokens"] == rows[1]["tokens"], "the same text"
    none, fused = rows
    assert none["tau_over"] == [0, 0, 0] and fused["tau_over"][0] == pytest.approx(fused["tau"][0] - 1)
    assert (none["temperature"], none["seed"], none["draft_mib"]) == (0.9, 3, 0) and none["tokens_min"] > 0
    assert fused["draft_ms"] > 0 and fused["run"]["command"].startswith(
        "python -m research.studies.token_classes none hybrid"
    )
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG") and "tau 1.000" in capsys.readouterr().out
    tables = (tmp_path / "s.md").read_text()
    assert tables.count("| hybrid |") == 6 and "| over none | tau | names |" in tables


def test_a_drafter_learns_from_request_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[str] = []

    def record_spec(model: Any, spec: str, *args: Any) -> Any:
        specs.append(spec)
        return patch_model(model, spec, *args)

    monkeypatch.setattr(study, "patch_model", record_spec)
    options = ["--model", "tiny", "--count", "3", "--task", "answer", "--no-progress"]
    assert study.main(["recycling", "none", *options]) == 0
    assert specs == ["recycling", "none"], "each drafter is built once"


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (study.main, ["none", "--count", "1", "--against", "hybrid"], "--against is one of the drafters"),
        (study.main, ["magic@3", "--count", "1"], "unknown drafter 'magic'"),
        (study.main, ["hybrid@3", "--count", "1", "--model", "tiny"], "which 'hybrid' does not"),
        (draft_heads.main, ["hybrid", "--count", "2", "--batch-sizes", "8"], "--count 2 does not fill a batch of 8"),
        (
            draft_heads.main,
            ["hybrid", "--nodes", "8,8,8"],
            "--nodes takes one size, or one for each of 2 --batch-sizes; got 3",
        ),
        (draft_heads.main, ["nobody"], "nobody"),
        (visual.main, ["d", "--shapes", "five"], "five"),
        (visual.main, ["d", "--shapes", "clip1"], "clip1"),
        (visual.main, ["d", "--shares", "a"], "a"),
        (visual.main, ["d", "--shares", "-1"], "-1"),
        (prefill.main, ["--compressors", "squeeze:3"], "unknown compressor 'squeeze:3'"),
        (prefill.main, ["--frames", "1,0"], "must be a whole number above 0, got '0'"),
        (prefill.main, ["--heads", "3"], "--hidden must be a multiple of --heads"),
        (prefill.main, ["--device", "abacus"], "abacus"),
        (prefill.main, ["--json", "/nowhere/a.json"], "/nowhere"),
        (copies.main, [], "--target"),
        (copies.main, ["--target", "scenes", "--shape", "smollm2-135m"], "--shape"),
        pytest.param(
            *(first_answers.main, ["unknown", "--prompts", "1", "--answers", "1"], "unknown drafter 'unknown'"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_usage_of_a_study_is_one_line(main: Any, arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2 and message in capsys.readouterr().err


def bench_row(drafter: str, block: int | None, **other: Any) -> dict[str, Any]:
    """A row of `research.bench --json`, with the keys that the study of blocks reads."""
    row = {"drafter": drafter, "batch": 1, "temperature": 0.0, "nodes": 16, "block": block, "tau": 4.0}
    row |= {"draft_ms": 10.0, "score_ms": 20.0, "R": 2.5, "speedup_own": 1.6, "speedup_hf": 2.0, "identical": True}
    return row | {"speedup_hf_ci": [1.9, 2.2], "accepted_at_position": [0.8, 0.61]} | other


def test_the_study_of_blocks(tmp_path: Path, capsys: Any) -> None:
    one = [bench_row("hf", None, draft_ms=None), bench_row("none", None, draft_ms=0.0)]
    one += [bench_row("msd@3", 1), bench_row("msd@5", 1), bench_row("msd", 1)]
    one += [bench_row("out/k2/flash", 2, draft_ms=4.0, tau=3.0), bench_row("out/k5/flash", 5, identical=False)]
    eight = [row | {"batch": 8, "nodes": None, "temperature": 1.0} for row in one]
    files = [tmp_path / "one.json", tmp_path / "eight.json"]
    for file, rows in zip(files, (one, eight), strict=True):
        file.write_text(json.dumps(rows))
    tables_file, plot_file = tmp_path / "b.md", tmp_path / "b.png"
    assert study_blocks.main([*map(str, files), "--markdown", str(tables_file), "--plot", str(plot_file)]) == 0
    tables = tables_file.read_text()
    assert tables == capsys.readouterr().out and plot_file.read_bytes().startswith(b"\x89PNG")
    assert "**batch 1, greedy, trees of 16 nodes**" in tables
    assert "**batch 8, temperature 1, tree size chosen by the controller**" in tables and "| hf |" not in tables
    line = "| k2/flash | 3.00 | 0.75 | 80 61 | 4.0 | 0.40 | 20.0 | 2.50 | 1.60 | 2.00 [1.90, 2.20] | 1.00 | yes |"
    assert tables.count(line) == 2 and tables.count("| NO |") == 2
    groups = study_blocks.group_by_setting(study_blocks.read_bench_rows(files[0]))
    sizes = {row["name"]: (row["kind"], row["size"]) for row in groups[study_blocks.BenchSetting(1, 0.0, 16)]}
    assert sizes == {
        "none": ("none", None),
        "msd@3": ("msd", 3),
        "msd@5": ("msd", 5),
        "msd": ("msd", None),
        "k2/flash": ("flash", 2),
        "k5/flash": ("flash", 5),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no 'rows'"),
        ('[{"drafter": "msd"}]', "no 'batch'"),
        ("{}", "not of `research.bench"),
        ("oh", "Expecting"),
        (None, "No such"),
    ],
)
def test_a_file_that_bench_has_not_written_is_refused(
    tmp_path: Path, capsys: Any, text: str | None, message: str
) -> None:
    file = tmp_path / "rows.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as exited:
        study_blocks.main([str(file)])
    assert exited.value.code == 2 and message in capsys.readouterr().err


def test_rows_of_earlier_compressor_studies_are_read(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    row = {"shape": "one", "spec": "msd+pool:4", "num_compressed_tokens": 4, "num_visual_tokens": 16, "scene_seed": 3}
    file.write_text(json.dumps([row]))
    assert read_earlier_rows(str(file)) == [row]
