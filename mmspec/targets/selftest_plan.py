"""Trees and prompts of the self-test: text rows of different length, or one row with a small image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.base import ModelAdapter

MAX_IDS = 256
"""About so many ids of a large vocabulary are used."""
IMAGE_SIZE = 32
"""Edge of the test image, in pixels."""


@dataclass(frozen=True)
class Plan:
    """The trees of a self-test. Nodes are indices of the tokens of a row.

    Attributes:
        parents: parent of each node of the first tree.
        paths: paths from its root, which transformers decodes.
        accepted: path that each row accepts after the first tree, so that rows differ in length and nodes move.
        following: chain that each row scores then: what follows the accepted path on one of `paths`.
        prompt_lengths: text tokens of each row's prompt; shorter rows are left-padded.
    """

    parents: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    accepted: tuple[tuple[int, ...], ...]
    following: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Logits of a path: of the prompt, and of each of its nodes."""
        return 1 + max(map(len, self.paths))

    @property
    def num_tokens(self) -> int:
        """Tokens of a row."""
        return 1 + max(map(max, self.paths))


TREE = Plan(
    (-1, 0, 1, 2, 0, 4, 1, 6), ((0, 1, 2, 3), (0, 4, 5), (0, 1, 6, 7)), ((0, 1, 6), (0, 4)), ((7,), (5,)), (6, 4)
)
"""Of models that score trees."""
CHAIN = Plan((-1, 0, 1, 2), ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6, 7)), ((0, 1), (0,)), ((4, 5), (6, 7)), (6, 4))
"""Of models with recurrent layers, of whose states each row keeps another part."""


def plan_of(adapter: ModelAdapter) -> Plan:
    """The trees for models like this one."""
    return CHAIN if adapter.is_recurrent else TREE


def text_inputs(adapter: ModelAdapter, prompt_lengths: Sequence[int]) -> dict[str, Tensor]:
    """Rows of text tokens of these lengths, left-padded, the same in every run."""
    device = input_device(adapter)
    lengths = torch.tensor(prompt_lengths, device=device)
    usable = torch.tensor(usable_ids(adapter), device=device)
    index = torch.arange(len(lengths) * int(lengths.max()), device=device) * 31 % len(usable)
    input_ids = usable[index].view(len(lengths), -1)
    mask = torch.arange(input_ids.shape[1], device=device) >= input_ids.shape[1] - lengths[:, None]
    return {"input_ids": input_ids, "attention_mask": mask.long()}


def image_inputs(adapter: ModelAdapter, processor: Any) -> dict[str, Any] | None:
    """A prompt with one small image, as the processor builds it; None where that fails or no placeholder results."""
    from PIL import Image

    pixels = torch.randint(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(pixels.to(torch.uint8).numpy())
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the image?"}]
    try:
        if getattr(processor, "chat_template", None):
            messages = [{"role": "user", "content": content}]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
            batch = processor.apply_chat_template(messages, **options)
        else:
            text = f"{getattr(processor, 'image_token', '<image>')} What is in the image?"
            batch = processor(images=image, text=text, return_tensors="pt")
        batch = batch.to(input_device(adapter), dtype=adapter.model.dtype)
    except Exception:  # processors differ widely; without an image the test still has its text rows
        return None
    return dict(batch) if has_media(adapter, batch["input_ids"]) else None


def usable_ids(adapter: ModelAdapter) -> list[int]:
    """Some ids that are no placeholders and have a finite embedding (rows of a padded vocabulary may be anything)."""
    media = set(adapter.media_token_ids)
    size = min(adapter.num_embeddings, adapter.vocab_size)
    ids = [token for token in range(0, size, max(1, size // MAX_IDS)) if token not in media]
    weight = adapter.model.get_input_embeddings().weight
    if weight.is_meta or not weight.is_floating_point():
        return ids
    is_finite = weight.detach()[torch.tensor(ids, device=weight.device)].isfinite().all(-1)
    return [token for token, finite in zip(ids, is_finite.tolist(), strict=True) if finite]


def input_device(adapter: ModelAdapter) -> torch.device:
    """Device of the test's inputs."""
    device = adapter.model.device
    return torch.device("cpu") if device.type == "meta" else device


def has_media(adapter: ModelAdapter, input_ids: Tensor) -> bool:
    """Whether a prompt has placeholders of images or videos."""
    media = torch.tensor(adapter.media_token_ids, device=input_ids.device)
    return bool(torch.isin(input_ids, media).any())
