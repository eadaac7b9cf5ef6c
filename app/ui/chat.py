"""A conversation about one picture or clip to what `generate` wants; and seeing the picture once for several runs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmspec.app.captioner import PLAIN_TEMPLATE
from mmspec.app.errors import UsageError
from mmspec.app.images import Shown, pictures

PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class Turn:
    """A question, and what was said to it."""

    question: str
    answer: str


def inputs_of(model: Any, processor: Any, shown: Shown, turns: Sequence[Turn], question: str) -> dict[str, Any]:
    """One prompt: the picture, what was said so far, the new question. On the model's device, in its precision."""
    images = list(pictures(shown))
    if getattr(processor, "chat_template", None):
        made = processor.apply_chat_template(
            [_messages(images, turns, question)],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        token = getattr(processor, "image_token", "<image>")
        made = processor(text=[_text(token, len(images), turns, question)], images=images, return_tensors="pt")
    return {name: _placed(model, value) for name, value in made.items()}


def _messages(images: Sequence[Any], turns: Sequence[Turn], question: str) -> list[dict[str, Any]]:
    """The picture stands in the first turn."""
    messages: list[dict[str, Any]] = []
    for asked, answer in [*((turn.question, turn.answer) for turn in turns), (question, None)]:
        seen = [{"type": "image", "image": image} for image in images] if not messages else []
        messages.append({"role": "user", "content": [*seen, {"type": "text", "text": asked}]})
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


def _text(token: str, images: int, turns: Sequence[Turn], question: str) -> str:
    """The same for a processor without a template."""
    seen, parts = f"{token}\n" * images, list[str]()
    for turn in turns:
        parts.append(PLAIN_TEMPLATE.format(images=seen, prompt=turn.question) + f" {turn.answer}")
        seen = ""
    return " ".join([*parts, PLAIN_TEMPLATE.format(images=seen, prompt=question)])


def _placed(model: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def check_length(model: Any, inputs: dict[str, Any], more: int) -> None:
    """Refuse what is longer than the positions that the model knows.

    Args:
        more: new tokens.

    Raises:
        UsageError: it is.
    """
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = inputs["input_ids"].shape[1]
    if most is not None and length + more > most:
        raise UsageError(
            f"Picture, conversation and question are {length} tokens, and {more} more were asked for; "
            f"this model knows {most} positions."
        )


def encoded(model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """`inputs` with the pictures as the vision tower sees them, and the seconds that took.

    Given to several runs, it spares each of them the tower, and changes none. A model that cannot take such outputs
    gets its inputs as they are, and 0 seconds.
    """
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return inputs, 0.0
    began, seen = time.perf_counter(), dict[str, Any]()
    for kind, pixels in zip(("image", "video"), PIXELS, strict=True):
        see = getattr(model.base_model, f"get_{kind}_features", None)
        if see is None or inputs.get(pixels) is None:
            continue
        taken = {name: inputs[name] for name in inspect.signature(see).parameters if name in inputs}
        with torch.no_grad():
            seen[kind] = see(**taken, return_dict=True)
    synchronize(model)
    seconds = time.perf_counter() - began
    words = {name: value for name, value in inputs.items() if name not in PIXELS}
    return ({**words, "mm_encoder_outputs": seen}, seconds) if seen else (inputs, 0.0)


def synchronize(model: Any) -> None:
    """Wait for what the device still has to do, so that a clock tells the truth."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


__all__ = ["Turn", "check_length", "encoded", "inputs_of", "synchronize"]
