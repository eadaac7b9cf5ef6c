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
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmspec.app.scenes import FOLDER, grammar, load, sums_of
from mmspec.app.scenes.model_card import write_card
from mmspec.app.scenes.objects import BY_NAME, KINDS
from mmspec.app.scenes.render import paint, visible
from mmspec.app.scenes.training.build_model import question
from mmspec.app.scenes.world import COLOURS, HELD_OUT, PLACES, SIZES, TEXTURES, Clip, Scene, Thing, clip, scene

SPOTS = tuple(name for row in PLACES for name in row)
LEAST = SIZES["small"][0]
"""Pixels. Smaller things are left out."""
RELATION = re.compile(r"\b(left of|right of|above|below|close to|far from) the (other )?[a-z]+", re.IGNORECASE)
Marks = dict[str, list[bool]]


@dataclass(frozen=True)
class Item:
    """One question to the model, and how its answer is marked."""

    pictures: tuple[Image.Image, ...]
    question: str
    mark: Callable[[str], Marks]
    tokens: int = 40


def kinds_in(text: str) -> set[int]:
    """All kinds that a text names, in the singular or the plural."""
    words = [
        word for word in re.findall(r"[A-Za-z]+", text) if len(word) == 1 or not word.isupper()
    ]  # signs are no things
    return {BY_NAME[word.lower()] for word in words if word.lower() in BY_NAME}


def spot_in(text: str) -> str | None:
    """The one place that a text names; None if it names none, or several."""
    text = text.lower()
    found = [name for name in sorted(SPOTS, key=len, reverse=True) if re.search(rf"\b{name}\b", text)]
    longest = [name for name in found if not any(name != other and name in other for other in found)]
    return longest[0] if len(longest) == 1 else None


def number_in(text: str) -> int | None:
    """The last number word of a text: who counts aloud ends with what it came to."""
    words = re.findall(r"[a-z]+", text.lower())
    return next((grammar.NUMBERS.index(word) for word in reversed(words) if word in grammar.NUMBERS), None)


def clear(made: Scene) -> list[Thing]:
    """The things that a model must name: at least half visible, and not too small. In this world that is all."""
    return [t for t, share in zip(made.things, visible(made), strict=True) if share >= 0.5 and t.size >= LEAST]


def _names(made: Scene) -> Callable[[str], Marks]:
    truth, must = {thing.kind for thing in made.things}, {thing.kind for thing in clear(made)}

    def mark(answer: str) -> Marks:
        named = kinds_in(answer)
        return {"things_named": [kind in named for kind in must], "named_are_there": [kind in truth for kind in named]}

    return mark


def _describe(made: Scene) -> Callable[[str], Marks]:
    """Sentence by sentence: what is left of it without "left of the globe" and the like says what stands where."""

    def mark(answer: str) -> Marks:
        marks: Marks = defaultdict(list, _names(made)(answer))
        for sentence in answer.split(".")[1:]:
            rest = RELATION.sub("", sentence)
            kinds, spot = kinds_in(rest), spot_in(rest)
            if len(kinds) == 1 and spot is not None:
                marks["described_places"].append(
                    any(thing.kind in kinds and thing.place == spot for thing in made.things)
                )
        return marks

    return mark


def _one(name: str, right: Callable[[str], bool]) -> Callable[[str], Marks]:
    return lambda answer: {name: [right(answer)]}


def items_of(made: Scene, dice: random.Random) -> list[Item]:
    """The questions about one scene."""
    pictures = (paint(made),)
    items = [Item(pictures, grammar.what(made, dice).question, _names(made))]
    items.append(Item(pictures, grammar.describe(made, dice).question, _describe(made), tokens=190))
    single = [thing for thing in made.things if made.count(thing.kind) == 1]
    if single:
        thing = dice.choice(single)
        items.append(Item(pictures, f"Where is the {thing.name}?", _one("places", lambda a: spot_in(a) == thing.place)))
    counted = dice.choice(grammar.groups(made))
    items.append(
        Item(
            pictures,
            f"How many {KINDS[counted[0]].plural} are there?",
            _one("counts", lambda a: number_in(a) == counted[1]),
        )
    )
    total = len(made.things)
    items.append(Item(pictures, "How many things are there?", _one("totals", lambda a: number_in(a) == total)))
    there = dice.choice(made.things).kind
    absent = dice.choice([kind for kind in range(len(KINDS)) if not made.count(kind)])
    for kind, word in ((there, "yes"), (absent, "no")):
        asked = f"Is there {KINDS[kind].a} in the picture?"
        items.append(Item(pictures, asked, _one("yes_no", lambda a, word=word: a.strip().lower().startswith(word))))  # type: ignore[misc]
    ground = (made.colour, made.texture)
    items.append(Item(pictures, "What is the background like?", _one("backgrounds", lambda a: _ground_in(a) == ground)))
    if made.sign is not None:
        text = made.sign.text
        items.append(
            Item(pictures, "What does the sign say?", _one("words", lambda a: text in re.findall(r"[A-Z0-9]+", a)))
        )
    if (pair := grammar.bigger(made, dice)) is not None:
        answer = kinds_in(pair.answer)
        items.append(Item(pictures, pair.question, _one("bigger", lambda a: kinds_in(a) == answer)))
    return items


def _ground_in(text: str) -> tuple[str | None, str | None]:
    words = re.findall(r"[a-z]+", text.lower())
    return next((w for w in words if w in COLOURS), None), next((w for w in words if w in TEXTURES), None)


def item_of_clip(made: Clip, dice: random.Random) -> Item:
    """The question about one clip."""

    def mark(answer: str) -> Marks:
        done = {"moves": "moves", "appears": "appears", "leaves": "disappears", "stays": "stays"}[made.event.what]
        words = set(re.findall(r"\b(?:moves|appears|disappears|stays)\b", answer.lower()))
        # Others stay, so "stays" is true beside whatever happens; that anything else happens as well is not.
        right = done in words and words <= {done, "stays"}
        marks: Marks = {"events": [right], "clip_things": [made.hero.kind in kinds_in(answer)]}
        if made.event.what == "moves":
            ways = re.findall(r"([A-Za-z]+) moves (?:to the )?(left|right|up|down)\b", answer)
            marks["motion"] = [
                len(ways) == 1 and kinds_in(ways[0][0]) == {made.hero.kind} and ways[0][1] == made.event.way
            ]
        return marks

    return Item(tuple(paint(frame) for frame in made.frames), grammar.clip_turn(made, dice).question, mark, tokens=48)


class Kept:
    """Answers that are there already, in a JSONL file or only in memory.

    The first line says what they are answers to. A line that was cut is answered again.
    """

    def __init__(self, path: Path | None = None, to: dict[str, Any] | None = None) -> None:
        """
        Raises:
            ValueError: the file holds answers to something else.
        """
        self.path, self.known = path, dict[tuple[str, int], str]()
        if path is None:
            return
        whole = path.read_bytes() if path.exists() else b""
        lines = [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
        if not lines:
            path.write_text(json.dumps(to) + "\n", encoding="utf-8")
        elif lines[0] != to:
            raise ValueError(f"{path} holds answers to {lines[0]}; these are to {to}. Name another file.")
        elif len(whole) > whole.rfind(b"\n") + 1:
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        for line in lines[1:]:
            self.known[line["of"], line["item"]] = line["answer"]

    def add(self, of: str, answers: Mapping[int, str]) -> None:
        """Keep these, by number of the item."""
        self.known |= {(of, item): answer for item, answer in answers.items()}
        if self.path is not None:
            rows = [json.dumps({"of": of, "item": item, "answer": answer}) for item, answer in answers.items()]
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(row + "\n" for row in rows))


def answers(
    model: Any,
    processor: Any,
    items: Sequence[Item],
    batch: int,
    tick: Callable[[int], None],
    kept: Kept | None = None,
    of: str = "",
) -> list[str]:
    """What the model says to each item, greedy. Items of one batch have equally many pictures and similar lengths.

    Pictures that several items share are read once.
    """
    kept = kept or Kept()
    order = sorted(range(len(items)), key=lambda i: (len(items[i].pictures), items[i].tokens))
    order = [i for i in order if (of, i) not in kept.known]
    tick(len(items) - len(order))
    start = 0
    while start < len(order):
        group = [i for i in order[start : start + batch] if len(items[i].pictures) == len(items[order[start]].pictures)]
        given = _read_once(model, processor, [items[i] for i in group])
        longest = max(items[i].tokens for i in group)
        out = model.generate(**given, max_new_tokens=longest, do_sample=False)
        rows = out[:, given["input_ids"].shape[1] :]
        texts = [processor.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
        kept.add(of, dict(zip(group, texts, strict=True)))
        start += len(group)
        tick(len(group))
    return [kept.known[of, i] for i in range(len(items))]


@torch.no_grad()
def _read_once(model: Any, processor: Any, items: Sequence[Item]) -> dict[str, Any]:
    """What `generate` is given for questions of which the pictures are in its cache already, a row for each.

    Shorter questions are padded behind the pictures, so that all rows begin with what was read.
    """
    seen = list({id(item.pictures): item.pictures for item in items}.values())
    row_of = {id(pictures): row for row, pictures in enumerate(seen)}
    rows = torch.tensor([row_of[id(item.pictures)] for item in items], device=model.device)
    begin, end = question("\n", len(seen[0])).split("\n")
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


def shares(items: Sequence[Item], said: Sequence[str]) -> dict[str, float]:
    """Share of marks that are right, and how many there were."""
    marks: Marks = defaultdict(list)
    for item, answer in zip(items, said, strict=True):
        for name, values in item.mark(answer).items():
            marks[name] += values
    result: dict[str, float] = {}
    for name, values in sorted(marks.items()):
        result[name] = round(sum(values) / len(values), 4) if values else float("nan")
        result[f"{name}_n"] = len(values)
    return result


def shuffled(items: Sequence[Item]) -> list[Item]:
    """The same questions, each with pictures from elsewhere."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        by_count[len(item.pictures)].append(number)
    result = list(items)
    for numbers in by_count.values():
        shift = max(1, len(numbers) // 2)
        for place, number in enumerate(numbers):
            other = items[numbers[(place + shift) % len(numbers)]]
            result[number] = Item(other.pictures, items[number].question, items[number].mark, items[number].tokens)
    return result


def evaluate(
    model: Any,
    processor: Any,
    first: int,
    count: int,
    *,
    batch: int = 16,
    control: bool = True,
    progress: bool = False,
    kept: Kept | None = None,
) -> dict[str, float]:
    """Shares of right answers on `count` scenes and a quarter as many clips; `control_...` with shuffled pictures."""
    from tqdm import tqdm

    items: list[Item] = []
    for seed in range(first, first + count):
        items += items_of(scene(seed), random.Random(f"ask {seed}"))
    for seed in range(first, first + count // 4):
        items.append(item_of_clip(clip(seed), random.Random(f"ask {seed}")))
    left_out = sum(len(made.things) - len(clear(made)) for made in map(scene, range(first, first + count)))
    result: dict[str, float] = {"first_seed": first, "count": count, "left_out": left_out}
    for prefix, asked in (("", items), ("control_", shuffled(items)))[: 1 + control]:
        with tqdm(total=len(asked), desc=prefix + "questions", disable=not progress, file=sys.stderr) as bar:
            said = answers(model, processor, asked, batch, bar.update, kept, prefix + "questions")
        result |= {prefix + name: value for name, value in shares(asked, said).items()}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmspec.app.scenes.training.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, metavar="FOLDER", help="default: the model that ships with mmspec")
    add("--first-seed", type=int, default=HELD_OUT, metavar="S")
    add("--count", type=int, default=1000, metavar="N", help="scenes (default 1000)")
    add("--batch-size", type=int, default=16)
    add("--json", metavar="FILE", help="write the shares as one flat object")
    add("--answers", type=Path, metavar="FILE.jsonl", help="keep the answers here; the same command again goes on")
    add("--card", action="store_true", help="write the accuracy into the model card in FOLDER as well")
    add("--control", action=argparse.BooleanOptionalAction, default=True, help="also with shuffled pictures")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    to = {"weights": sums_of(Path(args.model or FOLDER)).get("model.safetensors"), "first_seed": args.first_seed}
    try:
        kept = Kept(args.answers, to | {"count": args.count})
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model, processor = load(args.model)
    torch.manual_seed(0)
    result = evaluate(
        model, processor, args.first_seed, args.count,
        batch=args.batch_size, control=args.control, progress=args.progress, kept=kept,
    )  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.card:
        write_card(Path(args.model or FOLDER), sum(weight.numel() for weight in model.parameters()), result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
