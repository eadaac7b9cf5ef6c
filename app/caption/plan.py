"""Which rows a process captions, in which batches: a function of the input and the model, not of what is finished.

So a resumed job runs the batches that it would have run, and sampled captions do not depend on interruptions. Rows of
a batch have about as many visual tokens each, as the headers of their pictures say: the others are padded to the
longest. Large pictures are in smaller batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.variants import variant_ids, variants
from mmspec.app.io.content import Pictures
from mmspec.app.io.item import Item
from mmspec.app.io.picture_header import picture_sizes

WINDOW_BATCHES = 16
"""Batches among which rows are sorted by length."""
TYPICAL_SIZE = (1024, 1024)
"""Width and height of a picture, of which a batch of the largest size has as many visual tokens as a batch may have."""
LARGE_PIXELS = 40_000_000
"""A row with as many pixels is decoded and captioned alone."""
MAX_BATCH_PIXELS = 256_000_000
"""Pixels of a batch, three bytes each."""
WINDOW_BYTES = 256 << 20
"""Content that the rows of a window may hold."""


@dataclass
class RowPlan:
    """Divides rows among shards and processes, and into batches of like length.

    Attributes:
        is_pending: whether a row is to be captioned.
        count_tokens: visual tokens of a picture of a width and height; None: not known, all count alike. Called for
            the first row that is pending, not before.
        ids: of the rows of this shard, all processes; complete once `groups` is exhausted.
        num_finished: rows of this process that were planned so far and are not pending.
        max_pictures: largest number of pictures of a row so far.
        first_sizes: rows of each batch of the first window that was planned.
    """

    config: CaptionConfig
    process: ProcessInfo
    is_pending: Callable[[Item], bool]
    count_tokens: Callable[[int, int], int | None] = lambda width, height: None
    ids: set[str] = field(default_factory=set)
    num_finished: int = 0
    max_pictures: int = 1
    first_sizes: list[int] = field(default_factory=list)

    def groups(self, rows: Iterable[Item]) -> Iterator[list[list[Item]]]:
        """The batches with a pending row; those about the same pictures, which are decoded once, are together."""
        for window in _windows(self._assigned(rows), WINDOW_BATCHES * self.config.batch_size):
            asked = [row for item in window for row in variants(item, self.config)]
            pending = sum(map(self.is_pending, asked))
            self.num_finished += len(asked) - pending
            if pending:
                groups = [self._asked(batch) for batch in self._divided(window)]
                self.first_sizes = self.first_sizes or [len(batch) for group in groups for batch in group]
                yield from filter(None, map(self._to_run, groups))

    def describe(self, num_rows: int | None) -> str:
        """The plan in one line; complete once the first batch is known.

        Args:
            num_rows: of this process; None if it is not known.
        """
        size, sizes = self.config.batch_size, self.first_sizes
        tokens = "" if self.max_tokens is None else f" or {self.max_tokens:,} visual tokens"
        count = "" if num_rows is None else f"{num_rows:,} row{'s'[: num_rows != 1]}, "
        line = f"plan: {count}batches of at most {size} rows{tokens}"
        line += f", rows of {LARGE_PIXELS // 1_000_000} megapixels alone"
        if len(sizes) > 1:
            of = f"{min(sizes)}" + (f" to {max(sizes)}" if min(sizes) < max(sizes) else "")
            line += f"; the first {sum(sizes):,} are {len(sizes)} batches of {of}"
        return line

    @cached_property
    def max_tokens(self) -> int | None:
        """Visual tokens of a batch, padding included, above which it is not filled up; None: any number."""
        typical = self.count_tokens(*TYPICAL_SIZE)
        return None if typical is None else self.config.batch_size * typical

    def _divided(self, window: list[Item]) -> list[list[Item]]:
        """The batches of a window."""
        sized = [self._sized(item) for item in window]
        is_known = any(item.pixels for item, _ in sized) and self.max_tokens is not None
        sized.sort(key=lambda pair: _length(pair[0], pair[1], is_known))  # stable: rows alike stay in order
        batches: list[list[Item]] = []
        num_pixels = 0
        for item, tokens in sized:
            pixels = item.pixels or 0
            num_pixels += pixels
            batch = batches[-1] if batches else []
            full = len(batch) == self.config.batch_size or num_pixels > MAX_BATCH_PIXELS
            alone = max(pixels, batch[-1].pixels or 0 if batch else 0) >= LARGE_PIXELS
            if not batch or full or alone or (len(batch) + 1) * tokens > (self.max_tokens or math.inf):
                batches.append([item])
                num_pixels = pixels
            else:
                batch.append(item)
        return batches

    def _asked(self, batch: list[Item]) -> list[list[Item]]:
        """The batches of the rows of a batch of pictures: the first row of each, then the second of each."""
        rows = [variants(item, self.config) for item in batch]
        return [[one[number] for one in rows if number < len(one)] for number in range(max(map(len, rows)))]

    def _to_run(self, group: list[list[Item]]) -> list[list[Item]]:
        """Those of the batches about the same pictures that have a pending row, or answers for one that has."""
        pending = [number for number, batch in enumerate(group) if any(map(self.is_pending, batch))]
        needed = range(max(pending, default=-1) + 1) if self.config.uses_answers else pending
        return [group[number] for number in needed]

    def _sized(self, item: Item) -> tuple[Item, int]:
        """The item with its number of pixels, and its visual tokens; 0 of what is not known."""
        if item.is_video:
            return item, 0
        sizes = [size for size in picture_sizes(item) if size is not None]
        tokens = 0 if self.max_tokens is None else sum(self.count_tokens(*size) or 0 for size in sizes)
        return replace(item, pixels=sum(width * height for width, height in sizes) or None), tokens

    def _assigned(self, rows: Iterable[Item]) -> Iterator[Item]:
        (first, step), process = self.config.shard, self.process
        for item in rows:
            if item.index % step != first:
                continue
            self.ids.update(row.id for row in variants(item, self.config))
            if isinstance(item.content, Pictures):
                self.max_pictures = max(self.max_pictures, len(item.content.parts))
            if item.index // step % process.world_size == process.rank:
                yield item


def _windows(rows: Iterable[Item], size: int) -> Iterator[list[Item]]:
    window: list[Item] = []
    num_bytes = 0
    for item in rows:
        window.append(item)
        num_bytes += item.content.num_bytes if item.content else 0
        if len(window) == size or num_bytes > WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
    if window:
        yield window


def _length(item: Item, tokens: int, is_known: bool) -> tuple[bool, bool, bool, int, int]:
    """What the length of a row goes by, before anything is decoded: images before videos, large ones late, visual
    tokens, the text. Where sizes are known at all (`is_known`), rows of unknown size come last."""
    is_unknown = is_known and item.pixels is None
    return item.is_video, is_unknown, (item.pixels or 0) >= LARGE_PIXELS, tokens, len(item.prompt or "")


def skip_finished(finished: Container[str], config: CaptionConfig) -> Callable[[str], bool]:
    """Rows that a source need not read. When sampling, a batch is repeated as a whole, so all are read."""
    if config.temperature > 0 or config.retry_errors:
        return lambda ident: False
    return lambda ident: all(one in finished for one in variant_ids(ident, config))
