"""Who captions the rows of a job (`Executor`), and this process as one: planned batches, decoded ahead, captioned."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.plan import LARGE_PIXELS, RowPlan, skip_finished
from mmspec.app.caption.rows import CaptionModel, RowCaptioner
from mmspec.app.caption.stop import GracefulStop
from mmspec.app.caption.variants import picture_number
from mmspec.app.io.decode import decode_item
from mmspec.app.io.file_stamp import file_stamp
from mmspec.app.io.held import hold
from mmspec.app.io.images import ImageError, Media, decode_ahead, pixel_limit
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished
from mmspec.vision.video.decoder_pool import DecoderPool

MAX_AHEAD_PIXELS = 256_000_000
"""Pixels of pictures that are decoded and wait, three bytes each."""


Results = Iterator[tuple[list[Row], list[Item]]]
"""The rows of each batch, and what they are about."""


class Executor:
    """Who plans the batches of a job and captions them: this process, or a cluster.

    Attributes:
        process: which of the rows are this process's.
        model: what is loaded in this process; None: nothing, or not yet.
    """

    def __init__(self, config: CaptionConfig, process: ProcessInfo | None = None) -> None:
        """Set up; nothing is loaded. A single process by default."""
        self.config, self.process = config, process or ProcessInfo()
        self.model: CaptionModel | None = None

    def prepare(self, plan: RowPlan, inputs: Inputs, finished: Mapping[str, Finished]) -> bool:
        """Begin to plan; returns whether a row is pending.

        Args:
            plan: of the job; its `ids` and `num_finished` are complete once all results are taken.
            finished: the rows that exist.
        """
        self._plan, self._inputs, plan.count_tokens = plan, inputs, self._count_tokens
        groups = plan.groups(inputs.rows(skip_finished(finished, self.config)))
        first = next(groups, None)
        self._groups = itertools.chain([] if first is None else [first], groups)
        if first is not None:
            self._start()
        return first is not None

    def _count_tokens(self, width: int, height: int) -> int | None:
        """As `RowPlan.count_tokens`."""
        raise NotImplementedError

    def _start(self) -> None:
        """Load what captions, after all other checks; a row is pending."""

    def results(self, stop: GracefulStop, on_decoded: Callable[[Item, Media], None]) -> Results:
        """Caption the batches until `stop` has a signal; `on_decoded` is called with what this process decodes."""
        raise NotImplementedError

    def left_out(self) -> Sequence[str]:
        """What archives and remote folders hold besides the rows, as lines; known once they were read."""
        return self._inputs.left_out(listed=False)


class LocalExecutor(Executor):
    """Captions in this process, with pictures decoded ahead. See `Executor`."""

    def __init__(
        self, config: CaptionConfig, load: Callable[[], CaptionModel], process: ProcessInfo | None = None
    ) -> None:
        """Set up; `load` loads the model, once a row is pending."""
        super().__init__(config, process)
        self.load = load

    def _count_tokens(self, width: int, height: int) -> int | None:
        self._start()
        assert self.model is not None
        return self.model.count_tokens(width, height)

    def _start(self) -> None:
        """Load the model: to plan pictures, else when the first batch is planned."""
        if self.model is not None:
            return
        if self._plan.max_pictures > 1:
            from mmspec.app.modeling.load import check_several_pictures

            check_several_pictures(self.config.model)
        self.model = self.load()

    def results(self, stop: GracefulStop, on_decoded: Callable[[Item, Media], None]) -> Results:
        if self.model is None:
            return
        captioner = RowCaptioner(self.config, self.model)
        with pixel_limit(self.config.pixel_limit), DecoderPool() as decoders:
            for decoded in decode_batches(self._groups, self.config, decoders):
                if stop.signal:
                    return
                for item, media in decoded:
                    if not isinstance(media, ImageError):
                        on_decoded(item, media)
                yield captioner.caption_rows(decoded), [item for item, _ in decoded]


def decode_batches(
    groups: Iterable[list[list[Item]]], config: CaptionConfig, decoders: DecoderPool
) -> Iterator[list[tuple[Item, Media | ImageError]]]:
    """The batches of `RowPlan.groups` with their media: each picture of a group is decoded once, ahead in threads."""
    queue: deque[tuple[list[list[Item]], int]] = deque()
    sampler = config.frame_sampler()

    def pictures() -> Iterator[Item]:
        """An item for each picture."""
        for group in groups:
            first = {picture_number(item, config): item for batch in reversed(group) for item in batch}
            queue.append((group, len(first)))
            yield from first.values()

    def load(item: Item) -> tuple[Item, Media]:
        """What is decoded of an item, and the item; with its very bytes where they are stored."""
        with item.locate_errors():
            # The stamp before it is read: one that is replaced meanwhile is done again.
            item = replace(item, stamp=file_stamp(item))
            item = hold(item) if config.stores_pictures else item
        return item, decode_item(item, sampler, config.pixel_limit, decoders)

    ahead = config.batch_size + config.threads
    decoded = decode_ahead(pictures(), load, config.threads, ahead, _share_of_ahead)
    try:
        for one in decoded:
            group, number = queue.popleft()
            results = [one, *itertools.islice(decoded, number - 1)]
            found = {picture_number(item, config): result for item, result in results}
            for batch in group:
                yield [_with_media(item, found[picture_number(item, config)]) for item in batch]
    finally:
        decoded.close()


def _share_of_ahead(item: Item) -> float:
    """How much of what may be decoded ahead a row takes: a large picture all of it, it is decoded alone."""
    pixels = item.pixels or 0
    return 1.0 if pixels >= LARGE_PIXELS else pixels / MAX_AHEAD_PIXELS


def _with_media(item: Item, found: tuple[Item, Media] | ImageError) -> tuple[Item, Media | ImageError]:
    """A row with what was decoded for it, or for another row about the same picture."""
    if isinstance(found, ImageError):
        return item, found
    decoded, media = found
    return decoded if decoded.id == item.id else replace(item, content=decoded.content, stamp=decoded.stamp), media
