"""The study of compressors: who decodes what, what a drafter's prefill costs, and the table."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.app import choices, study_visual
from mmspec.app.models import random_model
from mmspec.app.shapes import SHAPES, asked, fitting
from mmspec.app.study_visual import ways_of
from mmspec.drafters.checkpoint import Made, fingerprint, save
from mmspec.drafters.head import EagleHead, HeadConfig
from mmspec.vision.elastic import Elastic


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine`, and `chosen`, which comes with an elastic compressor."""
    _, processor = random_model("tiny")
    config = HeadConfig(64, 128, 4, 2, 384)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head, elastic = EagleHead(config), Elastic(64, 8)
    place = tmp_path_factory.mktemp("heads")
    with_elastic = {"name": "elastic", "tokens": 8}, elastic.state_dict()
    for name, compressor in (("mine", None), ("chosen", with_elastic)):
        made = Made(config, "decoupled", 2, "llava", fingerprint(processor.tokenizer), compressor=compressor)
        save(place / name, head, made)
    return place


@pytest.fixture(scope="module")
def folder(folders: Path) -> Path:
    return folders / "mine"


def test_what_is_shown() -> None:
    for shape, pictures in SHAPES.items():
        if shape == "clip32":  # takes seconds to draw
            continue
        one, two = islice(asked(shape, 0), 2)
        assert len(one.pictures) == len(two.pictures) == pictures
        again = next(asked(shape, 0))
        assert again.question == one.question and again.pictures[0].tobytes() == one.pictures[0].tobytes()
    four = list(islice(asked("four", 0), 2))
    assert len({picture.tobytes() for one in four for picture in one.pictures}) == 8, "eight different pictures"


def test_the_ways() -> None:
    assert ways_of(["d", "e"], ["pool", "own"], [2, 16, 0], 64) == {
        "d": [], "e": [], "d+pool:32": [2], "d+pool:4": [16], "d+pool:1": [0], "d+own:32": [2], "d+own:4": [16],
        "d+own:1": [0],
    }  # fmt: skip
    assert ways_of(["d"], ["pool"], [16, 0], 8) == {"d": [], "d+pool:1": [16, 0]}, "no way twice, at least one token"


def test_from_the_command_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    files = ["--json", str(tmp_path / "v.json"), "--plot", str(tmp_path / "v.png"), "--no-progress"]
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
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG") and "mine+pool:32" in capsys.readouterr().out


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
    told = choices.against(rows)["e"]
    assert told["best_fixed"] == "d+pool at 1/4" and told["over_best_fixed"][0] == 4 / 3
    assert told["over_best_fixed_forwards"][0] == 28 / 30
    assert told["over_best_each_forwards"][0] == 25 / 30, "9 and, of two with 16, the one that is shown less"
    assert told["over_best_each"][0] == 2.0
    assert choices.names_of(rows[2]) == ["d+pool at 1/16", "d+pool:1"]
    other = [one | {"shape": "two"} for one in rows if one["way"] != "d+pool:4"]
    assert choices.against([*rows, *other])["e"]["best_fixed"] == "d+pool at 1/16", "only what was run on every shape"
    assert choices.against(rows[:3]) == {}


def test_clips_are_as_long_as_the_model_has_positions() -> None:
    model, processor = random_model("tiny")
    text = model.config.get_text_config(decoder=True)
    assert fitting("clip32", model, processor, 128) == "clip32" and fitting("one", model, processor, 9999) == "one"
    length = 46 + 9 * 17  # of ten frames and such a question
    text.max_position_embeddings = length + 8 + 20
    assert fitting("clip32", model, processor, 8) == "clip10" and fitting("clip4", model, processor, 8) == "clip4"
    with pytest.raises(ValueError, match="two frames alone are a prompt of"):
        fitting("clip32", model, processor, length)


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
