"""Embeddings that a published head was trained with: kept where they are not a copy of the target's, as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mmspec.drafters.checkpoints.state_dict import check_numbers
from mmspec.interfaces import SharedEmbeddings, TargetInfo

EMBED_TENSOR = "embed_tokens.weight"
ROWS_AT_ONCE = 4096
MAX_RELATIVE_DIFFERENCE = 2.0**-8
"""Of copies that went through bfloat16."""


def own_embeddings(weights: Mapping[str, Tensor], target: TargetInfo, hidden_size: int) -> nn.Embedding | None:
    """[V, D] embeddings of a head; None if the target's are to be used.

    Where `target` has no `shared_embeddings`, those of the head are kept: a copy costs memory only.

    Args:
        weights: of the head, without prefix.
        target: facts about the target. Ids that the head has no row for get the target's, if it is of the same size.
        hidden_size: D, of the head.

    Raises:
        ValueError: they are of another shape or not finite, or missing in a head that is not as wide as its target.
    """
    weight = weights.get(EMBED_TENSOR)
    if weight is None and hidden_size != target.hidden_size:
        raise ValueError(
            f"{EMBED_TENSOR} is missing: the embeddings of the target, {target.hidden_size} wide, do not fit a head of "
            f"hidden_size {hidden_size}."
        )
    if weight is None:
        return None
    if weight.dim() != 2 or weight.shape[1] != hidden_size or not len(weight):
        raise ValueError(f"{EMBED_TENSOR} must be [V, {hidden_size}]; got {list(weight.shape)}.")
    check_numbers(EMBED_TENSOR, weight)
    others = _rows(target.shared_embeddings)
    if others is not None and others.shape[1] == hidden_size and _is_copy(weight, others):
        return None
    size = max(len(weight), target.vocab_size if others is None else len(others))
    if len(weight) < size:
        fits = others is not None and others.shape[1] == hidden_size
        rest = (
            others[len(weight) :] if fits and others is not None else weight.new_zeros(size - len(weight), hidden_size)
        )
        weight = torch.cat((weight, rest.detach().to("cpu", weight.dtype)))
    return nn.Embedding.from_pretrained(weight)


def _rows(shared: SharedEmbeddings | None) -> Tensor | None:
    """[V, D] of the target's embeddings, if they are numbers that can be compared."""
    weight = None if shared is None else getattr(shared.embed_tokens, "weight", None)
    is_comparable = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    return weight if is_comparable and isinstance(weight, Tensor) and not weight.is_meta else None


def _is_copy(weight: Tensor, others: Tensor) -> bool:
    """Whether all rows that both have agree up to the rounding of bfloat16."""
    for start in range(0, min(len(weight), len(others)), ROWS_AT_ONCE):
        other = others[start : start + ROWS_AT_ONCE].detach()
        own = weight[start : start + len(other)].to(other.device).float()
        other = other[: len(own)].float()
        if not bool(((own - other).abs() <= MAX_RELATIVE_DIFFERENCE * other.abs() + 1e-6).all()):
            return False
    return True
