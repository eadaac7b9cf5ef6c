"""A row of the input (`Item`), and what yields rows (`RowSource`): a new input format is one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mmspec.app.caption.config import default_prompt
from mmspec.app.cli.options import described
from mmspec.app.io import videos
from mmspec.app.io.content import ByteRange, Content, Pictures, Unreadable, is_local
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.table_options import TableOptions
from mmspec.app.io.text import escaped, find_fault
from mmspec.vision.images import ImageError
from mmspec.vision.video.containers import FileBelow


@dataclass(frozen=True, slots=True)
class Item:
    """An image or video with its prompt.

    Attributes:
        path: of the file; with `content` only a name, whose suffix tells images from videos.
        id: of its row.
        file_name: relative to the folder of the output.
        prompt: its own prompt; None for the one of the job.
        index: position in the input.
        answer: a text to train a drafter on, from a manifest; not checked, as captions do not need it.
        content: where to read it; None: the file at `path`.
        origin: for messages, where a list or table names it: "list.csv line 3"; empty if the id says it.
        below: where `path` has to lie when it is opened, for one that a list names; None: anywhere.
        pixels: of its pictures together, as their headers say; None: not known, or not looked for.
        owns_id: a list or table gives its id, which therefore does not say what it is about.
        fields: what prompts name of it.
        template: its prompt with names of fields that it has not, or not yet; "" if there are none.
        stamp: `file_stamp` of what is decoded; None: not yet, or there is none.
    """

    path: Path
    id: str = ""
    file_name: str = ""
    prompt: str | None = None
    index: int = -1
    answer: str | None = None
    content: Content | None = None
    origin: str = ""
    pixels: int | None = None
    below: FileBelow | None = None
    owns_id: bool = False
    fields: Mapping[str, str] = field(default_factory=dict, hash=False)
    template: str = ""
    stamp: str | None = None

    def __post_init__(self) -> None:
        """Whatever it is read from, its id and name are valid Unicode; so is its prompt, or it is an error row."""
        for name in ("id", "file_name"):
            object.__setattr__(self, name, escaped(getattr(self, name)))
        if (fault := find_fault(self.prompt or "")) is not None:
            object.__setattr__(self, "content", Unreadable("BadText", f"the prompt {fault}"))
            object.__setattr__(self, "prompt", None)

    @property
    def contents(self) -> tuple[Content, ...]:
        """Where the bytes of each of its pictures are."""
        content = self.content or ByteRange(str(self.path), file=self.below)
        return content.parts if isinstance(content, Pictures) else (content,)

    @property
    def is_video(self) -> bool:
        """Whether the name is that of a video; its content, which is known once it is read, has the last word."""
        name = self.file_name or self.path.name
        suffix = self.path.suffix if is_local(name) else Path(urlsplit(name).path).suffix
        return suffix.lower() in videos.VIDEO_SUFFIXES

    def resolve_prompt(self, default: str | None = None, is_video: bool | None = None) -> str:
        """Its own prompt, else `default`, else the default of images or videos.

        Args:
            is_video: what it is by content; None: by name.
        """
        return self.prompt or default or default_prompt(self.is_video if is_video is None else is_video)

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Add where a list or table names this row to the message of an `ImageError` of the block."""
        try:
            yield
        except ImageError as error:
            if not self.origin or str(error).endswith(f"({self.origin})"):
                raise
            raise ImageError(error.kind, f"{error} ({self.origin})") from error


Skip = Callable[[str], bool]
"""Whether the row of an id is finished: a source need not read its picture."""


@dataclass(frozen=True)
class SourceOptions(TableOptions):
    """How inputs are read.

    Attributes:
        base: the folder that names in the rows are relative to.
        output_folder: in which the output is, be it a file or a folder; None: `base`.
        limit: rows that are read; None: all.
        fields: those of rows that prompts name; `ANY_FIELD` for all that there are.
    """

    base: Path = Path()
    output_folder: Path | None = None
    limit: int | None = None
    fields: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """The folder that ids are relative to."""
        return self.base if self.output_folder is None else self.output_folder

    def chosen(self) -> dict[str, str]:
        """The options of the command line that are not at their default, by name."""
        found = {name: (getattr(self, name), one.default) for name, one in described(TableOptions).items()}
        return {name: value for name, (value, default) in found.items() if value != default}

    def flags(self) -> list[str]:
        """The same as words of a command line."""
        return [word for name, value in self.chosen().items() for word in (f"--{name.replace('_', '-')}", value)]


class RowSource(ABC):
    """Rows of one input in a fixed order: iterating again yields the same ids in the same order.

    Attributes:
        name: for messages.
        is_listed: all rows are known from a listing or a manifest, which is read in whole and checked before a job
            begins. Of other sources problems are found on the way and become error rows.
    """

    is_listed = False

    def __init__(self, name: str) -> None:
        self.name, self._found = name, LeftOut()

    @abstractmethod
    def rows(self, skip: Skip) -> Iterator[Item]:
        """The rows, one after the other, with `id` set and `index` not. Rows to skip may lack their content."""

    def count(self) -> int | None:
        """Number of rows if it can be had without reading them, else None."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Read what describes the input: a schema, a first header.

        Raises:
            UsageError: it cannot be read, or lacks a column.
        """

    def add_left_out(self, found: LeftOut) -> None:
        """Add what is not read; of a source that is not listed it is complete once its rows were read."""
        found.merge(self._found)
