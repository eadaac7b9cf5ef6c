"""`python -m mmspec.app.study`: which words drafters guess, on held-out scenes: names, places, the rest.

Every drafter decodes the same requests with trees of the same size, one request at a time. A token counts as guessed if
it was drafted and kept, so that it cost no forward of its own. Intervals are over requests (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import mmspec
from mmspec.app.caption import check_drafter
from mmspec.app.captioner import Captioner
from mmspec.app.load import load
from mmspec.app.rounds import Recorder
from mmspec.app.scenes.kinds import BY_NAME
from mmspec.app.scenes.tasks import TASKS, requests
from mmspec.app.scenes.world import COLOURS, HELD_OUT, SIZES, TEXTURES
from mmspec.app.settings import DEFAULT

SPOTS = frozenset(("upper", "lower", "left", "right", "top", "bottom", "center", "above", "below"))
LOOKS = frozenset(
    (*COLOURS, *TEXTURES, *SIZES, "little", "middling", "big", "largest", "smallest", "larger", "smaller")
)
CLASSES = ("names", "places", "looks", "other")
SAMPLES = 1000


def class_of(word: str) -> str:
    """Which class a word belongs to."""
    low = word.lower()
    if low in BY_NAME:
        return "names"
    if low in SPOTS:
        return "places"
    return "looks" if low in LOOKS else "other"


@dataclass
class Answer:
    """One answer: tokens after the first, forwards after the prompt's; per class tokens, and how many were guessed."""

    tokens: int
    forwards: int
    total: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    guessed: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def classes_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The class of the word that each token belongs to; a word may be several tokens."""
    classes, text = [], ""
    ends = []
    for number in range(len(ids)):
        text = tokenizer.decode(ids[: number + 1])
        ends.append(len(text))
    words = [(m.start(), m.end(), class_of(m.group())) for m in re.finditer(r"[A-Za-z]+", text)]
    start = 0
    for end in ends:
        inside = [kind for first, last, kind in words if first < end and last > start]
        classes.append(inside[0] if inside else "other")
        start = end
    return classes


def answer_of(rounds: Sequence[Sequence[int]], tokenizer: Any, ends: Sequence[int]) -> Answer:
    """Count one answer from what its rounds emitted, the first of which is the prompt's."""
    later = [list(tokens) for tokens in rounds[1:] if tokens]
    ids = [token for tokens in rounds for token in tokens]
    classes = classes_of(tokenizer, ids)
    made, place = Answer(sum(map(len, later)), len(later)), len(rounds[0])
    for tokens in later:
        for step, token in enumerate(tokens):
            if token not in ends:
                made.total[classes[place]] += 1
                made.guessed[classes[place]] += step < len(tokens) - 1
            place += 1
    return made


def interval(answers: Sequence[Answer], name: str | None) -> tuple[float, float, float]:
    """(value, low, high): tau for None, else the share of a class that was guessed; 95% over requests."""

    def value(chosen: Sequence[Answer]) -> float:
        if name is None:
            return sum(a.tokens for a in chosen) / max(1, sum(a.forwards for a in chosen))
        return sum(a.guessed[name] for a in chosen) / max(1, sum(a.total[name] for a in chosen))

    dice = random.Random(0)
    spread = sorted(value(dice.choices(answers, k=len(answers))) for _ in range(SAMPLES))
    return value(answers), spread[SAMPLES // 40], spread[-SAMPLES // 40]


def study(
    model: Any, processor: Any, drafter: str, task: str, first: int, count: int, nodes: int, tick: Any = None
) -> list[Answer]:
    """Decode `count` requests with one drafter (`NAME+COMPRESSOR` shows it fewer visual tokens)."""
    maker = Captioner(model, processor)
    made = []
    for one in islice(requests(task, first), count):
        plain, _, compressor = drafter.partition("+")
        mmspec.patch(model, plain, compressor or None, processor=processor)
        recorder = Recorder(model.__dict__["_mmspec"].options.drafter)
        inputs = maker.inputs([one.pictures], [one.question])
        try:
            model.generate(**inputs, max_new_tokens=160, do_sample=False, mmspec={"drafter": recorder, "nodes": nodes})
        finally:
            mmspec.unpatch(model)
        emitted = [one.emitted for one in recorder.rounds()]
        made.append(answer_of(emitted, processor.tokenizer, maker.ends))
        if tick is not None:
            tick(1)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmspec.app.study", description=__doc__)
    add = parser.add_argument
    add("drafters", nargs="+", metavar="D", help="names, or folders of trained drafters")
    add("--model", default=DEFAULT)
    add("--task", choices=TASKS, default="describe")
    add("--first-seed", type=int, default=HELD_OUT, metavar="S")
    add("--count", type=int, default=100, metavar="N", help="requests (default 100)")
    add("--nodes", type=int, default=16, metavar="N", help="of every tree (default 16)")
    add("--json", metavar="FILE")
    add("--plot", metavar="FILE.png")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    from tqdm import tqdm

    for name in args.drafters:
        drafter, _, compressor = name.partition("+")
        check_drafter(drafter, compressor or None)
    model, processor = load(args.model)
    rows = []
    with tqdm(total=args.count * len(args.drafters), unit="answer", disable=not args.progress) as bar:
        for name in args.drafters:
            answers = study(model, processor, name, args.task, args.first_seed, args.count, args.nodes, bar.update)
            row: dict[str, Any] = {"drafter": Path(name).name, "tau": interval(answers, None)}
            row |= {kind: interval(answers, kind) for kind in CLASSES}
            row |= {"count": args.count, "nodes": args.nodes, "tokens": sum(answer.tokens for answer in answers)}
            row["mean_tokens"] = round(mean(answer.tokens for answer in answers), 1)
            rows.append(row)
            cells = [
                f"{kind} {row[kind][0]:.3f} [{row[kind][1]:.3f}, {row[kind][2]:.3f}]" for kind in ("tau", *CLASSES)
            ]
            print(f"{row['drafter']:<16}", "  ".join(cells), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from mmspec.app.plot import plot_study

        plot_study(rows, CLASSES, Path(args.plot))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
