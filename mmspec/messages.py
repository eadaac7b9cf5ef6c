"""Text of others in messages: on one line, of limited length, without characters that a terminal obeys.

File names, cells, answers of servers and texts of models may hold escape sequences, line breaks and characters that
turn the direction of writing. All that is printed or logged goes through `printable`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

# Cc but nothing else of ASCII; format characters that hide or turn text (not the joiners of emoji, Persian and Hindi);
# separators of lines; halves of surrogate pairs; tags.
_OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

MAX_DESCRIPTION = 300


def printable(text: str, *, lines: bool = False) -> str:
    r"""`text` with what a terminal obeys, hides or cannot encode as escape sequences, as in `\x1b[2J`.

    Args:
        lines: keep line breaks: the text has several lines of ours.
    """
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The message of `error` or a text, printable, in one line of at most `limit` characters; its type if it has none.

    Of a longer one the middle is left out: messages say the rule first and the value received last.
    """
    text = printable(" ".join(str(error).split())) or type(error).__name__
    head = 2 * limit // 3 - 5
    return text if len(text) <= limit else f"{text[:head]} ... {text[len(text) + head + 5 - limit :]}"


def description_of(config: Any) -> str | None:
    """What a model's config says of the model (`description`), on one printable line; None if it says nothing."""
    says = getattr(config, "description", None)
    return printable(" ".join(says.split()))[:MAX_DESCRIPTION] if isinstance(says, str) and says.strip() else None


def _escape_record(record: logging.LogRecord) -> bool:
    """A filter of loggers: the message as it is printed, with its arguments, is printable."""
    record.msg, record.args = printable(record.getMessage(), lines=not record.args), ()
    return True


logging.getLogger("mmspec").addFilter(_escape_record)
