"""Pictures that are prepared once for several prompts: the inputs are those of a processor that is asked alone."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from mmspec.app.io.images import Video
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.prompt_format import ChatFormat
from mmspec.app.modeling.random_models import random_model
from mmspec.app.modeling.shared_media import SharedMedia, equal_arguments
from research.synthetic_images import draw_image

QUESTIONS = ("What is it?", "How many things are there, and of which colours?", "Why?")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(equal_arguments(one[name], other[name]) for name in one)


def build(shared: SharedMedia | None, media: Any, question: str, max_pixels: int | None = None) -> dict[str, Any]:
    model, processor = random_model("tiny")
    chat = ChatFormat(max_pixels=max_pixels)
    if shared is None:
        return build_inputs(model, processor, media, [question] * len(media), chat=chat)
    with shared.attached(processor):
        found = build_inputs(model, processor, media, [question] * len(media), chat=chat)
    assert "preprocess" not in vars(processor.image_processor)
    return found


@pytest.mark.parametrize("max_pixels", [None, 2000])
def test_inputs_are_those_of_a_processor_alone(max_pixels: int | None) -> None:
    """Pictures alone, several in a row, other pictures, the frames of a clip, and the first pictures again."""
    one, two, three = (draw_image(number)[0] for number in range(3))
    clip = Video((one, two), {})
    shared = SharedMedia()
    for media in ([one, two], [(one, two), three], [three, one], [clip, clip], [one, two]):
        for question in QUESTIONS:
            assert same(build(shared, media, question, max_pixels), build(None, media, question, max_pixels))


class TextMatters:
    """A processor whose image processor is given the text, or another size for more pictures."""

    def __init__(self) -> None:
        self.image_processor, self.calls = self, 0

    def preprocess(self, images: Any, text: str = "", num_tiles: int = 1) -> dict[str, Any]:
        self.calls += 1
        return {"pixel_values": torch.full((len(images), num_tiles), float(len(text))), "sizes": [len(text)]}


def test_what_the_text_changes_is_computed_again() -> None:
    processor, shared, image = TextMatters(), SharedMedia(), np.zeros((4, 4, 3), np.uint8)
    calls: list[tuple[Any, dict[str, Any], int]] = [
        ([image], {"text": "a"}, 1),
        ([image.copy()], {"text": "a"}, 1),
        ([image], {"text": "bcd"}, 2),
        ([image, image], {"num_tiles": 2}, 3),
        ([image, image], {"num_tiles": 1}, 4),
        ([image, image + 1], {"num_tiles": 1}, 5),
    ]
    for images, options, count in calls:
        with shared.attached(processor):
            found = processor.image_processor.preprocess(images, **options)
        assert processor.calls == count
        assert same(found, TextMatters().preprocess(images, **options))
        found.pop("pixel_values")  # as processors do; the next call has it again
        found["sizes"].append(9)


def test_an_image_processor_that_fails_leaves_nothing_behind() -> None:
    class Refuses(TextMatters):
        def preprocess(self, images: Any, text: str = "", num_tiles: int = 1) -> dict[str, Any]:
            super().preprocess(images)
            raise ValueError("no")

    processor, shared = Refuses(), SharedMedia()
    for count in (1, 2):
        with pytest.raises(ValueError, match="no"), shared.attached(processor):
            processor.image_processor.preprocess([1])
        assert processor.calls == count and "preprocess" not in vars(processor)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, (2, "a")], [1, (2, "a")], True),
        ([1, 2], (1, 2), False),
        ({"a": np.ones(2)}, {"a": np.ones(2)}, True),
        ({"a": 1}, {"b": 1}, False),
        (np.ones(2), np.ones(2, np.float32), False),
        (torch.ones(2), torch.ones(3), False),
        (Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2)), True),
        (Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2), "red"), False),
        (1, True, False),
    ],
)
def test_equal_arguments(one: Any, other: Any, expected: bool) -> None:
    assert equal_arguments(one, other) is expected


def test_image_processors_are_called_by_their_processors() -> None:
    """All that transformers has are called, or have their `preprocess` called, so that the step is found."""
    call = transformers.image_processing_utils.BaseImageProcessor.__call__
    assert "self.preprocess(" in inspect.getsource(call)
