"""Language models without pictures, for the commands that take them too: which models they are."""

from __future__ import annotations

import os

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import read_model_config
from mmspec.app.modeling.random_models import SIZES
from mmspec.hints import looks_like_path


def is_text_model(source: str) -> bool:
    """Whether a model reads no pictures, by its own files. Of a hub id only what is in the local cache is read.

    Raises:
        UsageError: a folder that is not there, or one without a model that generates text.
    """
    if source == SCENES_MODEL or source in SIZES:
        return False
    if source.endswith(".gguf"):
        return True
    is_folder = os.path.isdir(source)
    config = read_model_config(source)
    if (is_folder and not config) or (not is_folder and looks_like_path(source)):
        raise UsageError(f"{source}: no folder with a model (config.json); name one, or a hub id")
    if not config:
        return False
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.get("model_type")
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return False
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"{source}: its type {kind!r} generates no text in transformers; choose another model")
    return True
