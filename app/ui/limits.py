"""Limits of what the pages accept: text, pictures, files, tokens. Each refusal is one sentence."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io import videos
from mmspec.app.io.images import ImageError, Media
from mmspec.app.ui.refusals import FileRefusedError, explain_refusal
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
        max_files: files of one batch.
        max_turns: turns of one conversation.
        num_frames: frames read of a clip.
    """

    max_question_chars: int = 4000
    max_new_tokens: int = 1024
    max_pixels: int = 40_000_000
    max_file_mb: int = 100
    max_files: int = 200
    max_turns: int = 16
    num_frames: int = 8

    def check_question(self, text: str | None) -> str:
        """The question, stripped.

        Raises:
            UsageError: it is empty or too long.
        """
        question = (text or "").strip()
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

    def check_file_size(self, path: Path) -> None:
        """Refuse a file that is too large to be opened.

        Raises:
            FileRefusedError: it has more bytes than allowed.
        """
        if path.is_file() and path.stat().st_size > self.max_file_mb * 1_000_000:
            raise FileRefusedError(f"{path.name} cannot be used: it has more than {self.max_file_mb} MB.")

    def check_media_path(self, path: str | Path | None) -> Path:
        """The path of an uploaded picture or clip, not yet opened.

        Raises:
            UsageError: there is none, or the file is too large.
        """
        if not path:
            raise UsageError("Please choose a picture or a clip first.")
        file = Path(path)
        self.check_file_size(file)
        return file

    def load_media(self, path: str | Path | None) -> Media:
        """The decoded picture, or the frames of a clip.

        Raises:
            UsageError: there is none.
            FileRefusedError: it cannot be decoded within the limits.
        """
        file = self.check_media_path(path)
        try:
            return videos.load_media(file, self.num_frames, self.max_pixels, isolated=DECODERS)
        except ImageError as error:
            reason = explain_refusal(error.kind, str(error))
            raise FileRefusedError(f"{file.name} cannot be used: {reason}.") from error

    def check_files(self, paths: Sequence[str | Path] | None) -> list[Path]:
        """The paths of a batch.

        Raises:
            UsageError: none, or too many. A file that is too large is a row with an error.
        """
        files = [Path(path) for path in paths or ()]
        if not files:
            raise UsageError("Please choose some pictures or clips first.")
        if len(files) > self.max_files:
            raise UsageError(f"{len(files)} files are too many; {self.max_files} is the limit.")
        return files
