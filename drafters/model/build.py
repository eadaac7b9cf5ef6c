"""The drafter for a draft model: by tokens if its tokenizer is the target's, else by text."""

from __future__ import annotations

from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.model.retokenizing import RetokenizingDrafter, same_tokenizer
from mmspec.drafters.model.vision_drafter import VisionModelDrafter
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
        if not same_tokenizer(source.tokenizer, target.tokenizer):
            return RetokenizingDrafter(source, target.tokenizer)
        return _drafter_of_ids(source, target)
    if source.vocab_size == target.vocab_size:
        return _drafter_of_ids(source, target)
    missing = (
        "processor= of patch" if target.tokenizer is None else f"a tokenizer in the folder of drafter={source.name}"
    )
    raise ValueError(
        f"drafter={source.name} has a vocabulary of {source.vocab_size} ids, the target one of {target.vocab_size}; "
        f"its drafts are written in the target's tokens by both tokenizers, of which one is unknown: pass {missing}."
    )


def _drafter_of_ids(source: DraftModelSource, target: TargetInfo) -> ModelDrafter:
    """With the images, if the draft model has the target's placeholders; else of the text."""
    reads_images = bool(source.media_token_ids) and set(source.media_token_ids) == set(target.media_token_ids)
    return VisionModelDrafter(source) if reads_images else ModelDrafter(source)
