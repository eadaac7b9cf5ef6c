"""`CaptionJob`: a list of images and videos to rows of captions. May be killed at any moment and resumed.

Handles batches, errors and order. The model (`CaptionModel`) and the destination of the rows (`Output`) are arguments.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from mmspec.app.caption.config import (
    SCENES_MODEL,
    CaptionConfig,
    ProcessInfo,
    derive_seed,
    prompt_sha1,
    shard_items,
    split_batches,
)
from mmspec.app.caption.progress import CaptionProgress, comparison_lines, print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import ImageError, Media, decode_ahead, pixel_limit
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Output
from mmspec.app.io.sources import Item, collect_items, describe_skipped
from mmspec.app.io.videos import load_media
from mmspec.app.scenes.domain_check import warn_if_out_of_domain
from mmspec.app.versions import mmspec_version
from mmspec.vision.video.decoder_pool import DecoderPool

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import Caption, ComparisonTotals

Work = Sequence[tuple[Item, Media]]


SignalHandler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns."""


class CaptionModel(Protocol):
    """What generates captions: `Captioner`, or a stand-in in tests."""

    @property
    def comparison(self) -> ComparisonTotals | None: ...

    @property
    def dtype(self) -> str: ...

    @property
    def acceptance(self) -> float: ...

    def caption(
        self, media: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> Sequence[Caption]: ...


@dataclass(frozen=True)
class Failure:
    """Why a file has no caption."""

    kind: str
    message: str


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
        on_decoded: Callable[[Item, Media], None] | None = None,
    ) -> None:
        """Set up; nothing is read or written before `run`.

        Args:
            load: loads the model; called after all other checks, and only if rows are pending.
            process: rank and world size; a single process by default.
            on_decoded: called with each decoded file before its batch is captioned, once.
        """
        self.config, self.output, self.load, self.process = config, output, load, process or ProcessInfo()
        self._on_decoded = on_decoded or (lambda item, media: None)
        self.model: CaptionModel | None = None
        self._max_batch = config.batch_size  # halved when out of memory
        self._check_images = config.model == SCENES_MODEL  # until the first warning

    def run(self) -> int:
        """Caption the pending rows.

        Returns:
            The exit code: 0, 1 if rows failed or differ, 128 + signal if interrupted.

        Raises:
            UsageError: inputs, settings or output that do not go together.
            OutputError: a row cannot be written.
        """
        base, config = self.output.base, self.config
        items = collect_items(config.paths, base, self.output.own_files())
        if self.process.rank == 0 and (line := describe_skipped(config.paths, self.output.own_files())):
            print_stderr(f"mmspec: {line}")
        in_shard, assigned = shard_items(items, config.shard, self.process)
        rows = self.output.open()
        complete = False
        try:
            self._check_prompts(items, rows)
            plan = [
                batch
                for batch in split_batches(assigned, config.batch_size)
                if any(self._is_pending(i, rows) for i in batch)
            ]
            num_pending = sum(self._is_pending(item, rows) for item in assigned)
            if num_pending:
                self.model = self.load()
            self.output.begin(lambda row: config.retry_errors and bool(row["error"]))
            label = f"rank {self.process.rank}" if self.process.world_size > 1 else "caption"
            show = config.progress if self.process.rank == 0 else False
            with (
                GracefulStop() as stop,
                CaptionProgress(len(assigned), len(assigned) - num_pending, show, label) as progress,
            ):
                self._work(plan, rows, stop, progress)
            complete = not stop.signal
        finally:
            final = self.output.close((item.id for item in in_shard), complete=complete)
        self._report(progress, len(assigned) - num_pending, stop)
        return 128 + stop.signal if stop.signal else self._exit_code(final)

    def _prompt(self, item: Item) -> str:
        return item.resolve_prompt(self.config.prompt)

    def _is_pending(self, item: Item, rows: dict[str, Row]) -> bool:
        row = rows.get(item.id)
        return row is None or (self.config.retry_errors and bool(row["error"]))

    def _check_prompts(self, items: Sequence[Item], rows: dict[str, Row]) -> None:
        for item in items:
            row = rows.get(item.id)
            if row is not None and row["prompt_sha1"] != prompt_sha1(self._prompt(item)):
                raise UsageError(f"{item.id!r} was captioned with another prompt: use another --out, or --overwrite")

    def _work(
        self, plan: list[Sequence[Item]], rows: dict[str, Row], stop: GracefulStop, progress: CaptionProgress
    ) -> None:
        config = self.config
        sampler = config.frame_sampler()
        with pixel_limit(config.max_pixels), DecoderPool() as isolated:

            def decode(item: Item) -> Media:
                return load_media(item.path, sampler, config.max_pixels, isolated)

            ahead = config.batch_size + config.threads
            decoded = decode_ahead(itertools.chain(*plan), decode, config.threads, ahead)
            for batch in plan:
                if stop.signal:
                    decoded.close()
                    return
                batch_rows = self._batch(list(itertools.islice(decoded, len(batch))))
                new = [row for item, row in zip(batch, batch_rows, strict=True) if self._is_pending(item, rows)]
                self.output.write(new)
                progress.add(new)

    def _batch(self, decoded: list[tuple[Item, Media | ImageError]]) -> list[Row]:
        """Rows of one batch. The whole batch runs even if some rows exist: sampling depends on the batch."""
        good = [(item, media) for item, media in decoded if not isinstance(media, ImageError)]
        self._check_domain(good)
        for item, media in good:
            self._on_decoded(item, media)
        results: dict[str, Caption | Failure] = {
            item.id: Failure(error.kind, str(error)) for item, error in decoded if isinstance(error, ImageError)
        }
        start = 0
        while start < len(good):
            work = good[start : start + self._max_batch]
            results |= zip((item.id for item, _ in work), self._attempt(work), strict=True)
            start += len(work)
        return [self._row(item, results[item.id]) for item, _ in decoded]

    def _check_domain(self, work: Work) -> None:
        """Warn once if the bundled toy model gets an image that is no drawn scene."""
        for item, media in work:
            self._check_images = self._check_images and not warn_if_out_of_domain(media, item.file_name)

    def _attempt(self, work: Work, may_halve: bool = True) -> list[Caption | Failure]:
        """Captions or failures of `work`. Out of memory: retried in halves. Any other error: each row alone."""
        from mmspec.app.modeling.captioner import out_of_memory

        try:
            return self._caption(work)
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":  # the device is unusable from here on
                raise
            full = out_of_memory(error)
            if len(work) == 1 or (full and not may_halve):
                kind = "OutOfMemory" if full else type(error).__name__
                return [Failure(kind, one_line(error))] * len(work)
        # outside of `except`, so that the error's traceback no longer holds the tensors of the failed attempt
        step = (len(work) + 1) // 2 if full else 1
        if full:
            _free()
            self._max_batch = min(self._max_batch, step)
            print_stderr(f"mmspec: out of memory with {len(work)} images per batch, continuing with {step}")
        parts = [work[start : start + step] for start in range(0, len(work), step)]
        return [result for part in parts for result in self._attempt(part, may_halve=False)]

    def _caption(self, work: Work) -> list[Caption | Failure]:
        assert self.model is not None
        config = self.config
        num_compared = len(work) if config.compare < 0 else config.compare
        compare = [config.compare < 0 or item.index < num_compared for item, _ in work] if config.compare else []
        prompts = [self._prompt(item) for item, _ in work]
        seed = derive_seed(config.seed, work[0][0].index)
        return list(self.model.caption([media for _, media in work], prompts, seed, compare))

    def _row(self, item: Item, result: Caption | Failure) -> Row:
        assert self.model is not None
        config = self.config
        row: Row = {"id": item.id, "file_name": item.file_name, "caption": None}
        row |= {"model": config.model, "drafter": config.drafter, "prompt_sha1": prompt_sha1(self._prompt(item))}
        row["gen"] = {
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "stop": list(config.stop),
            "batch_size": config.batch_size,
            "dtype": self.model.dtype,
        }
        row |= dict.fromkeys(("n_prompt_tokens", "n_new_tokens", "n_rounds", "tau", "ttft_s", "seconds"))
        row |= {"finish_reason": "error", "identical": None, "plain": None}
        row["error"] = None
        if isinstance(result, Failure):
            row["error"] = {"type": result.kind, "message": result.message}
        else:
            row |= asdict(result)
        return row | {"mmspec_version": mmspec_version(), "index": item.index}

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

    def _exit_code(self, final: list[Row] | None) -> int:
        """Of several ranks only the last to finish reports failures: a launcher kills the others when one fails."""
        if final is None:
            return 0
        num_failed = sum(1 for row in final if row["error"])
        if num_failed and not self.config.retry_errors:
            print_stderr(f"mmspec: {num_failed} of {len(final)} rows hold an error; --retry-errors repeats them")
        half = ("bfloat16", "float16")
        differs = any(row.get("identical") is False and row["gen"]["dtype"] not in half for row in final)
        return int(bool(num_failed) or differs)


def _free() -> None:
    """Release cached device memory before the retry."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["CaptionJob", "CaptionModel", "Failure", "GracefulStop"]
