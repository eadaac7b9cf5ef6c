"""`Family`: how to build a tiny random model of one model type, and the inputs of its images and videos."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
Media = tuple[Inputs, list[list[int]]]
"""Model inputs of some images or videos, and the token ids that stand for each of them in the prompt."""
Builder = Callable[[Any, Any], PreTrainedModel]
MediaBuilder = Callable[[PreTrainedModel, int, random.Random, int], Media]
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DOUBLE: dict[str, Any] = {"dtypes": ("float32",)}
"""Of models with experts, which have no kernel for float64, and of those that have eager attention only, where padded
rows give nan in float64."""
VIDEO_START, VIDEO_END = "bos", "eos"
"""Special ids that enclose a video where its frames are enclosed by `start` and `end`, as images are."""
TOKENS = {
    "image": ("image_token_id", "image_token_index", "image_patch_id"),
    "video": ("video_token_id", "video_token_index"),
    VIDEO_START: ("video_start_token_id",),
    VIDEO_END: ("video_end_token_id",),
    **{
        side: (
            *(f"vision_{side}_token_id", f"im_{side}_id", f"image_{side}_id", f"image_{side}_token_id"),
            *(f"{short}_token_id", f"{short}_token_index"),
        )
        for side, short in (("start", "boi"), ("end", "eoi"))
    },
}
"""{special id: its names in configs}."""


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
    build: Builder
    images: MediaBuilder | None = None
    videos: MediaBuilder | None = None
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


def vision_model(
    spec: Spec, ids: Ids, name: str, text: Any, vision: Any, model_name: str = "", attention: Any = None, **more: Any
) -> PreTrainedModel:
    """`<model_name>ForConditionalGeneration` with `<name>Config` and those token ids that it has."""
    config = getattr(transformers, f"{name}Config")
    tokens = {key: getattr(ids, special) for special, keys in TOKENS.items() for key in keys}
    values = {**tokens, "tie_word_embeddings": spec.tied, "text_config": text, "vision_config": vision}
    values = {key: value for key, value in values.items() if hasattr(config, key)} | more
    model = getattr(transformers, f"{model_name or name}ForConditionalGeneration")
    built: PreTrainedModel = model._from_config(config(**values), attn_implementation=attention or spec.attention)
    return built


def builder(name: str, text: Any, vision: Any, **more: Any) -> Builder:
    """A builder of `vision_model(name, text, vision, **more)`, where values may be functions of the spec."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        given = {"text": text, "vision": vision, **more}
        values = {key: value(spec) if callable(value) else copy.deepcopy(value) for key, value in given.items()}
        return vision_model(spec, ids, name, text_values(spec, ids) | values.pop("text"), **values)

    return build


def special_id(model: PreTrainedModel, special: str) -> int:
    """The id that stands for an image or a video, or encloses one, in the model's config."""
    config: Any = model.config
    return next(int(getattr(config, key)) for key in TOKENS[special] if hasattr(config, key))


def run_of(model: PreTrainedModel, size: int, media: str = "image", enclosed: bool = False) -> list[int]:
    """`size` placeholders, within the ids that enclose an image or not."""
    run = [special_id(model, media)] * size
    return [special_id(model, "start"), *run, special_id(model, "end")] if enclosed else run


def square_images(pixels: int, tokens: int, enclosed: bool = False) -> MediaBuilder:
    """Images of `pixels`² pixels and so many tokens."""

    def images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
        given = {"pixel_values": noise((count, 3, pixels, pixels), seed, model)}
        return given, [run_of(model, tokens, enclosed=enclosed)] * count

    return images
