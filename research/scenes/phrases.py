"""Phrases shared by the grammar's questions, answers and descriptions: counts, regions, verbs, enumerations.

Every function is deterministic. Later layers (`description`, `grammar`) combine the phrases into sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mmspec.app.scenes.objects import OBJECT_KINDS, ObjectKind
from mmspec.app.scenes.world import Scene, Thing
from research.scenes.names import plural, with_article

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")
"""Number -> its word."""

_VERBS = {
    "animal": ("stands", "waits", "sits", "rests", "hides"),
    "fruit": ("lies", "sits", "rests", "waits"),
    "food": ("lies", "waits", "sits", "steams"),
    "vehicle": ("stands", "waits", "stops", "appears"),
    "sport": ("lies", "rests", "waits", "hangs"),
    "tool": ("lies", "hangs", "leans", "rests"),
    "object": ("stands", "lies", "sits", "rests", "leans"),
    "nature": ("stands", "appears", "rises", "floats"),
}
"""Category of an object kind -> the verbs in use; the kind selects one of them."""


def join_list(parts: Sequence[str]) -> str:
    """Join phrases as "a", "a and b" or "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def format_count(kind: ObjectKind, count: int) -> str:
    """Return "a dog" for one thing, "three dogs" for several."""
    return with_article(kind) if count == 1 else f"{NUMBER_WORDS[count]} {plural(kind)}"


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case and the others unchanged."""
    return text[0].upper() + text[1:]


def count_kinds(scene: Scene) -> list[tuple[int, int]]:
    """Return (kind, count) pairs, in reading order of the first thing of each kind."""
    return list(Counter(thing.kind for thing in scene.reading_order()).items())


def format_background(scene: Scene) -> str:
    """Return for example "a plain red" or "a striped blue"."""
    return f"a {scene.texture} {scene.colour}"


def choose_verb(thing: Thing) -> str:
    """Return the verb of a thing; it is a function of the thing's kind."""
    choices = _VERBS[OBJECT_KINDS[thing.kind].category]
    return choices[thing.kind % len(choices)]


def format_region(region: str) -> str:
    """Return for example "in the upper left", "at the top" or "in the center"."""
    if region in ("top", "bottom"):
        return f"at the {region}"
    if region in ("left", "right"):
        return f"on the {region}"
    return f"in the {region}"


def list_things(scene: Scene) -> str:
    """Return the things in reading order, each behind its region: "upper left a dog, center a cat, bottom a dog"."""
    return ", ".join(f"{thing.region} {with_article(OBJECT_KINDS[thing.kind])}" for thing in scene.reading_order())


def count_aloud(scene: Scene, kind: int | None = None) -> str:
    """Return the list of things with a running count: "upper left dog one, center cat, bottom dog two".

    The running count makes each number depend on the one before it. An answer that begins with the number requires
    the model to count before its first token; an answer that only ends with it requires one sum over the whole list
    (`research/log.md`, 2026-11-24).

    Args:
        scene: The scene.
        kind: The object kind that is counted; None counts all things.
    """
    parts: list[str] = []
    count = 0
    for thing in scene.reading_order():
        part = f"{thing.region} {thing.name}"
        if kind in (None, thing.kind):
            count += 1
            part += f" {NUMBER_WORDS[count]}"
        parts.append(part)
    return ", ".join(parts)
