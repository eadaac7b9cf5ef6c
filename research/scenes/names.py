"""Names of the kinds of things in questions and answers: plurals, articles."""

from __future__ import annotations

from mmspec.app.scenes.objects import OBJECT_KINDS, ObjectKind

_PLURALS = {
    "sheep": "sheep",
    "fish": "fish",
    "blowfish": "blowfish",
    "squid": "squid",
    "dice": "dice",
    "leaf": "leaves",
    "tooth": "teeth",
    "snowman": "snowmen",
    "chocolate": "chocolates",
    "scarf": "scarves",
}


def plural(kind: ObjectKind) -> str:
    """The plural of the name."""
    if kind.name in _PLURALS:
        return _PLURALS[kind.name]
    if kind.name.endswith(("s", "x", "ch", "sh")) or kind.name in ("potato", "tomato", "volcano"):
        return kind.name + "es"
    if kind.name.endswith("y") and kind.name[-2] not in "aeiou":
        return kind.name[:-1] + "ies"
    return kind.name + "s"


def with_article(kind: ObjectKind) -> str:
    """The name with its indefinite article."""
    return ("an " if kind.name[0] in "aeiou" or kind.name.startswith("hour") else "a ") + kind.name


KIND_BY_NAME = {kind.name: index for index, kind in enumerate(OBJECT_KINDS)} | {
    plural(kind): index for index, kind in enumerate(OBJECT_KINDS)
}
"""Singular or plural name -> index."""
