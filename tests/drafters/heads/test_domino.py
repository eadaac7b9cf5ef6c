"""Domino: folders that do not fit are refused with one line. Its drafts: `test_published_layouts`, `test_c_draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_heads import check_refused, write_head
from published_layouts import LAYOUTS, H, V

from mmspec.drafters.checkpoints.export import refusal
from mmspec.drafters.checkpoints.published import load_published
from mmspec.interfaces import TargetInfo

LAYOUT = LAYOUTS["Domino, SpecForge"]
TARGET = TargetInfo("qwen3_vl", H, V, 8)


@pytest.mark.parametrize(
    ("nested", "tensors", "message"),
    [
        ({"emb_dim": 8}, {}, r"embed_proj\.0\.weight must be \[8, 41\] for this config; got \[7, 41\]"),
        ({"emb_dim": None}, {}, "emb_dim of a Domino head must be an integer of at least 1; got None"),
        ({"emb_dim": 7.0}, {}, "emb_dim of a Domino head must be an integer of at least 1; got 7.0"),
        ({"gru_hidden_dim": 10}, {}, r"prefix_gru\.weight_.h_l0 must be \[30, \d+\] for this config; got \[27, \d+\]"),
        ({"gru_hidden_dim": "9"}, {}, "gru_hidden_dim of a Domino head must be an integer of at least 1; got '9'"),
        ({"pure_draft_prefix_len": -1}, {}, "pure_draft_prefix_len .* must be an integer of at least 0; got -1"),
        ({"pure_draft_prefix_len": True}, {}, "pure_draft_prefix_len .* must be an integer of at least 0; got True"),
        ({"projector_type": "dflash"}, {}, "projector_type 'dflash' is not supported .* domino is"),
        ({"selector_rank": 6}, {}, r"dflash_config\.selector_rank 6 is not supported in such a draft head"),
        ({"conv_kernel_size": 2}, {}, r"dflash_config\.conv_kernel_size 2 is not supported in such a draft head"),
        ({"lilicorr_factor_dim": 5}, {}, r"dflash_config\.lilicorr_factor_dim 5 is not supported in such a draft head"),
        ({}, {"prefix_gru.weight_hh_l0": None}, r"a Domino head lacks prefix_gru\.weight_hh_l0"),
        ({}, {"embed_proj.2.weight": (V + 1, 7)}, rf"embed_proj\.2\.weight must be \[{V}, 7\] for this config; got"),
        ({}, {"prefix_gru.bias_ih_l0": (27,)}, r"unexpected tensors prefix_gru\.bias_ih_l0"),
        ({}, {"layers.0.mlp_conv.base_kernel": (2, 2, H)}, r"unexpected tensors layers\.0\.mlp_conv\.base_kernel"),
        ({}, {"logit_head.prefix_gru.weight_ih_l0": (27, H)}, r"the weights hold prefix_gru\.weight_ih_l0 twice"),
    ],
)
def test_what_does_not_fit(nested: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, LAYOUT, TARGET, nested, tensors, message)


@pytest.mark.parametrize("name", ["Domino, SpecForge", "LiLiCorr, Model-Optimizer"])
def test_what_no_engine_serves_is_not_exported(name: str, tmp_path: Path) -> None:
    """Nor written as the head that it extends."""
    drafter = load_published(write_head(tmp_path, LAYOUTS[name]), TARGET)
    for format_name in ("vllm", "sglang", "speculators"):
        assert "no engine serves the architecture" in str(refusal(drafter, TARGET, format_name))
