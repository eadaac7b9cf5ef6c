"""Which rows a process captions, in which batches: a function of the input alone, not of what is finished.

So a resumed job runs the batches that it would have run, and sampled captions do not depend on interruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.io.content import Pictures
from mmspec.app.io.item import Item

WINDOW_BATCHES = 16
"""Batches among which rows are sorted by length."""
WINDOW_BYTES = 256 << 20
"""Content that the rows of a window may hold."""


@dataclass
class RowPlan:
    """Divides rows among shards and processes, and into batches of like length.

    Attributes:
        is_pending: whether a row is to be captioned.
        ids: of the rows of this shard, all processes; complete once `batches` is exhausted.
        num_assigned: rows of this process that were planned so far.
        num_finished: those of them that are not pending.
        max_pictures: largest number of pictures of a row so far.
    """

    config: CaptionConfig
    process: ProcessInfo
    is_pending: Callable[[Item], bool]
    ids: set[str] = field(default_factory=set)
    num_assigned: int = 0
    num_finished: int = 0
    max_pictures: int = 1

    def batches(self, rows: Iterable[Item]) -> Iterator[list[Item]]:
        """The batches with a pending row, one after the other."""
        size = self.config.planned_batch_size
        for window in _windows(self._assigned(rows), WINDOW_BATCHES * size):
            window.sort(key=_length)  # stable: rows alike stay in order
            for start in range(0, len(window), size):
                batch = window[start : start + size]
                pending = sum(map(self.is_pending, batch))
                self.num_assigned += len(batch)
                self.num_finished += len(batch) - pending
                if pending:
                    yield batch

    def _assigned(self, rows: Iterable[Item]) -> Iterator[Item]:
        (first, step), process = self.config.shard, self.process
        for item in rows:
            if item.index % step != first:
                continue
            self.ids.add(item.id)
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


def _length(item: Item) -> tuple[bool, int]:
    """What the length of a prompt goes by, before anything is decoded: images before videos, then the text."""
    return item.is_video, len(item.prompt or "")


def skip_finished(finished: Container[str], config: CaptionConfig) -> Callable[[str], bool]:
    """Rows that a source need not read. When sampling, a batch is repeated as a whole, so all are read."""
    if config.temperature > 0 or config.retry_errors:
        return lambda ident: False
    return lambda ident: ident in finished
