"""Captions of a batch of uploaded files, by the same job as `mmspec caption`.

The files are linked into one folder under their own names, so that a manifest can name them and nothing else. A batch
can be cancelled at any token; finished rows remain.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import SCENES_MODEL, CaptionConfig
from mmspec.app.caption.job import CaptionJob
from mmspec.app.errors import UsageError
from mmspec.app.io.columns import ROW_COLUMNS
from mmspec.app.io.images import Media, media_images
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import StreamOutput
from mmspec.app.io.sources import MANIFESTS
from mmspec.app.modeling.chat import reject_media_tokens
from mmspec.app.modeling.sampling import Sampling
from mmspec.app.scenes.domain_check import looks_like_scene
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.thumbnails import to_data_uri
from mmspec.app.ui.worker import CancelSignal

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import ComparisonTotals
    from mmspec.app.ui.cancel import CancellableCaptioner

BATCH_SIZE = 4
COMPARED_FILES = BATCH_SIZE
"""Files at most that plain `generate` describes too, so that the speed-up is known."""
TABLE_IMAGE_SIZE = 64
"""Longest side in pixels of the picture in the table."""


class RecordingFileOutput(StreamOutput):
    """Writes rows to a file and keeps them in `rows` for the page, with the names that the files were given.

    File names of a job are relative to `base`; `names` has the given name of each.
    """

    def __init__(self, file: Path, base: Path, names: Mapping[str, str]) -> None:
        super().__init__(file.open("wb"))
        self.base = base
        self.names = names
        self.rows: list[Row] = []

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        named = [row | {"file_name": self.names.get(row["file_name"], row["file_name"])} for row in rows]
        super().write(named)
        self.rows += named


class CaptionBatch:
    """One batch. `run` is called in the worker's thread; other threads may read the attributes meanwhile.

    Attributes:
        output_file: JSONL with the rows.
        thumbnails: {id of a row: data URI of a small picture}.
        total: number of files to caption.
        cancelled: the batch ended early.
        num_ahead: runs ahead of it in the queue.
        num_out_of_domain: pictures that the small built-in model cannot describe.
        comparison: with plain `generate`; None before the job has begun.
    """

    def __init__(
        self,
        model_store: ModelStore,
        files: Sequence[Path],
        prompt: str | None,
        settings: RunSettings,
        limits: Limits,
        folder: Path,
        names: Sequence[str] | None = None,
    ) -> None:
        """Link the files into `folder`, an empty folder of this batch alone.

        Args:
            model_store: the offered models.
            files: pictures, clips, and lists that name some of them.
            prompt: for files without their own; None for the default.
            settings: of the run.
            limits: of files.
            folder: of this batch.
            names: given names of the files; None for their names on the disk.

        Raises:
            UsageError: there is nothing but invalid lists, or a list names too many files.
        """
        self.model_store = model_store
        self.prompt = prompt
        self.settings = settings
        self.limits = limits
        self.input_folder = folder / "files"
        self.output_file = folder / "captions.jsonl"
        self.input_folder.mkdir()
        given = unique_names([clean_name(name) for name in names] if names else [file.name for file in files])
        paths = link_files(files, self.input_folder, given)
        self.thumbnails: dict[str, str] = {}
        manifests = [path for path in paths if path.suffix.lower() in MANIFESTS]
        self._paths, self._refused, self.total = self._find_items(manifests)
        self._output = RecordingFileOutput(
            self.output_file, self.input_folder, {path.name: name for path, name in zip(paths, given, strict=True)}
        )
        self.cancelled = False
        self.num_ahead = 0
        self.num_out_of_domain = 0
        self.comparison: ComparisonTotals | None = None

    @property
    def tau(self) -> float | None:
        """Tokens per forward over all captions; None before the first."""
        rows = [row for row in self._output.rows if not row["error"] and row["tau"]]
        forwards = sum(max(0, row["n_new_tokens"] - 1) / row["tau"] for row in rows)
        return sum(max(0, row["n_new_tokens"] - 1) for row in rows) / forwards if forwards else None

    @property
    def speedup(self) -> float | None:
        """Seconds of plain `generate` divided by those of mmspec; None before a batch was decoded by both."""
        totals = self.comparison
        return totals.plain_s / totals.patched_s if totals is not None and totals.patched_s else None

    @property
    def rows(self) -> list[Row]:
        """Finished rows."""
        return list(self._output.rows)

    def _find_items(self, manifests: Sequence[Path]) -> tuple[tuple[str, ...], list[Row], int]:
        """What the job reads, rows of the lists that cannot be read, and the number of rows of both."""
        lists, refused, total, reason = [], [], 0, ""
        for path in manifests:
            try:
                total += self._count_rows(path)
                lists.append(str(path))
            except UsageError as error:
                message = str(error).replace(f"{self.input_folder}{os.sep}", "")  # pages must not read server paths
                reason = message.replace(str(self.input_folder), "the files")
                refused.append(_refused_row(path.name, reason))
        if not lists:
            try:
                lists, total = [str(self.input_folder)], self._count_rows(self.input_folder)
            except UsageError as error:
                text = str(error).replace(str(self.input_folder), "the files")
                raise UsageError(reason or text) from None
        if total > self.limits.max_files:
            raise UsageError(f"The list names more than {self.limits.max_files} files, which is the limit.")
        return tuple(lists), refused, total + len(refused)

    def _count_rows(self, path: Path) -> int:
        """Rows of the linked files or of a list, without their content; at most one more than a batch may have."""
        inputs = Inputs([str(path)], SourceOptions(self.input_folder))
        inputs.check()
        return sum(1 for _ in itertools.islice(inputs.rows(lambda ident: True), self.limits.max_files + 1))

    def run(self, cancel_signal: CancelSignal) -> CaptionBatch:
        """Caption all files; the links to the uploads are removed afterwards.

        Raises:
            UsageError: the model, drafter or compressor cannot be used.
        """
        from mmspec.app.ui.cancel import RunCancelledError

        run_settings = self.settings
        settings = CaptionConfig(
            self._paths,
            model=run_settings.model,
            drafter=run_settings.drafter,
            compressor=run_settings.compressor,
            prompt=self.prompt,
            frames=self.limits.num_frames,
            batch_size=BATCH_SIZE,
            max_new_tokens=run_settings.max_new_tokens,
            temperature=run_settings.temperature,
            seed=run_settings.seed,
            pixel_limit=self.limits.max_pixels,
            threads=1,
            progress=False,
            compare=COMPARED_FILES,
        )
        if self._refused:
            self._output.write(self._refused)
        try:
            CaptionJob(
                settings,
                self._output,
                lambda: self._build_captioner(cancel_signal),
                on_decoded=lambda item, media: self._draw(item.id, media),
            ).run()
        except RunCancelledError:
            self.cancelled = True
        finally:
            self._output.stream.close()
            shutil.rmtree(self.input_folder, ignore_errors=True)
        return self

    def _draw(self, row_id: str, media: Media) -> None:
        """Store a small picture of a file, of a clip its first frame."""
        if self.settings.model == SCENES_MODEL and not looks_like_scene(media_images(media)[0]):
            self.num_out_of_domain += 1
        self.thumbnails[row_id] = to_data_uri(media_images(media)[0], TABLE_IMAGE_SIZE, quality=70)

    def discard(self) -> None:
        """Close a batch that will not run; the links to the uploads are removed."""
        self.cancelled = True
        self.num_ahead = 0
        self._output.stream.close()
        shutil.rmtree(self.input_folder, ignore_errors=True)

    def _build_captioner(self, cancel_signal: CancelSignal) -> CancellableCaptioner:
        from mmspec.app.ui.cancel import CancellableCaptioner

        settings = self.settings
        loaded = self.model_store.get(settings.model)
        reject_media_tokens(loaded.processor, self.prompt)
        captioner = CancellableCaptioner(
            loaded.model,
            loaded.processor,
            settings.max_new_tokens,
            Sampling(settings.temperature),
            cancel_signal=cancel_signal,
            drafter=loaded.get_drafter(settings.drafter),
            compressor=loaded.get_compressor(settings.compressor),
        )
        captioner.comparison.is_warm = True
        self.comparison = captioner.comparison
        return captioner


def _refused_row(file_name: str, message: str) -> Row:
    """The row of a list that cannot be read."""
    row: Row = dict.fromkeys(ROW_COLUMNS)
    error = {"type": "BadList", "message": message}
    return row | {"id": file_name, "file_name": file_name, "finish_reason": "error", "error": error}


def write_parquet(rows: Sequence[Row], file: Path) -> None:
    """Write rows as Parquet, with the columns of the JSONL.

    Raises:
        ImportError: pyarrow is not installed.
    """
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def link_files(files: Sequence[Path], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Link files into a folder under sanitized names; a second file of the same name gets a number.

    Args:
        names: of the files as a list may name them; each is kept where it is a plain name with the file's own suffix.
    """
    targets: list[Path] = []
    for file, given in itertools.zip_longest(files, names):
        name = given if given and _is_plain_name(given, file) else sanitize_file_name(file.name)
        target, number = folder / name, 1
        while target.exists():
            number += 1
            target = folder / f"{Path(name).stem}_{number}{Path(name).suffix}"
        try:
            os.link(file.resolve(), target)
        except OSError:  # another file system
            shutil.copyfile(file, target)
        targets.append(target)
    return targets


def _is_plain_name(name: str, file: Path) -> bool:
    """Whether a name can be that of a file in a folder of the server, and says no more than the file's own does."""
    is_short = name.isprintable() and len(name.encode()) <= 200
    is_own = Path(name).suffix.lower() == file.suffix.lower() not in MANIFESTS
    return is_short and is_own and not name.startswith(".") and not {"/", "\\"} & set(name)


def clean_name(name: str) -> str:
    """A name that a page gives, to be shown and stored, never opened: the last part, without control characters."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(char for char in last if char.isprintable())[:200] or "file"


def unique_names(names: Sequence[str]) -> list[str]:
    """The names; a second one of the same name gets a number."""
    used: set[str] = set()
    result: list[str] = []
    for name in names:
        unique, number = name, 1
        while unique in used:
            number += 1
            unique = f"{Path(name).stem}_{number}{Path(name).suffix}"
        used.add(unique)
        result.append(unique)
    return result


def sanitize_file_name(name: str) -> str:
    """A file name without characters that are special to file systems, globs or terminals."""
    stem, suffix = Path(name).stem, Path(name).suffix
    clean = re.sub(r"[^\w.,+ -]", "_", stem).strip(" .")[:80]
    return (clean or "file") + re.sub(r"[^\w.]", "", suffix)[:12]
