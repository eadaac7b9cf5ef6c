"""`research.bench`: the right rows, measured on both sides in the same way."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_drafts import only_fixed, planned
from test_drafter_specs import use_head

import mmspec
from mmspec.app.errors import UsageError
from mmspec.app.io.decode import ReadableRows
from mmspec.app.io.item import SourceOptions
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.economy.chooser import Chooser
from mmspec.metrics.stats import Stats
from mmspec.vision.video.decoder_pool import DecoderPool
from research.arguments import positive_ints
from research.bench import command as bench
from research.bench.command import main
from research.bench.forced_tree import ForcedTree, add_forced_tree, format_not_used, is_probe_needed
from research.bench.measure import (
    Contestant,
    TimedRun,
    build_contestants,
    build_result_rows,
    count_tokens,
    disable_eos,
    run_once,
)
from research.bench.requests import build_requests, build_scene_requests, named_images, synthetic_images
from research.scenes import tasks

pytestmark = pytest.mark.research

KEYS = """drafter batch tau R tokens_per_s speedup_hf speedup_own speedup_e2e identical score_ms draft_ms overhead_ms
ttft_ms speedup_hf_ci speedup_e2e_pooled accepted_at_position tokens_min draft_mib of_target block"""


def test_bench_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    args = ["--model", "tiny", "--drafters", "none,lookup", "--batch-sizes", "1,2", "--new-tokens", "6"]
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main([*args, *files, "--repeats", "2", "--prompt-tokens", "50"]) == 0
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(row["drafter"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("hf", "hf-again", "none", "lookup")
    ]
    for row in rows:
        assert set(KEYS.split()) <= set(row)
        assert row["identical"] and row["tokens_per_s"] > 0 and row["ttft_ms"] > 0
        low, high = row["speedup_hf_ci"]
        assert row["speedup_hf_lo"] <= low <= row["speedup_hf"] <= high <= row["speedup_hf_hi"]
        assert row["tokens_min"] == 6 and row["nodes"] is None and "commit" in row["run"]
        assert row["prompt_tokens"] >= 50 and row["run"]["command"].startswith("python -m research.bench --model tiny")
    assert rows[0]["speedup_hf"] == 1.0 and rows[0]["score_ms"] is None and rows[2]["score_ms"] > 0
    assert rows[2]["R"] == 1.0 and rows[2]["tau"] == 1.0
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("ties")]
    assert len(table) == 9 and len(set(map(len, table))) == 1
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_sampled_bench_is_identical(capsys: Any) -> None:
    args = ["--drafters", "lookup", "--new-tokens", "6", "--repeats", "1", "--temperature", "0.9"]
    assert main(["--model", "tiny", *args]) == 0
    assert " NO " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafters", "magic"], "unknown drafter 'magic'"),
        (["--drafters", "msd@0"], "a depth is 1 to 63"),
        (["--drafters", "hybrid@3"], "which 'hybrid' does not"),
        (["--nodes", "65"], "--nodes is 1 to 64"),
        (["--new-tokens", "1"], "2 or more"),
        (["--json", "/no/such/folder/x.json"], "cannot write"),
        (["--images", "nowhere"], "no such file or folder"),
        (["--task", "short", "--prompt", "Hello"], "leave out --prompt"),
        (["--task", "short", "--images", "x.png"], "leave out --images"),
        (["--task", "short", "--count", "3", "--batch-sizes", "1,4"], "does not fill a batch of 4"),
        (["--scene-seed", "7"], "go with --task"),
        (["--peers", "magic"], "unknown peer 'magic'; known are hf, hf-static"),
        (["--peers", "hf-static"], "--suite {mmspec,scenes,text}"),
        (["--suite", "mmspec"], "--suite mmspec and --data FOLDER go together"),
        (["--suite", "mmspec", "--data", "/no/such"], "a suite folder holds mmspec.jsonl"),
        (["--suite", "text", "--categories", "chart"], "no item is of the category 'chart'; known are summarise"),
        (["--suite", "scenes", "--temperature", "1"], "decode greedily"),
    ],
)
def test_wrong_usage_is_refused_early(args: list[str], message: str, capsys: Any) -> None:
    assert main(["--model", "tiny", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_matplotlib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["--model", "tiny", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_clones_share_weights_and_nothing_else(tiny: Captioner) -> None:
    twin = disable_eos(clone(tiny.model))
    assert all(a is b for a, b in zip(tiny.model.parameters(), twin.parameters(), strict=True))
    mmspec.patch(twin, "none")
    assert mmspec.is_patched(twin) and not mmspec.is_patched(tiny.model)
    assert tiny.model.generation_config.eos_token_id == 2


def test_rows_never_end_early(tiny: Captioner) -> None:
    inputs = build_requests(tiny, synthetic_images(3, 0), "a", 3, 0, 1, 0)[0]
    model = clone(tiny.model)
    ended = model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1]
    model.generation_config.eos_token_id = ended.tolist()
    plain = run_once(Contestant("hf", disable_eos(model)), inputs, 9, 0.0, 0)
    speculative = run_once(Contestant("none", mmspec.patch(disable_eos(clone(model)), "none")), inputs, 9, 0.0, 0)
    assert plain.output_ids.shape == (3, 9) and torch.equal(plain.output_ids, speculative.output_ids)
    assert speculative.stats is not None and speculative.stats.rounds == 8
    assert 0 < plain.ttft_s < plain.total_s and plain.ttft_s + plain.decode_s <= plain.total_s


@pytest.mark.parametrize("wanted", [0, 40, 100, 333])
def test_prompts_have_the_wanted_length_and_differ(tiny: Captioner, wanted: int) -> None:
    requests = build_requests(tiny, synthetic_images(6, 0), "describe the image", 2, wanted, 3, 0)
    length = requests[0]["attention_mask"].sum(1)[0].item()
    assert wanted <= length < max(wanted, 36) + 8
    prompts = {tuple(row.tolist()) for request in requests for row in request["input_ids"]}
    images = {row.sum().item() for request in requests for row in request["pixel_values"]}
    assert len(images) == 6 and (len(prompts) == 6 or wanted <= 40)


def test_ratios_are_those_of_paired_runs() -> None:
    def runs(seconds: list[float], stats: bool) -> list[TimedRun]:
        counts = {"rounds": 4, "tokens": 5, "first_tokens": 1, "row_rounds": 4}
        return [
            TimedRun(s + 1, 1.0, s, torch.zeros(1, 5), 5, Stats(decode_s=s, **counts) if stats else None)
            for s in seconds
        ]

    contestants = [
        Contestant("hf", None, runs([1.0, 2.0, 4.0], False)),
        Contestant("hf-again", None, runs([1.0, 1.0, 1.0], False)),
        Contestant("none", None, runs([1.0, 2.0, 4.0], True)),
        Contestant("x", None, runs([0.5, 4.0, 1.0], True)),
    ]
    rows = {row["drafter"]: row for row in build_result_rows(contestants)}
    assert rows["x"]["speedup_hf_runs"] == [2.0, 0.375, 2.5]  # to the mean of hf and hf-again in the round
    assert rows["x"]["speedup_hf"] == 2.0 and (rows["x"]["speedup_hf_lo"], rows["x"]["speedup_hf_hi"]) == (0.375, 2.5)
    assert rows["x"]["R"] == 0.5 and rows["none"]["R"] == 1.0 and rows["x"]["tau"] == 1.0
    assert rows["hf-again"]["speedup_hf"] == 2.0 and rows["hf-again"]["R"] is None
    assert rows["x"]["speedup_e2e_pooled"] == pytest.approx((2 + 2.5 + 3.5) / (1.5 + 5 + 2), abs=1e-5)


def test_acceptance_per_position_is_of_all_rounds() -> None:
    stats = Stats(rounds=10, decode_s=1.0, tokens=19, first_tokens=1, row_rounds=10)
    stats.accept_length_hist.update({1: 5, 2: 2, 3: 3})
    runs = [TimedRun(1.0, 0.1, 0.9, torch.zeros(1, 5), 5, stats if is_ours else None, 5) for is_ours in (False, True)]
    rows = list(build_result_rows([Contestant("hf", None, runs[:1]), Contestant("none", None, runs[1:])]))
    assert rows[1]["acceptance_by_depth"] == [0.5, 0.6] and rows[1]["accepted_at_position"] == [0.5, 0.3]
    assert "  50 30  " in bench.format_table([dict.fromkeys(bench.COLUMNS) | {"drafter": "x"} | rows[1]])


def test_trees_of_one_size_and_none_stays_plain(tiny: Captioner) -> None:
    inputs = build_requests(tiny, synthetic_images(1, 0), "a", 1, 0, 1, 0)[0]
    contestants = {one.name: one for one in build_contestants(tiny.model, ["recycling"], tiny.processor, nodes=4)}
    nodes = {
        name: run_once(contestants[name], inputs, 8, 0.0, 0).stats.tree_size_hist for name in ("none", "recycling")
    }
    assert set(nodes["none"]) == {1} and set(nodes["recycling"]) == {4}


def test_pictures_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with DecoderPool() as decoders, pytest.raises(UsageError, match="not an image"):
        named_images(ReadableRows([str(tmp_path)], SourceOptions(), decoders, "--images"), 2)


def test_number_lists() -> None:
    assert positive_ints("1, 8") == [1, 8]
    for text in ("", "1,,2", "x", "0"):
        with pytest.raises(argparse.ArgumentTypeError):
            positive_ints(text)


# --- what the controller declined -------------------------------------------------------------------------------------


def test_a_drafter_that_was_left_out_is_named_with_its_tau(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The controller never drafts; the forced tree measures what that drafter would accept."""
    use_head(monkeypatch, "decoupled", only="recycling")  # a random one, which drafts in every round
    monkeypatch.setattr(Chooser, "plan", planned(only_fixed))
    file = tmp_path / "b.json"
    args = ["--model", "tiny", "--drafters", "recycling", "--new-tokens", "24", "--repeats", "2", "--json", str(file)]
    assert main([*args]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("ties")]
    row = json.loads(file.read_text())[-1]
    assert (row["drafter"], row["tau"], row["drafted_share"], row["not_used"]) == ("recycling", 1.0, 0.0, True)
    forced = row["forced_tree"]
    assert forced["tree_size"] == 16 and forced["drafted_share"] > 0.5 and forced["speedup_own"] > 0
    assert len(lines) == 6 and lines[-1].startswith("recycling (batch 1, prompt ")
    assert "not used: drafting did not pay here (0% of rounds drafted, estimated " in lines[-1]
    assert f"tau {forced['tau']:.2f} with trees of 16 nodes" in lines[-1]


def test_a_fixed_tree_is_used_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_head(monkeypatch, "decoupled", only="recycling")  # a random one, which drafts in every round
    file = tmp_path / "b.json"
    args = ["--model", "tiny", "--drafters", "recycling", "--new-tokens", "24", "--repeats", "1", "--nodes", "4"]
    assert main([*args, "--json", str(file)]) == 0
    rows = {row["drafter"]: row for row in json.loads(file.read_text())}
    assert rows["recycling"]["drafted_share"] > 0.8 and rows["none"]["drafted_share"] == 0
    assert rows["hf"]["drafted_share"] is None and not any(row["not_used"] for row in rows.values())
    assert "not used" not in capsys.readouterr().out


def test_a_drafter_without_drafts_is_not_declined() -> None:
    """A lookup that finds no match drafts in few rounds of its own accord."""
    row: dict[str, Any] = {"drafter": "lookup", "drafted_share": 0.3}
    assert is_probe_needed(row)
    add_forced_tree(row, ForcedTree(16, 1.3, 1.1, 0.31))
    assert row["not_used"] is False and format_not_used(row) == ""
    add_forced_tree(row, ForcedTree(16, 2.42, 0.82, 0.9))
    assert format_not_used(row) == (
        "not used: drafting did not pay here (30% of rounds drafted, estimated loss 18%); tau 2.42 with trees of 16 "
        "nodes in every round"
    )


def test_requests_use_the_given_seeds() -> None:
    model, processor = random_model("tiny")
    captioner = Captioner(model, processor)
    results = build_scene_requests(captioner, "describe", FIRST_HELD_OUT_SEED, 2, 2)
    drawn = list(islice(tasks.generate_requests("describe", FIRST_HELD_OUT_SEED), 6))
    assert [inputs["input_ids"].shape[0] for inputs in results] == [2, 2, 2]
    expected = captioner.build_inputs([one.images for one in drawn[:2]], [one.question for one in drawn[:2]])
    assert all((results[1][name] == value).all() for name, value in expected.items())


def test_bench_with_a_task(tmp_path: Path, capsys: Any) -> None:
    args = ["--task", "answer", "--count", "5", "--batch-sizes", "2", "--drafters", "lookup", "--new-tokens", "9"]
    assert main(["--model", "tiny", *args, "--json", str(tmp_path / "b.json")]) == 0
    for row in json.loads((tmp_path / "b.json").read_text()):
        assert (row["task"], row["scene_seed"], row["repeats"]) == ("answer", FIRST_HELD_OUT_SEED, 2)
        assert row["identical"] and row["tokens"] <= 2 * 2 * 9
    assert " NO " not in capsys.readouterr().out


def test_tokens_up_to_the_end() -> None:
    import torch

    ids = torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]])
    assert count_tokens(ids, 2) == count_tokens(ids, [2, 3]) == 3 + 5 + 1 and count_tokens(ids, None) == 15


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("--contexts 64", "--shape"),
        ("--tau 2", "--shape"),
        ("--categories chart", "--suite or --peers"),
        ("--shape tiny --report out", "--suite or --peers"),
        ("--peer-python a", "--peers, --suite or --shape"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(command: str, others: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    option = [word for word in command.split() if word.startswith("--")][-1]
    assert f"{option} goes with {others}" in capsys.readouterr().err
    for fine in ("--shape tiny --tau 2 --peer-python a", "--suite scenes --report out"):
        bench.build_parser().parse_args(fine.split())


def test_the_tasks_are_those_of_the_world() -> None:
    assert bench.TASKS == tasks.REQUEST_TASKS
