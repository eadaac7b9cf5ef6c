"""`CaptionJob`: a stream of images and videos to rows of captions. May be killed at any moment and resumed.

The model (`CaptionModel`) and the destination of the rows (`Output`) are arguments. What is in a batch is decided in
`plan`, what becomes of it in `rows`.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from mmspec.app.caption.config import CaptionConfig, ProcessInfo, prompt_sha1
from mmspec.app.caption.plan import RowPlan, skip_finished
from mmspec.app.caption.progress import CaptionProgress, comparison_lines, print_stderr
from mmspec.app.caption.rows import CaptionModel, RowCaptioner
from mmspec.app.errors import UsageError
from mmspec.app.io.decode import decode_item
from mmspec.app.io.images import ImageError, Media, decode_ahead, pixel_limit
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.output import Finished, JobSummary, Output
from mmspec.app.io.sources import describe_skipped
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
        os.write(2, b"\nmmspec: finishing this batch; once more to stop at once\n")


class CaptionJob:
    """One run of a caption job."""

    def __init__(
        self,
        config: CaptionConfig,
        output: Output,
        load: Callable[[], CaptionModel],
        process: ProcessInfo | None = None,
    ) -> None:
        """Set up; nothing is read or written before `run`.

        Args:
            load: loads the model; called after all other checks, and only if rows are pending.
            process: rank and world size; a single process by default.
        """
        self.config, self.output, self.load, self.process = config, output, load, process or ProcessInfo()
        self.model: CaptionModel | None = None
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
        if self.process.rank == 0 and (line := describe_skipped(config.paths, self.output.own_files())):
            print_stderr(f"mmspec: {line}")
        finished = self.output.open()
        plan = RowPlan(config, self.process, lambda item: self._is_pending(item, finished))
        complete = False
        try:
            total = survey(inputs, config, self.process, finished)
            batches = plan.batches(inputs.rows(skip_finished(finished, config)))
            first = next(batches, None)
            if first is not None:
                self.model = self.load()
            self.output.begin(config.retry_errors)
            label = f"rank {self.process.rank}" if self.process.world_size > 1 else "caption"
            show = config.progress if self.process.rank == 0 else False
            with GracefulStop() as stop, CaptionProgress(total, plan.num_finished, show, label) as progress:
                if first is not None:
                    self._work(itertools.chain([first], batches), stop, progress, finished)
            complete = not stop.signal
        finally:
            summary = self.output.close(plan.ids, complete=complete)
        self._report(progress, plan.num_finished, stop)
        return 128 + stop.signal if stop.signal else self._exit_code(summary)

    def _is_pending(self, item: Item, finished: Mapping[str, Finished]) -> bool:
        row = finished.get(item.id)
        if row is None:
            return True
        check_prompt(item, row, self.config)
        return self.config.retry_errors and row.has_error and item.id not in self._retried

    def _work(
        self,
        batches: Iterator[list[Item]],
        stop: GracefulStop,
        progress: CaptionProgress,
        finished: Mapping[str, Finished],
    ) -> None:
        config = self.config
        assert self.model is not None
        captioner = RowCaptioner(config, self.model)
        sampler = config.frame_sampler()
        with pixel_limit(config.max_pixels), DecoderPool() as isolated:

            def decode(item: Item) -> Media:
                return decode_item(item, sampler, config.max_pixels, isolated)

            for decoded in decode_batches(batches, decode, config):
                if stop.signal:
                    return
                rows = captioner.caption_rows(decoded)
                new = [
                    (row, item)
                    for row, (item, _) in zip(rows, decoded, strict=True)
                    if self._is_pending(item, finished)
                ]
                self.output.write([row for row, _ in new], [item for _, item in new])
                self._retried.update(row["id"] for row, _ in new if config.retry_errors)
                progress.add(row for row, _ in new)
                if stop.signal:
                    return

    def _report(self, progress: CaptionProgress, skipped: int, stop: GracefulStop) -> None:
        model = self.model
        lines = progress.summary(skipped, model.acceptance if model else None)
        lines += comparison_lines(model.comparison, model.dtype != "float32") if model else []
        if self.config.out != "-":
            lines.append(f"rows in {self.config.out}")
        if stop.signal:
            lines.append("interrupted: run the same command again to continue")
        who = f"mmspec rank {self.process.rank}: " if self.process.world_size > 1 else "mmspec: "
        for line in lines:
            print_stderr(who + line)

    def _exit_code(self, summary: JobSummary | None) -> int:
        """Of several ranks only the last to finish reports failures: a launcher kills the others when one fails."""
        if summary is None:
            return 0
        if summary.num_errors and not self.config.retry_errors:
            print_stderr(
                f"mmspec: {summary.num_errors} of {summary.num_rows} rows hold an error; --retry-errors repeats them"
            )
        return int(bool(summary.num_errors or summary.num_different))


def survey(inputs: Inputs, config: CaptionConfig, process: ProcessInfo, finished: Mapping[str, Finished]) -> int | None:
    """The number of rows of this process; None if it is not cheap to have.

    Raises:
        UsageError: of inputs that are listed, all problems that can be seen without decoding.
    """
    num_rows = inputs.count()
    if inputs.is_listed:
        num_rows = 0
        for item in inputs.rows(lambda ident: True):
            num_rows += 1
            if (row := finished.get(item.id)) is not None:
                check_prompt(item, row, config)
    if num_rows is None:
        return None
    return len(range(config.shard[0], num_rows, config.shard[1])[process.rank :: process.world_size])


def check_prompt(item: Item, row: Finished, config: CaptionConfig) -> None:
    """Refuse a row that was captioned with another prompt.

    Raises:
        UsageError: it was.
    """
    if row.prompt_sha1 != prompt_sha1(item.resolve_prompt(config.prompt)):
        raise UsageError(f"{item.id!r} was captioned with another prompt: use another --out, or --overwrite")


def decode_batches(
    batches: Iterator[list[Item]], decode: Callable[[Item], Media], config: CaptionConfig
) -> Iterator[list[tuple[Item, Media | ImageError]]]:
    """The batches with their media, decoded ahead in threads."""
    queue: deque[list[Item]] = deque()

    def items() -> Iterator[Item]:
        for batch in batches:
            queue.append(batch)
            yield from batch

    decoded = decode_ahead(items(), decode, config.threads, config.planned_batch_size + config.threads)
    try:
        for first in decoded:
            size = len(queue.popleft())
            yield [first, *itertools.islice(decoded, size - 1)]
    finally:
        decoded.close()


__all__ = ["CaptionJob", "GracefulStop"]
