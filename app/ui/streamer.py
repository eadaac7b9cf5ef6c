"""What a run says, token by token, with the time of each: a streamer. And tokens as pieces of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Tape:
    """Notes every token of a single row as `generate` gives it out. Read by another thread while it grows.

    Attributes:
        ids: the tokens. times: seconds from `start` to each.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self._began: float | None = None
        self._prompt = True  # transformers puts the prompt first

    def start(self) -> None:
        """The clock runs from now."""
        self._began = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """See transformers' `BaseStreamer`: the prompt [1, L], then [1] per token."""
        if self._began is None:
            self.start()
        if self._prompt:
            self._prompt = False
            return
        now = self.seconds
        for token in value.flatten().tolist():
            self.times.append(now)
            self.ids.append(token)  # last, so that whoever sees an id finds its time

    @property
    def seconds(self) -> float:
        """Seconds since `start`; 0 before it."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def end(self) -> None:
        """See transformers' `BaseStreamer`."""

    @property
    def rate(self) -> float:
        """Tokens after the first per second, so far; 0 if there is but one."""
        count = len(self.ids)
        seconds = self.times[count - 1] - self.times[0] if count > 1 else 0.0
        return (count - 1) / seconds if seconds > 0 else 0.0


class Pieces:
    """Tokens to pieces of text that, joined, are the whole text. Grows with the tokens.

    A token's piece depends on its neighbours (spaces, bytes of one character), so each is decoded behind the last few;
    one that ends within a character is empty, and the next has it all.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids, self.texts = tokenizer, list[int](), list[str]()
        self._from = self._read = 0

    def add(self, ids: list[int]) -> None:
        """Take in more tokens."""
        for token in ids:
            self.ids.append(token)
            before, now = self._decode(self._read), self._decode(len(self.ids))
            if now.endswith("\ufffd") or len(now) < len(before):
                self.texts.append("")
                continue
            self.texts.append(now[len(before) :])
            self._from, self._read = self._read, len(self.ids)

    def upto(self, ids: list[int]) -> list[str]:
        """The pieces of `ids`, which begin with what was taken in before."""
        self.add(ids[len(self.ids) :])
        return self.texts[: len(ids)]

    def _decode(self, end: int) -> str:
        text: str = self.tokenizer.decode(self.ids[self._from : end], skip_special_tokens=True)
        return text


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    """One piece of text per token."""
    return Pieces(tokenizer).upto(ids)


def name_of(tokenizer: Any, token: int) -> str:
    """A single token as it is shown by itself: special ones by their name, spaces and line ends visible."""
    text = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token))
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")


__all__ = ["Pieces", "Tape", "name_of", "pieces_of"]
