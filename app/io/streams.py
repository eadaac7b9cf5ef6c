"""Sources whose rows are read on the way: archives, tables, data sets, remote folders (`StreamedSource`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from mmspec.app.errors import MachineError, UsageError, is_shortage, one_line
from mmspec.app.io.cells import relative_name
from mmspec.app.io.content import Unreadable, is_local
from mmspec.app.io.item import Item, RowSource, Skip, SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.vision.video.worker_process import DecoderCrashedError, DecoderHungError, DecoderStartError


class StreamedSource(RowSource):
    """A source of which a fault ends the rows before it, with one error row, and not the job."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        super().__init__(relative_name(Path(url), options.place) if is_local(url) else url)
        self.url, self.options = url, options

    def check(self) -> None:
        try:
            self._check()
        except UsageError:
            raise
        except Exception as error:  # drivers and packages raise types of their own
            raise UsageError(f"cannot read {self.url}: {explain(error)}") from error

    def rows(self, skip: Skip) -> Iterator[Item]:
        self._found, number = LeftOut(), 0
        try:
            for item in self._read(skip):
                yield item
                number += 1
        except Exception as error:
            yield self._failure("rest", "Unreadable", f"after row {number}: {explain(error)}")

    @abstractmethod
    def _check(self) -> None:
        """As `check`; any exception means that it cannot be read."""

    @abstractmethod
    def _read(self, skip: Skip) -> Iterator[Item]:
        """As `rows`; any exception ends them."""

    def _failure(self, part: str, kind: str, message: str) -> Item:
        """The error row about a part."""
        name = f"{self.name}#{part}"
        return Item(Path(name), name, name, content=Unreadable(kind, f"{self.name}: {message}"))


def explain(error: Exception) -> str:
    """Why a source cannot be read.

    Raises:
        MachineError: not because of what it holds.
    """
    if isinstance(error, DecoderStartError) or is_shortage(error):
        raise MachineError(error) from error
    if isinstance(error, MemoryError):
        return "its values need too much memory: write it with smaller row groups, or smaller batches"
    if isinstance(error, DecoderHungError):
        return f"reading it took too long ({error})"
    return f"the reader crashed on it ({error})" if isinstance(error, DecoderCrashedError) else one_line(error)
