"""Training of instant heads from batches of whole sequences: their positions as examples, and the loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.heads.base.markov import MarkovHead
from mmspec.drafters.training.batch import TrainBatch
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs
from mmspec.interfaces import SharedEmbeddings
from mmspec.learning.protocols import Examples

SLOT_DECAY = 0.8
"""Weight of the loss of each further position of the block."""
MAX_FULL_SOFTMAX = 8192
"""Largest vocabulary whose softmax is computed whole; of a larger one, over the ids of the batch."""


def batch_examples(batch: TrainBatch, num_next: int) -> list[Examples]:
    """The response of every sequence as consecutive examples with `num_next` following tokens each."""
    is_response = batch.response_mask & batch.attention_mask
    examples = []
    for ids, states, mask in zip(batch.input_ids, batch.hidden_states, is_response, strict=True):
        positions = mask.nonzero()[:, 0]
        if not len(positions) or not int(positions[0]):
            continue
        tokens = ids[positions]
        padded = torch.cat((tokens, tokens.new_full((num_next,), -1)))
        next_ids = padded.unfold(0, num_next, 1)[1 : len(tokens) + 1]
        examples.append(Examples(states[positions - 1], tokens, next_ids))
    return examples


def instant_loss(given: LossInputs) -> LossAndMetrics:
    """Cross-entropy with the tokens of the response; results as those of `eagle_loss`.

    An instant head has no context, so each position is a sample of its own. The weights of the loss are not used: there
    is one part.
    """
    head, embeddings = given.draft_model.head, given.shared_embeddings
    parts = batch_examples(given.batch, head.config.block_size)
    if not parts:
        return given.batch.hidden_states.new_zeros(()), {}
    inputs = torch.cat([part.inputs for part in parts])
    root_ids = torch.cat([part.root_ids for part in parts])
    examples = Examples(inputs, root_ids, torch.cat([part.next_ids for part in parts]))
    with torch.no_grad():
        root_embeds = embeddings.embed(root_ids).to(inputs.dtype)
    vocab_size = head.config.vocab_size
    candidates = torch.arange(vocab_size, device=inputs.device) if vocab_size <= MAX_FULL_SOFTMAX else None
    if candidates is None:
        candidates = examples.next_ids.clamp(min=0).unique()
    features = head.block_features(root_embeds, inputs)
    return block_cross_entropy(features, examples, embeddings, head.markov_head, candidates)


def block_cross_entropy(
    features: Tensor,
    examples: Examples,
    shared_embeddings: SharedEmbeddings,
    markov_head: MarkovHead | None,
    candidate_ids: Tensor,
) -> LossAndMetrics:
    """Cross-entropy of every position of a block, each given the emitted token before it.

    Args:
        features: [n, k, D] of the block.
        examples: n examples.
        shared_embeddings: of the target.
        markov_head: corrects all positions but the first, or None.
        candidate_ids: [V'] int64, increasing, the ids of the softmax.

    Returns:
        The loss, a scalar, and the metrics `agree0`, `agree1`, ...: of each position the share whose argmax is right.
    """
    with torch.no_grad():
        lm_head_rows = shared_embeddings.lm_head_rows(candidate_ids).to(features.dtype)
        previous = shared_embeddings.embed(examples.next_ids[:, :-1].clamp(min=0)).to(features.dtype)
    logits = shared_embeddings.logits(features, lm_head_rows)
    if markov_head is not None and features.shape[1] > 1:
        mixed = markov_head.mix(markov_head.project_features(features[:, 1:]), previous)
        correction = functional.linear(mixed, markov_head.vocab_proj.weight[candidate_ids])
        logits = logits + functional.pad(correction, (0, 0, 1, 0))
    labels = torch.searchsorted(candidate_ids, examples.next_ids.clamp(min=0))
    total, metrics = logits.new_zeros(()), dict[str, float]()
    for slot in range(features.shape[1]):
        rows = (examples.next_ids[:, slot] >= 0).nonzero()[:, 0]
        if len(rows):
            slot_logits, slot_labels = logits[rows, slot].float(), labels[rows, slot]
            total = total + SLOT_DECAY**slot * functional.cross_entropy(slot_logits, slot_labels)
            metrics[f"agree{slot}"] = float((slot_logits.argmax(-1) == slot_labels).float().mean())
    return total, metrics
