"""LiLiCorr: scores of pairs beside those written out, exact calls with trees, training, folders that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from draft_rounds import read_text, run_call
from fake_target import (
    HEAD_CONFIG,
    LAYERS,
    NUM_LAYERS,
    FakeTarget,
    check_training,
)
from pair_losses import scores_beside_drafts
from parity import assert_parity, get_model
from published_heads import check_refused, write_head
from published_layouts import LAYOUTS, H, V
from slow_blocks import SlowLilicorr

from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.heads.lilicorr.head import LilicorrConfig, LilicorrDrafter, LilicorrHead, lilicorr_loss
from mmspec.interfaces import TargetInfo
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

NAMES = [name for name in LAYOUTS if name.startswith("LiLiCorr")]
LAYOUT = LAYOUTS[NAMES[1]]
TARGET = TargetInfo("qwen3_vl", H, V, 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PairExpander]:
    """The expanders of the drafts."""
    found, make = list[PairExpander](), PairExpander.__init__
    monkeypatch.setattr(PairExpander, "__init__", lambda self, *args: (make(self, *args), found.append(self))[0])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_scores_along_the_path_of_its_own_code(name: str, made: list[PairExpander], tmp_path: Path) -> None:
    """In every round, with those of the first position; ids that must not be drafted are no candidates."""
    layout = LAYOUTS[name]
    model, folder = get_model(layout.family, layers=8), write_head(tmp_path, layout)
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    call = run_call(model, folder, inputs, num_tokens=12, in_c=False)
    reader = SlowLilicorr(folder, read_text(model, inputs, call), **layout.options["reader"])
    for expander, drafted in zip(made, call.rows[0], strict=True):
        allowed = expander.state.logit_bias.isfinite()
        tokens, _ = reader.chain(drafted.num_known, len(drafted.tokens), allowed)
        assert tokens == drafted.tokens and 0 < int((~allowed).sum()) < 0.25 * V
        hidden = expander.root_hidden
        for level, (token, scores) in enumerate(zip(tokens, reader.path_scores, strict=False)):
            logits = expander.logits(level, hidden)[0, 0]
            assert torch.allclose(logits, scores, atol=1e-4)
            hidden = expander.expand(level + 1, expander.embed(torch.tensor([[token]])), hidden)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3}])
@pytest.mark.parametrize("name", NAMES)
def test_trees_are_exact_and_begin_with_the_best(
    name: str, options: dict[str, Any], made: list[PairExpander], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded batches."""
    model = get_model(LAYOUTS[name].family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, LAYOUTS[name])), find_adapter(model))
    assert type(drafter) is LilicorrDrafter
    drafter.top_k, draft_tree = 3, drafter.draft_tree

    def spy(state: Any, max_nodes: int, num_levels: int) -> Any:
        tree = draft_tree(state, max_nodes, num_levels)
        scores = made[-1].logits(0, made[-1].root_hidden)[:, 0]
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            firsts = {token for token, parent in zip(tokens[1:], parents[1:], strict=True) if parent == 0}
            best = made[-1].candidates[row, 0, scores[row].topk(len(firsts)).indices]
            assert state.noise is not None or firsts == set(best.tolist())
        return tree

    monkeypatch.setattr(drafter, "draft_tree", spy)
    inputs = tiny.build_inputs(model, 3, 2, images=[1, 0])
    stats = assert_parity(model, inputs, drafter, max_new_tokens=12, eos_token_id=None, **options)
    assert stats.num_draft_tokens > 10


def test_fewer_tokens_than_it_was_trained_for(tmp_path: Path) -> None:
    """The first slots of those that it has."""
    model = get_model(LAYOUT.family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, LAYOUT)), find_adapter(model))
    drafter.block_size = drafter.tokens_per_level = drafter.max_depth = 2
    assert_parity(model, tiny.build_inputs(model, 3, 2), drafter, max_new_tokens=8, eos_token_id=None, do_sample=False)


@pytest.mark.parametrize(
    ("nested", "tensors", "message"),
    [
        ({"lilicorr_num_heads": 5}, {}, "lilicorr_hidden_size must be a multiple of lilicorr_num_heads; got 32 and 5"),
        ({"lilicorr_candidate_topk": 3}, {}, r"rank_embedding must be \[1, 1, 1, 3, 32\] for this config; got"),
        (
            {"lilicorr_factor_dim": 0},
            {},
            "lilicorr_factor_dim of a LiLiCorr head must be an integer of at least 1; got",
        ),
        ({"lilicorr_logit_scale": None}, {}, "lilicorr_logit_scale .* must be a finite number above 0; got None"),
        ({"lilicorr_vector_eps": float("nan")}, {}, "lilicorr_vector_eps .* must be a finite number above 0; got nan"),
        ({"lilicorr_mlp_ratio": "2"}, {}, "lilicorr_mlp_ratio .* must be a finite number above 0; got '2'"),
        ({"lilicorr_num_layers": 3}, {}, r"a LiLiCorr head lacks lilicorr\.layers\.2\.attn\.in_proj_bias"),
        ({"lilicorr_num_layers": 1}, {}, r"unexpected tensors lilicorr\.layers\.1\.attn\.in_proj_bias"),
        ({"lilicorr_enabled": False}, {}, r"lilicorr_enabled is false, but the weights hold the tensors lilicorr\.\*"),
        ({"projector_type": "dflash2"}, {}, "projector_type 'dflash2' is not supported .* lilicorr is"),
        ({"selector_rank": 6}, {}, r"^.*dflash_config\.selector_rank 6 is not supported in such a draft head"),
        ({"conv_kernel_size": 3}, {}, r"base_kernel must be \[2, 3, 32\] for this config; got \[2, 2, 32\]"),
        ({"conv_group_size": 5}, {}, "conv_group_size must divide hidden_size 32; got 5"),
        ({"conv_group_size": None}, {}, "must be integers of at least 1, or both missing; got 2 and 0"),
        (
            {"conv_group_size": None, "conv_kernel_size": None},
            {},
            r"unexpected tensors layers\.0\.attention_conv\.base_kernel, layers\.0\.attention_conv\.kernel_projection",
        ),
        ({}, {"layers.1.mlp_conv.base_kernel": None}, r"a LiLiCorr head lacks layers\.1\.mlp_conv\.base_kernel"),
        ({}, {"lilicorr.same_slot_bias": (3,)}, r"lilicorr\.same_slot_bias must be \[2\] for this config; got \[3\]"),
        ({}, {"lilicorr.gate": (3,)}, r"unexpected tensors lilicorr\.gate"),
        ({}, {"candidate_selector.gate": (3,)}, r"unexpected tensors candidate_selector\.gate"),
        ({}, {"lilicorr.layers.1.mlp.0.bias": (48,)}, r"hold lilicorr\.layers\.1\.mlp\.up_proj\.bias twice, as lilic"),
        ({}, {"lilicorr.feature_mlp.0.bias": (5,)}, r"hold lilicorr\.feature_norm\.bias twice, as lilicorr\.feature_"),
    ],
)
def test_what_does_not_fit(nested: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, LAYOUT, TARGET, nested, tensors, message)


# --- training ---------------------------------------------------------------------------------------------------------


def new_head() -> LilicorrHead:
    config = LilicorrConfig.of(
        HEAD_CONFIG, block_size=3, sample_from_anchor=False, hidden_state_layers=LAYERS, candidate_topk=20,
        lattice_size=12, factor_dim=6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return LilicorrHead(config).eval()


@torch.no_grad()
def test_the_loss_is_of_the_scores_of_drafting(target: FakeTarget) -> None:
    """At each anchor those of a draft there, behind the text's own tokens; 0 behind a token that is no candidate."""
    drafter, checked = LilicorrDrafter(new_head(), num_layers=NUM_LAYERS, top_k=3), 0
    for slot, (candidates, scores), (ids, drafted) in scores_beside_drafts(
        target, "lilicorr", drafter, lilicorr_loss, False
    ):
        if drafted is None:
            assert not scores.any()
            continue
        assert candidates.tolist() == ids.tolist() and torch.allclose(drafted, scores, atol=1e-3)
        checked += slot > 0
    assert checked > 5


def test_training_lowers_the_loss_and_teaches_the_lattice(target: FakeTarget) -> None:
    check_training(target, "lilicorr", new_head(), lilicorr_loss)
