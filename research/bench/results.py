"""Result files of `research.bench` and of the studies: rows as JSON, tables as Markdown, a figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspec.app.cli.arguments import Options
from research.arguments import check_writable
from research.bench.plot import require_matplotlib
from research.bench.rows import ResultRow


@dataclass(frozen=True)
class ResultFiles:
    """Files to write, each of them optional."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ResultFiles:
        """The files that `add_result_options` reads; a command without one of the options has no such file."""
        return cls(*(getattr(args, name, None) for name in ("json", "markdown", "plot")))

    def check(self) -> None:
        """Refuse what could not be written, before anything is measured.

        Raises:
            UsageError: a file cannot be opened for writing, or matplotlib is missing.
        """
        for file in (self.json, self.markdown, self.plot):
            if file is not None:
                check_writable(file)
        if self.plot is not None:
            require_matplotlib(self.plot)

    def write(
        self,
        rows: Sequence[ResultRow],
        tables: str = "",
        plot: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the rows as JSON, `tables` as Markdown, and the figure with `plot`, each if it has a file."""
        if self.json is not None:
            self.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(tables, encoding="utf-8")
        if self.plot is not None and plot is not None:
            plot(self.plot)


def add_result_options(
    parser: Options,
    *,
    json_help: str | None = None,
    markdown_help: str | None = None,
    plot_help: str | None = None,
) -> None:
    """Add those of `--json`, `--markdown` and `--plot` that have a help text."""
    add = parser.add_argument
    if json_help is not None:
        add("--json", type=Path, default=None, metavar="FILE", help=json_help)
    if markdown_help is not None:
        add("--markdown", type=Path, default=None, metavar="FILE.md", help=markdown_help)
    if plot_help is not None:
        add("--plot", type=Path, default=None, metavar="FILE.png", help=plot_help)
