"""Images or videos and prompts to captions with a patched model, one batch at a time; optionally by plain generate too.

Knows models and processors. Knows nothing of files, resuming or progress.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

import mmspec
from mmspec.app.io.images import Media
from mmspec.app.modeling.chat import build_inputs, find_too_long
from mmspec.app.modeling.load import model_revision, synchronize
from mmspec.app.modeling.picture_size import count_visual_tokens
from mmspec.app.modeling.prompt_format import DEFAULT_FORMAT, ChatFormat, describe_prompt_format
from mmspec.app.modeling.sampling import GREEDY, Sampling
from mmspec.app.modeling.thinking import opens_thoughts, without_thoughts
from mmspec.patching import patch_state

CUT_WHILE_THINKING = "thinking"
"""`Caption.finish_reason` of an output that ended within the model's thoughts: it holds no caption."""
PROMPT_END = 16
"""Tokens of a prompt that show whether it lets the model think."""


class PromptTooLongError(Exception):
    """Rows of a batch have more tokens than the model has positions.

    Attributes:
        rows: index of each such row -> why.
    """

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__("; ".join(rows.values()))
        self.rows = rows


@dataclass(frozen=True)
class Caption:
    """One caption. The fields are columns of the output.

    Attributes:
        n_rounds: forward passes of the row after its prompt.
        tau: new tokens after the first, per round.
        ttft_s: seconds from the start of the batch to its first tokens.
        seconds: of the batch, divided by its rows.
        finish_reason: "eos", "length", "stop" or `CUT_WHILE_THINKING`; in rows also "loop".
        identical: whether plain `generate` gives the same tokens; None if not compared.
        plain: the text of plain `generate`; None if not compared.
    """

    caption: str
    n_prompt_tokens: int
    n_new_tokens: int
    n_rounds: int
    tau: float
    ttft_s: float | None
    seconds: float
    finish_reason: str
    identical: bool | None = None
    plain: str | None = None


@dataclass(frozen=True)
class Provenance:
    """What generated a caption. The fields but the last are columns of the output, that one is part of `gen`.

    Attributes:
        model_revision: the commit on the hub, or None.
        drafter: the name of the drafter in use.
        sampling: settings in effect.
    """

    model_revision: str | None = None
    drafter: str = "none"
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ComparisonTotals:
    """Totals of the comparison with plain `generate`.

    Attributes:
        rows: compared rows.
        identical: rows with identical tokens.
        first_difference: where the first difference is, as text.
        plain_s: seconds of plain `generate`, without the first batch where that warms up.
        patched_s: seconds with mmspec, likewise.
        is_warm: the model has generated before, so that the first batch counts too.
    """

    rows: int = 0
    identical: int = 0
    first_difference: str | None = None
    plain_s: float = 0.0
    patched_s: float = 0.0
    is_warm: bool = False


@dataclass
class Captioner:
    """A patched model with its processor and generation settings.

    Attributes:
        grammar: of xgrammar, which all answers follow; None for free text.
        hide_start: what answers are made to begin with (`chat.start`) is no part of captions.
    """

    model: PreTrainedModel
    processor: ProcessorMixin
    max_new_tokens: int = 128
    sampling: Sampling = GREEDY
    stop: Sequence[str] = ()
    chat: ChatFormat = DEFAULT_FORMAT
    comparison: ComparisonTotals = field(default_factory=ComparisonTotals)
    hide_start: bool = False
    grammar: Any = None
    _prompt_end: Sequence[int] = ()

    @property
    def tokenizer(self) -> Any:
        """Of the processor, or the processor itself of a language model."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def dtype(self) -> str:
        """Precision of the weights, as in "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def eos_ids(self) -> list[int]:
        """End-of-sequence ids; empty if the model has none."""
        ends = self.model.generation_config.eos_token_id
        return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]

    @property
    def acceptance(self) -> float | None:
        """Accepted draft tokens divided by all draft tokens, so far; None if nothing was drafted."""
        found = mmspec.stats(self.model)
        return found.acceptance_rate if found.num_draft_tokens else None

    @property
    def drafter_name(self) -> str:
        """The drafter in use."""
        return patch_state(self.model).config.drafter.name

    @property
    def provenance(self) -> Provenance:
        """What generates the captions."""
        settings = self.sampling.settings(self.model.generation_config)
        return Provenance(model_revision(self.model), self.drafter_name, settings)

    def describe(self) -> list[str]:
        """Lines about settings that the model's files chose."""
        lines = self.sampling.describe(self.model.generation_config)
        format_line = describe_prompt_format(self.processor)
        return lines if format_line is None else [*lines, format_line]

    def close(self) -> None:
        """Take the patch off the model."""
        mmspec.unpatch(self.model)

    def count_tokens(self, width: int, height: int) -> int | None:
        """Visual tokens of a picture of this size; None if that is not known."""
        return count_visual_tokens(self.processor, width, height, self.chat.max_pixels)

    def caption(
        self, media: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        """Caption a batch.

        Args:
            media: of each row.
            prompts: of each row.
            seed: of torch's generators, set before the call.
            compare: rows to compare with plain `generate`, which then decodes the whole batch too.

        Raises:
            PromptTooLongError: of some rows, before any is captioned.
        """
        start = time.perf_counter()
        inputs = self.checked_inputs(media, prompts)
        output, seconds = self._generate(inputs, seed)
        captions = self._captions(inputs, output, (time.perf_counter() - start) / len(media))
        if not any(compare):
            return captions
        found = self._compare(inputs, output, seed, compare, seconds)
        rows = zip(captions, found, compare, strict=True)
        return [replace(c, identical=same, plain=text) if on else c for c, (same, text), on in rows]

    def _generate(self, inputs: dict[str, Any], seed: int) -> tuple[Tensor, float]:
        """[B, L] ids of prompt and answer, and the seconds of the call."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        output: Tensor = self.model.generate(**inputs, **self.generation_kwargs())
        synchronize(output.device)
        return output, time.perf_counter() - start

    def build_inputs(self, media: Sequence[Media], prompts: Sequence[str]) -> dict[str, Any]:
        """Keyword arguments of `generate`, on the model's device and in its dtype."""
        return build_inputs(self.model, self.processor, media, prompts, chat=self.chat)

    def checked_inputs(self, media: Sequence[Media], prompts: Sequence[str]) -> dict[str, Any]:
        """The same of rows that the model has positions for.

        Raises:
            PromptTooLongError: it has not. A processor that refuses a picture raises nearly any type.
        """
        inputs = self.build_inputs(media, prompts)
        if too_long := find_too_long(self.model, inputs):
            raise PromptTooLongError(too_long)
        self._prompt_end = [] if self.chat.start is None else inputs["input_ids"][0, -PROMPT_END:].tolist()
        return inputs

    def generation_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `generate` besides the inputs."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        options |= self.sampling.generation_kwargs(self.model.generation_config)
        if self.stop:
            options |= {"stop_strings": list(self.stop), "tokenizer": self.tokenizer}
        if self.grammar is not None:
            from xgrammar.contrib.hf import LogitsProcessor

            options["logits_processor"] = [LogitsProcessor(self.grammar)]  # of one call
        return options

    def _captions(self, inputs: dict[str, Any], output: Tensor, seconds: float) -> list[Caption]:
        stats = mmspec.stats(self.model, last=True)
        prompt = inputs["input_ids"].shape[1]
        lengths = inputs["attention_mask"].sum(1).tolist() if "attention_mask" in inputs else [prompt] * len(output)
        captions = []
        for row, ids in enumerate(output[:, prompt:].tolist()):
            thinks = opens_thoughts(self._decode(inputs["input_ids"][row, -PROMPT_END:].tolist(), special=True))
            text, num_tokens, reason = self._finish_row(ids, thinks)
            plain = stats.fallback_calls > 0 or not stats.row_forwards
            rounds = max(0, num_tokens - 1) if plain else stats.row_forwards[row]
            tau = round((num_tokens - 1) / rounds, 4) if rounds else 1.0
            first = None if plain else round(stats.ttft_s, 6)
            captions.append(Caption(text, lengths[row], num_tokens, rounds, tau, first, round(seconds, 6), reason))
        return captions

    def _finish_row(self, ids: list[int], thinks: bool = False) -> tuple[str, int, str]:
        """Text, number of tokens (an end token counts) and finish reason of a row; padding after its end is cut.

        Args:
            thinks: the prompt lets the output begin within the model's thoughts, which are no part of the text.
        """
        ends = set(self.eos_ids)
        size = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        reason = "eos" if size and ids[size - 1] in ends else "length" if size >= self.max_new_tokens else "stop"
        if stopped := any(stop in self._decode(ids[:size]) for stop in self.stop):
            size = next(n for n in range(1, size + 1) if any(stop in self._decode(ids[:n]) for stop in self.stop))
            reason = "stop"
        answer = without_thoughts(self._decode(ids[:size], special=True), thinks)
        if answer.is_cut:
            return answer.text.strip(), size, CUT_WHILE_THINKING
        start = "" if self.hide_start else self.chat.start or ""
        text = self._without_special(answer.text) if answer.has_thoughts else self._decode(ids[:size])
        if stopped:
            text = text[: min((text.find(stop) for stop in self.stop if stop in text), default=len(text))]
        return f"{start}{text}".strip(), size, reason

    def _decode(self, ids: list[int], special: bool = False) -> str:
        """The text of an answer; of one that goes on from a start with the space that is between them."""
        decode = self.tokenizer.decode
        before: str = decode(self._prompt_end, skip_special_tokens=not special) if self._prompt_end else ""
        text: str = decode([*self._prompt_end, *ids], skip_special_tokens=not special)
        size = next((n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        return text[size:]

    def _without_special(self, text: str) -> str:
        """A text without special tokens, of which thoughts have been cut out."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _compare(
        self, inputs: dict[str, Any], output: Tensor, seed: int, compare: Sequence[bool], seconds: float
    ) -> list[tuple[bool, str]]:
        """Whether plain `generate` gives the same tokens, and its text, for each row.

        Args:
            seconds: of the same call with mmspec.
        """
        with mmspec.disabled(self.model):
            plain, plain_seconds = self._generate(inputs, seed)
        if self.comparison.rows or self.comparison.is_warm:  # else the first batch is the warm-up of both
            self.comparison.plain_s += plain_seconds
            self.comparison.patched_s += seconds
        prompt = inputs["input_ids"].shape[1]
        rows = zip(plain[:, prompt:].tolist(), output[:, prompt:].tolist(), strict=True)
        same, texts = [], []
        for plain_ids, patched_ids in rows:
            text, size, _ = self._finish_row(plain_ids)
            same.append(plain_ids[:size] == patched_ids[: self._finish_row(patched_ids)[1]])
            texts.append(text)
        self.comparison.rows += sum(compare)
        self.comparison.identical += sum(s for s, on in zip(same, compare, strict=True) if on)
        if self.comparison.first_difference is None and not all(s for s, on in zip(same, compare, strict=True) if on):
            self.comparison.first_difference = self._locate_difference(inputs, seed)
        return list(zip(same, texts, strict=True))

    def _locate_difference(self, inputs: dict[str, Any], seed: int) -> str:
        if self.grammar is not None:
            return "not looked for: a grammar serves one call"
        torch.manual_seed(seed)
        found = mmspec.compare(self.model, inputs, **self.generation_kwargs()).first_divergence
        if found is None:
            return "not found in a second run, which indicates rounding that is not reproducible"
        token = self.tokenizer.convert_ids_to_tokens
        difference = " / ".join("end" if i < 0 else repr(token(i)) for i in (found.plain, found.patched))
        return f"at token {found.column}: {difference} (plain / mmspec), logit margin {found.margin:.2e}"


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` is about memory, on any device."""
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )
