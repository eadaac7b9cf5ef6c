"""The training loss of a drafter's head over recorded sequences, for online learning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.registry import method_of
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.losses import LossInputs, LossWeights, TrainProgress
from mmspec.interfaces import SharedEmbeddings

LOSS_WEIGHTS = LossWeights()


def sequence_loss(
    drafter: HeadDrafter,
    head: nn.Module,
    sequences: Sequence[TrainBatch],
    shared_embeddings: SharedEmbeddings,
    rng: torch.Generator,
) -> Tensor:
    """The loss of the drafter's architecture with the default weights of its parts, a scalar.

    Args:
        drafter: of a method with a loss.
        head: a copy of its head.
        sequences: of one row each.
        shared_embeddings: of the target.
        rng: random generator on the CPU.
    """
    method = method_of(drafter)
    assert method is not None
    batch = TrainBatch.collate(sequences).float()
    model = DraftModel(head, drafter.visual_mode, method.name)
    model.draft_ids = drafter.draft_ids if drafter.head.config.draft_vocab_size else None
    placeholder = batch.inputs_embeds.new_zeros(batch.inputs_embeds.shape[-1])
    visual_ids = batch.input_ids[batch.visual_mask][:1]
    if len(visual_ids) and len(placeholder):
        placeholder = shared_embeddings.embed(visual_ids)[0].float()
    compute_loss = method.loss()
    progress = TrainProgress(fraction=1.0, rng=rng)
    device = placeholder.device
    lm_head_dtype = getattr(getattr(shared_embeddings.lm_head, "weight", None), "dtype", None)
    is_half = lm_head_dtype in (torch.bfloat16, torch.float16)
    use_bf16 = is_half or bf16_is_faster(device)  # as offline training; float32 inputs need it before a half LM head
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
        loss, _ = compute_loss(LossInputs(model, batch, shared_embeddings, placeholder, LOSS_WEIGHTS, progress))
    # It is cleared by the outermost context only: within another one the next step would find the weights of this one.
    torch.clear_autocast_cache()
    return torch.as_tensor(loss)
