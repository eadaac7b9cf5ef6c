"""The study of compressors: who decodes what, what a drafter's prefill costs, and the table."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.app import study_visual
from mmspec.app.models import random_model
from mmspec.app.study_visual import SHAPES, asked, ways_of
from mmspec.drafters.checkpoint import Made, fingerprint, save
from mmspec.drafters.head import EagleHead, HeadConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, processor = random_model("tiny")
    config = HeadConfig(64, 128, 4, 2, 384)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head = EagleHead(config)
    place = tmp_path_factory.mktemp("heads") / "mine"
    save(place, head, Made(config, "decoupled", 2, "llava", fingerprint(processor.tokenizer)))
    return place


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
    assert ways_of(["d", "e"], ["pool", "stride"], [2, 16, 0], 64) == [
        "d", "e", "d+pool:32", "d+pool:4", "d+pool:1", "d+stride:32", "d+stride:4", "d+stride:1"
    ]  # fmt: skip
    assert ways_of(["d"], ["pool"], [16, 0], 8) == ["d", "d+pool:1"], "no way twice, and no token fewer than one"


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
    each = 2 * config.num_key_value_heads * config.head_dim * 4 / 1024
    assert pool["kv_kib"] - drop["kv_kib"] == pytest.approx(32 * each)
    assert whole["kv_kib"] - drop["kv_kib"] == pytest.approx(128 * each)
    # Of rows that are not asked only keys and values are made: 2 * D * (2 * kv heads * size) operations each, and
    # visual tokens are not fused with states.
    assert 1e6 * (whole["mflops"] - pool["mflops"]) == pytest.approx(96 * 2 * 64 * 2 * 2 * config.head_dim)
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG") and "mine+pool:32" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--shapes", "five"], ["--shares", "a"], ["--shares", "-1"]])
def test_wrong_words_are_named(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        study_visual.main(["d", *words])
    assert stopped.value.code == 2 and words[1] in capsys.readouterr().err
