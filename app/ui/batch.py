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

from mmspec.app.caption.config import JobSettings
from mmspec.app.caption.job import Job
from mmspec.app.errors import UsageError
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import StreamOutput
from mmspec.app.io.sources import MANIFESTS, collect
from mmspec.app.modeling.chat import check_words
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import Choice, Shelf
from mmspec.app.ui.worker import Halt

if TYPE_CHECKING:
    from mmspec.app.ui.cancel import HaltingCaptioner

BATCH = 4


class FileRows(StreamOutput):
    """Rows to a file, and at hand for whoever shows them meanwhile. File names are relative to `base`."""

    def __init__(self, file: Path, base: Path) -> None:
        super().__init__(file.open("wb"))
        self.base = base
        self.rows: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        super().write(rows)
        self.rows += rows


class Batch:
    """One batch. `run` is for the worker's thread; `rows` and `total` may be looked at by any.

    Attributes:
        file: where the rows go. stopped: it was halted before its end. ahead: runs before it in the line.
    """

    def __init__(
        self, shelf: Shelf, files: Sequence[Path], prompt: str | None, choice: Choice, limits: Limits, place: Path
    ) -> None:
        """`place`: an empty folder for this batch alone."""
        self.shelf, self.prompt, self.choice, self.limits = shelf, prompt, choice, limits
        self.inside, self.file = place / "files", place / "captions.jsonl"
        self.inside.mkdir()
        paths = lay_out(files, self.inside)
        lists = [path for path in paths if path.suffix.lower() in MANIFESTS]
        self._paths = tuple(str(path) for path in lists or [self.inside])
        self.total = self._count()
        self._output = FileRows(self.file, self.inside)
        self.stopped, self.ahead = False, 0

    @property
    def rows(self) -> list[Row]:
        """Those that are done."""
        return list(self._output.rows)

    def _count(self) -> int:
        try:
            items = collect(self._paths, self.inside)
        except UsageError as error:
            raise UsageError(
                str(error).replace(f"{self.inside}{os.sep}", "").replace(str(self.inside), "them")
            ) from None
        if len(items) > self.limits.files:
            raise UsageError(f"The list names {len(items)} files; {self.limits.files} is the limit.")
        return len(items)

    def run(self, halt: Halt) -> Batch:
        """Make the captions; the uploaded files are removed afterwards.

        Raises:
            UsageError: the model or the drafter does not do.
        """
        from mmspec.app.ui.cancel import StoppedError

        choice = self.choice
        settings = JobSettings(
            self._paths,
            model=choice.model,
            drafter=choice.drafter,
            compressor=choice.compressor,
            prompt=self.prompt,
            frames=self.limits.frames,
            batch_size=BATCH,
            max_new_tokens=choice.max_new_tokens,
            temperature=choice.temperature,
            seed=choice.seed,
            max_pixels=self.limits.pixels,
            threads=1,
            progress=False,
        )
        try:
            Job(settings, self._output, lambda: self._captioner(halt)).run()
        except StoppedError:
            self.stopped = True
        finally:
            self._output.stream.close()
            shutil.rmtree(self.inside, ignore_errors=True)
        return self

    def leave(self) -> None:
        """It will not be run; the uploaded files are removed."""
        self.stopped, self.ahead = True, 0
        self._output.stream.close()
        shutil.rmtree(self.inside, ignore_errors=True)

    def _captioner(self, halt: Halt) -> HaltingCaptioner:
        from mmspec.app.ui.cancel import HaltingCaptioner

        choice = self.choice
        desk = self.shelf.take(choice.model)
        check_words(desk.processor, self.prompt)
        return HaltingCaptioner(
            desk.model,
            desk.processor,
            choice.max_new_tokens,
            choice.temperature,
            halt=halt,
            drafter=desk.drafter(choice.drafter),
            compressor=desk.compressor(choice.compressor),
        )


def lay_out(files: Sequence[Path], folder: Path) -> list[Path]:
    """Put files into a folder under plain names; a second one of the same name gets a number."""
    made: list[Path] = []
    for file in files:
        name = plain_name(file.name)
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


def plain_name(name: str) -> str:
    """A file name without what file systems, globs and terminals trip over."""
    stem, suffix = Path(name).stem, Path(name).suffix
    clean = re.sub(r"[^\w.,+ -]", "_", stem).strip(" .")[:80]
    return (clean or "file") + re.sub(r"[^\w.]", "", suffix)[:12]


__all__ = ["Batch", "lay_out", "plain_name"]
