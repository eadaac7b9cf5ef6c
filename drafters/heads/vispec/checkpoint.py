"""ViSpec heads in the layout of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.checkpoints.state_dict import from_eagle_state_dict
from mmspec.drafters.heads.eagle.checkpoint import read_eagle
from mmspec.drafters.heads.vispec.config import VispecConfig
from mmspec.drafters.heads.vispec.drafter import VispecDrafter
from mmspec.drafters.heads.vispec.head import VispecHead
from mmspec.interfaces import TargetInfo


def load_vispec(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str
) -> VispecDrafter:
    """The drafter of a head; arguments and errors as `HeadMethod.load_published`."""
    shape, weights, vocab_limit = read_eagle(values, weights, target)
    queries = weights["imadpt.q"]
    if queries.dim() != 3 or queries.shape[1:] != (shape.num_attention_heads, shape.head_dim):
        raise ValueError(
            f"imadpt.q must be [queries, {shape.num_attention_heads}, {shape.head_dim}]; got {list(queries.shape)}."
        )
    config = VispecConfig.of(shape, num_queries=queries.shape[0])
    state_dict = from_eagle_state_dict(config, weights, VispecHead)
    with torch.device("meta"):  # an initialisation would advance the user's random generator
        head = VispecHead(config)
    head.load_state_dict({key: value.float() for key, value in state_dict.items()}, assign=True)
    return VispecDrafter(head, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)
