"""Why a file is refused, in words for a visitor: no names of decoders, no bytes of the file, megapixels.

Commands keep the exact message; the page shows these.
"""

from __future__ import annotations

import re

READABLE_PICTURES = "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"
REASONS = {
    "Empty": "it is empty",
    "Missing": "it is no longer there; choose it again",
    "Unreadable": "it cannot be read; choose it again",
    "TooThin": "it is too narrow for its length; crop it",
    "NotAnImage": f"it is not a picture that can be opened here; save it as {READABLE_PICTURES}",
    "BrokenImage": "it is damaged or incomplete; save the picture again",
    "BrokenVideo": "it is not a clip that can be opened here, or is damaged; save it as MP4",
    "NoVideoReader": "this server opens no clips, only pictures",
    "DecoderHung": "it takes too long to open; save it again, or make it smaller",
    "DecoderCrashed": "it cannot be opened, perhaps because it is damaged; save it again",
    "OutOfMemory": "it needs too much memory; make it smaller",
    "TooLarge": "it is too large; make it smaller",
}
"""{kind of `ImageError`: reason}."""
SIZE = re.compile(r"(\d+) x (\d+)")
LIMIT = re.compile(r"more than (\d+) pixels")  # a JPEG, which can be read at a part of its size, may have more
NO_PICTURES = re.compile(r"no (?:picture|video|frame)|without frames", re.IGNORECASE)


def explain_refusal(kind: str, message: str) -> str:
    """The reason in one clause, without the name of the file; the message itself where it is not about the file.

    Args:
        kind: of an `ImageError`.
        message: of it.
    """
    most = LIMIT.search(message)
    if kind == "TooLarge" and most is not None:
        limit = f"{int(most[1]) / 1e6:.3g} megapixels is the limit"
        size = SIZE.search(message)
        if size is None:
            return f"it has too many pixels; {limit}"
        width, height = int(size[1]), int(size[2])
        return f"it has {width * height / 1e6:.3g} megapixels ({width} x {height}); {limit}"
    if kind == "BrokenVideo" and NO_PICTURES.search(message):
        return "there is no moving picture in it"
    if kind == "NotAnImage" and "HEIC" in message:
        return "it is a HEIC photo; save it as JPEG"
    return REASONS.get(kind, message)
