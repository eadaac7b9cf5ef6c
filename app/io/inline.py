"""Pictures that are part of a text: base64 and data URLs, recognised by what they decode to. Within a limit of size."""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse

from mmspec.app.io.content import MAX_CONTENT_BYTES, Content, InlineBytes, Unreadable
from mmspec.app.io.kinds import media_kind

MIN_BASE64_CHARS = 40
"""A picture of a pixel has more."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_START_CHARS = 1400
"""Characters that are decoded to see whether they are the beginning of a picture."""


def held_bytes(data: bytes) -> Content:
    """Bytes of a file; text in them is base64."""
    if media_kind(data[:4096]) is None and len(data) >= MIN_BASE64_CHARS and data[:64].isascii():
        inline = inline_text(data.decode("ascii", errors="replace"))
        return inline or InlineBytes(data)
    return InlineBytes(data)


def inline_text(text: str) -> Content | None:
    """The picture that a text holds, as base64 or a data URL; None for a path or an address."""
    if text[:5].lower() == "data:":
        head, comma, body = text.partition(",")
        if comma and head.lower().endswith(";base64"):
            return _decode_base64(body)
        if len(body) > MAX_CONTENT_BYTES:
            return Unreadable("TooLarge", f"{len(body)} characters; the limit is {MAX_CONTENT_BYTES} bytes")
        data = urllib.parse.unquote_to_bytes(body)
        return InlineBytes(data) if data else Unreadable("Empty", "a data URL without data")
    start = re.sub(r"\s", "", text[:_START_CHARS])
    if len(start) < MIN_BASE64_CHARS or not _BASE64.fullmatch(start):
        return None
    try:
        header = base64.b64decode(start.rstrip("=")[: len(start.rstrip("=")) // 4 * 4], altchars=_altchars(start))
    except (binascii.Error, ValueError):
        return None
    return _decode_base64(text) if media_kind(header) is not None else None


def _altchars(text: str) -> bytes | None:
    return b"-_" if "-" in text or "_" in text else None


def _decode_base64(text: str) -> Content:
    if len(text) > MAX_CONTENT_BYTES * 4 // 3:
        return Unreadable("TooLarge", f"{len(text)} characters of base64; the limit is {MAX_CONTENT_BYTES} bytes")
    plain = urllib.parse.unquote(text) if "%" in text[:4096] else text
    plain = "".join(plain.split()).rstrip("=")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=_altchars(plain), validate=True)
    except (binascii.Error, ValueError):
        return Unreadable("BadText", f"base64 that is cut or damaged ({len(text)} characters)")
    return InlineBytes(data) if data else Unreadable("Empty", "base64 without data")
