"""How a prompt is put before a model: its chat template and the template's variables, or its family's plain format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmspec.app.errors import UsageError
from mmspec.app.io.text import GENERIC_TOKENS

if TYPE_CHECKING:
    from transformers import ProcessorMixin

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of chat templates that let a model think before it answers; off unless they are set."""
_RESERVED = """conversation messages chat_template tools documents add_generation_prompt continue_final_message tokenize
return_assistant_tokens_mask return_tensors return_dict load_audio_from_video processor_kwargs sanitize_control_tokens
padding images videos audio text"""
RESERVED = frozenset(_RESERVED.split())
"""Names that a call of `apply_chat_template` sets itself."""


@dataclass(frozen=True)
class ChatFormat:
    """Options of a prompt besides its text.

    Attributes:
        system_prompt: None for that of the template.
        template_kwargs: variables of the chat template.
        max_pixels: pictures and frames with more are shrunk; None: as the processor does without it.
        in_place: placeholders within a question, one for each of its media, say where these stand.
        start: how the answer begins, as part of the prompt; None: the model begins it.
    """

    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_pixels: int | None = None
    in_place: bool = False
    start: str | None = None


DEFAULT_FORMAT = ChatFormat()


@dataclass(frozen=True)
class PlainFormat:
    """The format of a family without a chat template.

    Attributes:
        turn: of a question; `{images}` are its placeholders.
        after_image: follows each placeholder.
        prompt: of a picture without one; None for that of the command.
        takes_system_prompt: whether a text may stand before everything.
    """

    turn: str
    after_image: str = ""
    prompt: str | None = None
    takes_system_prompt: bool = True


LLAVA_FORMAT = PlainFormat("USER: {images}{prompt} ASSISTANT:", "\n")
PLAIN_FORMATS = {
    "paligemma": PlainFormat("{images}{prompt}", prompt="caption en", takes_system_prompt=False),
    "blip": PlainFormat("{images}{prompt}"),
    "blip2": PlainFormat("{images}Question: {prompt} Answer:"),
    "instructblip": PlainFormat("{images}{prompt}"),
    "kosmos2": PlainFormat("{images}<grounding>{prompt}"),
    "fuyu": PlainFormat("{images}{prompt}\n"),
}
"""Model type without dashes -> its format. Others get LLaVA-1.5's."""


def plain_format(processor: ProcessorMixin) -> PlainFormat:
    """The format of a processor without a chat template; its class is named after the model type."""
    family = type(processor).__name__.removesuffix("Processor").lower()
    return PLAIN_FORMATS.get(family, LLAVA_FORMAT)


def describe_prompt_format(processor: ProcessorMixin) -> str | None:
    """A line about a processor without a chat template whose family's format is not known; else None."""
    is_llava = "llava" in type(processor).__name__.lower()
    if chat_template(processor) is not None or is_llava or plain_format(processor) is not LLAVA_FORMAT:
        return None
    return f"the model has no chat template: prompts have the format of LLaVA-1.5, {LLAVA_FORMAT.turn!r}"


def task_prompt(model_type: str | None) -> str | None:
    """The prompt that a family takes for captions in place of a sentence, or None: PaliGemma's tasks have names."""
    plain = PLAIN_FORMATS.get((model_type or "").replace("-", "").replace("_", ""))
    return plain.prompt if plain is not None else None


def chat_template(processor: ProcessorMixin) -> str | None:
    """The template of a processor, of several the default one; None if it has none."""
    template = getattr(processor, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default") or next(iter(template.values()), None)
    return str(template) if template else None


def media_tokens(processor: ProcessorMixin) -> list[str]:
    """The placeholder tokens of a processor."""
    tokens = (getattr(processor, name, None) for name in ("image_token", "video_token"))
    return [token for token in tokens if token]


def strip_media_tokens(processor: ProcessorMixin, text: str, num_media: int = 1) -> str:
    """A prompt without the placeholders at its beginning, or on a line of their own at its end; at most `num_media`.

    Prompts of data sets are written with them, as in "<image>\\nDescribe it.".
    """
    tokens = dict.fromkeys((*media_tokens(processor), *GENERIC_TOKENS))
    for _ in range(num_media):
        bare = text.strip()
        first = next((token for token in tokens if bare.startswith(token)), None)
        last = next((token for token in tokens if bare.endswith(f"\n{token}")), None)
        if first is None and last is None:
            break
        text = (bare.removeprefix(first) if first else bare.removesuffix(last or "")).strip()
    return text


def media_places(processor: ProcessorMixin, text: str, num_media: int, in_place: bool) -> list[str]:
    """A prompt without placeholders; with `in_place`, if some stand between its words, its parts before and after each.

    Raises:
        UsageError: there are not as many of these as media.
    """
    bare = strip_media_tokens(processor, text, num_media)
    pattern = "|".join(map(re.escape, dict.fromkeys((*media_tokens(processor), *GENERIC_TOKENS))))
    if not in_place or not re.search(pattern, bare):
        return [bare]
    found = re.split(pattern, text)
    if len(found) != num_media + 1:
        raise UsageError(
            f"the prompt has {len(found) - 1} placeholders and the row {num_media} pictures or clips: give one for each"
        )
    return found


def template_variables(processor: ProcessorMixin, chat: ChatFormat, name: str = "the model") -> dict[str, Any]:
    """The variables that the chat template is rendered with: those given, and no thinking where it can be chosen.

    Args:
        name: of the model, for messages.

    Raises:
        UsageError: a variable that the template does not have.
    """
    template = chat_template(processor)
    if template is None:
        if chat.template_kwargs:
            raise UsageError(f"--chat-template-kwargs: {name} has no chat template: leave it out")
        return {}
    for variable in chat.template_kwargs:
        if not _knows(template, variable):
            known = " and ".join(one for one in THINKING_VARIABLES if _knows(template, one))
            raise UsageError(
                f"--chat-template-kwargs: the chat template of {name} has no variable {variable!r:.40}"
                + (f"; it has {known}" if known else ": leave it out")
            )
    thinking = {variable: False for variable in THINKING_VARIABLES if _knows(template, variable)}
    return thinking | dict(chat.template_kwargs)


def _knows(template: str, variable: str) -> bool:
    """Whether a template's expressions and statements use a variable."""
    blocks = re.findall(r"{[{%].*?[%}]}", template, re.DOTALL)
    return any(re.search(rf"(?<![\w.'\"]){re.escape(variable)}(?![\w'\"])", block) for block in blocks)
