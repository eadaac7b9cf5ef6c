"""ViSpec heads in the layout of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.state_dict import read_head
from mmspec.drafters.heads.eagle.checkpoint import read_eagle
from mmspec.drafters.heads.vispec.drafter import VispecDrafter
from mmspec.drafters.heads.vispec.head import VispecConfig, VispecHead
from mmspec.interfaces import TargetInfo

PARTS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
AUTOMODEL_NAMES = {
    "img_adaptor.query": "imadpt.q",
    **{f"img_adaptor.{part}": f"imadpt.{part}" for part in ("o_proj.weight", *PARTS)},
}
"""Name in NeMo Automodel's layout -> in that of the authors."""


def load_vispec(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str
) -> VispecDrafter:
    """The drafter of a head; arguments and errors as `HeadMethod.load_published`."""
    weights = {AUTOMODEL_NAMES.get(name, name): value for name, value in weights.items()}
    shape, weights, vocab_limit = read_eagle(values, weights, target)
    queries = weights["imadpt.q"]
    if queries.dim() != 3 or queries.shape[1:] != (shape.num_attention_heads, shape.head_dim):
        raise ValueError(
            f"imadpt.q must be [queries, {shape.num_attention_heads}, {shape.head_dim}]; got {list(queries.shape)}."
        )
    config = VispecConfig.of(shape, num_queries=queries.shape[0])
    head = read_head(lambda: VispecHead(config), weights)
    return VispecDrafter(head, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)
