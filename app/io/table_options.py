"""How lists, tables and archives are read, as options of commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmspec.app.cli.options import option

_GROUP = "lists, tables and archives"


def _name(help: str, metavar: str = "NAME") -> Any:
    return option(None, help, _GROUP, metavar=metavar, decides="if set")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The options of several commands about rows of lists, tables and archives."""

    image_column: str | None = _name(
        "column of the pictures, or extension of their members (default: found by name, as image, jpg or url)"
    )
    prompt_column: str | None = _name(
        "column of the prompts; in archives a member (txt), or a key of the member json (default: none)"
    )
    id_column: str | None = _name("column of the ids (default: file name and row number or key)")
    split: str = option("train", "split of a dataset (default train)", _GROUP, metavar="S", decides="if set")
    root: str | None = _name("paths in lists and tables are relative to DIR and may lead to it", "DIR")
    urls: str | None = option(
        None,
        "read http(s) addresses in rows: those of the public internet, or with `any` of private networks as well",
        _GROUP,
        choices=("public", "any"),
        optional="public",
    )
