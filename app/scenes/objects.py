"""The object kinds: name, category and the emoji of the sprite.

The order is part of the world: the index of a kind is its index in the sprite atlas.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TABLE_FILE = Path(__file__).parent / "data" / "objects.txt"
"""A category and its kinds a line, each a name and its emoji."""


@dataclass(frozen=True)
class ObjectKind:
    """One object kind.

    Attributes:
        name: Name in the singular, one lower-case word.
        category: Category, which selects the verbs of descriptions.
        emoji: Character that the sprite is rendered from.
    """

    name: str
    category: str
    emoji: str


def _read_table() -> tuple[ObjectKind, ...]:
    kinds = []
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines():
        category, entries = line.split(": ")
        for entry in entries.split(", "):
            name, emoji = entry.split(" ")
            kinds.append(ObjectKind(name, category, emoji))
    return tuple(kinds)


OBJECT_KINDS = _read_table()
"""All object kinds; elsewhere a kind is its index in this tuple."""
