"""Contenders by name: what is asked for, what is fixed, and what a drafter weighs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_heads as heads
import tiny_models as tiny

import mmspec
from mmspec.app import versions
from mmspec.app.bench import specs as contenders
from mmspec.app.bench.measure import bootstrap, clone, limits
from mmspec.app.bench.specs import Contender, Fixed, block_of, check, drafter_of, labels, parse, patched, weight_of
from mmspec.app.errors import UsageError
from mmspec.app.modeling.random_models import random_model


def test_names() -> None:
    told = {
        "msd": Contender("msd"),
        "msd@3": Contender("msd", 3),
        "out/msd@5+pool:49": Contender("out/msd", 5, "pool:49"),
        "out@2/msd+own:4": Contender("out@2/msd", keep=4),
        "a+b/msd": Contender("a+b/msd"),
    }
    assert {name: parse(name) for name in told} == told
    assert labels(["a/msd", "b/msd@3", "b/msd+pool:4", "c/flash/"]) == ["a/msd", "b/msd@3", "b/msd+pool:4", "flash"]


@pytest.mark.parametrize("name", ["msd@0", "msd@64", "msd+own", "msd+own:0", "", "magic@3", "msd@x", "none+pool"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError):
        check(name)


def with_head(monkeypatch: pytest.MonkeyPatch, kind: str) -> tuple[Any, Any]:
    """The tiny model, whose drafter by any name is a random head of some kind."""
    model, processor = random_model("tiny")
    text = model.config.get_text_config(decoder=True)
    spec = tiny.ModelSpec("llava", hidden=text.hidden_size, layers=text.num_hidden_layers)
    vocab = model.get_output_embeddings().weight.shape[0]
    made = heads.build_drafter(kind, spec, vocab_size=vocab)
    monkeypatch.setattr(contenders, "resolve_drafter", lambda name, family, tokenizer: made)
    return model, processor


def test_a_depth_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_head(monkeypatch, "decoupled")
    drafter = drafter_of(patched(model, "head@7", processor))
    assert type(drafter.depth_controller) is Fixed and drafter.max_lookahead == 7
    for _ in range(30):
        drafter.depth_controller.learn(1, 7, [0], 1.0, 1e-6)  # a level costs much and brings nothing
    assert {drafter.depth_controller.choose(1) for _ in range(30)} == {7}


@pytest.mark.parametrize("kind", ["flash", "parallel"])
def test_one_pass_has_no_depth(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, processor = with_head(monkeypatch, kind)
    with pytest.raises(UsageError, match="does not: head@3"):
        patched(model, "head@3", processor)
    assert not mmspec.is_patched(model)


def test_how_many_tokens_a_pass_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    assert block_of(model) is None and block_of(patched(clone(model), "fused", processor)) is None
    for kind, more in {"decoupled": False, "falcon": True, "flash": True}.items():
        model, processor = with_head(monkeypatch, kind)
        twin = patched(model, "head", processor)
        assert block_of(twin) == drafter_of(twin).head.config.block and (block_of(twin) > 1) is more


def test_weights_of_the_target_are_not_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_head(monkeypatch, "latent")
    assert weight_of(model) == {"draft_mib": None, "of_target": None}
    twin = patched(clone(model), "head", processor)
    drafter = drafter_of(twin)
    mine = sum(p.nbytes for part in (drafter.head, drafter.compressor) for p in part.parameters())
    drafter.words = model.lm_head  # shared by reference, and so nobody's twice
    told = weight_of(twin)
    assert told["draft_mib"] == mine / 2**20
    assert told["of_target"] == pytest.approx(mine / sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert weight_of(patched(clone(model), "head+pool:4", processor))["draft_mib"] < told["draft_mib"]


def test_own_compressors_keep_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_head(monkeypatch, "latent")
    assert drafter_of(patched(model, "head+own:2", processor)).compressor.tokens == 2
    mmspec.unpatch(model)
    drafter_of_measured = with_head(monkeypatch, "measured")
    with pytest.raises(UsageError, match="takes no number"):
        patched(drafter_of_measured[0], "head+own:2", drafter_of_measured[1])


def test_limits_hold_the_median_and_narrow_with_runs() -> None:
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 30
    assert limits([]) == [] and limits([2.0]) == [2.0, 2.0]
    assert limits(few)[0] < 2 < limits(few)[1] and limits(many) == [2.0, 2.0]
    assert bootstrap(lambda places: float(len(places)), 5) == (5, 5, 5)


def test_the_commit_is_told_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions.commit.cache_clear()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "versions.py"))
    assert versions.commit() is None
    versions.commit.cache_clear()
