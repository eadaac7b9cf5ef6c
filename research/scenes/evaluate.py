"""`python -m research.scenes.evaluate`: accuracy of the scenes model's answers on held-out scenes.

The questions and their scoring are in `eval_questions`. The control, the same questions with the image of another
scene, measures chance level. With --answers, an interrupted evaluation resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmspec.app.scenes import WEIGHTS_FOLDER, compute_checksums, load_scenes_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, generate_scene
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from research.scenes.build_model import format_prompt
from research.scenes.clips import generate_clip
from research.scenes.eval_questions import (
    EvalQuestion,
    MetricOutcomes,
    build_clip_question,
    build_scene_questions,
    clearly_visible_things,
)
from research.scenes.model_card import write_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


class AnswerLog:
    """Answers of one evaluation, in memory and optionally in a JSONL file.

    The first line of the file is the header that identifies the evaluation. An incomplete last line is dropped and its
    question is answered again.

    Attributes:
        path: The file, or None.
        answers: {(split, index of the question): answer}.
    """

    def __init__(self, path: Path | None = None, header: dict[str, Any] | None = None) -> None:
        """
        Args:
            path: JSONL file to read and append to; None for memory only.
            header: Identifies the evaluation: checksum of the weights, seeds, count.

        Raises:
            ValueError: The file has another header.
        """
        self.path = path
        self.answers: dict[tuple[str, int], str] = {}
        if path is None:
            return
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in complete.splitlines()]
        if not lines:
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        elif lines[0] != header:
            raise ValueError(
                f"{path} holds answers to another evaluation, {lines[0]}; this one is {header}. Name another file."
            )
        elif len(content) > len(complete):
            path.write_bytes(complete)
        for line in lines[1:]:
            self.answers[line["of"], line["item"]] = line["answer"]

    def add(self, split: str, answers: Mapping[int, str]) -> None:
        """Store answers by index of the question."""
        self.answers |= {(split, index): answer for index, answer in answers.items()}
        if self.path is not None:
            rows = [json.dumps({"of": split, "item": index, "answer": answer}) for index, answer in answers.items()]
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(row + "\n" for row in rows))


def generate_answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    questions: Sequence[EvalQuestion],
    batch_size: int,
    on_progress: Callable[[int], None],
    answer_log: AnswerLog | None = None,
    split: str = "",
) -> list[str]:
    """Return the model's greedy answer to each question.

    The questions of a batch have the same number of images and similar lengths; images that several of them share are
    prefilled once.

    Args:
        model: The scenes model.
        processor: Its processor.
        questions: The questions.
        batch_size: Maximum questions per batch.
        on_progress: Called with the number of questions answered since the last call.
        answer_log: Answers that exist already; new ones are added.
        split: Name of this set of questions in the log.
    """
    answer_log = answer_log or AnswerLog()
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i].images), questions[i].max_new_tokens))
    order = [i for i in order if (split, i) not in answer_log.answers]
    on_progress(len(questions) - len(order))
    start = 0
    while start < len(order):
        num_images = len(questions[order[start]].images)
        batch = [i for i in order[start : start + batch_size] if len(questions[i].images) == num_images]
        inputs = _prefill_shared_images(model, processor, [questions[i] for i in batch])
        max_new_tokens = max(questions[i].max_new_tokens for i in batch)
        output_ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new_ids = output_ids[:, inputs["input_ids"].shape[1] :]
        texts = [processor.tokenizer.decode(row, skip_special_tokens=True).strip() for row in new_ids]
        answer_log.add(split, dict(zip(batch, texts, strict=True)))
        start += len(batch)
        on_progress(len(batch))
    return [answer_log.answers[split, i] for i in range(len(questions))]


@torch.no_grad()
def _prefill_shared_images(
    model: PreTrainedModel, processor: ProcessorMixin, questions: Sequence[EvalQuestion]
) -> dict[str, Any]:
    """Return the arguments of `generate`, one row per question, with the images in the KV cache already.

    Shorter questions are padded between the images and the question, so that all rows begin with the cached prefix.
    """
    image_sets = list({id(question.images): question.images for question in questions}.values())
    row_of = {id(images): row for row, images in enumerate(image_sets)}
    rows = torch.tensor([row_of[id(question.images)] for question in questions], device=model.device)
    prefix_text, suffix_text = format_prompt("\n", len(image_sets[0])).split("\n")
    prefix = processor(
        images=[list(images) for images in image_sets],
        text=["<s>" + prefix_text] * len(image_sets),
        return_tensors="pt",
    ).to(model.device)
    cache = model.model(**prefix, use_cache=True)[CACHE_ARGUMENT]
    cache.batch_select_indices(rows)
    suffix = processor.tokenizer(
        [question.question + suffix_text for question in questions],
        add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt",
    ).to(model.device)  # fmt: skip
    inputs = {name: torch.cat((prefix[name][rows], suffix[name]), 1) for name in ("input_ids", "attention_mask")}
    return inputs | {CACHE_ARGUMENT: cache}


def compute_accuracies(questions: Sequence[EvalQuestion], answers: Sequence[str]) -> dict[str, float]:
    """Return {metric: share of passed checks} and {metric_n: number of checks}."""
    outcomes: MetricOutcomes = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        for metric, values in question.score(answer).items():
            outcomes[metric] += values
    result: dict[str, float] = {}
    for metric, values in sorted(outcomes.items()):
        result[metric] = round(sum(values) / len(values), 4) if values else float("nan")
        result[f"{metric}_n"] = len(values)
    return result


def shuffle_images(questions: Sequence[EvalQuestion]) -> list[EvalQuestion]:
    """Return the same questions, each with the images of another one with as many images."""
    by_num_images: dict[int, list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        by_num_images[len(question.images)].append(index)
    shuffled = list(questions)
    for indices in by_num_images.values():
        shift = max(1, len(indices) // 2)
        for i, index in enumerate(indices):
            donor = questions[indices[(i + shift) % len(indices)]]
            shuffled[index] = replace(questions[index], images=donor.images)
    return shuffled


def evaluate_scenes_model(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    first_seed: int,
    count: int,
    *,
    batch_size: int = 16,
    control: bool = True,
    progress: bool = False,
    answer_log: AnswerLog | None = None,
) -> dict[str, float]:
    """Evaluate on `count` scenes and a quarter as many clips.

    Args:
        model: The scenes model.
        processor: Its processor.
        first_seed: Seed of the first scene and clip.
        count: Number of scenes.
        batch_size: Questions per batch.
        control: Also evaluate with shuffled images.
        progress: Show a progress bar on stderr.
        answer_log: Answers of an interrupted evaluation.

    Returns:
        `first_seed`, `count`, `left_out` (things that need not be named), and per metric its accuracy, `METRIC_n` the
        number of checks, and the same with the prefix `control_`.
    """
    from tqdm import tqdm

    scenes = [generate_scene(seed) for seed in range(first_seed, first_seed + count)]
    questions: list[EvalQuestion] = []
    for scene in scenes:
        questions += build_scene_questions(scene, random.Random(f"ask {scene.seed}"))
    for seed in range(first_seed, first_seed + count // 4):
        questions.append(build_clip_question(generate_clip(seed), random.Random(f"ask {seed}")))
    left_out = sum(len(scene.things) - len(clearly_visible_things(scene)) for scene in scenes)
    result: dict[str, float] = {"first_seed": first_seed, "count": count, "left_out": left_out}
    for prefix in ("", "control_")[: 1 + control]:
        subset = shuffle_images(questions) if prefix else questions
        split = prefix + "questions"
        with tqdm(total=len(subset), desc=split, disable=not progress, file=sys.stderr) as bar:
            answers = generate_answers(model, processor, subset, batch_size, bar.update, answer_log, split)
        result |= {prefix + name: value for name, value in compute_accuracies(subset, answers).items()}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m research.scenes.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, metavar="FOLDER", help="folder of the model (default: the bundled scenes model)")
    add("--first-seed", type=int, default=FIRST_HELD_OUT_SEED, metavar="S", help="seed of the first scene and clip")
    add("--count", type=int, default=1000, metavar="N", help="number of scenes (default 1000); a quarter as many clips")
    add("--batch-size", type=int, default=16, help="questions per batch (default 16)")
    add("--json", metavar="FILE", help="write the accuracies as one flat JSON object")
    add("--answers", type=Path, metavar="FILE.jsonl", help="store the answers here; repeat the command to resume")
    add("--card", action="store_true", help="write the accuracies into the model card in FOLDER as well")
    add("--control", action=argparse.BooleanOptionalAction, default=True, help="also evaluate with shuffled images")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty(), help="show a progress bar")
    args = parser.parse_args(argv)
    folder = Path(args.model or WEIGHTS_FOLDER)
    header = {
        "weights": compute_checksums(folder).get("model.safetensors"),
        "first_seed": args.first_seed,
        "count": args.count,
    }
    try:
        answer_log = AnswerLog(args.answers, header)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model, processor = load_scenes_model(args.model)
    torch.manual_seed(0)
    result = evaluate_scenes_model(
        model, processor, args.first_seed, args.count,
        batch_size=args.batch_size, control=args.control, progress=args.progress, answer_log=answer_log,
    )  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.card:
        write_card(folder, sum(weight.numel() for weight in model.parameters()), result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
