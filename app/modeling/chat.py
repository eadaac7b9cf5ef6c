"""Images or videos, previous turns and a question to the inputs of `generate`, one batch at a time.

Works with and without a chat template (`prompt_format`). Several runs can share one pass of the vision tower
(`encode_media`). Knows nothing of drafting, files or web pages.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import Media, Video, media_images
from mmspec.app.io.text import GENERIC_TOKENS
from mmspec.app.modeling.load import synchronize
from mmspec.app.modeling.picture_size import image_limits, shrink_media
from mmspec.app.modeling.prompt_format import (
    DEFAULT_FORMAT,
    ChatFormat,
    chat_template,
    media_places,
    media_tokens,
    plain_format,
    strip_media_tokens,
    template_variables,
)

PIXELS = ("pixel_values", "pixel_values_videos")
ContentPart = dict[str, Any]
"""A part of a message, as chat templates define it: `{"type": ..., ...}`."""


@dataclass(frozen=True)
class ChatTurn:
    """A question and its answer."""

    question: str
    answer: str


def reject_media_tokens(processor: ProcessorMixin, text: str | None, what: str = "The question") -> None:
    """Refuse a text with a placeholder token of images or videos: the media are inserted before it already.

    Raises:
        UsageError: it contains one.
    """
    for token in (*media_tokens(processor), *GENERIC_TOKENS):
        if token in (text or ""):
            raise UsageError(f"{what} must not contain {token}: the image is inserted before it already")


def accepts_videos(processor: ProcessorMixin) -> bool:
    """Whether the processor and its template take a video as such, not as images."""
    return getattr(processor, "video_processor", None) is not None and "video" in (chat_template(processor) or "video")


def build_inputs(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    media: Sequence[Media],
    questions: Sequence[str],
    turns: Sequence[Sequence[ChatTurn]] = (),
    chat: ChatFormat = DEFAULT_FORMAT,
) -> dict[str, Any]:
    """Keyword arguments of `generate`, one row per question, on the model's device and in its dtype.

    Args:
        processor: of a language model its tokenizer: then there are no media, and no options of `chat`.
        media: at the beginning of each row; pictures larger than `chat.max_pixels` are shrunk.
        questions: one per row. Placeholder tokens of the media at its beginning or end are left out, as many as there
            are media: data sets are written with them. Those within it say where the media stand (`chat.in_place`).
        turns: previous turns of each row; none by default.
        chat: system prompt, variables of the template, size of pictures.

    Raises:
        UsageError: a question contains another placeholder token.
    """
    if hasattr(processor, "convert_ids_to_tokens"):  # a tokenizer
        return _text_inputs(model, processor, questions, turns)
    counts = [1 if isinstance(one, Video) else len(media_images(one)) for one in media]
    places = [media_places(processor, *one, chat.in_place) for one in zip(questions, counts, strict=True)]
    for text in itertools.chain(*places):
        reject_media_tokens(processor, text)
    limits = image_limits(processor, chat.max_pixels)
    if chat.max_pixels is not None:
        media = [shrink_media(one, chat.max_pixels, videos_only=bool(limits)) for one in media]
    as_videos = accepts_videos(processor)
    parts = [_content_parts(one, as_videos) for one in media]
    rows = list(zip(parts, turns or [()] * len(questions), places, strict=True))
    options: dict[str, Any] = {"padding": True} | ({"images_kwargs": limits} if limits else {})
    videos = [one for one in media if isinstance(one, Video)] if as_videos else []
    if videos:  # frames are selected already; some models use their timestamps
        metadata = [one.metadata for one in videos]
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
    if chat_template(processor):
        outputs = processor.apply_chat_template(
            [_messages(*row, chat) for row in rows],
            **_ending(chat),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=options,
            **template_variables(processor, chat),
        )
    else:
        texts = [_text(processor, *row, chat) for row in rows]
        flat = {kind: [part[kind] for row in parts for part in row if kind in part] for kind in ("image", "video")}
        media_inputs = {f"{kind}s": values for kind, values in flat.items() if values}
        outputs = processor(text=texts, return_tensors="pt", **media_inputs, **options)
    return {name: to_model_device(model, name, value) for name, value in outputs.items()}


def _text_inputs(
    model: PreTrainedModel, tokenizer: Any, questions: Sequence[str], turns: Sequence[Sequence[ChatTurn]]
) -> dict[str, Any]:
    """The same of a language model: by the chat template, or the lines alone."""
    has_template = tokenizer.chat_template is not None
    prompts = []
    for question, before in zip(questions, turns or [()] * len(questions), strict=True):
        texts = [*(text for turn in before for text in (turn.question, turn.answer)), question]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        ending: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
        prompts.append(tokenizer.apply_chat_template(messages, **ending) if has_template else "\n".join(texts))
    inputs = tokenizer(prompts, add_special_tokens=not has_template, padding=True, return_tensors="pt")
    return {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}


def takes_several_pictures(processor: ProcessorMixin) -> bool:
    """Whether a prompt with two pictures is longer than with one: other processors refuse the second, or drop it."""

    class Nowhere:
        """Stands for the model, of which only device and dtype are asked."""

        device, dtype = torch.device("cpu"), torch.float32

    picture = Image.new("RGB", (64, 64), "red")
    lengths = []
    for number in (1, 2):
        try:
            inputs = build_inputs(cast(PreTrainedModel, Nowhere), processor, [(picture,) * number], ["What is it?"])
        except Exception:  # processors raise nearly any type
            return False
        lengths.append(int(inputs["input_ids"].shape[1]))
    return lengths[1] > lengths[0]


def _content_parts(media: Media, as_videos: bool) -> list[ContentPart]:
    """The parts of a message: images, or one video if the processor takes videos."""
    if as_videos and isinstance(media, Video):
        return [{"type": "video", "video": media.array()}]
    return [{"type": "image", "image": image} for image in media_images(media)]


def _between(parts: Sequence[ContentPart], texts: Sequence[str]) -> list[ContentPart]:
    """Texts with the media between them: those of one placeholder are one picture, or all frames of a clip."""
    groups = [[part] for part in parts] if len(parts) == len(texts) - 1 else [list(parts)]
    found: list[ContentPart] = []
    for text, group in zip(texts, [*groups, []], strict=True):
        found += [{"type": "text", "text": text.strip()}] if text.strip() else []
        found += group
    return found


def _ending(chat: ChatFormat) -> dict[str, bool]:
    """What `apply_chat_template` puts at the end: what an answer follows, or nothing after one that has begun."""
    return {"add_generation_prompt": chat.start is None, "continue_final_message": chat.start is not None}


def _messages(
    parts: Sequence[ContentPart], turns: Sequence[ChatTurn], places: Sequence[str], chat: ChatFormat
) -> list[dict[str, Any]]:
    """The messages of a conversation; the media are in the first one of the user.

    Args:
        places: the question, or its parts between the media.
    """

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    messages: list[dict[str, Any]] = []
    if len(places) > 1:
        messages.append({"role": "user", "content": _between(parts, places)})
    else:
        for turn in turns:
            messages += [message("user", turn.question), message("assistant", turn.answer)]
        messages.append(message("user", places[0]))
        messages[0]["content"] = [*parts, *messages[0]["content"]]
    system = [] if chat.system_prompt is None else [message("system", chat.system_prompt)]
    return [*system, *messages, *([] if chat.start is None else [message("assistant", chat.start)])]


def _text(
    processor: ProcessorMixin,
    parts: Sequence[ContentPart],
    turns: Sequence[ChatTurn],
    places: Sequence[str],
    chat: ChatFormat,
) -> str:
    """The same for a processor without a template."""

    def placeholder(part: ContentPart) -> str:
        return str(getattr(processor, f"{part['type']}_token", f"<{part['type']}>"))

    plain = plain_format(processor)
    if len(places) > 1:
        words = (part["text"] if part["type"] == "text" else placeholder(part) for part in _between(parts, places))
        texts = [plain.turn.format(images="", prompt=" ".join(words))]
    else:
        first = "".join(placeholder(part) + plain.after_image for part in parts)
        asked = [*(turn.question for turn in turns), places[0]]
        texts = [plain.turn.format(images="" if number else first, prompt=text) for number, text in enumerate(asked)]
        texts = [f"{text} {turn.answer}" for text, turn in zip(texts, turns, strict=False)] + texts[-1:]
    text = "".join((f"{chat.system_prompt} " if chat.system_prompt is not None else "", " ".join(texts)))
    if chat.start is None:
        return text
    return f"{text.rstrip(' ')} {chat.start}" if text == text.rstrip("\n") else text + chat.start


def check_chat(processor: ProcessorMixin, name: str, prompt: str | None, chat: ChatFormat) -> None:
    """Refuse a prompt or options that the processor cannot render, before the weights are read.

    Args:
        name: of the model, for messages.
        prompt: of the job; None if every row has its own.

    Raises:
        UsageError: a placeholder in the prompt, variables that the template does not have, a system prompt or start
            that it refuses or leaves out.
    """
    reject_media_tokens(processor, strip_media_tokens(processor, prompt or ""), "--prompt")
    template_variables(processor, chat, name)
    for flag, given in (("--system-prompt", chat.system_prompt), ("--start", chat.start)):
        if given is None:
            continue
        reject_media_tokens(processor, given, flag)
        if chat_template(processor) is None:
            if not plain_format(processor).takes_system_prompt:
                raise UsageError(f"{flag}: {name} takes names of tasks as prompts, nothing else: leave it out")
            continue
        one = replace(chat, start=None) if flag == "--system-prompt" else replace(chat, system_prompt=None)
        try:
            text = processor.apply_chat_template(
                _messages([{"type": "image"}], (), ["?"], one),
                tokenize=False,
                **_ending(one),
                **template_variables(processor, one),
            )
        except Exception as error:  # jinja2's, and what the template raises itself
            if "does not appear" in str(error):  # transformers, of the message that goes on
                what, advice = "drops or changes it", "give it as the end of --prompt"
            else:
                what, advice = f"refuses it ({one_line(error, 120)})", "leave it out"
            raise UsageError(f"{flag}: the chat template of {name} {what}: {advice}") from error
        if flag == "--system-prompt" and given.strip() not in text:
            raise UsageError(f"{flag}: the chat template of {name} leaves it out: put it at the beginning of --prompt")
        if flag == "--start" and not text.endswith(given):
            advice = "without the space at its end" if text.endswith(given.rstrip()) else "as the end of --prompt"
            raise UsageError(f"{flag}: the chat template of {name} does not end with it: give it {advice}")


def to_model_device(model: PreTrainedModel, name: str, value: Any) -> Any:
    """An output of a processor on the model's device; pixels in its dtype."""
    if not isinstance(value, torch.Tensor):
        return value
    pixels = name.startswith("pixel_values")  # timestamps stay float32: position ids are computed from them
    return value.to(model.device, model.dtype if pixels else None)


def max_positions(model: PreTrainedModel) -> int | None:
    """Positions of the language model; None if it states none."""
    found: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found


def find_too_long(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[int, str]:
    """Rows whose prompt leaves no position for an answer -> why: a model says nothing beyond its positions."""
    limit, shape = max_positions(model), inputs["input_ids"].shape
    if limit is None or shape[1] < limit:
        return {}
    lengths = inputs["attention_mask"].sum(1).tolist() if "attention_mask" in inputs else [shape[1]] * shape[0]
    return {
        row: f"image and prompt have {length} tokens, the model {limit} positions: shorten the prompt"
        for row, length in enumerate(lengths)
        if length >= limit
    }


def check_length(model: PreTrainedModel, inputs: dict[str, Any], max_new_tokens: int) -> None:
    """Refuse inputs that exceed the model's positions with `max_new_tokens` more.

    Raises:
        UsageError: they do.
    """
    limit = max_positions(model)
    length = inputs["input_ids"].shape[1]
    if limit is not None and length + max_new_tokens > limit:
        raise UsageError(
            f"Image, conversation and question have {length} tokens, plus {max_new_tokens} new ones; "
            f"the model has {limit} positions: shorten them or lower the number of new tokens"
        )


def encode_media(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """`inputs` with the output of the vision tower instead of pixels, and its seconds.

    Several runs can use the result and skip the tower; their outputs do not change. For a model without
    `mm_encoder_outputs`: `inputs` unchanged, and 0 seconds.
    """
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return inputs, 0.0
    start = time.perf_counter()
    features: dict[str, Any] = {}
    for kind, pixels in zip(("image", "video"), PIXELS, strict=True):
        get_features = getattr(model.base_model, f"get_{kind}_features", None)
        if get_features is None or inputs.get(pixels) is None:
            continue
        arguments = {name: inputs[name] for name in inspect.signature(get_features).parameters if name in inputs}
        with torch.no_grad():
            features[kind] = get_features(**arguments, return_dict=True)
    synchronize(model.device)
    seconds = time.perf_counter() - start
    text_inputs = {name: value for name, value in inputs.items() if name not in PIXELS}
    return ({**text_inputs, "mm_encoder_outputs": features}, seconds) if features else (inputs, 0.0)
