"""Items of a suite to prompts: with images, and in the text form for peers that read token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmspec.app.modeling.chat import ChatTurn, build_inputs
from mmspec.vision.video.decoder_pool import DecoderPool
from research.bench.peers.base import MEDIA as MEDIA
from research.bench.peers.base import TEXT, PeerPrompt
from research.bench.peers.export import prompt_embeddings
from research.bench.suite.items import SuiteItem, load_item_media

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

History = tuple[ChatTurn, ...]
"""Earlier turns of a conversation."""


@dataclass(frozen=True)
class PromptBuilder:
    """Prompts for one model.

    Attributes:
        model: the unpatched target.
        processor: of a vision-language model, or the tokenizer of a language model.
        decoders: decodes image files.
        with_embeddings: prompts of one row with images carry their embeddings.
    """

    model: PreTrainedModel
    processor: ProcessorMixin | PreTrainedTokenizerBase
    decoders: DecoderPool
    with_embeddings: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the target."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the target."""
        ends = self.model.generation_config.eos_token_id
        return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)

    def build(self, items: Sequence[SuiteItem], histories: Sequence[History], turn: int, form: str) -> PeerPrompt:
        """One prompt, a row per item.

        Args:
            histories: earlier turns of each row.
            turn: index of the question.
            form: `MEDIA`, or `TEXT`: image tokens are removed, and rows continue to the limit, since a description of
                nothing ends after a few words.

        Raises:
            ImageError: an image cannot be read.
        """
        questions = [item.turns[turn] for item in items]
        has_media = any(item.has_media for item in items)
        if not hasattr(self.processor, "image_processor"):
            return PeerPrompt(self._text_inputs(questions, histories), self.eos_ids)
        media = [load_item_media(item, self.decoders) for item in items]
        inputs = build_inputs(self.model, self.processor, media, questions, histories)
        if not has_media:
            return PeerPrompt(inputs, self.eos_ids)
        if form == TEXT:
            return PeerPrompt(self._without_media(inputs), ())
        embeddings = prompt_embeddings(self.model, inputs) if self.with_embeddings and len(items) == 1 else None
        return PeerPrompt(inputs, self.eos_ids, True, embeddings)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _text_inputs(self, questions: Sequence[str], histories: Sequence[History]) -> dict[str, Any]:
        """Inputs of a language model; without a chat template the questions as they are."""
        rows = []
        for question, history in zip(questions, histories, strict=True):
            messages = []
            for one in history:
                messages.append({"role": "user", "content": one.question})
                messages.append({"role": "assistant", "content": one.answer})
            messages.append({"role": "user", "content": question})
            rows.append(messages)
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None):
            options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
            batch = tokenizer.apply_chat_template(rows, tokenize=True, **options)
        else:
            texts = ["\n\n".join(message["content"] for message in row) + "\n\n" for row in rows]
            batch = tokenizer(texts, padding=True, return_tensors="pt")
        return {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}

    def _without_media(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Ids and mask of a prompt of one row without the placeholders of images and videos."""
        config = self.model.config
        names = [f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")]
        media_ids = {getattr(config, name, None) for name in names} - {None}
        ids = [token for token in inputs["input_ids"][0].tolist() if token not in media_ids]
        input_ids = torch.tensor([ids], device=self.model.device)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
