"""The picture or clip of a row, decoded in another process within limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from mmspec.app.caption.config import MAX_PIXELS
from mmspec.app.caption.option_fields import FRAMES
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import MachineError, UsageError, is_shortage, one_line
from mmspec.app.io.content import Pictures
from mmspec.app.io.images import ImageError, Media, load_image
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.videos import load_media
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform
from mmspec.vision.video.worker_process import DecoderStartError

if TYPE_CHECKING:
    from PIL import Image

    from mmspec.interfaces import FrameSampler

MAX_ROW_PIXELS = 4
"""Pixels of all pictures of a row together, in multiples of the limit of one."""


def decode_item(item: Item, sampler: FrameSampler, max_pixels: int, decoders: DecoderPool) -> Media:
    """The media of a row: a picture, a clip, or several pictures, by content.

    Raises:
        ImageError: it cannot be read or decoded; the message says where a list or table names it.
        MachineError: the machine lacks processes, memory or open files; the picture may be good.
    """
    try:
        with item.locate_errors():
            if isinstance(item.content, Pictures) and len(item.content.parts) > 1:
                return _decode_pictures(item.content, max_pixels, decoders)
            source = item.below or item.path if item.content is None else item.content.read()
            return load_media(source, sampler, max_pixels, decoders, named_video=item.is_video)
    except (DecoderStartError, ImageError) as error:
        if isinstance(error, ImageError) and not is_shortage(error):
            raise
        raise MachineError(error) from error


def _decode_pictures(content: Pictures, max_pixels: int, decoders: DecoderPool) -> tuple[Image.Image, ...]:
    """All pictures of a row, within `MAX_ROW_PIXELS`."""
    images: list[Image.Image] = []
    left = MAX_ROW_PIXELS * max_pixels
    for number, part in enumerate(content.parts):
        try:
            image = load_image(part.read(), max_pixels, decoders)
        except ImageError as error:
            raise ImageError(error.kind, f"picture {number} of {len(content.parts)}: {error}") from error
        left -= image.width * image.height
        if left < 0:
            raise ImageError("TooLarge", f"the pictures of the row have more than {MAX_ROW_PIXELS * max_pixels} pixels")
        images.append(image)
    return tuple(images)


class ReadableRows:
    """The rows of inputs that can be used, with their media, one after the other; the others are counted.

    For commands that need some pictures, not a caption of each: one that cannot be used ends nothing.

    Attributes:
        check: called with each row; raises any exception for one that cannot be used, though it can be decoded (a
            processor refuses it). A `UsageError` is raised. Set once the model is loaded.
    """

    def __init__(self, paths: Sequence[str], options: SourceOptions, decoders: DecoderPool, command: str) -> None:
        """
        Args:
            command: for messages.

        Raises:
            UsageError: as `Inputs`.
        """
        self.check: Callable[[Item, Media], object] = lambda item, media: None
        self._inputs, self._decoders, self._command = Inputs(paths, options), decoders, command
        self._inputs.check()
        self._rows = self._decoded()
        self._num_read = self._num_skipped = 0
        self._first_error, self._is_complete = "", False

    def peek(self) -> tuple[Item, Media]:
        """The next row that can be decoded, which is not taken: before the model is loaded.

        Raises:
            UsageError: none can be decoded.
        """
        first = next(self._rows, None)
        if first is None:
            self._refuse()
        self._rows = itertools.chain([first], self._rows)
        return first

    def __iter__(self) -> Iterator[tuple[Item, Media]]:
        """The rows; a later loop goes on where an earlier one was left.

        Raises:
            UsageError: none can be used.
        """
        for item, media in self._rows:
            try:
                self.check(item, media)
            except UsageError:
                raise
            except Exception as error:  # processors raise nearly any type
                self._skip(item, error)
            else:
                yield item, media
        if self._num_read == self._num_skipped:
            self._refuse()

    def _decoded(self) -> Iterator[tuple[Item, Media]]:
        for item in self._inputs.rows(lambda ident: False):
            self._num_read += 1
            try:
                media = decode_item(item, Uniform(FRAMES), MAX_PIXELS, self._decoders)
            except ImageError as error:
                self._skip(item, error)
            else:
                yield item, media
        self._is_complete = True

    def _skip(self, item: Item, error: Exception) -> None:
        self._num_skipped += 1
        self._first_error = self._first_error or f"{item.id}: {one_line(error)}"

    def _refuse(self) -> NoReturn:
        raise UsageError(f"{self._command}: {self._first_error or 'no pictures or clips'}")

    def report(self) -> None:
        """Print in one line each what was skipped, and what the inputs hold besides rows."""
        for line in self._inputs.left_out(None if self._is_complete else True):
            print_stderr(f"mmspec: {line}")
        if self._num_skipped:
            of = f"{self._num_skipped} of {self._num_read}"
            print_stderr(f"mmspec: skipped {of} that cannot be used; the first: {self._first_error}")
