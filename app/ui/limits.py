"""What the pages accept: how much text, how large a picture or file, how many. Each refusal is one sentence."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io import images
from mmspec.app.io import videos as clips
from mmspec.app.io.images import ImageError, Media
from mmspec.vision.video.decoder_pool import DecoderPool

DECODERS = DecoderPool(timeout_s=40.0)
"""Processes that decode what visitors choose. A visitor waits no longer for one file."""
atexit.register(DECODERS.close)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        characters: of a question. tokens: new ones, per answer. pixels: of a picture, or of one frame.
        megabytes: of one file. files: of one batch. turns: of one conversation. frames: shown of a clip.
    """

    max_question_chars: int = 4000
    max_new_tokens: int = 1024
    max_pixels: int = 40_000_000
    max_file_mb: int = 100
    max_files: int = 200
    max_turns: int = 16
    num_frames: int = 8

    def check_question(self, text: str | None) -> str:
        """The question without white space around it, if it may be asked.

        Raises:
            UsageError: empty, or too long.
        """
        asked = (text or "").strip()
        if not asked:
            raise UsageError("Please write a question first.")
        if len(asked) > self.max_question_chars:
            raise UsageError(f"The question has {len(asked)} characters; {self.max_question_chars} is the limit.")
        return asked

    def check_number(self, name: str, value: Any, low: float, high: float) -> float:
        """`value` if it is a number from `low` to `high`.

        Raises:
            UsageError: it is not.
        """
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high:
            raise UsageError(f"{name} must be a number from {low:g} to {high:g}; got {str(value)[:40]!r}.")
        return float(value)

    def check_file_size(self, path: Path) -> None:
        """Refuse a file that is too large to be looked at.

        Raises:
            UsageError: more bytes than allowed.
        """
        if path.is_file() and path.stat().st_size > self.max_file_mb * 1_000_000:
            raise UsageError(f"{path.name} has more than {self.max_file_mb} MB.")

    def check_media_path(self, path: str | Path | None) -> Path:
        """The file of a picture or clip, not yet opened.

        Raises:
            UsageError: none was given, or it is too large.
        """
        if not path:
            raise UsageError("Please choose a picture or a clip first.")
        file = Path(path)
        self.check_file_size(file)
        return file

    def load_media(self, path: str | Path | None) -> Media:
        """The picture in a file, or the frames of a clip.

        Raises:
            UsageError: none was given, or it cannot be used.
        """
        file = self.check_media_path(path)
        try:
            if file.suffix.lower() in clips.SUFFIXES:
                return clips.load_video(file, self.num_frames, self.max_pixels, isolated=DECODERS)
            return images.load_image(file, self.max_pixels, DECODERS)
        except ImageError as error:
            told = str(error).replace("; raise --max-pixels if you trust it", "")
            raise UsageError(f"{file.name}: {told}.") from error

    def check_files(self, paths: Sequence[str | Path] | None) -> list[Path]:
        """The files of a batch.

        Raises:
            UsageError: none, too many, or one that is too large.
        """
        files = [Path(path) for path in paths or ()]
        if not files:
            raise UsageError("Please choose some pictures or clips first.")
        if len(files) > self.max_files:
            raise UsageError(f"{len(files)} files are too many; {self.max_files} is the limit.")
        for file in files:
            self.check_file_size(file)
        return files


__all__ = ["Limits"]
