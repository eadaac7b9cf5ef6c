"""The study of guessed words: what belongs to which class, and how answers are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.app import study
from mmspec.app.scenes.data import corpus
from mmspec.app.scenes.model import train_tokenizer
from mmspec.app.study import CLASSES, Answer, answer_of, class_of, classes_of, interval


def test_classes() -> None:
    kinds = {"dog": "names", "Dogs": "names", "upper": "places", "striped": "looks", "Large": "looks", "the": "other"}
    assert {word: class_of(word) for word in kinds} == kinds


def test_a_word_of_several_tokens_is_one_word() -> None:
    tokenizer = train_tokenizer(corpus(200))
    ids = tokenizer(" In the upper left waits a small flamingo, smaller.", add_special_tokens=False).input_ids
    found = dict(zip(map(tokenizer.decode, ids), classes_of(tokenizer, ids), strict=True))
    assert found[" upper"] == found[" left"] == "places" and found[" small"] == found[" smaller"] == "looks"
    assert found[" the"] == found[","] == found["."] == "other"
    name = [kind for token, kind in found.items() if len(token.strip()) > 1 and token.strip() in "flamingo"]
    assert name and set(name) == {"names"}


def test_what_counts_as_guessed() -> None:
    tokenizer = train_tokenizer(corpus(200))
    ids = tokenizer(" In the left a dog waits", add_special_tokens=False).input_ids
    kinds = classes_of(tokenizer, ids)
    assert [tokenizer.decode(i) for i in ids][:4] == [" In", " the", " left", " a"] and len(ids) >= 6
    made = answer_of([ids[:1], ids[1:4], [], ids[4:], [2]], tokenizer, [2])
    assert (made.tokens, made.forwards) == (len(ids), 3)
    assert made.total["places"] == made.guessed["places"] == 1, "in the middle of a round"
    assert made.total["other"] == kinds[1:].count("other") and made.guessed["other"] <= made.total["other"]
    assert sum(made.total.values()) == len(ids) - 1, "neither the prompt's token nor the end"


def test_intervals_hold_the_value() -> None:
    answers = [Answer(10 + n % 3, 5, {"names": 4}, {"names": n % 5}) for n in range(40)]
    for name in (None, "names"):
        value, low, high = interval(answers, name)
        assert low < value < high
    assert interval(answers, None)[0] == pytest.approx(sum(10 + n % 3 for n in range(40)) / 200)


def test_the_study_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    files = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    assert (
        study.main(["none", "fused", "--model", "tiny", "--count", "2", "--task", "answer", "--no-progress", *files])
        == 0
    )
    rows = json.loads((tmp_path / "s.json").read_text())
    assert [row["drafter"] for row in rows] == ["none", "fused"] and rows[0]["tau"] == [1.0, 1.0, 1.0]
    assert set(CLASSES) <= set(rows[0]) and rows[0]["tokens"] == rows[1]["tokens"], "the same text"
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG") and "tau 1.000" in capsys.readouterr().out
