"""The rows of inputs as a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions


def collect_items(paths: Sequence[str], base: Path, skip: Iterable[Path] = ()) -> list[Item]:
    """All rows of files, folders, globs and manifests as a list; file names are relative to `base`.

    Args:
        skip: files that are never inputs.

    Raises:
        UsageError: as `Inputs`.
    """
    inputs = Inputs(paths, SourceOptions(base), skip)
    inputs.check()
    return list(inputs.rows(lambda ident: False))
