"""A drafter from the folder of a draft head, of `mmspec train` or as published, checked against the target."""

from __future__ import annotations

import os
from pathlib import Path

from mmspec.drafters.checkpoints.format import MODEL_TYPE, HeadMetadata, load_head, read_config, read_metadata
from mmspec.drafters.checkpoints.published_heads import hub_id_of
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.registry import find_method
from mmspec.interfaces import TargetInfo


def load_trained(
    folder: str | os.PathLike[str], target: TargetInfo | None = None, name: str | None = None
) -> HeadDrafter:
    """The drafter in a folder written by `mmspec train` or published by the authors of a method.

    Args:
        folder: with `config.json` and the weights.
        target: facts about the target; required for published layouts, which do not record them.
        name: of the drafter, such as its hub id; by default the folder's.

    Raises:
        FileNotFoundError: a file is missing.
        TargetMismatch: the head was trained for another target.
        ValueError: the files are not a draft head's, or damaged, or `target` is required.
    """
    try:
        return _load(folder, target, name)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
        text = " ".join(str(error).split())[:200]  # what a damaged folder makes the code run into, past all checks
        raise ValueError(f"drafter {os.fspath(folder)} cannot be loaded: {type(error).__name__}: {text}") from error


def _load(folder: str | os.PathLike[str], target: TargetInfo | None, name: str | None) -> HeadDrafter:
    if read_config(Path(folder)).get("model_type") != MODEL_TYPE:
        from mmspec.drafters.checkpoints.published import load_published

        if target is None:
            raise ValueError(f"{os.fspath(folder)} is in a published layout, which needs target=; got None.")
        return load_published(folder, target, name)
    metadata = read_metadata(folder)
    if target is not None:
        metadata.check_target(target)
    given = name or hub_id_of(folder) or os.path.basename(os.path.normpath(folder))
    method = find_method(metadata.architecture)
    if method.is_of_target:
        if target is None:
            raise ValueError(
                f"{os.fspath(folder)} holds a head of its target's own layers, which is needed: target= (or --target); "
                "got None."
            )
        return _with_facts(method.load_for_target(Path(folder), metadata, target, given), metadata)
    head, metadata = load_head(folder, metadata)
    drafter = method.classes().drafter(
        head, metadata.visual_mode, num_layers=metadata.num_layers, name=given, draft_ids=metadata.draft_ids
    )
    return _with_facts(drafter, metadata)


def _with_facts(drafter: HeadDrafter, metadata: HeadMetadata) -> HeadDrafter:
    """The drafter with what its head was trained with."""
    drafter.bundled_compressor = metadata.compressor
    trained_mode = metadata.facts.get("visual_mode")
    drafter.trained_visual_mode = trained_mode if isinstance(trained_mode, str) else None
    return drafter
