"""Tuned heads of a target's checkpoint on disk, under the names of that checkpoint.

A folder of `mmspec train` has them beside our own config. An exported one is what vLLM loads as draft model of its
method `mtp`: the target's config, the head, and copies of the embeddings and the LM head, which its loader expects
before it shares the target's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.drafters.checkpoints.format import CONFIG_NAME, WEIGHTS_NAME, HeadMetadata
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.files import atomic_write
from mmspec.interfaces import SharedEmbeddings, TargetInfo
from mmspec.weight_files import TensorFiles

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
HEAD_SHARD, TARGET_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def load_tuned(folder: Path, metadata: HeadMetadata, target: TargetInfo, name: str) -> MTPDrafter:
    """The drafter of a tuned head, with the visual mode that it was trained in.

    Raises:
        ValueError: the target is not loaded, or the head is not of it.
    """
    if target.read_own_head is None:
        raise ValueError(f"{folder} holds a head of its target's own layers, which must be loaded: name the target.")
    ids = TensorFiles(folder)
    draft_ids = ids.read("draft_ids") if "draft_ids" in ids.names else None
    drafter = MTPDrafter(target.read_own_head(folder), name=name, draft_ids=draft_ids)
    drafter.fix_visual_mode(metadata.visual_mode)
    return drafter


def export_own_head(folder: Path, drafter: HeadDrafter, shared_embeddings: SharedEmbeddings) -> None:
    """Write a head as vLLM loads it: `config.json`, an index, and two files of tensors.

    Args:
        folder: to write to.
        drafter: an `MTPDrafter`.
        shared_embeddings: of the target.
    """
    assert isinstance(drafter, MTPDrafter)
    embeddings, lm_head = _on_cpu(shared_embeddings.embed_tokens.weight), _on_cpu(shared_embeddings.lm_head.weight)
    own_lm_head = lm_head if drafter.head.lm_head is None else _on_cpu(drafter.head.lm_head)
    weights = {"embeddings": embeddings, "own_lm_head": own_lm_head}
    if shared_embeddings.lm_head.weight is not shared_embeddings.embed_tokens.weight:  # else engines tie them, too
        weights["lm_head"] = lm_head
    shards: dict[str, dict[str, Tensor]] = {
        HEAD_SHARD: {name: _on_cpu(value) for name, value in drafter.head.stored_tensors().items()},
        TARGET_SHARD: {name: weights[what] for name, what in drafter.head.files.copies.items() if what in weights},
    }
    folder.mkdir(parents=True, exist_ok=True)
    sizes, weight_map = 0, dict[str, str]()
    for shard, tensors in shards.items():
        with atomic_write(folder / shard) as part:
            save_file(tensors, part, metadata={"format": "pt"})
            part.chmod(0o644)
        sizes += sum(value.nbytes for value in tensors.values())
        weight_map |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
    for name, values in ((INDEX_NAME, index), (CONFIG_NAME, drafter.head.files.config)):
        with atomic_write(folder / name) as part:
            part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _on_cpu(weight: Tensor | torch.nn.Module) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.detach().to("cpu").contiguous().clone()
