"""What published layouts of several methods share: the draft vocabulary, and the section of `speculators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.interfaces import TargetInfo


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
