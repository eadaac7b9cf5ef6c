"""A processor for the tiny models of `zoo`: the pixels of an image are noise that the image seeds.

Its text is letters, its images have the layout that the family's own processor gives them. So `mmspec train` and other
commands run on a model of any family, without the family's processor, of which most need torchvision.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import Any

import tiny_models as tiny
import torch
import zoo
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

IMAGE = "<image>"


class TinyProcessor:
    """What `mmspec.app.modeling.chat.build_inputs` needs of a processor without a chat template."""

    image_token = IMAGE

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.family = zoo.ROWS[model.tiny_spec.family]
        self.tokenizer = tiny.build_tokenizer(model.tiny_spec)

    def __call__(self, text: Sequence[str], images: Sequence[Image] = (), **options: Any) -> tiny.Inputs:
        """Model inputs of texts with an image token per image, padded on the left."""
        media = [self._image_inputs(image) for image in images]
        runs = iter([run for _, run in media])
        rows = [self._row(one, runs) for one in text]
        length = max(map(len, rows))
        pad = tiny.special_ids(self.model.tiny_spec).pad
        input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        names = media[0][0] if media else ()
        pixels = {name: concatenate([inputs[name] for inputs, _ in media], _padding(name)) for name in names}
        derived = self.family.derived(self.model, input_ids)
        return {"input_ids": input_ids, "attention_mask": mask, **pixels, **derived}

    def _image_inputs(self, image: Image) -> tuple[tiny.Inputs, list[int]]:
        """Inputs of one image, and the tokens that stand for it."""
        assert self.family.images is not None
        seed = zlib.crc32(image.convert("RGB").tobytes())
        inputs, runs = self.family.images(self.model, 1, random.Random(seed), seed)
        return inputs, runs[0]

    def _row(self, text: str, runs: Any) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({IMAGE})", text):
            ids += next(runs) if part == IMAGE else self.tokenizer(part.lower()).input_ids
        return ids


def _padding(name: str) -> int:
    """What pads an input: -1 marks patches that do not exist."""
    return -1 if name.endswith("position_ids") else 0


def concatenate(parts: Sequence[Tensor], padding: int = 0) -> Tensor:
    """Tensors one after another; all other dimensions are padded to the largest."""
    sizes = [max(part.shape[axis] for part in parts) for axis in range(parts[0].dim())]
    padded = []
    for part in parts:
        gaps = [size - own for size, own in zip(sizes[1:], part.shape[1:], strict=True)]
        padded.append(functional.pad(part, [value for gap in reversed(gaps) for value in (0, gap)], value=padding))
    return torch.cat(padded)
