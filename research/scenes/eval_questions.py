"""Evaluation questions about held-out scenes, and the parsers that score the answers against the ground truth.

The parsers look for names, numbers and regions; they do not assume the grammar's sentences. An answer that cannot be
parsed counts as wrong.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from PIL import Image

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import BACKGROUND_COLOURS, BACKGROUND_TEXTURES, REGIONS, SIZE_CLASSES, Scene, Thing
from research.scenes import grammar
from research.scenes.clips import Clip, visible_shares
from research.scenes.names import KIND_BY_NAME, plural, with_article
from research.scenes.phrases import NUMBER_WORDS, count_kinds

REGION_NAMES = tuple(name for row in REGIONS for name in row)
MIN_THING_SIZE = SIZE_CLASSES["small"][0]
"""Pixels. Smaller things need not be named."""
MIN_VISIBLE_SHARE = 0.5
"""Things with a smaller visible share need not be named."""
RELATION_PATTERN = re.compile(r"\b(left of|right of|above|below|close to|far from) the (other )?[a-z]+", re.IGNORECASE)
MetricOutcomes = dict[str, list[bool]]
"""Metric name -> whether each of its checks passed."""
AnswerScorer = Callable[[str], MetricOutcomes]
"""Scores one answer."""


@dataclass(frozen=True)
class EvalQuestion:
    """One question to the model.

    Attributes:
        images: One image of a scene, or the frames of a clip.
        question: The user's text.
        score: Scores the answer.
        max_new_tokens: Limit of the answer's length.
    """

    images: tuple[Image.Image, ...]
    question: str
    score: AnswerScorer
    max_new_tokens: int = 40


def find_kinds(text: str) -> set[int]:
    """Return all object kinds that a text names, in the singular or the plural."""
    names = re.findall(r"[A-Za-z]+", text)
    names = [name for name in names if len(name) == 1 or not name.isupper()]  # all capitals: the text of a sign
    return {KIND_BY_NAME[name.lower()] for name in names if name.lower() in KIND_BY_NAME}


def find_region_name(text: str) -> str | None:
    """Return the one region that a text names; None if it names none or several."""
    text = text.lower()
    found = [name for name in sorted(REGION_NAMES, key=len, reverse=True) if re.search(rf"\b{name}\b", text)]
    longest = [name for name in found if not any(name != other and name in other for other in found)]
    return longest[0] if len(longest) == 1 else None


def find_number(text: str) -> int | None:
    """Return the value of the last number word of a text: answers with a running count end with the result."""
    tokens = re.findall(r"[a-z]+", text.lower())
    return next((NUMBER_WORDS.index(token) for token in reversed(tokens) if token in NUMBER_WORDS), None)


def find_background(text: str) -> tuple[str | None, str | None]:
    """Return the first colour and the first texture that a text names."""
    tokens = re.findall(r"[a-z]+", text.lower())
    colour = next((token for token in tokens if token in BACKGROUND_COLOURS), None)
    texture = next((token for token in tokens if token in BACKGROUND_TEXTURES), None)
    return colour, texture


def clearly_visible_things(scene: Scene) -> list[Thing]:
    """Return the things that an answer must name: at least half visible and not too small. In this world: all."""
    return [
        thing
        for thing, share in zip(scene.things, visible_shares(scene), strict=True)
        if share >= MIN_VISIBLE_SHARE and thing.size >= MIN_THING_SIZE
    ]


def _score_names(scene: Scene) -> AnswerScorer:
    """Recall (`things_named`) and precision (`named_are_there`) of the named kinds."""
    present = {thing.kind for thing in scene.things}
    required = {thing.kind for thing in clearly_visible_things(scene)}

    def score(answer: str) -> MetricOutcomes:
        named = find_kinds(answer)
        return {
            "things_named": [kind in named for kind in required],
            "named_are_there": [kind in present for kind in named],
        }

    return score


def _score_description(scene: Scene) -> AnswerScorer:
    """The names, and per sentence the region of its thing; relations to other things are removed first."""

    def score(answer: str) -> MetricOutcomes:
        outcomes: MetricOutcomes = defaultdict(list, _score_names(scene)(answer))
        for sentence in answer.split(".")[1:]:
            without_relations = RELATION_PATTERN.sub("", sentence)
            kinds = find_kinds(without_relations)
            region = find_region_name(without_relations)
            if len(kinds) == 1 and region is not None:
                is_true = any(thing.kind in kinds and thing.region == region for thing in scene.things)
                outcomes["described_places"].append(is_true)
        return outcomes

    return score


def _score_single(metric: str, is_correct: Callable[[str], bool]) -> AnswerScorer:
    return lambda answer: {metric: [is_correct(answer)]}


def _starts_with(prefix: str, answer: str) -> bool:
    return answer.strip().lower().startswith(prefix)


def build_scene_questions(scene: Scene, rng: random.Random) -> list[EvalQuestion]:
    """Return the evaluation questions about one scene; all share its image."""
    images = (render_scene(scene),)

    def single(metric: str, question: str, is_correct: Callable[[str], bool]) -> EvalQuestion:
        return EvalQuestion(images, question, _score_single(metric, is_correct))

    questions = [
        EvalQuestion(images, grammar.ask_contents(scene, rng).question, _score_names(scene)),
        EvalQuestion(
            images, grammar.ask_description(scene, rng).question, _score_description(scene), max_new_tokens=190
        ),
    ]
    unique = [thing for thing in scene.things if scene.count(thing.kind) == 1]
    if unique:
        thing = rng.choice(unique)
        questions.append(single("places", f"Where is the {thing.name}?", lambda a: find_region_name(a) == thing.region))
    counted_kind, count = rng.choice(count_kinds(scene))
    how_many = f"How many {plural(OBJECT_KINDS[counted_kind])} are there?"
    questions.append(single("counts", how_many, lambda a: find_number(a) == count))
    total = len(scene.things)
    questions.append(single("totals", "How many things are there?", lambda a: find_number(a) == total))
    present = rng.choice(scene.things).kind
    absent = rng.choice([kind for kind in range(len(OBJECT_KINDS)) if not scene.count(kind)])
    for kind, expected in ((present, "yes"), (absent, "no")):
        is_there = f"Is there {with_article(OBJECT_KINDS[kind])} in the picture?"
        questions.append(single("yes_no", is_there, partial(_starts_with, expected)))
    background = (scene.colour, scene.texture)
    questions.append(single("backgrounds", "What is the background like?", lambda a: find_background(a) == background))
    if scene.sign is not None:
        text = scene.sign.text
        questions.append(single("words", "What does the sign say?", lambda a: text in re.findall(r"[A-Z0-9]+", a)))
    if (larger := grammar.ask_larger(scene, rng)) is not None:
        larger_kind = find_kinds(larger.answer)
        questions.append(single("bigger", larger.question, lambda a: find_kinds(a) == larger_kind))
    return questions


def build_clip_question(clip: Clip, rng: random.Random) -> EvalQuestion:
    """Return the evaluation question about one clip."""

    def score(answer: str) -> MetricOutcomes:
        expected = {"moves": "moves", "appears": "appears", "leaves": "disappears", "stays": "stays"}[clip.event.what]
        verbs = set(re.findall(r"\b(?:moves|appears|disappears|stays)\b", answer.lower()))
        # The other things stay, so "stays" is true in every clip; any other second verb is false.
        is_true = expected in verbs and verbs <= {expected, "stays"}
        outcomes: MetricOutcomes = {"events": [is_true], "clip_things": [clip.hero.kind in find_kinds(answer)]}
        if clip.event.what == "moves":
            motions = re.findall(r"([A-Za-z]+) moves (?:to the )?(left|right|up|down)\b", answer)
            outcomes["motion"] = [
                len(motions) == 1 and find_kinds(motions[0][0]) == {clip.hero.kind} and motions[0][1] == clip.event.way
            ]
        return outcomes

    return EvalQuestion(
        tuple(render_scene(frame) for frame in clip.frames),
        grammar.ask_clip(clip, rng).question,
        score,
        max_new_tokens=48,
    )
