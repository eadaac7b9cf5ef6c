"""What ends a command: an error of the user's, told in one line. Imports nothing, so that everything may import it."""

from __future__ import annotations


class UsageError(Exception):
    """The command cannot be carried out as given; the message says what was received and what to do. Exit code 2."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of `error` on a single line of at most `limit` characters; the name of its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


__all__ = ["UsageError", "one_line"]
