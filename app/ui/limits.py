"""Limits of what the pages accept: text, pictures, files, tokens. Each refusal is one sentence."""

from __future__ import annotations

import atexit
import math
from dataclasses import dataclass
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io import videos
from mmspec.app.io.images import ImageError, Media
from mmspec.app.ui.refusals import explain_refusal
from mmspec.app.ui.uploads import StoredFile
from mmspec.vision.video.decoder_pool import DecoderPool

DECODERS = DecoderPool(timeout_s=40.0)
"""Processes that decode uploaded files, at most `timeout_s` seconds per file."""
atexit.register(DECODERS.close)


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        max_question_chars: characters of a question.
        max_new_tokens: new tokens per answer.
        max_pixels: pixels of a picture, or of one frame.
        max_file_mb: megabytes of one file.
        max_turns: turns of one conversation.
        num_frames: frames read of a clip.
    """

    max_question_chars: int = 4000
    max_new_tokens: int = 1024
    max_pixels: int = 40_000_000
    max_file_mb: int = 100
    max_turns: int = 16
    num_frames: int = 8

    def check_question(self, text: object) -> str:
        """The question, stripped.

        Raises:
            UsageError: it is empty or too long.
        """
        question = text.strip() if isinstance(text, str) else ""
        if not question:
            raise UsageError("Please write a question first.")
        if len(question) > self.max_question_chars:
            raise UsageError(f"The question has {len(question)} characters; {self.max_question_chars} is the limit.")
        return question

    def check_number(self, name: str, value: Any, low: float, high: float) -> float:
        """`value` as a float.

        Raises:
            UsageError: it is not a finite number from `low` to `high`.
        """
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high:
            raise UsageError(f"{name} must be a number from {low:g} to {high:g}; got {str(value)[:40]!r}.")
        return float(value)

    def load_media(self, file: StoredFile) -> Media:
        """The decoded picture, or the frames of a clip.

        Raises:
            UsageError: it cannot be decoded within the limits.
        """
        try:
            return videos.load_media(file.path, self.num_frames, self.max_pixels, isolated=DECODERS)
        except ImageError as error:
            raise UsageError(f"{file.name} cannot be used: {explain_refusal(error.kind, str(error))}.") from error
