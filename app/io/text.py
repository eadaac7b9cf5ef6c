"""Text of files as editors and spreadsheets write it; text of rows that every output can hold.

JSON may hold one half of a surrogate pair, and file systems names that are not UTF-8; neither can be written as UTF-8,
and no tokenizer takes it. Prompts with it are errors, names and ids are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.messages import one_line

GENERIC_TOKENS = ("<image>", "<video>")
"""Placeholders of pictures and clips in prompts of data sets, whatever the model's own are."""
MAX_PROMPT_CHARS = 1 << 16
"""Characters of the prompt of a row."""


def text_encoding(start: bytes) -> str:
    """By the byte order mark, or by the zeros of two ASCII characters in UTF-16 or one in UTF-32; else UTF-8.

    Args:
        start: the first four bytes of a file.
    """
    has_mark = start[:2] in (b"\xff\xfe", b"\xfe\xff") or start == b"\0\0\xfe\xff"
    zeros = tuple(not byte for byte in start)
    is_wide = zeros in ((False, True) * 2, (True, False) * 2, (False, True, True, True), (True, True, True, False))
    return json.detect_encoding(start) if has_mark or is_wide else "utf-8-sig"


def decode_text(data: bytes) -> str:
    """The text of a whole file, without a byte order mark.

    Raises:
        ValueError: it is in another encoding than UTF-8, UTF-16 and UTF-32.
    """
    try:
        return data.decode(text_encoding(data[:4]))
    except UnicodeDecodeError as error:
        found = data[error.start : error.start + 1].hex()
        raise ValueError(f"byte {error.start} (0x{found}) is not UTF-8: save the file as UTF-8") from error


def read_text(path: str, max_bytes: int) -> str:
    """The text of a small file.

    Raises:
        ValueError: it cannot be read, is larger, or is in another encoding; one line.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(error.strerror or one_line(error)) from error
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return decode_text(data)


def is_valid(text: str) -> bool:
    """Whether it can be encoded as UTF-8."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def find_fault(text: str) -> str | None:
    """Why a text is no prompt or answer, as the end of a sentence; None if it is one."""
    if len(text) > MAX_PROMPT_CHARS:
        return f"has {len(text)} characters; the limit is {MAX_PROMPT_CHARS}"
    if not is_valid(text):
        at = next(number for number, character in enumerate(text) if "\ud800" <= character <= "\udfff")
        return f"is no valid Unicode: character {at} is {text[at]!a}, half of a surrogate pair; remove it"
    return None


def escaped(text: str) -> str:
    """`text` with what is not valid Unicode as escape sequences: a name that is not UTF-8 becomes "a\\udcff.png"."""
    return text if is_valid(text) else text.encode("utf-8", "backslashreplace").decode()


def escaped_values(value: Any) -> Any:
    """The same for all texts in a row."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {key: escaped_values(one) for key, one in value.items()}
    return [escaped_values(one) for one in value] if isinstance(value, list) else value
