"""The long description of a scene: one sentence per thing, then counts, relations, sizes and empty regions.

The sentence form is a function of the scene's content (kind, region, background), so the text cannot be predicted
without the picture. Deterministic.
"""

from __future__ import annotations

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.world import REGIONS, SIZE_CLASSES, Scene, Thing
from research.scenes.clips import spatial_relation
from research.scenes.names import plural
from research.scenes.phrases import NUMBER_WORDS, capitalize, choose_verb, count_kinds, format_region


def describe_scene(scene: Scene) -> str:
    """Return the description: 80 to 150 tokens for three things or more, else fewer."""
    order = scene.reading_order()
    parts = [_background_sentence(scene)]
    for index, thing in enumerate(order):
        parts.append(_thing_sentence(thing, order[index - 1] if index else None))
    if scene.sign is not None:
        parts.append(f"{capitalize(format_region(scene.sign.region))} a sign says {scene.sign.text}.")
    for kind, count in count_kinds(scene):
        if count > 1:
            parts.append(f"{capitalize(NUMBER_WORDS[count])} {plural(OBJECT_KINDS[kind])} in all.")
    parts.append(f"{capitalize(NUMBER_WORDS[len(order)])} thing{'' if len(order) == 1 else 's'}.")
    if len(order) < 5:
        parts += [_relation_sentence(one, other) for one, other in zip(order[2:], order, strict=False)]
    if len(order) == 3:
        parts.append(_relation_sentence(order[0], order[1]))
    if 1 < len(order) < 6:
        parts.append(_size_extremes_sentence(order))
    if len(order) < 6:
        parts.append(_empty_regions_sentence(scene))
    return " ".join(parts)


def _background_sentence(scene: Scene) -> str:
    """Texture and colour of the background; the first thing's kind selects the form."""
    base = f"{scene.texture} {scene.colour}"
    form = scene.things[0].kind % 5
    if form == 0:
        return f"On {base} ground."
    if form == 1:
        return f"{capitalize(base)} background."
    if form == 2:
        return f"Before a {base} wall."
    if form == 3:
        return f"The background {base}."
    return f"A {base} picture."


def _size_phrase(thing: Thing) -> str:
    """Size and name; the region selects one of two adjectives per size class."""
    adjectives = {"small": ("small", "little"), "medium": ("medium", "middling"), "large": ("large", "big")}
    return f"a {adjectives[thing.size_class][len(thing.region) % 2]} {thing.name}"


def _thing_sentence(thing: Thing, previous: Thing | None) -> str:
    """Name, size and region of a thing, and its relation to the previous one in reading order."""
    region = format_region(thing.region)
    verb = choose_verb(thing)
    sized = _size_phrase(thing)
    relation = _relation_phrase(thing, previous) if previous is not None else ""
    form = (thing.kind + 2 * len(thing.region)) % 6
    if form == 0:
        return f"{capitalize(region)} {verb} {sized}{relation and ', ' + relation}."
    if form == 1:
        return f"{capitalize(sized)} {verb} {region}{relation and ', ' + relation}."
    if form == 2 and relation:
        return f"{capitalize(relation)} {verb} {sized}, {region}."
    if form == 3:
        return f"{capitalize(sized)}, {region}{relation and ', ' + relation}."
    if form == 4 and relation:
        return f"{capitalize(region)}, {relation}, {verb} {sized}."
    return f"{capitalize(verb)} {region} {sized}{relation and ', ' + relation}."


def _relation_phrase(thing: Thing, other: Thing) -> str:
    """Size comparison (if the classes differ) and direction, or distance where no direction is clear."""
    side = spatial_relation(thing, other)
    if side is None:
        near = (thing.x - other.x) ** 2 + (thing.y - other.y) ** 2 < 90**2
        side = "close to" if near else "far from"
    rank = list(SIZE_CLASSES)
    size_difference = rank.index(thing.size_class) - rank.index(other.size_class)
    comparison = ("smaller and ", "", "larger and ")[(size_difference > 0) - (size_difference < 0) + 1]
    return f"{comparison}{side} the {'other ' if other.kind == thing.kind else ''}{other.name}"


def _relation_sentence(one: Thing, other: Thing) -> str:
    """Relation of two things that earlier sentences have introduced."""
    relation, name = _relation_phrase(one, other), one.name
    if one.kind % 3 == 0:
        return f"{capitalize(relation)}: the {name}."
    return f"The {name}, {relation}." if one.kind % 3 == 1 else f"{capitalize(name)} {relation}."


def _size_extremes_sentence(order: list[Thing]) -> str:
    """Region of the largest and of the smallest thing, or how many there are of that size class."""
    rank = list(SIZE_CLASSES)
    large = [thing for thing in order if thing.size_class == max((t.size_class for t in order), key=rank.index)]
    small = [thing for thing in order if thing.size_class == min((t.size_class for t in order), key=rank.index)]
    if large[0].size_class == small[0].size_class:
        return f"All {large[0].size_class}."
    largest = (
        f"largest {format_region(large[0].region)}"
        if len(large) == 1
        else f"{NUMBER_WORDS[len(large)]} {large[0].size_class}"
    )
    smallest = (
        f"smallest {format_region(small[0].region)}"
        if len(small) == 1
        else f"{NUMBER_WORDS[len(small)]} {small[0].size_class}"
    )
    return f"{capitalize(largest)}, {smallest}."


def _empty_regions_sentence(scene: Scene) -> str:
    """The first four regions without a thing or sign, in reading order."""
    occupied = {thing.region for thing in scene.things} | ({scene.sign.region} if scene.sign is not None else set())
    empty = [name for row in REGIONS for name in row if name not in occupied][:4]
    if scene.things[0].kind % 2:
        return f"Empty: {', '.join(empty)}."
    return f"Nothing {format_region(empty[0])}, {', '.join(empty[1:])}."
