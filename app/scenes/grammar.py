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

from mmspec.app.scenes.objects import OBJECT_KINDS, ObjectKind
from mmspec.app.scenes.world import (
    IMAGE_SIZE,
    REGION_MARGIN,
    REGIONS,
    SIZE_CLASSES,
    Clip,
    Scene,
    Thing,
    spatial_relation,
)

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and which task it belongs to."""

    task: str
    question: str
    answer: str


def join_list(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def format_count(kind: ObjectKind, count: int) -> str:
    """ "three dogs"; one is "a dog"."""
    return kind.with_article if count == 1 else f"{NUMBER_WORDS[count]} {kind.plural}"


def capitalize(text: str) -> str:
    """With a capital at the beginning."""
    return text[0].upper() + text[1:]


def count_kinds(scene: Scene) -> list[tuple[int, int]]:
    """(kind, count) in reading order of their first things."""
    return list(Counter(thing.kind for thing in scene.reading_order()).items())


def format_background(scene: Scene) -> str:
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


def choose_verb(thing: Thing) -> str:
    """What a kind of thing does in a picture: each kind has its own word."""
    choices = _VERBS[OBJECT_KINDS[thing.kind].category]
    return choices[thing.kind % len(choices)]


def format_region(region: str) -> str:
    """ "in the upper left", "at the top", "in the center"."""
    if region in ("top", "bottom"):
        return f"at the {region}"
    if region in ("left", "right"):
        return f"on the {region}"
    return f"in the {region}"


def list_things(scene: Scene) -> str:
    """ "upper left a dog, center a cat, bottom a dog": who lists looks at one place after the other."""
    return ", ".join(f"{thing.region} {OBJECT_KINDS[thing.kind].with_article}" for thing in scene.reading_order())


def count_aloud(scene: Scene, kind: int | None = None) -> str:
    """ "upper left dog one, center cat, bottom dog two": who counts a kind, or all things, says the number on the way.

    A model that says it first has to have counted before its first word, one that says it last has to add up a whole
    list at once; here each number follows from the one before (`docs/log.md`, 2026-11-24).
    """
    parts, so_far = list[str](), 0
    for thing in scene.reading_order():
        part = f"{thing.region} {thing.name}"
        if kind in (None, thing.kind):
            so_far += 1
            part += f" {NUMBER_WORDS[so_far]}"
        parts.append(part)
    return ", ".join(parts)


# --- tasks ------------------------------------------------------------------------------------------------------------

Task = Callable[[Scene, random.Random], Turn | None]
"""None if the scene has nothing to ask about."""


def ask_contents(scene: Scene, rng: random.Random) -> Turn:
    """All things, each with its place."""
    question = rng.choice(
        ("What is in the picture?", "What do you see?", "List the things in this picture.", "Name everything here.")
    )
    return Turn("what", question, capitalize(list_things(scene)) + ".")


def ask_caption(scene: Scene, rng: random.Random) -> Turn:
    """A caption: the things, the ground, the sign."""
    question = rng.choice(("Write a short caption.", "Caption this picture.", "Describe the picture in one sentence."))
    names = join_list([format_count(OBJECT_KINDS[kind], count) for kind, count in count_kinds(scene)])
    base = f"{scene.texture} {scene.colour}"
    form = scene.things[0].kind % 4
    if form == 0:
        text = f"{names} on a {base} background"
    elif form == 1:
        text = f"a {base} background with {names}"
    elif form == 2:
        text = f"{names} in front of a {base} wall"
    else:
        text = f"against {format_background(scene)} backdrop, {names}"
    if scene.sign is not None:
        text += f", and a sign that says {scene.sign.text}"
    return Turn("short", question, capitalize(text) + ".")


def ask_description(scene: Scene, rng: random.Random) -> Turn:
    """Everything, thing by thing: 80 to 150 tokens if there are three things or more, else fewer."""
    question = rng.choice(
        (
            "Describe the image.",
            "Describe the picture in detail.",
            "Give a detailed description.",
            "What does this picture show? Be detailed.",
        )
    )
    order = scene.reading_order()
    parts = [_background_sentence(scene)]
    for number, thing in enumerate(order):
        parts.append(_thing_sentence(thing, order[number - 1] if number else None))
    if scene.sign is not None:
        parts.append(f"{capitalize(format_region(scene.sign.region))} a sign says {scene.sign.text}.")
    for kind, count in count_kinds(scene):
        if count > 1:
            parts.append(f"{capitalize(NUMBER_WORDS[count])} {OBJECT_KINDS[kind].plural} in all.")
    parts.append(f"{capitalize(NUMBER_WORDS[len(order)])} thing{'' if len(order) == 1 else 's'}.")
    if len(order) < 5:
        parts += [_relation_sentence(one, other) for one, other in zip(order[2:], order, strict=False)]
    if len(order) == 3:
        parts.append(_relation_sentence(order[0], order[1]))
    if 1 < len(order) < 6:
        parts.append(_size_extremes_sentence(order))
    if len(order) < 6:
        parts.append(_empty_regions_sentence(scene))
    return Turn("describe", question, " ".join(parts))


def _background_sentence(scene: Scene) -> str:
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
    """Size and name; which of two words for the size hangs on the place."""
    words = {"small": ("small", "little"), "medium": ("medium", "middling"), "large": ("large", "big")}[
        thing.size_class
    ]
    return f"a {words[len(thing.region) % 2]} {thing.name}"


def _thing_sentence(thing: Thing, before: Thing | None) -> str:
    """One thing: what, how large, where, and how it stands to the one before."""
    spot, does, sized = format_region(thing.region), choose_verb(thing), _size_phrase(thing)
    relation = _relation_phrase(thing, before) if before is not None else ""
    form = (thing.kind + 2 * len(thing.region)) % 6
    if form == 0:
        return f"{capitalize(spot)} {does} {sized}{relation and ', ' + relation}."
    if form == 1:
        return f"{capitalize(sized)} {does} {spot}{relation and ', ' + relation}."
    if form == 2 and relation:
        return f"{capitalize(relation)} {does} {sized}, {spot}."
    if form == 3:
        return f"{capitalize(sized)}, {spot}{relation and ', ' + relation}."
    if form == 4 and relation:
        return f"{capitalize(spot)}, {relation}, {does} {sized}."
    return f"{capitalize(does)} {spot} {sized}{relation and ', ' + relation}."


def _relation_phrase(thing: Thing, other: Thing) -> str:
    side = spatial_relation(thing, other)
    if side is None:
        near = (thing.x - other.x) ** 2 + (thing.y - other.y) ** 2 < 90**2
        side = "close to" if near else "far from"
    rank = list(SIZE_CLASSES)
    compared = rank.index(thing.size_class) - rank.index(other.size_class)
    words = ("smaller and ", "", "larger and ")[(compared > 0) - (compared < 0) + 1]
    return f"{words}{side} the {'other ' if other.kind == thing.kind else ''}{other.name}"


def _relation_sentence(one: Thing, other: Thing) -> str:
    """How two things that were named before stand to each other."""
    relation, name = _relation_phrase(one, other), one.name
    if one.kind % 3 == 0:
        return f"{capitalize(relation)}: the {name}."
    return f"The {name}, {relation}." if one.kind % 3 == 1 else f"{capitalize(name)} {relation}."


def _size_extremes_sentence(order: list[Thing]) -> str:
    """Where the largest and the smallest are, or how many."""
    rank = list(SIZE_CLASSES)
    large = [thing for thing in order if thing.size_class == max((t.size_class for t in order), key=rank.index)]
    small = [thing for thing in order if thing.size_class == min((t.size_class for t in order), key=rank.index)]
    if large[0].size_class == small[0].size_class:
        return f"All {large[0].size_class}."
    most = (
        f"largest {format_region(large[0].region)}"
        if len(large) == 1
        else f"{NUMBER_WORDS[len(large)]} {large[0].size_class}"
    )
    least = (
        f"smallest {format_region(small[0].region)}"
        if len(small) == 1
        else f"{NUMBER_WORDS[len(small)]} {small[0].size_class}"
    )
    return f"{capitalize(most)}, {least}."


def _empty_regions_sentence(scene: Scene) -> str:
    """The first four places where nothing stands, in reading order."""
    taken = {thing.region for thing in scene.things} | ({scene.sign.region} if scene.sign is not None else set())
    free = [name for row in REGIONS for name in row if name not in taken]
    spots = ", ".join(free[:4])
    return (
        f"Empty: {spots}." if scene.things[0].kind % 2 else f"Nothing {format_region(free[0])}, {', '.join(free[1:4])}."
    )


def ask_region(scene: Scene, rng: random.Random) -> Turn | None:
    """The place of a thing that is alone of its kind."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    if not single:
        return None
    thing = rng.choice(single)
    question = rng.choice(("Where is the {}?", "Where do you see the {}?", "In which part of the picture is the {}?"))
    form = thing.kind % 3
    spot = format_region(thing.region)
    if form == 0:
        answer = f"The {thing.name} is {spot}."
    elif form == 1:
        answer = f"It is {spot}."
    else:
        answer = capitalize(spot) + "."
    return Turn("where", question.format(thing.name), answer)


def ask_count(scene: Scene, rng: random.Random) -> Turn:
    """The number of a kind, or of all things, behind what there is."""
    if rng.random() < 0.25:
        return ask_total_count(scene, rng)
    repeated = [kind for kind, count in count_kinds(scene) if count > 1]
    kind = rng.choice(repeated) if repeated and rng.random() < 0.7 else rng.choice(scene.things).kind
    return _ask_kind_count(scene, kind, rng)


def ask_total_count(scene: Scene, rng: random.Random) -> Turn:
    """The number of all things."""
    question = rng.choice(("How many things are there?", "How many things do you count in all?"))
    return Turn("count", question, answer_total_count(scene))


def ask_uniform_kind_count(scene: Scene, rng: random.Random) -> Turn:
    """The number of a kind, each as likely as the other: so one asks who does not know the answer; for training."""
    return _ask_kind_count(scene, rng.choice(count_kinds(scene))[0], rng)


def _ask_kind_count(scene: Scene, kind: int, rng: random.Random) -> Turn:
    named = OBJECT_KINDS[kind]
    question = rng.choice(("How many {} are there?", "How many {} do you see?", "Count the {}."))
    return Turn("count", question.format(named.plural), answer_kind_count(scene, kind))


def answer_kind_count(scene: Scene, kind: int) -> str:
    """The answer: what there is, those asked for counted, and how many it was."""
    count, named = scene.count(kind), OBJECT_KINDS[kind]
    return (
        f"{capitalize(count_aloud(scene, kind))}: {NUMBER_WORDS[count]} {named.name if count == 1 else named.plural}."
    )


def answer_total_count(scene: Scene) -> str:
    """The answer: what there is, all counted, and how many it was."""
    return f"{capitalize(count_aloud(scene))}: {NUMBER_WORDS[len(scene.things)]} in all."


def ask_presence(scene: Scene, rng: random.Random) -> Turn:
    """Yes or no, half and half."""
    there = {thing.kind for thing in scene.things}
    question = rng.choice(("Is there {} in the picture?", "Do you see {}?", "Can you find {} here?"))
    if rng.random() < 0.5:
        kind = OBJECT_KINDS[rng.choice(sorted(there))]
        return Turn("yesno", question.format(kind.with_article), f"Yes, there is {kind.with_article}.")
    kind = OBJECT_KINDS[rng.choice([number for number in range(len(OBJECT_KINDS)) if number not in there])]
    return Turn("yesno", question.format(kind.with_article), f"No, there is no {kind.name}.")


def ask_larger(scene: Scene, rng: random.Random) -> Turn | None:
    """Which of two things is bigger, if they are of different sizes."""
    pairs = [
        (a, b)
        for a in scene.things
        for b in scene.things
        if a.size_class != b.size_class and a.kind != b.kind and scene.count(a.kind) == scene.count(b.kind) == 1
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    larger = a if a.size > b.size else b
    question = rng.choice(("Which is bigger, the {} or the {}?", "What is larger, the {} or the {}?"))
    return Turn("bigger", question.format(a.name, b.name), f"The {larger.name} is bigger.")


def ask_background(scene: Scene, rng: random.Random) -> Turn:
    """Colour and pattern of the ground."""
    question = rng.choice(
        ("What is the background like?", "Which color is the background?", "Describe the background.")
    )
    form = len(scene.colour) % 2
    answer = (
        f"The background is {scene.texture} {scene.colour}."
        if form
        else f"It is {format_background(scene)} background."
    )
    return Turn("background", question, answer)


def ask_sign_text(scene: Scene, rng: random.Random) -> Turn:
    """The word on the sign, or that there is none."""
    question = rng.choice(("What does the sign say?", "Read the sign.", "What is written in the picture?"))
    if scene.sign is None:
        return Turn("read", question, "There is no sign.")
    form = len(scene.sign.text) % 2
    return Turn("read", question, f"The sign says {scene.sign.text}." if form else f"It says {scene.sign.text}.")


def ask_relation(scene: Scene, rng: random.Random) -> Turn | None:
    """How one thing lies to another."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    pairs = [(a, b) for a in single for b in single if a != b and spatial_relation(a, b) is not None]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    answer = f"The {a.name} is {spatial_relation(a, b)} the {b.name}."
    return Turn("relation", f"How does the {a.name} lie to the {b.name}?", answer)


QA_TASKS: dict[str, Task] = {
    "what": ask_contents,
    "short": ask_caption,
    "describe": ask_description,
    "where": ask_region,
    "count": ask_count,
    "yesno": ask_presence,
    "bigger": ask_larger,
    "background": ask_background,
    "read": ask_sign_text,
    "relation": ask_relation,
}


def ask_clip(clip: Clip, rng: random.Random) -> Turn:
    """What happens in a clip: of each thing what it does, in reading order of the first picture.

    Whoever begins with the one that does something has to have found it before the first word.
    """
    question = rng.choice(("What happens in the clip?", "Describe the video.", "What changes from picture to picture?"))
    seen = [*clip.frames[0].reading_order(), *([clip.hero] if clip.event.what == "appears" else [])]
    done = join_list([f"{OBJECT_KINDS[thing.kind].with_article} {_action_phrase(clip, thing)}" for thing in seen])
    base = f"on a {clip.frames[0].texture} {clip.frames[0].colour} background"
    return Turn("clip", question, capitalize(f"{base} {done}" if seen[0].kind % 2 else f"{done}, {base}") + ".")


def _action_phrase(clip: Clip, thing: Thing) -> str:
    """What a thing of a clip does."""
    if thing.kind != clip.hero.kind or clip.event.what == "stays":
        return "stays"
    spot = format_region(clip.hero.region)
    return {
        "moves": f"moves {'to the ' if clip.event.way in ('left', 'right') else ''}{clip.event.way}",
        "appears": f"appears {spot}",
        "leaves": f"disappears {spot.replace('in', 'from', 1) if spot.startswith('in') else spot}",
    }[clip.event.what]


def generate_clip_qa_turns(clip: Clip, rng: random.Random) -> list[Turn]:
    """Short questions about one picture of a clip, or about the way of a thing; for training."""
    name, a, frames = OBJECT_KINDS[clip.hero.kind].name, OBJECT_KINDS[clip.hero.kind].with_article, len(clip.frames)
    turns = []
    if frames < len(NUMBER_WORDS):
        turns.append(Turn("pictures", "How many pictures are there?", f"There are {NUMBER_WORDS[frames]} pictures."))
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
            if all(
                abs(v - border) >= REGION_MARGIN
                for v in (here[0].x, here[0].y)
                for border in (IMAGE_SIZE // 3, 2 * IMAGE_SIZE // 3)
            ):
                asked = f"Where is the {name} in picture {number}?"
                turns.append(Turn("when", asked, f"It is {format_region(here[0].region)}."))
    rng.shuffle(turns)
    return turns


def generate_qa_turns(
    scene: Scene, rng: random.Random, num_turns: int, balanced: bool = False, independent: bool = False
) -> list[Turn]:
    """Many short questions about one scene, those that are hard to learn more often; for training.

    Args:
        even: ask for numbers more often, and less often mostly where there are several of a kind.
        apart: no turn will see another. Else no answer is given that could be copied.
    """
    shares = QA_TASK_WEIGHTS | BALANCED_QA_TASK_WEIGHTS if balanced else QA_TASK_WEIGHTS
    tasks = QA_TASKS | {"count of any": ask_uniform_kind_count, "total": ask_total_count}
    made: list[Turn] = []
    said: set[str] = set()
    for _ in range(4 * num_turns):
        if len(made) == num_turns:
            break
        task = rng.choices(tuple(shares), tuple(shares.values()))[0]
        if task == "read" and scene.sign is None and rng.random() < 0.8:
            continue
        turn = tasks[task](scene, rng)
        if turn is None:
            continue
        new = turn.question if independent else "the list" if turn.task in LISTING_TASKS else turn.answer
        if new not in said:
            made.append(turn)
            said.add(new)
    return made


QA_TASK_WEIGHTS = {
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
BALANCED_QA_TASK_WEIGHTS = {"count": 2, "count of any": 10, "total": 4}
"""How often each task is drawn, and what is other if the drill is even."""
LISTING_TASKS = ("what", "count")
"""Tasks whose answers name everything there is."""


def generate_chat(scene: Scene, rng: random.Random, num_turns: int, tasks: Sequence[str] | None = None) -> list[Turn]:
    """Several questions about one scene, of different tasks, in random order."""
    names = list(tasks or QA_TASKS)
    rng.shuffle(names)
    made: list[Turn] = []
    asked: set[str] = set()
    while names and len(made) < num_turns:
        turn = QA_TASKS[names.pop()](scene, rng)
        if turn is not None and turn.question not in asked:
            made.append(turn)
            asked.add(turn.question)
    return made
