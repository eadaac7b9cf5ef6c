"""Nothing is drafted below a token that ends the row, whatever the drafter proposes; the output stays the same."""

from __future__ import annotations

from dataclasses import replace

import fuzz as fuzz
import pytest
import tiny_heads as heads
import torch
from torch import Tensor

from mmspec.engine import loop
from mmspec.engine.tree import DraftTree, sanitize

DRAFTERS = (
    *(name for name in fuzz.BUILT_IN_DRAFTERS if name != "none"),
    "arbitrated",
    *fuzz.WHOLE_MODEL_DRAFTERS,
    *(f"head-{heads.ECHOING_PREFIX}{kind}" for kind in ("decoupled", "eagle3", *heads.BLOCK_DRAFTERS)),
    "bush",
    "chaos",
)


def count_below(tree: DraftTree, stop_ids: Tensor | None) -> int:
    """Valid nodes with an ancestor, other than the root, that ends the row."""
    if stop_ids is None:
        return 0
    assert tree.ancestor_mask is not None
    ends_row = torch.isin(tree.tokens, stop_ids)
    ends_row[:, 0] = False
    strict = tree.ancestor_mask & ~torch.eye(tree.num_nodes, dtype=torch.bool)
    return int(((strict & ends_row[:, None]).any(-1) & tree.node_mask).sum())


@pytest.mark.every(3)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nothing_is_drafted_below_an_end_token(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_nodes, num_below = [0], [0]

    def counting(tree: DraftTree, root_ids: Tensor, draftable: Tensor, stop_ids: Tensor | None = None) -> DraftTree:
        result = sanitize(tree, root_ids, draftable, stop_ids)
        num_nodes[0] += int(result.node_mask.sum())
        num_below[0] += count_below(result, stop_ids)
        return result

    monkeypatch.setattr(loop, "sanitize", counting)
    for seed in range(3):
        case = fuzz.draw_case(1300 + seed)
        odd = ("override", "turns", "processor", "prefix", "criterion", "streamer", "cache")
        case = replace(
            case, drafter=drafter, nodes=8, eos="several", biased=(), stop_strings=False, **dict.fromkeys(odd, "")
        )
        result = fuzz.run_case(case)
        assert not result.differences, result.report()
    assert num_nodes[0] > 0 and num_below[0] == 0


def test_what_an_end_token_drops() -> None:
    """A tree with an end token in the middle of a chain, and as the root."""
    tree = DraftTree(
        tokens=torch.tensor([[7, 1, 7, 2, 3], [7, 1, 2, 7, 3]]),
        parents=torch.tensor([[-1, 0, 1, 2, 1], [-1, 0, 1, 2, 3]]),
        node_mask=torch.ones(2, 5, dtype=torch.bool),
    )
    draftable = torch.ones(9, dtype=torch.bool)
    dropped = sanitize(tree, torch.tensor([7, 7]), draftable, torch.tensor([7, 8]))
    assert dropped.node_mask.tolist() == [[True, True, True, False, True], [True, True, True, True, False]]
    assert sanitize(tree, torch.tensor([7, 7]), draftable).node_mask.all()
    assert count_below(sanitize(tree, torch.tensor([7, 7]), draftable), torch.tensor([7])) == 2
