"""Specs of drafters: parsing, fixed depth, budget of the own compressor, size of the weights; intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_heads as heads
import tiny_models as tiny

import mmspec
from mmspec.app import versions
from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import clone
from mmspec.app.modeling.random_models import random_model
from research.bench import drafter_specs as specs
from research.bench.drafter_specs import DrafterSpec, check_spec, parse_spec, patch_model
from research.bench.measure import bootstrap_interval, median_ci
from research.bench.specs import get_block_size, get_drafter, short_labels, weight_sizes


def test_specs_are_parsed() -> None:
    expected = {
        "msd": DrafterSpec("msd"),
        "msd@3": DrafterSpec("msd", 3),
        "out/msd@5+pool:49": DrafterSpec("out/msd", 5, "pool:49"),
        "out@2/msd+own:4": DrafterSpec("out@2/msd", own_tokens=4),
        "a+b/msd": DrafterSpec("a+b/msd"),
    }
    assert {name: parse_spec(name) for name in expected} == expected
    assert short_labels(["a/msd", "b/msd@3", "b/msd+pool:4", "c/flash/"]) == [
        "a/msd",
        "b/msd@3",
        "b/msd+pool:4",
        "flash",
    ]


@pytest.mark.parametrize("name", ["msd@0", "msd@64", "msd+own", "msd+own:0", "", "magic@3", "msd@x", "none+pool"])
def test_wrong_specs_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_spec(name)


def use_head(monkeypatch: pytest.MonkeyPatch, kind: str, only: str | None = None) -> tuple[Any, Any]:
    """The tiny model; any name of a drafter, or the one that is given, resolves to a random head of this kind."""
    model, processor = random_model("tiny")
    text = model.config.get_text_config(decoder=True)
    spec = tiny.ModelSpec("llava", hidden=text.hidden_size, layers=text.num_hidden_layers)
    vocab, resolve = model.get_output_embeddings().weight.shape[0], specs.resolve_drafter

    def resolve_drafter(name: Any, *rest: Any) -> Any:
        is_head = only in (None, name)
        return heads.build_drafter(kind, spec, vocab_size=vocab) if is_head else resolve(name, *rest)

    monkeypatch.setattr(specs, "resolve_drafter", resolve_drafter)
    return model, processor


def test_a_fixed_depth_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = use_head(monkeypatch, "decoupled")
    drafter = get_drafter(patch_model(model, "head@7", processor))
    assert drafter.min_levels == drafter.max_levels == drafter.max_depth == 7


@pytest.mark.parametrize("kind", ["flash", "parallel"])
def test_drafters_of_one_pass_have_no_depth(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, processor = use_head(monkeypatch, kind)
    with pytest.raises(UsageError, match="does not: head@3"):
        patch_model(model, "head@3", processor)
    assert not mmspec.is_patched(model)


def test_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    assert get_block_size(model) is None and get_block_size(patch_model(clone(model), "hybrid", processor)) is None
    for kind, is_block in {"decoupled": False, "falcon": True, "flash": True}.items():
        model, processor = use_head(monkeypatch, kind)
        twin = patch_model(model, "head", processor)
        assert (
            get_block_size(twin) == get_drafter(twin).head.config.block_size and (get_block_size(twin) > 1) is is_block
        )


def test_weights_of_the_target_do_not_count_as_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = use_head(monkeypatch, "latent")
    assert weight_sizes(model) == {"draft_mib": None, "of_target": None}
    twin = patch_model(clone(model), "head", processor)
    drafter = get_drafter(twin)
    num_bytes = sum(p.nbytes for part in (drafter.head, drafter.compressor) for p in part.parameters())
    drafter.lm_head = model.lm_head  # shared by reference, so it does not count
    sizes = weight_sizes(twin)
    assert sizes["draft_mib"] == num_bytes / 2**20
    assert sizes["of_target"] == pytest.approx(num_bytes / sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert weight_sizes(patch_model(clone(model), "head+pool:4", processor))["draft_mib"] < sizes["draft_mib"]


def test_the_budget_of_the_own_compressor_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = use_head(monkeypatch, "latent")
    assert get_drafter(patch_model(model, "head+own:2", processor)).compressor.max_tokens == 2


def test_intervals_contain_the_median_and_narrow_with_runs() -> None:
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 30
    assert median_ci([]) == [] and median_ci([2.0]) == [2.0, 2.0]
    assert median_ci(few)[0] < 2 < median_ci(few)[1] and median_ci(many) == [2.0, 2.0]
    assert bootstrap_interval(lambda indices: float(len(indices)), 5) == (5, 5, 5)


def test_the_commit_is_known_only_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions.commit.cache_clear()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "versions.py"))
    assert versions.commit() is None
    versions.commit.cache_clear()
