"""Pictures or clips, what was said about them and a new question, to what `generate` wants: a batch at a time.

Knows processors with a chat template and without one. Also lets several runs share one look at the pictures. Knows
nothing of drafting, of files or of pages.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.app.errors import UsageError
from mmspec.app.io.images import Media, Video, media_images
from mmspec.app.modeling.load import synchronize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN_TEMPLATE = "USER: {images}{prompt} ASSISTANT:"
"""For processors without a chat template: what LLaVA-1.5 was trained on."""
PIXELS = ("pixel_values", "pixel_values_videos")
ContentPart = dict[str, Any]
"""A part of a message, in the words of chat templates."""


@dataclass(frozen=True)
class Turn:
    """A question, and what was said to it."""

    question: str
    answer: str


def reject_media_tokens(processor: Any, text: str | None, what: str = "The question") -> None:
    """Refuse a text with a word that stands for a picture: the picture is put before it already.

    Raises:
        UsageError: it has one.
    """
    for token in (getattr(processor, name, None) for name in ("image_token", "video_token")):
        if token and token in (text or ""):
            raise UsageError(f"{what} must not contain {token}: the picture is put before it already")


def accepts_videos(processor: Any) -> bool:
    """Whether a video is one thing to the processor, and to its template, and not so many pictures."""
    template = getattr(processor, "chat_template", None)
    return getattr(processor, "video_processor", None) is not None and "video" in str(template or "video")


def build_inputs(
    model: PreTrainedModel,
    processor: Any,
    shown: Sequence[Media],
    questions: Sequence[str],
    turns: Sequence[Sequence[Turn]] = (),
) -> dict[str, Any]:
    """What `generate` wants for one row per question, on the model's device and in its precision.

    Args:
        shown: what stands at the beginning of each row. turns: what was said in each row before; by default nothing.

    Raises:
        UsageError: a question contains a word that stands for a picture.
    """
    for question in questions:
        reject_media_tokens(processor, question)
    videos = accepts_videos(processor)
    seen = [_entries(one, videos) for one in shown]
    rows = list(zip(seen, turns or [()] * len(questions), questions, strict=True))
    options: dict[str, Any] = {"padding": True}
    clips = [one for one in shown if isinstance(one, Video)] if videos else []
    if clips:  # their frames are chosen already, and some models want to know when these were seen
        metadata = [one.metadata for one in clips]
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
    if getattr(processor, "chat_template", None):
        made = processor.apply_chat_template(
            [_messages(*row) for row in rows],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=options,
        )
    else:
        texts = [_text(processor, *row) for row in rows]
        flat = {kind: [e[kind] for entries in seen for e in entries if kind in e] for kind in ("image", "video")}
        media = {f"{kind}s": values for kind, values in flat.items() if values}
        made = processor(text=texts, return_tensors="pt", **media, **options)
    return {name: to_model_device(model, name, value) for name, value in made.items()}


def _entries(shown: Media, videos: bool) -> list[ContentPart]:
    """What a message holds of it: pictures, or one video if videos are taken."""
    if videos and isinstance(shown, Video):
        return [{"type": "video", "video": shown.array()}]
    return [{"type": "image", "image": image} for image in media_images(shown)]


def _messages(entries: Sequence[ContentPart], turns: Sequence[Turn], question: str) -> list[dict[str, Any]]:
    """What is shown stands in the first message."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
    messages[0]["content"] = [*entries, *messages[0]["content"]]
    return messages


def _text(processor: Any, entries: Sequence[ContentPart], turns: Sequence[Turn], question: str) -> str:
    """The same for a processor without a template."""
    kinds = [entry["type"] for entry in entries]
    seen, parts = "".join(getattr(processor, f"{kind}_token", f"<{kind}>") + "\n" for kind in kinds), list[str]()
    for turn in turns:
        parts.append(PLAIN_TEMPLATE.format(images=seen, prompt=turn.question) + f" {turn.answer}")
        seen = ""
    return " ".join([*parts, PLAIN_TEMPLATE.format(images=seen, prompt=question)])


def to_model_device(model: PreTrainedModel, name: str, value: Any) -> Any:
    """An entry of what a processor made, on the model's device; pixels in its precision."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    pixels = name.startswith("pixel_values")  # seconds stay precise: positions are reckoned from them
    return value.to(model.device, model.dtype if pixels else None)


def check_length(model: PreTrainedModel, inputs: dict[str, Any], max_new_tokens: int) -> None:
    """Refuse what is longer than the positions that the model knows.

    Args:
        more: new tokens.

    Raises:
        UsageError: it is.
    """
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = inputs["input_ids"].shape[1]
    if most is not None and length + max_new_tokens > most:
        raise UsageError(
            f"Picture, conversation and question are {length} tokens, and {max_new_tokens} more were asked for; "
            f"this model knows {most} positions."
        )


def encode_media(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """`inputs` with the pictures as the vision tower sees them, and the seconds that took.

    Given to several runs, it spares each of them the tower, and changes none. A model that cannot take such outputs
    gets its inputs as they are, and 0 seconds.
    """
    import torch

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
    synchronize(model.device)
    seconds = time.perf_counter() - began
    words = {name: value for name, value in inputs.items() if name not in PIXELS}
    return ({**words, "mm_encoder_outputs": seen}, seconds) if seen else (inputs, 0.0)


__all__ = [
    "PLAIN_TEMPLATE",
    "Turn",
    "accepts_videos",
    "build_inputs",
    "check_length",
    "encode_media",
    "reject_media_tokens",
    "to_model_device",
]
