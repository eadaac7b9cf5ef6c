"""From the truth to words: questions and answers about a scene or a clip, in many forms.

Which form is used hangs on what the picture shows (the kind of the thing, its place, the ground), so that content
carries the text: whoever has not seen the picture cannot guess the words. The readers that check answers are in
`evaluate`; they know the truth, not these sentences.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmspec.app.scenes.objects import KINDS, Kind
from mmspec.app.scenes.world import MARGIN, PLACES, SIDE, SIZES, Clip, Scene, Thing, direction

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and which task it belongs to."""

    task: str
    question: str
    answer: str


def listed(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def number_of(kind: Kind, count: int) -> str:
    """ "three dogs"; one is "a dog"."""
    return kind.a if count == 1 else f"{NUMBERS[count]} {kind.plural}"


def capital(text: str) -> str:
    """With a capital at the beginning."""
    return text[0].upper() + text[1:]


def groups(scene: Scene) -> list[tuple[int, int]]:
    """(kind, count) in reading order of their first things."""
    return list(Counter(thing.kind for thing in scene.reading_order()).items())


def ground(scene: Scene) -> str:
    """ "a plain red"; "a striped blue"."""
    return f"a {scene.texture} {scene.colour}"


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


def verb(thing: Thing) -> str:
    """What a kind of thing does in a picture: each kind has its own word."""
    choices = _VERBS[KINDS[thing.kind].group]
    return choices[thing.kind % len(choices)]


def where(thing_place: str) -> str:
    """ "in the upper left", "at the top", "in the center"."""
    if thing_place in ("top", "bottom"):
        return f"at the {thing_place}"
    if thing_place in ("left", "right"):
        return f"on the {thing_place}"
    return f"in the {thing_place}"


def one_by_one(scene: Scene) -> str:
    """ "upper left a dog, center a cat, bottom a dog": who lists looks at one place after the other."""
    return ", ".join(f"{thing.place} {KINDS[thing.kind].a}" for thing in scene.reading_order())


def tally(scene: Scene, kind: int | None = None) -> str:
    """ "upper left dog one, center cat, bottom dog two": who counts a kind, or all things, says the number on the way.

    A model that says it first has to have counted before its first word, one that says it last has to add up a whole
    list at once; here each number follows from the one before (`docs/log.md`, 2026-11-24).
    """
    parts, so_far = list[str](), 0
    for thing in scene.reading_order():
        part = f"{thing.place} {thing.name}"
        if kind in (None, thing.kind):
            so_far += 1
            part += f" {NUMBERS[so_far]}"
        parts.append(part)
    return ", ".join(parts)


# --- tasks ------------------------------------------------------------------------------------------------------------

Task = Callable[[Scene, random.Random], Turn | None]
"""None if the scene has nothing to ask about."""


def what(scene: Scene, dice: random.Random) -> Turn:
    """All things, each with its place."""
    question = dice.choice(
        ("What is in the picture?", "What do you see?", "List the things in this picture.", "Name everything here.")
    )
    return Turn("what", question, capital(one_by_one(scene)) + ".")


def short(scene: Scene, dice: random.Random) -> Turn:
    """A caption: the things, the ground, the sign."""
    question = dice.choice(("Write a short caption.", "Caption this picture.", "Describe the picture in one sentence."))
    names = listed([number_of(KINDS[kind], count) for kind, count in groups(scene)])
    base = f"{scene.texture} {scene.colour}"
    form = scene.things[0].kind % 4
    if form == 0:
        text = f"{names} on a {base} background"
    elif form == 1:
        text = f"a {base} background with {names}"
    elif form == 2:
        text = f"{names} in front of a {base} wall"
    else:
        text = f"against {ground(scene)} backdrop, {names}"
    if scene.sign is not None:
        text += f", and a sign that says {scene.sign.text}"
    return Turn("short", question, capital(text) + ".")


def describe(scene: Scene, dice: random.Random) -> Turn:
    """Everything, thing by thing: 80 to 150 tokens if there are three things or more, else fewer."""
    question = dice.choice(
        (
            "Describe the image.",
            "Describe the picture in detail.",
            "Give a detailed description.",
            "What does this picture show? Be detailed.",
        )
    )
    order = scene.reading_order()
    parts = [_opening(scene)]
    for number, thing in enumerate(order):
        parts.append(_sentence(thing, order[number - 1] if number else None))
    if scene.sign is not None:
        parts.append(f"{capital(where(scene.sign.place))} a sign says {scene.sign.text}.")
    for kind, count in groups(scene):
        if count > 1:
            parts.append(f"{capital(NUMBERS[count])} {KINDS[kind].plural} in all.")
    parts.append(f"{capital(NUMBERS[len(order)])} thing{'' if len(order) == 1 else 's'}.")
    if len(order) < 5:
        parts += [_pair(one, other) for one, other in zip(order[2:], order, strict=False)]
    if len(order) == 3:
        parts.append(_pair(order[0], order[1]))
    if 1 < len(order) < 6:
        parts.append(_extremes(order))
    if len(order) < 6:
        parts.append(_empty(scene))
    return Turn("describe", question, " ".join(parts))


def _opening(scene: Scene) -> str:
    base = f"{scene.texture} {scene.colour}"
    form = scene.things[0].kind % 5
    if form == 0:
        return f"On {base} ground."
    if form == 1:
        return f"{capital(base)} background."
    if form == 2:
        return f"Before a {base} wall."
    if form == 3:
        return f"The background {base}."
    return f"A {base} picture."


def _sized(thing: Thing) -> str:
    """Size and name; which of two words for the size hangs on the place."""
    words = {"small": ("small", "little"), "medium": ("medium", "middling"), "large": ("large", "big")}[thing.bulk]
    return f"a {words[len(thing.place) % 2]} {thing.name}"


def _sentence(thing: Thing, before: Thing | None) -> str:
    """One thing: what, how large, where, and how it stands to the one before."""
    spot, does, sized = where(thing.place), verb(thing), _sized(thing)
    relation = _relation(thing, before) if before is not None else ""
    form = (thing.kind + 2 * len(thing.place)) % 6
    if form == 0:
        return f"{capital(spot)} {does} {sized}{relation and ', ' + relation}."
    if form == 1:
        return f"{capital(sized)} {does} {spot}{relation and ', ' + relation}."
    if form == 2 and relation:
        return f"{capital(relation)} {does} {sized}, {spot}."
    if form == 3:
        return f"{capital(sized)}, {spot}{relation and ', ' + relation}."
    if form == 4 and relation:
        return f"{capital(spot)}, {relation}, {does} {sized}."
    return f"{capital(does)} {spot} {sized}{relation and ', ' + relation}."


def _relation(thing: Thing, other: Thing) -> str:
    side = direction(thing, other)
    if side is None:
        near = (thing.x - other.x) ** 2 + (thing.y - other.y) ** 2 < 90**2
        side = "close to" if near else "far from"
    rank = list(SIZES)
    compared = rank.index(thing.bulk) - rank.index(other.bulk)
    words = ("smaller and ", "", "larger and ")[(compared > 0) - (compared < 0) + 1]
    return f"{words}{side} the {'other ' if other.kind == thing.kind else ''}{other.name}"


def _pair(one: Thing, other: Thing) -> str:
    """How two things that were named before stand to each other."""
    relation, name = _relation(one, other), one.name
    if one.kind % 3 == 0:
        return f"{capital(relation)}: the {name}."
    return f"The {name}, {relation}." if one.kind % 3 == 1 else f"{capital(name)} {relation}."


def _extremes(order: list[Thing]) -> str:
    """Where the largest and the smallest are, or how many."""
    rank = list(SIZES)
    large = [thing for thing in order if thing.bulk == max((t.bulk for t in order), key=rank.index)]
    small = [thing for thing in order if thing.bulk == min((t.bulk for t in order), key=rank.index)]
    if large[0].bulk == small[0].bulk:
        return f"All {large[0].bulk}."
    most = f"largest {where(large[0].place)}" if len(large) == 1 else f"{NUMBERS[len(large)]} {large[0].bulk}"
    least = f"smallest {where(small[0].place)}" if len(small) == 1 else f"{NUMBERS[len(small)]} {small[0].bulk}"
    return f"{capital(most)}, {least}."


def _empty(scene: Scene) -> str:
    """The first four places where nothing stands, in reading order."""
    taken = {thing.place for thing in scene.things} | ({scene.sign.place} if scene.sign is not None else set())
    free = [name for row in PLACES for name in row if name not in taken]
    spots = ", ".join(free[:4])
    return f"Empty: {spots}." if scene.things[0].kind % 2 else f"Nothing {where(free[0])}, {', '.join(free[1:4])}."


def where_is(scene: Scene, dice: random.Random) -> Turn | None:
    """The place of a thing that is alone of its kind."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    if not single:
        return None
    thing = dice.choice(single)
    question = dice.choice(("Where is the {}?", "Where do you see the {}?", "In which part of the picture is the {}?"))
    form = thing.kind % 3
    spot = where(thing.place)
    if form == 0:
        answer = f"The {thing.name} is {spot}."
    elif form == 1:
        answer = f"It is {spot}."
    else:
        answer = capital(spot) + "."
    return Turn("where", question.format(thing.name), answer)


def how_many(scene: Scene, dice: random.Random) -> Turn:
    """The number of a kind, or of all things, behind what there is."""
    if dice.random() < 0.25:
        return how_many_things(scene, dice)
    repeated = [kind for kind, count in groups(scene) if count > 1]
    kind = dice.choice(repeated) if repeated and dice.random() < 0.7 else dice.choice(scene.things).kind
    return _number(scene, kind, dice)


def how_many_things(scene: Scene, dice: random.Random) -> Turn:
    """The number of all things."""
    question = dice.choice(("How many things are there?", "How many things do you count in all?"))
    return Turn("count", question, how_many_in_all(scene))


def how_many_of_any(scene: Scene, dice: random.Random) -> Turn:
    """The number of a kind, each as likely as the other: so one asks who does not know the answer; for training."""
    return _number(scene, dice.choice(groups(scene))[0], dice)


def _number(scene: Scene, kind: int, dice: random.Random) -> Turn:
    named = KINDS[kind]
    question = dice.choice(("How many {} are there?", "How many {} do you see?", "Count the {}."))
    return Turn("count", question.format(named.plural), how_many_of(scene, kind))


def how_many_of(scene: Scene, kind: int) -> str:
    """The answer: what there is, those asked for counted, and how many it was."""
    count, named = scene.count(kind), KINDS[kind]
    return f"{capital(tally(scene, kind))}: {NUMBERS[count]} {named.name if count == 1 else named.plural}."


def how_many_in_all(scene: Scene) -> str:
    """The answer: what there is, all counted, and how many it was."""
    return f"{capital(tally(scene))}: {NUMBERS[len(scene.things)]} in all."


def is_there(scene: Scene, dice: random.Random) -> Turn:
    """Yes or no, half and half."""
    there = {thing.kind for thing in scene.things}
    question = dice.choice(("Is there {} in the picture?", "Do you see {}?", "Can you find {} here?"))
    if dice.random() < 0.5:
        kind = KINDS[dice.choice(sorted(there))]
        return Turn("yesno", question.format(kind.a), f"Yes, there is {kind.a}.")
    kind = KINDS[dice.choice([number for number in range(len(KINDS)) if number not in there])]
    return Turn("yesno", question.format(kind.a), f"No, there is no {kind.name}.")


def bigger(scene: Scene, dice: random.Random) -> Turn | None:
    """Which of two things is bigger, if they are of different sizes."""
    pairs = [
        (a, b)
        for a in scene.things
        for b in scene.things
        if a.bulk != b.bulk and a.kind != b.kind and scene.count(a.kind) == scene.count(b.kind) == 1
    ]
    if not pairs:
        return None
    a, b = dice.choice(pairs)
    larger = a if a.size > b.size else b
    question = dice.choice(("Which is bigger, the {} or the {}?", "What is larger, the {} or the {}?"))
    return Turn("bigger", question.format(a.name, b.name), f"The {larger.name} is bigger.")


def background(scene: Scene, dice: random.Random) -> Turn:
    """Colour and pattern of the ground."""
    question = dice.choice(
        ("What is the background like?", "Which color is the background?", "Describe the background.")
    )
    form = len(scene.colour) % 2
    answer = f"The background is {scene.texture} {scene.colour}." if form else f"It is {ground(scene)} background."
    return Turn("background", question, answer)


def reads(scene: Scene, dice: random.Random) -> Turn:
    """The word on the sign, or that there is none."""
    question = dice.choice(("What does the sign say?", "Read the sign.", "What is written in the picture?"))
    if scene.sign is None:
        return Turn("read", question, "There is no sign.")
    form = len(scene.sign.text) % 2
    return Turn("read", question, f"The sign says {scene.sign.text}." if form else f"It says {scene.sign.text}.")


def next_to(scene: Scene, dice: random.Random) -> Turn | None:
    """How one thing lies to another."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    pairs = [(a, b) for a in single for b in single if a != b and direction(a, b) is not None]
    if not pairs:
        return None
    a, b = dice.choice(pairs)
    answer = f"The {a.name} is {direction(a, b)} the {b.name}."
    return Turn("relation", f"How does the {a.name} lie to the {b.name}?", answer)


TASKS: dict[str, Task] = {
    "what": what,
    "short": short,
    "describe": describe,
    "where": where_is,
    "count": how_many,
    "yesno": is_there,
    "bigger": bigger,
    "background": background,
    "read": reads,
    "relation": next_to,
}


def clip_turn(clip: Clip, dice: random.Random) -> Turn:
    """What happens in a clip: of each thing what it does, in reading order of the first picture.

    Whoever begins with the one that does something has to have found it before the first word.
    """
    question = dice.choice(
        ("What happens in the clip?", "Describe the video.", "What changes from picture to picture?")
    )
    seen = [*clip.frames[0].reading_order(), *([clip.hero] if clip.event.what == "appears" else [])]
    done = listed([f"{KINDS[thing.kind].a} {_does(clip, thing)}" for thing in seen])
    base = f"on a {clip.frames[0].texture} {clip.frames[0].colour} background"
    return Turn("clip", question, capital(f"{base} {done}" if seen[0].kind % 2 else f"{done}, {base}") + ".")


def _does(clip: Clip, thing: Thing) -> str:
    """What a thing of a clip does."""
    if thing.kind != clip.hero.kind or clip.event.what == "stays":
        return "stays"
    spot = where(clip.hero.place)
    return {
        "moves": f"moves {'to the ' if clip.event.way in ('left', 'right') else ''}{clip.event.way}",
        "appears": f"appears {spot}",
        "leaves": f"disappears {spot.replace('in', 'from', 1) if spot.startswith('in') else spot}",
    }[clip.event.what]


def clip_drills(clip: Clip, dice: random.Random) -> list[Turn]:
    """Short questions about one picture of a clip, or about the way of a thing; for training."""
    name, a, frames = KINDS[clip.hero.kind].name, KINDS[clip.hero.kind].a, len(clip.frames)
    turns = []
    if frames < len(NUMBERS):
        turns.append(Turn("pictures", "How many pictures are there?", f"There are {NUMBERS[frames]} pictures."))
    if clip.event.what == "moves":
        way = f"to the {clip.event.way}" if clip.event.way in ("left", "right") else clip.event.way
        turns.append(Turn("way", f"Which way does the {name} move?", f"It moves {way}."))
    else:
        turns.append(Turn("way", f"Which way does the {name} move?", "It does not move."))
    others = [thing.name for thing in clip.frames[0].things if thing.kind != clip.hero.kind]
    turns += [Turn("way", f"Which way does the {other} move?", "It does not move.") for other in others[:1]]
    for number, frame in enumerate(clip.frames, 1):
        here = [thing for thing in frame.things if thing.kind == clip.hero.kind]
        if not here:
            turns.append(Turn("when", f"Is there {a} in picture {number}?", f"No, there is no {name}."))
        else:
            turns.append(Turn("when", f"Is there {a} in picture {number}?", f"Yes, there is {a}."))
            if all(abs(v - border) >= MARGIN for v in (here[0].x, here[0].y) for border in (SIDE // 3, 2 * SIDE // 3)):
                asked = f"Where is the {name} in picture {number}?"
                turns.append(Turn("when", asked, f"It is {where(here[0].place)}."))
    dice.shuffle(turns)
    return turns


def drill(scene: Scene, dice: random.Random, turns: int, even: bool = False, apart: bool = False) -> list[Turn]:
    """Many short questions about one scene, those that are hard to learn more often; for training.

    Args:
        even: ask for numbers more often, and less often mostly where there are several of a kind.
        apart: no turn will see another. Else no answer is given that could be copied.
    """
    shares = DRILLS | EVEN if even else DRILLS
    tasks = TASKS | {"count of any": how_many_of_any, "total": how_many_things}
    made: list[Turn] = []
    said: set[str] = set()
    for _ in range(4 * turns):
        if len(made) == turns:
            break
        task = dice.choices(tuple(shares), tuple(shares.values()))[0]
        if task == "read" and scene.sign is None and dice.random() < 0.8:
            continue
        turn = tasks[task](scene, dice)
        if turn is None:
            continue
        new = turn.question if apart else "the list" if turn.task in LISTS else turn.answer
        if new not in said:
            made.append(turn)
            said.add(new)
    return made


DRILLS = {
    "where": 5,
    "yesno": 3,
    "count": 3,
    "count of any": 4,
    "total": 3,
    "relation": 3,
    "read": 5,
    "bigger": 2,
    "what": 2,
    "background": 1,
    "short": 1,
}
EVEN = {"count": 2, "count of any": 10, "total": 4}
"""How often each task is drawn, and what is other if the drill is even."""
LISTS = ("what", "count")
"""Tasks whose answers name everything there is."""


def chat(scene: Scene, dice: random.Random, turns: int, tasks: Sequence[str] | None = None) -> list[Turn]:
    """Several questions about one scene, of different tasks, in random order."""
    names = list(tasks or TASKS)
    dice.shuffle(names)
    made: list[Turn] = []
    asked: set[str] = set()
    while names and len(made) < turns:
        turn = TASKS[names.pop()](scene, dice)
        if turn is not None and turn.question not in asked:
            made.append(turn)
            asked.add(turn.question)
    return made
