"""`Family`: how to build a tiny random model of one model type, and the inputs of its images and videos."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
Media = tuple[Inputs, list[list[int]]]
"""Model inputs of some images or videos, and the token ids that stand for each of them in the prompt."""


class Spec(Protocol):
    """What a builder reads of `tiny_models.ModelSpec`."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    window: int
    mixed: bool
    tied: bool
    attention: str
    seed: int


class Ids(Protocol):
    """What a builder reads of `tiny_models.SpecialIds`."""

    pad: int
    bos: int
    eos: int
    image: int
    video: int
    start: int
    end: int


@dataclass(frozen=True)
class Family:
    """One row of the table of model types.

    Attributes:
        model_type: `config.model_type`.
        build: (spec, special ids) -> model with any weights; `tiny_models` draws them anew. All fields of the spec
            that the architecture has are honoured: above all `vocab`, `hidden`, `layers`, and the special ids.
        images: (model, count, rng, seed) -> inputs of `count` images, and the ids of each; None for text models.
        videos: the same for videos; None where the model has no videos.
        derived: (model, input_ids) -> further inputs that are computed from the prompt, such as token types.
        traits: what the family needs beyond a causal mask and 1-D positions, in words, for the table.
        mixes_media: whether one call may have images and videos.
        has_window: whether `spec.window` and `spec.mixed` change the model.
        needs_image: whether the model rejects a batch without an image.
        dtypes: dtypes that the family's modules support.
        attentions: attention implementations of the text model that the family supports.
        min_transformers: the first release that has the family.
        broken_in: releases in which the forward of the family raises, whether patched or not.
    """

    model_type: str
    build: Callable[[Any, Any], PreTrainedModel]
    images: Callable[[PreTrainedModel, int, random.Random, int], Media] | None = None
    videos: Callable[[PreTrainedModel, int, random.Random, int], Media] | None = None
    derived: Callable[[PreTrainedModel, Tensor], Inputs] = lambda model, input_ids: {}
    traits: str = ""
    mixes_media: bool = True
    has_window: bool = False
    needs_image: bool = False
    dtypes: tuple[str, ...] = ("float32", "float64")
    attentions: tuple[str, ...] = ("sdpa", "eager")
    min_transformers: str = "5.18"
    broken_in: tuple[str, ...] = ()


def text_values(spec: Spec, ids: Ids) -> dict[str, Any]:
    """Config values that nearly every text model has."""
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden // spec.heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": spec.tied,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
    }


def layer_types(spec: Spec) -> list[str]:
    """Attention types of the layers: all full without a window; all sliding, or every second one if `mixed`."""
    slides = [bool(spec.window) and (not spec.mixed or index % 2 == 1) for index in range(spec.layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def noise(shape: tuple[int, ...], seed: int, model: PreTrainedModel) -> Tensor:
    """Random pixels in the dtype of the model."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(model.dtype)
