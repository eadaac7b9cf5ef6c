"""Pictures or clips and prompts to captions with a patched model, a batch at a time; on request plainly as well.

Knows models and processors. Knows nothing of files, resuming or progress.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import mmspec
from mmspec.app.io.images import Media
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import synchronize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Caption:
    """One caption. Named like the columns of the output.

    Attributes:
        identical, plain: whether plain `generate` says the same, and what it says; None where nothing was compared.
        ttft_s: from the start of the batch to its first tokens. seconds: the batch's time divided by its rows.
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


@dataclass
class ComparisonTotals:
    """What comparing with plain `generate` has found so far; seconds without those of the first batch."""

    rows: int = 0
    identical: int = 0
    first_difference: str | None = None
    plain_s: float = 0.0
    patched_s: float = 0.0


@dataclass
class Captioner:
    """A patched model and how to ask it."""

    model: PreTrainedModel
    processor: Any
    max_new_tokens: int = 128
    temperature: float = 0.0
    stop: Sequence[str] = ()
    comparison: ComparisonTotals = field(default_factory=ComparisonTotals)

    @property
    def dtype(self) -> str:
        """Precision of the weights, as in "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer; none if the model has none."""
        ends = self.model.generation_config.eos_token_id
        return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were kept so far."""
        return mmspec.stats(self.model).acceptance_rate

    def caption(
        self, shown: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        """Caption a batch; rows marked in `compare` are also decoded plainly (the whole batch is, as one)."""
        began = time.perf_counter()
        inputs = self.build_inputs(shown, prompts)
        output, seconds = self._generate(inputs, seed)
        made = self._captions(inputs, output, (time.perf_counter() - began) / len(shown))
        if not any(compare):
            return made
        found = self._compare(inputs, output, seed, compare, seconds)
        rows = zip(made, found, compare, strict=True)
        return [replace(c, identical=same, plain=text) if on else c for c, (same, text), on in rows]

    def _generate(self, inputs: dict[str, Any], seed: int) -> tuple[Tensor, float]:
        """Ids of prompt and answer, and the seconds it took."""
        torch.manual_seed(seed)
        began = time.perf_counter()
        output: Tensor = self.model.generate(**inputs, **self.generation_kwargs())
        synchronize(output.device)
        return output, time.perf_counter() - began

    def build_inputs(self, shown: Sequence[Media], prompts: Sequence[str]) -> dict[str, Any]:
        """What `generate` wants, on the model's device and in its precision."""
        return build_inputs(self.model, self.processor, shown, prompts)

    def generation_kwargs(self) -> dict[str, Any]:
        """What `generate` is told besides its inputs."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.temperature > 0:
            options |= {"do_sample": True, "temperature": self.temperature}
        else:  # None: what a checkpoint brings for sampling would only cause warnings
            options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if self.stop:
            options |= {"stop_strings": list(self.stop), "tokenizer": self.processor.tokenizer}
        return options

    def _captions(self, inputs: dict[str, Any], output: Tensor, seconds: float) -> list[Caption]:
        stats = mmspec.stats(self.model, last=True)
        prompt = inputs["input_ids"].shape[1]
        lengths = inputs["attention_mask"].sum(1).tolist() if "attention_mask" in inputs else [prompt] * len(output)
        made = []
        for row, ids in enumerate(output[:, prompt:].tolist()):
            text, kept, reason = self._finish_row(ids)
            plain = stats.fallback_calls > 0 or not stats.row_forwards
            rounds = max(0, kept - 1) if plain else stats.row_forwards[row]
            tau = round((kept - 1) / rounds, 4) if rounds else 1.0
            first = None if plain else round(stats.ttft_s, 6)
            made.append(Caption(text, lengths[row], kept, rounds, tau, first, round(seconds, 6), reason))
        return made

    def _finish_row(self, ids: list[int]) -> tuple[str, int, str]:
        """Text, number of tokens (an end token counts) and why the row ended; padding after its end is not its own."""
        ends = set(self.eos_ids)
        size = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        reason = "eos" if size and ids[size - 1] in ends else "length" if size >= self.max_new_tokens else "stop"
        text = self._decode(ids[:size])
        if any(word in text for word in self.stop):
            size = next(n for n in range(1, size + 1) if any(word in self._decode(ids[:n]) for word in self.stop))
            text, reason = self._decode(ids[:size]), "stop"
            text = text[: min(text.find(word) for word in self.stop if word in text)]
        return text.strip(), size, reason

    def _decode(self, ids: list[int]) -> str:
        text: str = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _compare(
        self, inputs: dict[str, Any], output: Tensor, seed: int, wanted: Sequence[bool], seconds: float
    ) -> list[tuple[bool, str]]:
        """Whether plain `generate` gives each row too, token for token, and what it says.

        Args:
            seconds: of the same call with mmspec.
        """
        with mmspec.disabled(self.model):
            plain, plain_seconds = self._generate(inputs, seed)
        if self.comparison.rows:  # the first batch warmed up for both
            self.comparison.plain_s += plain_seconds
            self.comparison.patched_s += seconds
        prompt = inputs["input_ids"].shape[1]
        rows = zip(plain[:, prompt:].tolist(), output[:, prompt:].tolist(), strict=True)
        same, said = [], []
        for theirs, ours in rows:
            text, size, _ = self._finish_row(theirs)
            same.append(theirs[:size] == ours[: self._finish_row(ours)[1]])
            said.append(text)
        self.comparison.rows += sum(wanted)
        self.comparison.identical += sum(s for s, on in zip(same, wanted, strict=True) if on)
        if self.comparison.first_difference is None and not all(s for s, on in zip(same, wanted, strict=True) if on):
            self.comparison.first_difference = self._locate_difference(inputs, seed)
        return list(zip(same, said, strict=True))

    def _locate_difference(self, inputs: dict[str, Any], seed: int) -> str:
        torch.manual_seed(seed)
        found = mmspec.compare(self.model, inputs, **self.generation_kwargs()).first_divergence
        if found is None:
            return "gone when run again, which points to rounding that does not repeat itself"
        token = self.processor.tokenizer.convert_ids_to_tokens
        words = " / ".join("the end" if i < 0 else repr(token(i)) for i in (found.plain, found.patched))
        return f"at token {found.column}: {words} (plain / mmspec), logit margin {found.margin:.2e}"


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on whichever device."""
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


__all__ = ["Caption", "Captioner", "ComparisonTotals", "out_of_memory"]
