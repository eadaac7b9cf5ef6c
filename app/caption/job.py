"""`CaptionJob`: a stream of images and videos to rows of captions. May be killed at any moment and resumed.

The model (`CaptionModel`) and the destination of the rows (`Output`) are arguments. What is in a batch is decided in
`plan`, what becomes of it in `rows`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.pending import is_pending, survey
from mmspec.app.caption.plan import LARGE_PIXELS, RowPlan, skip_finished
from mmspec.app.caption.progress import CaptionProgress, comparison_lines, file_line, print_stderr
from mmspec.app.caption.report import JobReport
from mmspec.app.caption.rows import CaptionModel, RowCaptioner
from mmspec.app.caption.variants import picture_number
from mmspec.app.io.columns import select
from mmspec.app.io.decode import decode_item
from mmspec.app.io.held import decode_held
from mmspec.app.io.images import ImageError, Media, decode_ahead, pixel_limit
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished, JobSummary, Output
from mmspec.vision.video.decoder_pool import DecoderPool

SignalHandler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns."""


class GracefulStop:
    """First SIGINT or SIGTERM: finish the batch. Second: KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous_handlers: dict[int, SignalHandler] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        os.write(_stderr_number(), b"\nmmspec: finishing this batch; once more to stop at once\n")


def _stderr_number() -> int:
    """The file descriptor of standard error; a signal handler must not use its buffer."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2


class CaptionJob:
    """One run of a caption job."""

    def __init__(
        self,
        config: CaptionConfig,
        output: Output,
        load: Callable[[], CaptionModel],
        process: ProcessInfo | None = None,
        on_decoded: Callable[[Item, Media], None] | None = None,
        report: JobReport | None = None,
    ) -> None:
        """Set up; nothing is read or written before `run`.

        Args:
            load: loads the model; called after all other checks, and only if rows are pending.
            process: rank and world size; a single process by default.
            on_decoded: called with each decoded file before its batch is captioned, once.
            report: told of pictures and rows, and written at the end.
        """
        self.config, self.output, self.load, self.process = config, output, load, process or ProcessInfo()
        self._on_decoded = on_decoded or (report.add_picture if report else lambda item, media: None)
        self._job_report = report
        self.model: CaptionModel | None = None
        self._finished: Mapping[str, Finished] = {}
        self._retried: set[str] = set()  # rows with an error that were repeated in this run

    def run(self) -> int:
        """Caption the pending rows.

        Returns:
            The exit code: 0, 1 if rows failed or differ, 128 + signal if interrupted.

        Raises:
            UsageError: inputs, settings or output that do not go together.
            OutputError: a row cannot be written.
        """
        config = self.config
        inputs = Inputs(config.paths, config.source_options(self.output.base), self.output.own_files())
        inputs.check()
        self._finished = self.output.open()
        complete = False
        try:
            total, replaced = survey(inputs, config, self.process, self._finished)
            self._print_left_out([*inputs.left_out(listed=True), *replaced])
            self._prepare(inputs)
            if self.model is not None:
                self._print_left_out([self._plan.describe(total)])
            self.output.begin(config.retry_errors)
            label = f"rank {self.process.rank}" if self.process.world_size > 1 else "caption"
            show = config.progress if self.process.rank == 0 else False
            skipped = self._num_finished()
            with GracefulStop() as stop, CaptionProgress(total, skipped, show, label) as progress:
                for rows, items in self._results(stop):
                    self._write(rows, items, progress)
                    if stop.signal:
                        break
            complete = not stop.signal
        finally:
            summary = self.output.close(self._ids(), complete=complete)
        self._report(progress, self._num_finished(), stop, summary)
        self._print_left_out(self._left_out_while_reading(inputs))
        return 128 + stop.signal if stop.signal else self._exit_code(summary)

    def _print_left_out(self, lines: Sequence[str]) -> None:
        if self.process.rank == 0:
            for line in lines:
                print_stderr(f"mmspec: {line}")

    def _left_out_while_reading(self, inputs: Inputs) -> Sequence[str]:
        """What archives and remote folders hold besides the rows; known once they were read."""
        return inputs.left_out(listed=False)

    def _prepare(self, inputs: Inputs) -> None:
        """Plan the batches, and load the model if a row is pending."""
        rows = inputs.rows(skip_finished(self._finished, self.config))
        self._plan = RowPlan(self.config, self.process, self._is_pending, self._count_tokens)
        batches = self._plan.batches(rows)
        first = next(batches, None)
        self._batches = itertools.chain([] if first is None else [first], batches)
        if first is not None:
            self._loaded()

    def _loaded(self) -> CaptionModel:
        """The model, which is loaded once a row is pending: to plan pictures, else when the first batch is planned."""
        if self.model is None:
            if self._plan.max_pictures > 1:
                from mmspec.app.modeling.load import check_several_pictures

                check_several_pictures(self.config.model)
            self.model = self.load()
        return self.model

    def _count_tokens(self, width: int, height: int) -> int | None:
        """Visual tokens of a picture."""
        return self._loaded().count_tokens(width, height)

    def _num_finished(self) -> int:
        """Rows that were there before this run."""
        return self._plan.num_finished

    def _ids(self) -> set[str]:
        """Ids of the rows of the job."""
        return self._plan.ids if hasattr(self, "_plan") else set()

    def _results(self, stop: GracefulStop) -> Iterator[tuple[list[Row], list[Item]]]:
        """The rows of each batch and what they are about."""
        if self.model is None:
            return
        config = self.config
        captioner = RowCaptioner(config, self.model)
        sampler = config.frame_sampler()
        with pixel_limit(config.pixel_limit), DecoderPool() as isolated:

            def read(item: Item) -> Media:
                return decode_item(item, sampler, config.pixel_limit, isolated)

            def decode(item: Item) -> tuple[Item, Media]:
                return decode_held(item, read, config.stores_pictures)

            for decoded in decode_batches(self._batches, decode, config):
                if stop.signal:
                    return
                for item, media in decoded:
                    if not isinstance(media, ImageError):
                        self._on_decoded(item, media)
                yield captioner.caption_rows(decoded), [item for item, _ in decoded]

    def _write(self, rows: list[Row], items: list[Item], progress: CaptionProgress) -> None:
        """Write the pending ones of the rows of a batch."""
        new = [(row, item) for row, item in zip(rows, items, strict=True) if self._is_pending(item)]
        columns = self.config.columns()
        self.output.write([select(row, columns) for row, _ in new], [item for _, item in new])
        if self.config.retry_errors:
            self._retried.update(row["id"] for row, _ in new)
        if self._job_report is not None:
            self._job_report.add_rows([row for row, _ in new])
        progress.add(row for row, _ in new)

    def _is_pending(self, item: Item) -> bool:
        return is_pending(item, self._finished, self.config) and item.id not in self._retried

    def _report(self, progress: CaptionProgress, skipped: int, stop: GracefulStop, summary: JobSummary | None) -> None:
        model = self.model
        lines = progress.summary(skipped, model.acceptance if model else None)
        lines += comparison_lines(model.comparison, model.dtype != "float32") if model else []
        if self.config.writes_texts:
            lines.append(f"text files {'beside the pictures' if self.config.out == '-' else f'in {self.config.out}'}")
        elif self.config.out != "-":
            lines.append(file_line(summary, self.config.out, self.output, self.process))
        if stop.signal:
            lines.append("interrupted: run the same command again to continue")
        if self._job_report is not None:
            self._job_report.write(lines)
            lines.append(f"report in {self._job_report.file}")
        who = f"mmspec rank {self.process.rank}: " if self.process.world_size > 1 else "mmspec: "
        for line in lines:
            print_stderr(who + line)

    def _exit_code(self, summary: JobSummary | None) -> int:
        """Of several ranks only the last to finish reports failures: a launcher kills the others when one fails."""
        if summary is None:
            return 0
        if summary.num_errors and self.config.writes_texts:
            print_stderr(
                f"mmspec: {summary.num_errors} of {summary.num_rows} have no caption; the next run tries again"
            )
        elif summary.num_errors and not self.config.retry_errors:
            print_stderr(
                f"mmspec: {summary.num_errors} of {summary.num_rows} rows hold an error; --retry-errors repeats them"
            )
        return int(bool(summary.num_errors or summary.num_different))


MAX_AHEAD_PIXELS = 256_000_000
"""Pixels of pictures that are decoded and wait, three bytes each."""


def _share_of_ahead(item: Item | None) -> float:
    """How much of what may be decoded ahead a row takes: a large picture all of it, it is decoded alone."""
    pixels = 0 if item is None else item.pixels or 0
    return 1.0 if pixels >= LARGE_PIXELS else pixels / MAX_AHEAD_PIXELS


def decode_batches(
    batches: Iterator[list[Item]], decode: Callable[[Item], tuple[Item, Media]], config: CaptionConfig
) -> Iterator[list[tuple[Item, Media | ImageError]]]:
    """The batches with their media, decoded ahead in threads; once for consecutive batches about the same pictures.

    Args:
        decode: returns the media of an item, and the item with what else was found of it.
    """
    queue: deque[tuple[list[Item], int]] = deque()

    def picture(item: Item) -> int:
        return picture_number(item, config)

    def pictures() -> Iterator[Item | None]:
        """What is to be decoded for each batch; None for a batch about pictures of the one before."""
        held: set[int] = set()
        for batch in batches:
            new = [item for item in batch if picture(item) not in held]
            held = set(map(picture, batch))
            queue.append((batch, len(new)))
            yield from new or (None,)

    def load(item: Item | None) -> tuple[Item, Media] | None:
        return None if item is None else decode(item)

    ahead = config.batch_size + config.threads
    decoded = decode_ahead(pictures(), load, config.threads, ahead, _share_of_ahead)
    held: dict[int, tuple[Item, Media] | ImageError] = {}
    try:
        for first in decoded:
            batch, num_new = queue.popleft()
            found = [first, *itertools.islice(decoded, max(1, num_new) - 1)]
            held = {number: held[number] for number in map(picture, batch) if number in held}
            held |= {picture(item): result for item, result in found if item is not None and result is not None}
            yield [_with_media(item, held[picture(item)]) for item in batch]
    finally:
        decoded.close()


def _with_media(item: Item, found: tuple[Item, Media] | ImageError) -> tuple[Item, Media | ImageError]:
    """A row with what was decoded for it, or for another row about the same picture."""
    if isinstance(found, ImageError):
        return item, found
    decoded, media = found
    return decoded if decoded.id == item.id else replace(item, content=decoded.content, stamp=decoded.stamp), media
