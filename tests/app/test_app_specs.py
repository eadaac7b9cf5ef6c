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
from mmspec.app.bench.measure import bootstrap_interval, clone, median_ci
from mmspec.app.bench.specs import (
    BenchSpec,
    FixedDepth,
    check_spec,
    get_block_size,
    get_drafter,
    parse_spec,
    patch_model,
    short_labels,
    weight_sizes,
)
from mmspec.app.errors import UsageError
from mmspec.app.modeling.random_models import random_model


def test_names() -> None:
    told = {
        "msd": BenchSpec("msd"),
        "msd@3": BenchSpec("msd", 3),
        "out/msd@5+pool:49": BenchSpec("out/msd", 5, "pool:49"),
        "out@2/msd+own:4": BenchSpec("out@2/msd", own_tokens=4),
        "a+b/msd": BenchSpec("a+b/msd"),
    }
    assert {name: parse_spec(name) for name in told} == told
    assert short_labels(["a/msd", "b/msd@3", "b/msd+pool:4", "c/flash/"]) == [
        "a/msd",
        "b/msd@3",
        "b/msd+pool:4",
        "flash",
    ]


@pytest.mark.parametrize("name", ["msd@0", "msd@64", "msd+own", "msd+own:0", "", "magic@3", "msd@x", "none+pool"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError):
        check_spec(name)


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
    drafter = get_drafter(patch_model(model, "head@7", processor))
    assert type(drafter.depth_controller) is FixedDepth and drafter.max_lookahead == 7
    for _ in range(30):
        drafter.depth_controller.record(1, 7, [0], 1.0, 1e-6)  # a level costs much and brings nothing
    assert {drafter.depth_controller.choose(1) for _ in range(30)} == {7}


@pytest.mark.parametrize("kind", ["flash", "parallel"])
def test_one_pass_has_no_depth(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, processor = with_head(monkeypatch, kind)
    with pytest.raises(UsageError, match="does not: head@3"):
        patch_model(model, "head@3", processor)
    assert not mmspec.is_patched(model)


def test_how_many_tokens_a_pass_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    assert get_block_size(model) is None and get_block_size(patch_model(clone(model), "fused", processor)) is None
    for kind, more in {"decoupled": False, "falcon": True, "flash": True}.items():
        model, processor = with_head(monkeypatch, kind)
        twin = patch_model(model, "head", processor)
        assert get_block_size(twin) == get_drafter(twin).head.config.block_size and (get_block_size(twin) > 1) is more


def test_weights_of_the_target_are_not_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_head(monkeypatch, "latent")
    assert weight_sizes(model) == {"draft_mib": None, "of_target": None}
    twin = patch_model(clone(model), "head", processor)
    drafter = get_drafter(twin)
    mine = sum(p.nbytes for part in (drafter.head, drafter.compressor) for p in part.parameters())
    drafter.words = model.lm_head  # shared by reference, and so nobody's twice
    told = weight_sizes(twin)
    assert told["draft_mib"] == mine / 2**20
    assert told["of_target"] == pytest.approx(mine / sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert weight_sizes(patch_model(clone(model), "head+pool:4", processor))["draft_mib"] < told["draft_mib"]


def test_own_compressors_keep_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_head(monkeypatch, "latent")
    assert get_drafter(patch_model(model, "head+own:2", processor)).compressor.max_tokens == 2
    mmspec.unpatch(model)
    drafter_of_measured = with_head(monkeypatch, "measured")
    with pytest.raises(UsageError, match="takes no number"):
        patch_model(drafter_of_measured[0], "head+own:2", drafter_of_measured[1])


def test_limits_hold_the_median_and_narrow_with_runs() -> None:
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 30
    assert median_ci([]) == [] and median_ci([2.0]) == [2.0, 2.0]
    assert median_ci(few)[0] < 2 < median_ci(few)[1] and median_ci(many) == [2.0, 2.0]
    assert bootstrap_interval(lambda places: float(len(places)), 5) == (5, 5, 5)


def test_the_commit_is_told_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions.commit.cache_clear()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "versions.py"))
    assert versions.commit() is None
    versions.commit.cache_clear()
