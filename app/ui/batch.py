"""A batch of uploaded files to rows of captions, through the same job as `mmspec caption`.

The files are laid into one folder under their own names, so that names in a list find them and nothing else. May be
stopped at any token; what is done by then stays.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.job import CaptionJob
from mmspec.app.errors import UsageError
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import StreamOutput
from mmspec.app.io.sources import MANIFESTS, collect_items
from mmspec.app.modeling.chat import reject_media_tokens
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.worker import CancelSignal

if TYPE_CHECKING:
    from mmspec.app.ui.cancel import CancellableCaptioner

BATCH_SIZE = 4


class RecordingFileOutput(StreamOutput):
    """Rows to a file, and at hand for whoever shows them meanwhile. File names are relative to `base`."""

    def __init__(self, file: Path, base: Path) -> None:
        super().__init__(file.open("wb"))
        self.base = base
        self.rows: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        super().write(rows)
        self.rows += rows


class CaptionBatch:
    """One batch. `run` is for the worker's thread; `rows` and `total` may be looked at by any.

    Attributes:
        file: where the rows go. stopped: it was halted before its end. ahead: runs before it in the line.
    """

    def __init__(
        self,
        model_store: ModelStore,
        files: Sequence[Path],
        prompt: str | None,
        settings: RunSettings,
        limits: Limits,
        folder: Path,
    ) -> None:
        """`place`: an empty folder for this batch alone."""
        self.model_store, self.prompt, self.settings, self.limits = model_store, prompt, settings, limits
        self.input_folder, self.output_file = folder / "files", folder / "captions.jsonl"
        self.input_folder.mkdir()
        paths = link_files(files, self.input_folder)
        lists = [path for path in paths if path.suffix.lower() in MANIFESTS]
        self._paths = tuple(str(path) for path in lists or [self.input_folder])
        self.total = self._count_items()
        self._output = RecordingFileOutput(self.output_file, self.input_folder)
        self.cancelled, self.num_ahead = False, 0

    @property
    def rows(self) -> list[Row]:
        """Those that are done."""
        return list(self._output.rows)

    def _count_items(self) -> int:
        try:
            items = collect_items(self._paths, self.input_folder)
        except UsageError as error:
            raise UsageError(
                str(error).replace(f"{self.input_folder}{os.sep}", "").replace(str(self.input_folder), "them")
            ) from None
        if len(items) > self.limits.max_files:
            raise UsageError(f"The list names {len(items)} files; {self.limits.max_files} is the limit.")
        return len(items)

    def run(self, cancel_signal: CancelSignal) -> CaptionBatch:
        """Make the captions; the uploaded files are removed afterwards.

        Raises:
            UsageError: the model or the drafter does not do.
        """
        from mmspec.app.ui.cancel import RunCancelledError

        choice = self.settings
        settings = CaptionConfig(
            self._paths,
            model=choice.model,
            drafter=choice.drafter,
            compressor=choice.compressor,
            prompt=self.prompt,
            frames=self.limits.num_frames,
            batch_size=BATCH_SIZE,
            max_new_tokens=choice.max_new_tokens,
            temperature=choice.temperature,
            seed=choice.seed,
            max_pixels=self.limits.max_pixels,
            threads=1,
            progress=False,
        )
        try:
            CaptionJob(settings, self._output, lambda: self._build_captioner(cancel_signal)).run()
        except RunCancelledError:
            self.cancelled = True
        finally:
            self._output.stream.close()
            shutil.rmtree(self.input_folder, ignore_errors=True)
        return self

    def discard(self) -> None:
        """It will not be run; the uploaded files are removed."""
        self.cancelled, self.num_ahead = True, 0
        self._output.stream.close()
        shutil.rmtree(self.input_folder, ignore_errors=True)

    def _build_captioner(self, halt: CancelSignal) -> CancellableCaptioner:
        from mmspec.app.ui.cancel import CancellableCaptioner

        choice = self.settings
        desk = self.model_store.get(choice.model)
        reject_media_tokens(desk.processor, self.prompt)
        return CancellableCaptioner(
            desk.model,
            desk.processor,
            choice.max_new_tokens,
            choice.temperature,
            cancel_signal=halt,
            drafter=desk.get_drafter(choice.drafter),
            compressor=desk.get_compressor(choice.compressor),
        )


def link_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """Put files into a folder under plain names; a second one of the same name gets a number."""
    made: list[Path] = []
    for file in files:
        name = sanitize_file_name(file.name)
        target, number = folder / name, 1
        while target.exists():
            number += 1
            target = folder / f"{Path(name).stem}_{number}{Path(name).suffix}"
        try:
            os.link(file.resolve(), target)
        except OSError:  # another file system
            shutil.copyfile(file, target)
        made.append(target)
    return made


def sanitize_file_name(name: str) -> str:
    """A file name without what file systems, globs and terminals trip over."""
    stem, suffix = Path(name).stem, Path(name).suffix
    clean = re.sub(r"[^\w.,+ -]", "_", stem).strip(" .")[:80]
    return (clean or "file") + re.sub(r"[^\w.]", "", suffix)[:12]


__all__ = ["CaptionBatch", "link_files", "sanitize_file_name"]
