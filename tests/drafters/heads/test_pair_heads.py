"""Blocks whose tokens are chosen in pairs (DFlash 2, LiLiCorr): their scores beside those written out, exact calls with
trees, training; folders of these and of Domino that do not fit. Domino's drafts: `test_published_layouts`,
`test_c_draft`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from draft_rounds import read_text, run_call
from fake_target import HEAD_CONFIG, LAYERS, NUM_LAYERS, FakeTarget, check_training
from pair_losses import scores_beside_drafts
from parity import assert_parity, get_model
from published_heads import check_refused, write_head
from published_layouts import LAYOUTS, H, V
from slow_blocks import SlowLilicorr
from torch import Tensor

from mmspec.drafters.checkpoints.export import refusal
from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.heads.dflash2.head import Dflash2Config, Dflash2Drafter, Dflash2Head, dflash2_loss
from mmspec.drafters.heads.lilicorr.head import LilicorrConfig, LilicorrDrafter, LilicorrHead, lilicorr_loss
from mmspec.interfaces import TargetInfo
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

DFLASH2 = "DFlash 2, NeMo Automodel"
LILICORRS = [name for name in LAYOUTS if name.startswith("LiLiCorr")]
TARGET = TargetInfo("qwen3_vl", H, V, 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PairExpander]:
    """The expanders of the drafts."""
    found, make = list[PairExpander](), PairExpander.__init__
    monkeypatch.setattr(PairExpander, "__init__", lambda self, *args: (make(self, *args), found.append(self))[0])
    return found


@pytest.mark.parametrize("name", LILICORRS)
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
@pytest.mark.parametrize("name", [DFLASH2, *LILICORRS])
def test_trees_are_exact_and_begin_with_the_best(
    name: str, options: dict[str, Any], made: list[PairExpander], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded batches."""
    model = get_model(LAYOUTS[name].family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, LAYOUTS[name])), find_adapter(model))
    assert type(drafter) is (Dflash2Drafter if name == DFLASH2 else LilicorrDrafter)
    drafter.top_k, draft_tree, num_checked = 3, drafter.draft_tree, 0

    def spy(state: Any, max_nodes: int, num_levels: int) -> Any:
        nonlocal num_checked
        tree = draft_tree(state, max_nodes, num_levels)
        scores = made[-1].logits(0, made[-1].root_hidden)[:, 0]
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            if state.noise is None and bool(tree.node_mask[row, 1:].any()):
                firsts = {token for token, parent in zip(tokens[1:], parents[1:], strict=True) if parent == 0}
                best = made[-1].candidates[row, 0, scores[row].topk(len(firsts)).indices]
                assert firsts and firsts == set(best.tolist())
                num_checked += 1
        return tree

    monkeypatch.setattr(drafter, "draft_tree", spy)
    inputs = tiny.build_inputs(model, 3, 2, images=[1, 0])
    stats = assert_parity(model, inputs, drafter, max_new_tokens=12, eos_token_id=None, **options)
    assert stats.num_draft_tokens > 10 and (options["do_sample"] or num_checked > 3)


def test_fewer_tokens_than_it_was_trained_for(tmp_path: Path) -> None:
    """The first slots of those that it has."""
    layout = LAYOUTS[LILICORRS[1]]
    model = get_model(layout.family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, layout)), find_adapter(model))
    drafter.block_size = drafter.tokens_per_level = drafter.max_depth = 2
    assert_parity(model, tiny.build_inputs(model, 3, 2), drafter, max_new_tokens=8, eos_token_id=None, do_sample=False)


@torch.no_grad()
def test_pair_scores_are_the_products_of_the_codebooks(tmp_path: Path) -> None:
    drafter: Any = load_published(write_head(tmp_path, LAYOUTS[DFLASH2]), TARGET)
    selector, rng = drafter.head.selector, torch.Generator().manual_seed(0)
    gates, before = torch.randn(2, 6, generator=rng), torch.randint(V, (2, 3), generator=rng)
    candidates = torch.randint(V, (2, 5), generator=rng)
    rows: Tensor = selector.predecessor_codebook
    found = selector(gates, rows[before], candidates)
    for row, node, slot in itertools.product(range(2), range(3), range(5)):
        expected = (rows[before[row, node]] * gates[row]) @ selector.successor_codebook[candidates[row, slot]]
        assert torch.allclose(found[row, node, slot], expected, atol=1e-5)


@torch.no_grad()
def test_taps_do_not_cross_blocks(tmp_path: Path) -> None:
    """Several blocks end to end are mixed as each alone, and the anchor's position reads nothing before it."""
    layer: Any = load_published(write_head(tmp_path, LAYOUTS[DFLASH2]), TARGET).head.layers[0]
    inputs, conv = torch.randn(2, 12, H, generator=torch.Generator().manual_seed(0)), layer.attention_conv
    double = conv.around(inputs, lambda mixed: 2 * mixed)
    for start in range(0, 12, 4):
        assert torch.allclose(double[:, start : start + 4], conv.around(inputs[:, start : start + 4], lambda x: 2 * x))
    changed = inputs.clone()
    changed[:, 3] += 1
    assert torch.equal(conv.around(changed, lambda x: x)[:, 4:], conv.around(inputs, lambda x: x)[:, 4:])


def test_scale_and_cap_of_its_own(tmp_path: Path) -> None:
    """Of the head's config, not the target's."""
    layout = LAYOUTS[DFLASH2]
    section = layout.config["dflash_config"] | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    model = get_model(layout.family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, layout, dflash_config=section)), find_adapter(model))
    hidden, shared = torch.randn(2, H), find_adapter(model).shared_embeddings
    with torch.no_grad():
        expected = 3.0 * (0.5 * shared.lm_head(hidden) / 3.0).tanh()
        assert torch.allclose(drafter.head.logits(hidden, shared, None), expected, atol=1e-6)


# --- folders that do not fit ------------------------------------------------------------------------------------------

FAULTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "DFlash 2, NeMo Automodel": [
        ({"conv_group_size": 5}, "conv_group_size must divide hidden_size 32; got 5"),
        ({"selector_rank": 7}, r"candidate_selector\.predecessor_codebook must be \[120, 7\] for this config; got"),
        ({"selector_top_k": 0}, "selector_top_k of a DFlash 2 head must be an integer of at least 1; got 0"),
        ({"conv_kernel_size": "2"}, "conv_kernel_size of a DFlash 2 head must be an integer of at least 1; got '2'"),
        ({"conv_kernel_size": True}, "conv_kernel_size of a DFlash 2 head must be an integer of at least 1; got True"),
        ({"output_multiplier": "2"}, "output_multiplier of a DFlash 2 head must be a finite number above 0; got '2'"),
        ({"output_multiplier": 0}, "output_multiplier of a DFlash 2 head must be a finite number above 0; got 0"),
        (
            {"final_logit_softcapping": float("nan")},
            "final_logit_softcapping .* must be a finite number above 0; got nan",
        ),
        (
            {"candidate_selector.successor_codebook": (V, 5)},
            r"successor_codebook must be \[120, 6\] for this config; got",
        ),
        ({"layers.0.attention_conv.kernel_projection.weight": (8, H)}, r"kernel_projection.weight must be \[16, 32\]"),
        ({"candidate_selector.hidden_projection.weight": None}, r"lacks candidate_selector\.hidden_projection\.weight"),
        ({"prefix_gru.weight_ih_l0": (27, H)}, r"unexpected tensors prefix_gru\.weight_ih_l0"),
        (
            {"lilicorr.same_slot_bias": (2,)},
            r"dflash_config\.selector_(rank|top_k) \d is not supported in such a draft head",
        ),
        ({"markov_rank": 6}, r"markov_rank is 6, but markov_head\.markov_w1\.weight is missing"),
        ({"conv_kernel_size": 3}, r"base_kernel must be \[2, 3, 32\]"),
        ({"layers.1.mlp_conv.base_kernel": None}, r"a DFlash 2 head lacks layers\.1\.mlp_conv\.base_kernel"),
        ({"candidate_selector.gate": (3,)}, r"unexpected tensors candidate_selector\.gate"),
        ({"projector_type": "domino"}, "projector_type 'domino' is not supported"),
    ],
    "LiLiCorr, Model-Optimizer, with convolution": [
        ({"lilicorr_num_heads": 5}, "lilicorr_hidden_size must be a multiple of lilicorr_num_heads; got 32 and 5"),
        ({"lilicorr_candidate_topk": 3}, r"rank_embedding must be \[1, 1, 1, 3, 32\] for this config; got"),
        ({"lilicorr_factor_dim": 0}, "lilicorr_factor_dim of a LiLiCorr head must be an integer of at least 1; got"),
        ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale .* must be a finite number above 0; got None"),
        ({"lilicorr_vector_eps": float("nan")}, "lilicorr_vector_eps .* must be a finite number above 0; got nan"),
        ({"lilicorr_mlp_ratio": "2"}, "lilicorr_mlp_ratio .* must be a finite number above 0; got '2'"),
        ({"lilicorr_num_layers": 3}, r"a LiLiCorr head lacks lilicorr\.layers\.2\.attn\.in_proj_bias"),
        ({"lilicorr_num_layers": 1}, r"unexpected tensors lilicorr\.layers\.1\.attn\.in_proj_bias"),
        ({"lilicorr_enabled": False}, r"lilicorr_enabled is false, but the weights hold the tensors lilicorr\.\*"),
        ({"projector_type": "dflash2"}, "projector_type 'dflash2' is not supported .* lilicorr is"),
        ({"selector_rank": 6}, r"^.*dflash_config\.selector_rank 6 is not supported in such a draft head"),
        ({"conv_kernel_size": 3}, r"base_kernel must be \[2, 3, 32\] for this config; got \[2, 2, 32\]"),
        ({"conv_group_size": 5}, "conv_group_size must divide hidden_size 32; got 5"),
        ({"conv_group_size": None}, "must be integers of at least 1, or both missing; got 2 and 0"),
        (
            {"conv_group_size": None, "conv_kernel_size": None},
            r"unexpected tensors layers\.0\.attention_conv\.base_kernel, layers\.0\.attention_conv\.kernel_projection",
        ),
        ({"layers.1.mlp_conv.base_kernel": None}, r"a LiLiCorr head lacks layers\.1\.mlp_conv\.base_kernel"),
        ({"lilicorr.same_slot_bias": (3,)}, r"lilicorr\.same_slot_bias must be \[2\] for this config; got \[3\]"),
        ({"lilicorr.gate": (3,)}, r"unexpected tensors lilicorr\.gate"),
        ({"candidate_selector.gate": (3,)}, r"unexpected tensors candidate_selector\.gate"),
        ({"lilicorr.layers.1.mlp.0.bias": (48,)}, r"hold lilicorr\.layers\.1\.mlp\.up_proj\.bias twice, as lilic"),
        ({"lilicorr.feature_mlp.0.bias": (5,)}, r"hold lilicorr\.feature_norm\.bias twice, as lilicorr\.feature_"),
    ],
    "Domino, SpecForge": [
        ({"emb_dim": 8}, r"embed_proj\.0\.weight must be \[8, 41\] for this config; got \[7, 41\]"),
        ({"emb_dim": None}, "emb_dim of a Domino head must be an integer of at least 1; got None"),
        ({"emb_dim": 7.0}, "emb_dim of a Domino head must be an integer of at least 1; got 7.0"),
        ({"gru_hidden_dim": 10}, r"prefix_gru\.weight_.h_l0 must be \[30, \d+\] for this config; got \[27, \d+\]"),
        ({"gru_hidden_dim": "9"}, "gru_hidden_dim of a Domino head must be an integer of at least 1; got '9'"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len .* must be an integer of at least 0; got -1"),
        ({"pure_draft_prefix_len": True}, "pure_draft_prefix_len .* must be an integer of at least 0; got True"),
        ({"projector_type": "dflash"}, "projector_type 'dflash' is not supported .* domino is"),
        ({"selector_rank": 6}, r"dflash_config\.selector_rank 6 is not supported in such a draft head"),
        ({"conv_kernel_size": 2}, r"dflash_config\.conv_kernel_size 2 is not supported in such a draft head"),
        ({"lilicorr_factor_dim": 5}, r"dflash_config\.lilicorr_factor_dim 5 is not supported in such a draft head"),
        ({"prefix_gru.weight_hh_l0": None}, r"a Domino head lacks prefix_gru\.weight_hh_l0"),
        ({"embed_proj.2.weight": (V + 1, 7)}, rf"embed_proj\.2\.weight must be \[{V}, 7\] for this config; got"),
        ({"prefix_gru.bias_ih_l0": (27,)}, r"unexpected tensors prefix_gru\.bias_ih_l0"),
        ({"layers.0.mlp_conv.base_kernel": (2, 2, H)}, r"unexpected tensors layers\.0\.mlp_conv\.base_kernel"),
        ({"logit_head.prefix_gru.weight_ih_l0": (27, H)}, r"the weights hold prefix_gru\.weight_ih_l0 twice"),
    ],
}
"""Of each layout: other values in `dflash_config` (None: without), or a tensor's other shape, and what is said."""


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_what_does_not_fit(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, LAYOUTS[name], TARGET, changes, message)


@pytest.mark.parametrize("name", ["Domino, SpecForge", "LiLiCorr, Model-Optimizer"])
def test_what_no_engine_serves_is_not_exported(name: str, tmp_path: Path) -> None:
    """Nor written as the head that it extends."""
    drafter = load_published(write_head(tmp_path, LAYOUTS[name]), TARGET)
    for format_name in ("vllm", "sglang", "speculators"):
        assert "no engine serves the architecture" in str(refusal(drafter, TARGET, format_name))


# --- training ---------------------------------------------------------------------------------------------------------


def new_dflash2() -> Dflash2Head:
    config = Dflash2Config.of(
        HEAD_CONFIG, block_size=3, sample_from_anchor=False, hidden_state_layers=LAYERS, conv_group_size=8,
        selector_rank=6, selector_top_k=20,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        head = Dflash2Head(config)
        for name, weight in head.named_parameters():
            if "kernel" in name or "codebook" in name or name == "mask_embedding":
                weight.data += 0.5 * torch.randn_like(weight)
    return head.eval()


@torch.no_grad()
def test_the_loss_of_dflash2_is_of_the_scores_of_drafting(target: FakeTarget) -> None:
    """At each anchor the candidates' scores of a draft there, behind the text's own tokens."""
    head, checked = new_dflash2(), 0
    drafter = Dflash2Drafter(head, num_layers=NUM_LAYERS, top_k=3)
    for _, (candidates, scores), (ids, drafted) in scores_beside_drafts(target, "dflash2", drafter, dflash2_loss, True):
        if drafted is None:
            continue
        found = torch.full((head.config.vocab_size,), -torch.inf).index_copy_(0, ids, drafted)[candidates]
        both = found.isfinite()  # ids that stand for media are not drafted
        assert torch.allclose(found[both], scores[both], atol=1e-3) and int(both.sum()) > 2
        checked += 1
    assert checked > 15


def new_lilicorr() -> LilicorrHead:
    config = LilicorrConfig.of(
        HEAD_CONFIG, block_size=3, sample_from_anchor=False, hidden_state_layers=LAYERS, candidate_topk=20,
        lattice_size=12, factor_dim=6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return LilicorrHead(config).eval()


@torch.no_grad()
def test_the_loss_of_lilicorr_is_of_the_scores_of_drafting(target: FakeTarget) -> None:
    """At each anchor those of a draft there, behind the text's own tokens; 0 behind a token that is no candidate."""
    drafter, checked = LilicorrDrafter(new_lilicorr(), num_layers=NUM_LAYERS, top_k=3), 0
    for slot, (candidates, scores), (ids, drafted) in scores_beside_drafts(
        target, "lilicorr", drafter, lilicorr_loss, False
    ):
        if drafted is None:
            assert not scores.any()
            continue
        assert candidates.tolist() == ids.tolist() and torch.allclose(drafted, scores, atol=1e-3)
        checked += slot > 0
    assert checked > 5


def test_training_lowers_the_loss_and_teaches_the_choice(target: FakeTarget) -> None:
    check_training(target, "dflash2", new_dflash2(), dflash2_loss)
    check_training(target, "lilicorr", new_lilicorr(), lilicorr_loss)
