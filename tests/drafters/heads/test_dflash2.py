"""DFlash 2: trees over pair scores beside the scores written out, training, exact calls, folders that do not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
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
from torch import Tensor

from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.heads.dflash2.head import Dflash2Config, Dflash2Drafter, Dflash2Head, dflash2_loss
from mmspec.interfaces import TargetInfo
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

LAYOUT = LAYOUTS["DFlash 2, NeMo Automodel"]
TARGET = TargetInfo("qwen3_vl", H, V, 8)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3}])
def test_trees_are_exact_and_their_nodes_the_best_paths(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded batches; node by node the product of the softmax over each position's candidates."""
    model = get_model(LAYOUT.family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, LAYOUT)), find_adapter(model))
    assert type(drafter) is Dflash2Drafter
    drafter.top_k, checked = 3, list[int]()
    draft_tree, make = drafter.draft_tree, PairExpander.__init__
    made: list[PairExpander] = []
    monkeypatch.setattr(PairExpander, "__init__", lambda self, *args: (make(self, *args), made.append(self))[0])

    def spy(state: Any, max_nodes: int, num_levels: int) -> Any:
        tree = draft_tree(state, max_nodes, num_levels)
        if not options["do_sample"] and max_nodes > 3:
            checked.append(check_tree(made[-1], state, tree, max_nodes))
        return tree

    monkeypatch.setattr(drafter, "draft_tree", spy)
    inputs = tiny.build_inputs(model, 3, 2, images=[1, 0])
    stats = assert_parity(model, inputs, drafter, max_new_tokens=12, eos_token_id=None, **options)
    assert stats.num_draft_tokens > 10 and (options["do_sample"] or sum(checked) > 10)


def check_tree(expander: PairExpander, state: Any, tree: Any, max_nodes: int) -> int:
    """Every node of the tree is a candidate behind its parent; at the first level they are the likeliest."""
    scores = expander.logits(0, expander.root_hidden).log_softmax(-1)[:, 0]
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        firsts = [token for token, parent in zip(tokens[1:], parents[1:], strict=True) if parent == 0]
        if not bool(tree.node_mask[row, 1:].any()):
            continue
        best = scores[row].topk(len(set(firsts))).indices
        assert firsts and set(firsts) == set(expander.candidates[row, 0, best].tolist())
    return len(tree.tokens)


@torch.no_grad()
def test_pair_scores_are_the_products_of_the_codebooks(tmp_path: Path) -> None:
    drafter: Any = load_published(write_head(tmp_path, LAYOUT), TARGET)
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
    layer: Any = load_published(write_head(tmp_path, LAYOUT), TARGET).head.layers[0]
    inputs, conv = torch.randn(2, 12, H, generator=torch.Generator().manual_seed(0)), layer.attention_conv
    double = conv.around(inputs, lambda mixed: 2 * mixed)
    for start in range(0, 12, 4):
        assert torch.allclose(double[:, start : start + 4], conv.around(inputs[:, start : start + 4], lambda x: 2 * x))
    changed = inputs.clone()
    changed[:, 3] += 1
    assert torch.equal(conv.around(changed, lambda x: x)[:, 4:], conv.around(inputs, lambda x: x)[:, 4:])


@pytest.mark.parametrize(
    ("nested", "tensors", "message"),
    [
        ({"conv_group_size": 5}, {}, "conv_group_size must divide hidden_size 32; got 5"),
        ({"selector_rank": 7}, {}, r"candidate_selector\.predecessor_codebook must be \[120, 7\] for this config; got"),
        ({"selector_top_k": 0}, {}, "selector_top_k of a DFlash 2 head must be an integer of at least 1; got 0"),
        (
            {"conv_kernel_size": "2"},
            {},
            "conv_kernel_size of a DFlash 2 head must be an integer of at least 1; got '2'",
        ),
        (
            {"conv_kernel_size": True},
            {},
            "conv_kernel_size of a DFlash 2 head must be an integer of at least 1; got True",
        ),
        (
            {"output_multiplier": "2"},
            {},
            "output_multiplier of a DFlash 2 head must be a finite number above 0; got '2'",
        ),
        ({"output_multiplier": 0}, {}, "output_multiplier of a DFlash 2 head must be a finite number above 0; got 0"),
        (
            {"final_logit_softcapping": float("nan")},
            {},
            "final_logit_softcapping .* must be a finite number above 0; got nan",
        ),
        (
            {},
            {"candidate_selector.successor_codebook": (V, 5)},
            r"successor_codebook must be \[120, 6\] for this config; got",
        ),
        (
            {},
            {"layers.0.attention_conv.kernel_projection.weight": (8, H)},
            r"kernel_projection.weight must be \[16, 32\]",
        ),
        (
            {},
            {"candidate_selector.hidden_projection.weight": None},
            r"lacks candidate_selector\.hidden_projection\.weight",
        ),
        ({}, {"prefix_gru.weight_ih_l0": (27, H)}, r"unexpected tensors prefix_gru\.weight_ih_l0"),
        (
            {},
            {"lilicorr.same_slot_bias": (2,)},
            r"dflash_config\.selector_(rank|top_k) \d is not supported in such a draft head",
        ),
        ({"markov_rank": 6}, {}, r"markov_rank is 6, but markov_head\.markov_w1\.weight is missing"),
        ({"conv_kernel_size": 3}, {}, r"base_kernel must be \[2, 3, 32\]"),
        ({}, {"layers.1.mlp_conv.base_kernel": None}, r"a DFlash 2 head lacks layers\.1\.mlp_conv\.base_kernel"),
        ({}, {"candidate_selector.gate": (3,)}, r"unexpected tensors candidate_selector\.gate"),
        ({"projector_type": "domino"}, {}, "projector_type 'domino' is not supported"),
    ],
)
def test_what_does_not_fit(nested: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, LAYOUT, TARGET, nested, tensors, message)


def test_scale_and_cap_of_its_own(tmp_path: Path) -> None:
    """Of the head's config, not the target's."""
    section = LAYOUT.config["dflash_config"] | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    model = get_model(LAYOUT.family, layers=8)
    drafter: Any = resolve_drafter(str(write_head(tmp_path, LAYOUT, dflash_config=section)), find_adapter(model))
    hidden, shared = torch.randn(2, H), find_adapter(model).shared_embeddings
    with torch.no_grad():
        expected = 3.0 * (0.5 * shared.lm_head(hidden) / 3.0).tanh()
        assert torch.allclose(drafter.head.logits(hidden, shared, None), expected, atol=1e-6)


# --- training ---------------------------------------------------------------------------------------------------------


def new_head() -> Dflash2Head:
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
def test_the_loss_is_of_the_scores_of_drafting(target: FakeTarget) -> None:
    """At each anchor the candidates' scores of a draft there, behind the text's own tokens."""
    head, checked = new_head(), 0
    drafter = Dflash2Drafter(head, num_layers=NUM_LAYERS, top_k=3)
    for _, (candidates, scores), (ids, drafted) in scores_beside_drafts(target, "dflash2", drafter, dflash2_loss, True):
        if drafted is None:
            continue
        found = torch.full((head.config.vocab_size,), -torch.inf).index_copy_(0, ids, drafted)[candidates]
        both = found.isfinite()  # ids that stand for media are not drafted
        assert torch.allclose(found[both], scores[both], atol=1e-3) and int(both.sum()) > 2
        checked += 1
    assert checked > 15


def test_training_lowers_the_loss_and_teaches_the_selector(target: FakeTarget) -> None:
    check_training(target, "dflash2", new_head(), dflash2_loss)
