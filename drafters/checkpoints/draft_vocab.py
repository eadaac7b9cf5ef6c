"""What published layouts of several methods share: draft vocabulary, keys of layers, the section of `speculators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.interfaces import TargetInfo

HEAD_MAX_POSITIONS = 1 << 17
"""`max_position_embeddings` of a head: RoPE has no limit, engines ask for one."""


def parse_draft_ids(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int, target_vocab_size: int) -> Tensor:
    """[V'] int64 target ids of the draft vocabulary, from its offsets `d2t`, checked against the mask `t2d`."""
    if d2t is not None and d2t.shape != (vocab_size,):
        raise ValueError(f"d2t must be [{vocab_size}], as draft_vocab_size says; got {list(d2t.shape)}.")
    ids = torch.arange(vocab_size) if d2t is None else torch.arange(vocab_size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_vocab_size:
        raise ValueError(f"d2t leads to id {int(ids.max())}; the target has {target_vocab_size}.")
    if t2d is not None and (t2d.dim() != 1 or int(t2d.sum()) != len(ids.unique()) or not bool(t2d[ids].all())):
        raise ValueError("t2d and d2t name different ids.")
    return ids


def draft_vocabulary_tensors(draft_ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """`d2t`, the offset of each draft id to its target id, and `t2d`, the mask of those ids; empty for all ids."""
    if draft_ids is None:
        return {}
    ids = draft_ids.cpu()
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def speculators_section(algorithm: str, num_tokens: int, target: TargetInfo) -> dict[str, Any]:
    """`speculators_config`: how the head is meant to be used, and for which target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target.name or None, "architectures": []},
    }


def layer_keys(config: Any, target: TargetInfo, model_type: str) -> dict[str, Any]:
    """The keys of the layers of a head, as transformers names them for the models of a type.

    Args:
        config: of the head, with `num_hidden_layers`.
        target: facts about the target.
        model_type: whose layers those of the head are.
    """
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.qkv_bias,
        "hidden_act": "silu",
        "max_position_embeddings": HEAD_MAX_POSITIONS,
        "tie_word_embeddings": False,
    }
