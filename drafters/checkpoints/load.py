"""A trained draft head from a folder, ours or published by others, to a drafter, checked against the target."""

from __future__ import annotations

import os
from pathlib import Path

from mmspec.drafters.architectures import ARCHITECTURES
from mmspec.drafters.checkpoints.format import MODEL_TYPE, load_head, read_config, read_metadata, tokenizer_fingerprint
from mmspec.drafters.checkpoints.validate import explain_damage
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.interfaces import TargetInfo


def load_trained(folder: str | os.PathLike[str], target: TargetInfo | None = None) -> EagleDrafter:
    """The drafter in a folder of `mmspec train`, or as its authors published it.

    Raises:
        FileNotFoundError, ValueError: no draft head, or a damaged one. OtherTarget: one for another target.
    """
    with explain_damage(folder):
        return _load(folder, target)


def _load(folder: str | os.PathLike[str], target: TargetInfo | None) -> EagleDrafter:
    if read_config(Path(folder)).get("model_type") != MODEL_TYPE:
        from mmspec.drafters.checkpoints.published import load_published

        if target is None:
            raise ValueError(f"{os.fspath(folder)} was published for some target: it is needed to check that it fits.")
        return load_published(folder, target)
    if target is not None:
        read_metadata(folder).check_target(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
            tokenizer=None if target.tokenizer is None else tokenizer_fingerprint(target.tokenizer),
        )
    head, made = load_head(folder)
    name = os.path.basename(os.path.normpath(folder))
    drafter = ARCHITECTURES[made.architecture].drafter(
        head, made.visual_mode, num_layers=made.num_layers, name=name, draft_ids=made.draft_ids
    )
    drafter.bundled_compressor = made.compressor
    return drafter


__all__ = ["load_trained"]
