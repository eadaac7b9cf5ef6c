"""DFlash 2 heads as NeMo Automodel publishes them and vLLM reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from mmspec.drafters.checkpoints.draft_vocab import layer_keys
from mmspec.drafters.checkpoints.format import write_checkpoint
from mmspec.drafters.checkpoints.published import MASK_EMBEDDING, MASK_EMBEDDING_FILE
from mmspec.drafters.checkpoints.state_dict import to_stored
from mmspec.drafters.heads.dflash2.head import Dflash2Head
from mmspec.drafters.heads.dflash2.recipe import SCALES, SIZES
from mmspec.drafters.heads.registry import ExportInputs
from mmspec.files import atomic_write


@torch.no_grad()
def export_dflash2(folder: Path, given: ExportInputs) -> None:
    """Write a head without embeddings: the target's serve, but for the mask token's, which has a file of its own."""
    drafter, target, shared = given.drafter, given.target, given.embeddings()
    head, mask_token_id = drafter.head, next(iter(target.media_token_ids), 0)
    assert isinstance(head, Dflash2Head)
    config, weights = head.config, to_stored(head)
    own = getattr(shared.embed_tokens, "weight", None)
    assert isinstance(own, torch.Tensor)
    own = own[:256].float()
    scale = float(shared.embed(torch.arange(len(own))).float().norm() / own.norm())
    section = {key: getattr(config, key) for key in (*SIZES, *SCALES)}
    section |= {
        "mask_token_id": mask_token_id,
        "target_layer_ids": [layer - 1 for layer in drafter.hidden_state_indices],
        "input_embedding_scale": scale,
    }
    values = layer_keys(config, target, "qwen3") | {
        "architectures": ["DFlash2DraftModel"],
        "block_size": config.block_positions,
        "num_target_layers": target.num_layers,
        "dflash_config": section,
    }
    mask_embedding = weights.pop(MASK_EMBEDDING) / scale
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / MASK_EMBEDDING_FILE) as part:
        torch.save({"mask_token_id": mask_token_id, "embedding": mask_embedding}, part)
    write_checkpoint(folder, weights, values)
