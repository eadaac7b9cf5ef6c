"""Records every token of an answer with its time; the text of each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class TimingStreamer:
    """Records every token of a single row as it is emitted. Other threads may read it meanwhile.

    Plain `generate` takes it as `streamer`. mmspec calls `record` once per round: its loop calls a streamer once per
    token, after checking what user code may have changed.

    Attributes:
        token_ids: emitted tokens, prompt not included.
        token_times: seconds from `start` to each token.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self._start_time: float | None = None
        self._expects_prompt = True  # transformers streams the prompt first

    def start(self) -> None:
        """Start the clock."""
        self._start_time = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """See transformers' `BaseStreamer`: the prompt [1, L], then [1] per token."""
        if self._start_time is None:
            self.start()
        if self._expects_prompt:
            self._expects_prompt = False
            return
        self.record(value.flatten().tolist())

    def record(self, token_ids: list[int]) -> None:
        """Append tokens that were emitted now."""
        self.token_times += [self.elapsed_s] * len(token_ids)
        self.token_ids += token_ids  # after their times: a reader that finds an id also finds its time

    def truncate(self, count: int) -> None:
        """Drop all but the first `count` tokens."""
        del self.token_ids[count:], self.token_times[count:]

    @property
    def elapsed_s(self) -> float:
        """Seconds since `start`; 0 before it."""
        return 0.0 if self._start_time is None else time.perf_counter() - self._start_time

    def end(self) -> None:
        """See transformers' `BaseStreamer`."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second, so far; 0 with fewer than two tokens."""
        count = len(self.token_ids)
        seconds = self.token_times[count - 1] - self.token_times[0] if count > 1 else 0.0
        return (count - 1) / seconds if seconds > 0 else 0.0


class TokenTexts:
    """The text of each token of a growing sequence; joined, they are the decoded sequence.

    A token that ends within a character has an empty text, and the one that completes it the whole character.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        backend, stream = getattr(tokenizer, "backend_tokenizer", None), DecodeStream(skip_special_tokens=True)

        def step(token: int) -> str:
            if backend is None:  # of a tokenizer in Python
                return str(tokenizer.decode([token], skip_special_tokens=True))
            return stream.step(backend, token) or ""

        self._step, self._texts = step, list[str]()

    def decode(self, token_ids: list[int]) -> list[str]:
        """Texts of `token_ids`, which start with all tokens of earlier calls."""
        self._texts += map(self._step, token_ids[len(self._texts) :])
        return self._texts[: len(token_ids)]


def token_label(tokenizer: Any, token: int) -> str:
    """A single token as a label: special tokens by their name, white space by visible characters."""
    text = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token))
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
