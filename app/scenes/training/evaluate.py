"""`python -m mmspec.app.scenes.training.evaluate`: how often the model's answers are true, on scenes it has never seen.

Answers are read by small readers that know the truth of the scene, not the sentences of the training: a word that
cannot be read is wrong. The same questions with another scene's picture are the control: near chance. With
--answers a run that was cut goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmspec.app.scenes import WEIGHTS_FOLDER, compute_checksums, grammar, load_scenes_model
from mmspec.app.scenes.model_card import write_card
from mmspec.app.scenes.objects import KIND_BY_NAME, OBJECT_KINDS
from mmspec.app.scenes.render import render_scene, visible_shares
from mmspec.app.scenes.training.build_model import format_prompt
from mmspec.app.scenes.world import (
    BACKGROUND_COLOURS,
    BACKGROUND_TEXTURES,
    FIRST_HELD_OUT_SEED,
    REGIONS,
    SIZE_CLASSES,
    Clip,
    Scene,
    Thing,
    generate_clip,
    generate_scene,
)

REGION_NAMES = tuple(name for row in REGIONS for name in row)
MIN_THING_SIZE = SIZE_CLASSES["small"][0]
"""Pixels. Smaller things are left out."""
RELATION_PATTERN = re.compile(r"\b(left of|right of|above|below|close to|far from) the (other )?[a-z]+", re.IGNORECASE)
MetricOutcomes = dict[str, list[bool]]


@dataclass(frozen=True)
class EvalQuestion:
    """One question to the model, and how its answer is marked."""

    images: tuple[Image.Image, ...]
    question: str
    score: Callable[[str], MetricOutcomes]
    max_new_tokens: int = 40


def find_kinds(text: str) -> set[int]:
    """All kinds that a text names, in the singular or the plural."""
    words = [
        word for word in re.findall(r"[A-Za-z]+", text) if len(word) == 1 or not word.isupper()
    ]  # signs are no things
    return {KIND_BY_NAME[word.lower()] for word in words if word.lower() in KIND_BY_NAME}


def find_region_name(text: str) -> str | None:
    """The one place that a text names; None if it names none, or several."""
    text = text.lower()
    found = [name for name in sorted(REGION_NAMES, key=len, reverse=True) if re.search(rf"\b{name}\b", text)]
    longest = [name for name in found if not any(name != other and name in other for other in found)]
    return longest[0] if len(longest) == 1 else None


def find_number(text: str) -> int | None:
    """The last number word of a text: who counts aloud ends with what it came to."""
    words = re.findall(r"[a-z]+", text.lower())
    return next((grammar.NUMBER_WORDS.index(word) for word in reversed(words) if word in grammar.NUMBER_WORDS), None)


def clearly_visible_things(made: Scene) -> list[Thing]:
    """The things that a model must name: at least half visible, and not too small. In this world that is all."""
    return [
        t
        for t, share in zip(made.things, visible_shares(made), strict=True)
        if share >= 0.5 and t.size >= MIN_THING_SIZE
    ]


def _score_names(made: Scene) -> Callable[[str], MetricOutcomes]:
    truth, must = {thing.kind for thing in made.things}, {thing.kind for thing in clearly_visible_things(made)}

    def mark(answer: str) -> MetricOutcomes:
        named = find_kinds(answer)
        return {"things_named": [kind in named for kind in must], "named_are_there": [kind in truth for kind in named]}

    return mark


def _score_description(made: Scene) -> Callable[[str], MetricOutcomes]:
    """Sentence by sentence: what is left of it without "left of the globe" and the like says what stands where."""

    def mark(answer: str) -> MetricOutcomes:
        marks: MetricOutcomes = defaultdict(list, _score_names(made)(answer))
        for sentence in answer.split(".")[1:]:
            rest = RELATION_PATTERN.sub("", sentence)
            kinds, spot = find_kinds(rest), find_region_name(rest)
            if len(kinds) == 1 and spot is not None:
                marks["described_places"].append(
                    any(thing.kind in kinds and thing.region == spot for thing in made.things)
                )
        return marks

    return mark


def _score_single(name: str, right: Callable[[str], bool]) -> Callable[[str], MetricOutcomes]:
    return lambda answer: {name: [right(answer)]}


def _starts_with(word: str, answer: str) -> bool:
    return answer.strip().lower().startswith(word)


def build_scene_questions(made: Scene, rng: random.Random) -> list[EvalQuestion]:
    """The questions about one scene."""
    pictures = (render_scene(made),)
    items = [EvalQuestion(pictures, grammar.ask_contents(made, rng).question, _score_names(made))]
    items.append(
        EvalQuestion(
            pictures, grammar.ask_description(made, rng).question, _score_description(made), max_new_tokens=190
        )
    )
    single = [thing for thing in made.things if made.count(thing.kind) == 1]
    if single:
        thing = rng.choice(single)
        items.append(
            EvalQuestion(
                pictures,
                f"Where is the {thing.name}?",
                _score_single("places", lambda a: find_region_name(a) == thing.region),
            )
        )
    counted = rng.choice(grammar.count_kinds(made))
    items.append(
        EvalQuestion(
            pictures,
            f"How many {OBJECT_KINDS[counted[0]].plural} are there?",
            _score_single("counts", lambda a: find_number(a) == counted[1]),
        )
    )
    total = len(made.things)
    items.append(
        EvalQuestion(pictures, "How many things are there?", _score_single("totals", lambda a: find_number(a) == total))
    )
    there = rng.choice(made.things).kind
    absent = rng.choice([kind for kind in range(len(OBJECT_KINDS)) if not made.count(kind)])
    for kind, word in ((there, "yes"), (absent, "no")):
        asked = f"Is there {OBJECT_KINDS[kind].with_article} in the picture?"
        score = _score_single("yes_no", partial(_starts_with, word))
        items.append(EvalQuestion(pictures, asked, score))
    ground = (made.colour, made.texture)
    items.append(
        EvalQuestion(
            pictures,
            "What is the background like?",
            _score_single("backgrounds", lambda a: _find_background(a) == ground),
        )
    )
    if made.sign is not None:
        text = made.sign.text
        items.append(
            EvalQuestion(
                pictures,
                "What does the sign say?",
                _score_single("words", lambda a: text in re.findall(r"[A-Z0-9]+", a)),
            )
        )
    if (pair := grammar.ask_larger(made, rng)) is not None:
        answer = find_kinds(pair.answer)
        items.append(EvalQuestion(pictures, pair.question, _score_single("bigger", lambda a: find_kinds(a) == answer)))
    return items


def _find_background(text: str) -> tuple[str | None, str | None]:
    words = re.findall(r"[a-z]+", text.lower())
    return next((w for w in words if w in BACKGROUND_COLOURS), None), next(
        (w for w in words if w in BACKGROUND_TEXTURES), None
    )


def build_clip_question(made: Clip, rng: random.Random) -> EvalQuestion:
    """The question about one clip."""

    def mark(answer: str) -> MetricOutcomes:
        done = {"moves": "moves", "appears": "appears", "leaves": "disappears", "stays": "stays"}[made.event.what]
        words = set(re.findall(r"\b(?:moves|appears|disappears|stays)\b", answer.lower()))
        # Others stay, so "stays" is true beside whatever happens; that anything else happens as well is not.
        right = done in words and words <= {done, "stays"}
        marks: MetricOutcomes = {"events": [right], "clip_things": [made.hero.kind in find_kinds(answer)]}
        if made.event.what == "moves":
            ways = re.findall(r"([A-Za-z]+) moves (?:to the )?(left|right|up|down)\b", answer)
            marks["motion"] = [
                len(ways) == 1 and find_kinds(ways[0][0]) == {made.hero.kind} and ways[0][1] == made.event.way
            ]
        return marks

    return EvalQuestion(
        tuple(render_scene(frame) for frame in made.frames),
        grammar.ask_clip(made, rng).question,
        mark,
        max_new_tokens=48,
    )


class AnswerLog:
    """Answers that are there already, in a JSONL file or only in memory.

    The first line says what they are answers to. A line that was cut is answered again.
    """

    def __init__(self, path: Path | None = None, header: dict[str, Any] | None = None) -> None:
        """
        Raises:
            ValueError: the file holds answers to something else.
        """
        self.path, self.answers = path, dict[tuple[str, int], str]()
        if path is None:
            return
        whole = path.read_bytes() if path.exists() else b""
        lines = [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
        if not lines:
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        elif lines[0] != header:
            raise ValueError(f"{path} holds answers to {lines[0]}; these are to {header}. Name another file.")
        elif len(whole) > whole.rfind(b"\n") + 1:
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        for line in lines[1:]:
            self.answers[line["of"], line["item"]] = line["answer"]

    def add(self, split: str, answers: Mapping[int, str]) -> None:
        """Keep these, by number of the item."""
        self.answers |= {(split, item): answer for item, answer in answers.items()}
        if self.path is not None:
            rows = [json.dumps({"of": split, "item": item, "answer": answer}) for item, answer in answers.items()]
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(row + "\n" for row in rows))


def generate_answers(
    model: Any,
    processor: Any,
    questions: Sequence[EvalQuestion],
    batch_size: int,
    tick: Callable[[int], None],
    answer_log: AnswerLog | None = None,
    split: str = "",
) -> list[str]:
    """What the model says to each item, greedy. Items of one batch have equally many pictures and similar lengths.

    Pictures that several items share are read once.
    """
    answer_log = answer_log or AnswerLog()
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i].images), questions[i].max_new_tokens))
    order = [i for i in order if (split, i) not in answer_log.answers]
    tick(len(questions) - len(order))
    start = 0
    while start < len(order):
        group = [
            i
            for i in order[start : start + batch_size]
            if len(questions[i].images) == len(questions[order[start]].images)
        ]
        given = _prefill_shared_images(model, processor, [questions[i] for i in group])
        longest = max(questions[i].max_new_tokens for i in group)
        out = model.generate(**given, max_new_tokens=longest, do_sample=False)
        rows = out[:, given["input_ids"].shape[1] :]
        texts = [processor.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
        answer_log.add(split, dict(zip(group, texts, strict=True)))
        start += len(group)
        tick(len(group))
    return [answer_log.answers[split, i] for i in range(len(questions))]


@torch.no_grad()
def _prefill_shared_images(model: Any, processor: Any, items: Sequence[EvalQuestion]) -> dict[str, Any]:
    """What `generate` is given for questions of which the pictures are in its cache already, a row for each.

    Shorter questions are padded behind the pictures, so that all rows begin with what was read.
    """
    seen = list({id(item.images): item.images for item in items}.values())
    row_of = {id(pictures): row for row, pictures in enumerate(seen)}
    rows = torch.tensor([row_of[id(item.images)] for item in items], device=model.device)
    begin, end = format_prompt("\n", len(seen[0])).split("\n")
    given = processor(
        images=[list(pictures) for pictures in seen], text=["<s>" + begin] * len(seen), return_tensors="pt"
    ).to(model.device)
    cache = model.model(**given, use_cache=True).past_key_values
    cache.batch_select_indices(rows)
    asked = processor.tokenizer(
        [item.question + end for item in items],
        add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt",
    ).to(model.device)  # fmt: skip
    parts = {name: torch.cat((given[name][rows], asked[name]), 1) for name in ("input_ids", "attention_mask")}
    return parts | {"past_key_values": cache}


def compute_accuracies(questions: Sequence[EvalQuestion], answers: Sequence[str]) -> dict[str, float]:
    """Share of marks that are right, and how many there were."""
    marks: MetricOutcomes = defaultdict(list)
    for item, answer in zip(questions, answers, strict=True):
        for name, values in item.score(answer).items():
            marks[name] += values
    result: dict[str, float] = {}
    for name, values in sorted(marks.items()):
        result[name] = round(sum(values) / len(values), 4) if values else float("nan")
        result[f"{name}_n"] = len(values)
    return result


def shuffle_images(questions: Sequence[EvalQuestion]) -> list[EvalQuestion]:
    """The same questions, each with pictures from elsewhere."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(questions):
        by_count[len(item.images)].append(number)
    result = list(questions)
    for numbers in by_count.values():
        shift = max(1, len(numbers) // 2)
        for place, number in enumerate(numbers):
            other = questions[numbers[(place + shift) % len(numbers)]]
            result[number] = EvalQuestion(
                other.images, questions[number].question, questions[number].score, questions[number].max_new_tokens
            )
    return result


def evaluate_scenes_model(
    model: Any,
    processor: Any,
    first_seed: int,
    count: int,
    *,
    batch_size: int = 16,
    control: bool = True,
    progress: bool = False,
    answer_log: AnswerLog | None = None,
) -> dict[str, float]:
    """Shares of right answers on `count` scenes and a quarter as many clips; `control_...` with shuffled pictures."""
    from tqdm import tqdm

    items: list[EvalQuestion] = []
    for seed in range(first_seed, first_seed + count):
        items += build_scene_questions(generate_scene(seed), random.Random(f"ask {seed}"))
    for seed in range(first_seed, first_seed + count // 4):
        items.append(build_clip_question(generate_clip(seed), random.Random(f"ask {seed}")))
    describe_skipped = sum(
        len(made.things) - len(clearly_visible_things(made))
        for made in map(generate_scene, range(first_seed, first_seed + count))
    )
    result: dict[str, float] = {"first_seed": first_seed, "count": count, "left_out": describe_skipped}
    for prefix, asked in (("", items), ("control_", shuffle_images(items)))[: 1 + control]:
        with tqdm(total=len(asked), desc=prefix + "questions", disable=not progress, file=sys.stderr) as bar:
            said = generate_answers(model, processor, asked, batch_size, bar.update, answer_log, prefix + "questions")
        result |= {prefix + name: value for name, value in compute_accuracies(asked, said).items()}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmspec.app.scenes.training.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, metavar="FOLDER", help="default: the model that ships with mmspec")
    add("--first-seed", type=int, default=FIRST_HELD_OUT_SEED, metavar="S")
    add("--count", type=int, default=1000, metavar="N", help="scenes (default 1000)")
    add("--batch-size", type=int, default=16)
    add("--json", metavar="FILE", help="write the shares as one flat object")
    add("--answers", type=Path, metavar="FILE.jsonl", help="keep the answers here; the same command again goes on")
    add("--card", action="store_true", help="write the accuracy into the model card in FOLDER as well")
    add("--control", action=argparse.BooleanOptionalAction, default=True, help="also with shuffled pictures")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    to = {
        "weights": compute_checksums(Path(args.model or WEIGHTS_FOLDER)).get("model.safetensors"),
        "first_seed": args.first_seed,
    }
    try:
        kept = AnswerLog(args.answers, to | {"count": args.count})
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model, processor = load_scenes_model(args.model)
    torch.manual_seed(0)
    result = evaluate_scenes_model(
        model, processor, args.first_seed, args.count,
        batch_size=args.batch_size, control=args.control, progress=args.progress, answer_log=kept,
    )  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.card:
        write_card(Path(args.model or WEIGHTS_FOLDER), sum(weight.numel() for weight in model.parameters()), result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
