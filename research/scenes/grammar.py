"""Questions about a scene or a clip, and their answers, in many forms.

The form of an answer is a function of the scene's content (kind, region, background), so the text cannot be predicted
without the picture. The parsers that score a model's answers are in `training/eval_questions.py`; they compare with the
scene's ground truth, not with these sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.world import REGION_MARGIN, SCENE_IMAGE_SIZE, Scene, Thing
from research.scenes.clips import Clip, spatial_relation
from research.scenes.description import describe_scene
from research.scenes.names import plural, with_article
from research.scenes.phrases import (
    NUMBER_WORDS,
    capitalize,
    count_aloud,
    count_kinds,
    format_background,
    format_count,
    format_region,
    join_list,
    list_things,
)


@dataclass(frozen=True)
class QATurn:
    """One question and its answer.

    Attributes:
        task: Name of the task, such as a key of `QA_TASKS`.
        question: The user's text.
        answer: The assistant's text.
    """

    task: str
    question: str
    answer: str


Task = Callable[[Scene, random.Random], QATurn | None]
"""Builds a turn about a scene; returns None where the question does not apply."""


def ask_contents(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for all things; the answer lists each with its region."""
    question = rng.choice(
        ("What is in the picture?", "What do you see?", "List the things in this picture.", "Name everything here.")
    )
    return QATurn("what", question, capitalize(list_things(scene)) + ".")


def ask_caption(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for a caption: the things, the background, the sign."""
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
    return QATurn("short", question, capitalize(text) + ".")


def ask_description(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for a long description (`description.describe_scene`)."""
    question = rng.choice(
        (
            "Describe the image.",
            "Describe the picture in detail.",
            "Give a detailed description.",
            "What does this picture show? Be detailed.",
        )
    )
    return QATurn("describe", question, describe_scene(scene))


def ask_region(scene: Scene, rng: random.Random) -> QATurn | None:
    """Ask for the region of a thing that is the only one of its kind; None if there is no such thing."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    if not single:
        return None
    thing = rng.choice(single)
    question = rng.choice(("Where is the {}?", "Where do you see the {}?", "In which part of the picture is the {}?"))
    form = thing.kind % 3
    region = format_region(thing.region)
    if form == 0:
        answer = f"The {thing.name} is {region}."
    elif form == 1:
        answer = f"It is {region}."
    else:
        answer = capitalize(region) + "."
    return QATurn("where", question.format(thing.name), answer)


def ask_count(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for the number of a kind, or of all things; repeated kinds are preferred."""
    if rng.random() < 0.25:
        return ask_total_count(scene, rng)
    repeated = [kind for kind, count in count_kinds(scene) if count > 1]
    kind = rng.choice(repeated) if repeated and rng.random() < 0.7 else rng.choice(scene.things).kind
    return _ask_kind_count(scene, kind, rng)


def ask_total_count(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for the number of all things."""
    question = rng.choice(("How many things are there?", "How many things do you count in all?"))
    return QATurn("count", question, answer_total_count(scene))


def ask_uniform_kind_count(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for the number of a kind drawn uniformly from the kinds in the scene; for training."""
    return _ask_kind_count(scene, rng.choice(count_kinds(scene))[0], rng)


def _ask_kind_count(scene: Scene, kind: int, rng: random.Random) -> QATurn:
    question = rng.choice(("How many {} are there?", "How many {} do you see?", "Count the {}."))
    return QATurn("count", question.format(plural(OBJECT_KINDS[kind])), answer_kind_count(scene, kind))


def answer_kind_count(scene: Scene, kind: int) -> str:
    """Return the running count of a kind (`count_aloud`), then the number."""
    count = scene.count(kind)
    name = OBJECT_KINDS[kind].name if count == 1 else plural(OBJECT_KINDS[kind])
    return f"{capitalize(count_aloud(scene, kind))}: {NUMBER_WORDS[count]} {name}."


def answer_total_count(scene: Scene) -> str:
    """Return the running count of all things, then the number."""
    return f"{capitalize(count_aloud(scene))}: {NUMBER_WORDS[len(scene.things)]} in all."


def ask_presence(scene: Scene, rng: random.Random) -> QATurn:
    """Ask whether a kind is in the picture; half of the answers are yes."""
    present = {thing.kind for thing in scene.things}
    question = rng.choice(("Is there {} in the picture?", "Do you see {}?", "Can you find {} here?"))
    if rng.random() < 0.5:
        kind = OBJECT_KINDS[rng.choice(sorted(present))]
        return QATurn("yesno", question.format(with_article(kind)), f"Yes, there is {with_article(kind)}.")
    kind = OBJECT_KINDS[rng.choice([number for number in range(len(OBJECT_KINDS)) if number not in present])]
    return QATurn("yesno", question.format(with_article(kind)), f"No, there is no {kind.name}.")


def ask_larger(scene: Scene, rng: random.Random) -> QATurn | None:
    """Ask which of two things is bigger; None if no two single things differ in size class."""
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
    return QATurn("bigger", question.format(a.name, b.name), f"The {larger.name} is bigger.")


def ask_background(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for the colour and texture of the background."""
    question = rng.choice(
        ("What is the background like?", "Which color is the background?", "Describe the background.")
    )
    form = len(scene.colour) % 2
    answer = (
        f"The background is {scene.texture} {scene.colour}."
        if form
        else f"It is {format_background(scene)} background."
    )
    return QATurn("background", question, answer)


def ask_sign_text(scene: Scene, rng: random.Random) -> QATurn:
    """Ask for the text on the sign; the answer may be that there is none."""
    question = rng.choice(("What does the sign say?", "Read the sign.", "What is written in the picture?"))
    if scene.sign is None:
        return QATurn("read", question, "There is no sign.")
    form = len(scene.sign.text) % 2
    return QATurn("read", question, f"The sign says {scene.sign.text}." if form else f"It says {scene.sign.text}.")


def ask_relation(scene: Scene, rng: random.Random) -> QATurn | None:
    """Ask for the spatial relation of two things; None if no pair has a clear one."""
    single = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    pairs = [(a, b) for a in single for b in single if a != b and spatial_relation(a, b) is not None]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    answer = f"The {a.name} is {spatial_relation(a, b)} the {b.name}."
    return QATurn("relation", f"How does the {a.name} lie to the {b.name}?", answer)


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


def ask_clip(clip: Clip, rng: random.Random) -> QATurn:
    """Ask what happens in a clip; the answer gives the action of each thing in reading order of the first frame.

    Reading order avoids that the model has to find the acting thing before its first token.
    """
    question = rng.choice(("What happens in the clip?", "Describe the video.", "What changes from picture to picture?"))
    things = [*clip.frames[0].reading_order(), *([clip.hero] if clip.event.what == "appears" else [])]
    actions = join_list([f"{with_article(OBJECT_KINDS[thing.kind])} {_action_phrase(clip, thing)}" for thing in things])
    background = f"on a {clip.frames[0].texture} {clip.frames[0].colour} background"
    answer = f"{background} {actions}" if things[0].kind % 2 else f"{actions}, {background}"
    return QATurn("clip", question, capitalize(answer) + ".")


def _action_phrase(clip: Clip, thing: Thing) -> str:
    """The verb phrase of a thing of a clip."""
    if thing.kind != clip.hero.kind or clip.event.what == "stays":
        return "stays"
    region = format_region(clip.hero.region)
    return {
        "moves": f"moves {'to the ' if clip.event.way in ('left', 'right') else ''}{clip.event.way}",
        "appears": f"appears {region}",
        "leaves": f"disappears {region.replace('in', 'from', 1) if region.startswith('in') else region}",
    }[clip.event.what]


def generate_clip_qa_turns(clip: Clip, rng: random.Random) -> list[QATurn]:
    """Return short questions about single frames and motion directions, in random order; for training."""
    name = OBJECT_KINDS[clip.hero.kind].name
    named = with_article(OBJECT_KINDS[clip.hero.kind])
    num_frames = len(clip.frames)
    turns = []
    if num_frames < len(NUMBER_WORDS):
        answer = f"There are {NUMBER_WORDS[num_frames]} pictures."
        turns.append(QATurn("pictures", "How many pictures are there?", answer))
    if clip.event.what == "moves":
        direction = f"to the {clip.event.way}" if clip.event.way in ("left", "right") else clip.event.way
        turns.append(QATurn("way", f"Which way does the {name} move?", f"It moves {direction}."))
    else:
        turns.append(QATurn("way", f"Which way does the {name} move?", "It does not move."))
    others = [thing.name for thing in clip.frames[0].things if thing.kind != clip.hero.kind]
    turns += [QATurn("way", f"Which way does the {other} move?", "It does not move.") for other in others[:1]]
    borders = (SCENE_IMAGE_SIZE // 3, 2 * SCENE_IMAGE_SIZE // 3)
    for number, frame in enumerate(clip.frames, 1):
        question = f"Is there {named} in picture {number}?"
        present = [thing for thing in frame.things if thing.kind == clip.hero.kind]
        if not present:
            turns.append(QATurn("when", question, f"No, there is no {name}."))
            continue
        turns.append(QATurn("when", question, f"Yes, there is {named}."))
        hero = present[0]
        if all(abs(value - border) >= REGION_MARGIN for value in (hero.x, hero.y) for border in borders):
            question = f"Where is the {name} in picture {number}?"
            turns.append(QATurn("when", question, f"It is {format_region(hero.region)}."))
    rng.shuffle(turns)
    return turns


def generate_qa_turns(
    scene: Scene, rng: random.Random, num_turns: int, balanced: bool = False, independent: bool = False
) -> list[QATurn]:
    """Return short questions about one scene, drawn with `QA_TASK_WEIGHTS`; for training.

    Args:
        scene: The scene.
        rng: Source of all random choices.
        num_turns: Maximum number of turns; fewer if the scene does not yield enough distinct ones.
        balanced: Apply `BALANCED_QA_TASK_WEIGHTS`: more counting, with kinds drawn uniformly.
        independent: The turns do not attend to each other, so only equal questions are dropped. Otherwise turns are
            dropped whose answer could be copied from an earlier answer.
    """
    weights = QA_TASK_WEIGHTS | BALANCED_QA_TASK_WEIGHTS if balanced else QA_TASK_WEIGHTS
    tasks = QA_TASKS | {"count of any": ask_uniform_kind_count, "total": ask_total_count}
    turns: list[QATurn] = []
    used_keys: set[str] = set()
    for _ in range(4 * num_turns):
        if len(turns) == num_turns:
            break
        task = rng.choices(tuple(weights), tuple(weights.values()))[0]
        if task == "read" and scene.sign is None and rng.random() < 0.8:
            continue
        turn = tasks[task](scene, rng)
        if turn is None:
            continue
        key = turn.question if independent else "the list" if turn.task in LISTING_TASKS else turn.answer
        if key not in used_keys:
            turns.append(turn)
            used_keys.add(key)
    return turns


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
"""Task -> relative sampling weight in `generate_qa_turns`."""
BALANCED_QA_TASK_WEIGHTS = {"count": 2, "count of any": 10, "total": 4}
"""Overrides of `QA_TASK_WEIGHTS` for balanced turns."""
LISTING_TASKS = ("what", "count")
"""Tasks whose answers list all things."""


def generate_chat(scene: Scene, rng: random.Random, num_turns: int, tasks: Sequence[str] | None = None) -> list[QATurn]:
    """Return up to `num_turns` turns of different tasks in random order.

    Args:
        scene: The scene.
        rng: Source of all random choices.
        num_turns: Maximum number of turns.
        tasks: Keys of `QA_TASKS`; None means all.
    """
    names = list(tasks or QA_TASKS)
    rng.shuffle(names)
    turns: list[QATurn] = []
    questions: set[str] = set()
    while names and len(turns) < num_turns:
        turn = QA_TASKS[names.pop()](scene, rng)
        if turn is not None and turn.question not in questions:
            turns.append(turn)
            questions.add(turn.question)
    return turns
