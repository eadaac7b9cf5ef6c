"""Tiny models of every model type that mmspec is tested with. One module per group, one `Family` per model type."""

from __future__ import annotations

from importlib import import_module

from packaging.version import Version
from transformers import __version__ as transformers_version

from zoo import first
from zoo.base import Family

MODULES = ("mrope", "mrope_others", "recurrent", "llava_like", "other_vlms", "gemma_like", "text_only", "counted")


def _load() -> dict[str, Family]:
    rows: list[Family] = []
    for name in MODULES:
        rows += import_module(f"zoo.{name}").ROWS
    families = {row.model_type: row for row in rows}
    assert len(families) == len(rows), "a model type twice"
    return families


ALL: dict[str, Family] = _load()
"""{model_type: family} of all rows."""
ROWS = {
    name: row
    for name, row in ALL.items()
    if Version(row.min_transformers) <= Version(transformers_version) and transformers_version not in row.broken_in
}
"""Those that the installed transformers has."""
FIRST = {row.model_type: row for row in first.ROWS}
"""Those among which random calls choose, in no other table."""
FAMILIES = FIRST | ROWS
