"""What a run says, token by token, with the time of each: a streamer. And tokens as pieces of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class TimingStreamer:
    """Notes every token of a single row as `generate` gives it out. Read by another thread while it grows.

    Attributes:
        ids: the tokens. times: seconds from `start` to each.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self._start_time: float | None = None
        self._expects_prompt = True  # transformers puts the prompt first

    def start(self) -> None:
        """The clock runs from now."""
        self._start_time = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """See transformers' `BaseStreamer`: the prompt [1, L], then [1] per token."""
        if self._start_time is None:
            self.start()
        if self._expects_prompt:
            self._expects_prompt = False
            return
        now = self.elapsed_s
        for token in value.flatten().tolist():
            self.token_times.append(now)
            self.token_ids.append(token)  # last, so that whoever sees an id finds its time

    @property
    def elapsed_s(self) -> float:
        """Seconds since `start`; 0 before it."""
        return 0.0 if self._start_time is None else time.perf_counter() - self._start_time

    def end(self) -> None:
        """See transformers' `BaseStreamer`."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second, so far; 0 if there is but one."""
        count = len(self.token_ids)
        seconds = self.token_times[count - 1] - self.token_times[0] if count > 1 else 0.0
        return (count - 1) / seconds if seconds > 0 else 0.0


class IncrementalDetokenizer:
    """Tokens to pieces of text that, joined, are the whole text. Grows with the tokens.

    A token's piece depends on its neighbours (spaces, bytes of one character), so each is decoded behind the last few;
    one that ends within a character is empty, and the next has it all.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.token_ids, self.texts = tokenizer, list[int](), list[str]()
        self._prefix_offset = self._read_offset = 0

    def append(self, token_ids: list[int]) -> None:
        """Take in more tokens."""
        for token in token_ids:
            self.token_ids.append(token)
            before, now = self._decode(self._read_offset), self._decode(len(self.token_ids))
            if now.endswith("\ufffd") or len(now) < len(before):
                self.texts.append("")
                continue
            self.texts.append(now[len(before) :])
            self._prefix_offset, self._read_offset = self._read_offset, len(self.token_ids)

    def decode(self, token_ids: list[int]) -> list[str]:
        """The pieces of `ids`, which begin with what was taken in before."""
        self.append(token_ids[len(self.token_ids) :])
        return self.texts[: len(token_ids)]

    def _decode(self, end: int) -> str:
        text: str = self.tokenizer.decode(self.token_ids[self._prefix_offset : end], skip_special_tokens=True)
        return text


def detokenize(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """One piece of text per token."""
    return IncrementalDetokenizer(tokenizer).decode(token_ids)


def token_label(tokenizer: Any, token: int) -> str:
    """A single token as it is shown by itself: special ones by their name, spaces and line ends visible."""
    text = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token))
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")


__all__ = ["IncrementalDetokenizer", "TimingStreamer", "detokenize", "token_label"]
