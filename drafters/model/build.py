"""The drafter for a draft model: by tokens if its tokenizer is the target's, else by text."""

from __future__ import annotations

from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.model.retokenizing import RetokenizingDrafter, same_tokenizer
from mmspec.interfaces import DraftModelSource, TargetInfo


def build_model_drafter(source: DraftModelSource, target: TargetInfo) -> ModelDrafter:
    """The drafter.

    Args:
        source: the draft model.
        target: facts about the target. Where one of the tokenizers is unknown, equal vocabulary sizes stand for equal
            tokenizers: a wrong guess costs speed, never a token.

    Raises:
        ValueError: a tokenizer is missing, or does not reproduce text.
    """
    if source.tokenizer is not None and target.tokenizer is not None:
        if same_tokenizer(source.tokenizer, target.tokenizer):
            return ModelDrafter(source)
        return RetokenizingDrafter(source, target.tokenizer)
    if source.vocab_size == target.vocab_size:
        return ModelDrafter(source)
    missing = (
        "processor= of patch" if target.tokenizer is None else f"a tokenizer in the folder of drafter={source.name}"
    )
    raise ValueError(
        f"drafter={source.name} has a vocabulary of {source.vocab_size} ids, the target one of {target.vocab_size}; "
        f"its drafts are written in the target's tokens by both tokenizers, of which one is unknown: pass {missing}."
    )


__all__ = ["build_model_drafter"]
