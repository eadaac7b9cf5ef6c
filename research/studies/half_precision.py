"""How often answers in half precision are those of transformers, beside its own share in a batch of two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.scenes import load_scenes_model
from research.arguments import module_parser
from research.bench.suite.items import TEXT_TASKS, choose_grouping, group_items, read_items, scene_items
from research.scenes.tasks import REQUEST_TASKS

EPILOG = """
method
  Greedy answers of at most --tokens tokens to --prompts requests of each task, by transformers alone with one row
  (the reference) and with the row twice in a batch of two, and by mmspec with `none` and with --drafter. A text model
  answers the text tasks of `research.bench`; the bundled toy model, `scenes`, describes pictures. Printed: the shares
  of answers that are identical, token for token.

examples
  python -m research.studies.half_precision --models scenes,./SmolLM2-135M-Instruct
"""
IMAGE_TASKS = [task for task in REQUEST_TASKS if task != "clip"]
"""Of the toy model."""


def requests(name: str, per_task: int) -> tuple[Any, Iterator[dict[str, Any]]]:
    """A model and its prepared requests of one row."""
    if name != "scenes":
        tokenizer = AutoTokenizer.from_pretrained(name)
        items = read_items(TEXT_TASKS)
        items = group_items(items, choose_grouping(items))
        first: dict[str, list[str]] = {}
        for item in items:
            first.setdefault(item.category, []).append(item.turns[0])
        questions = [question for group in first.values() for question in group[:per_task]]

        def ask(question: str) -> dict[str, Any]:
            if tokenizer.chat_template is None:  # a base model
                return dict(tokenizer(f"{question}\n\n", return_tensors="pt"))
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            return dict(tokenizer.apply_chat_template([{"role": "user", "content": question}], **options))

        return AutoModelForCausalLM.from_pretrained(name), map(ask, questions)
    model, processor = load_scenes_model()

    def prepare(item: Any) -> dict[str, Any]:
        content = [*({"type": "image"} for _ in item.images), {"type": "text", "text": item.turns[0]}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return dict(processor(images=list(item.images), text=prompt, return_tensors="pt"))

    return model, map(prepare, scene_items(IMAGE_TASKS, per_task, 0))


def study(name: str, dtype: str, options: argparse.Namespace) -> str:
    """The row of one model in one type."""
    model, prepared = requests(name, options.prompts)
    model = model.to(getattr(torch, dtype)).eval()
    limits = {"max_new_tokens": options.tokens, "do_sample": False}

    def answer(inputs: dict[str, Any], rows: int = 1, drafter: str | None = None) -> list[int]:
        given = {key: repeated(value, rows, model.dtype) for key, value in inputs.items()}
        if drafter is None:
            return list(model.generate(**given, **limits)[0].tolist())
        mmspec.patch(model, drafter)
        try:
            return list(model.generate(**given, **limits)[0].tolist())
        finally:
            mmspec.unpatch(model)

    counts = torch.zeros(4, dtype=torch.long)
    for inputs in prepared:
        one, two = answer(inputs), answer(inputs, rows=2)
        none, drafted = answer(inputs, drafter="none"), answer(inputs, drafter=options.drafter)
        counts += torch.tensor([1, two == one, none == one, drafted == none])
    total, *same = counts.tolist()
    cells = [Path(name).name, dtype, str(total), *(f"{count / total:.0%}" for count in same)]
    return f"| {' | '.join(cells)} |"


def repeated(value: Any, rows: int, dtype: torch.dtype) -> Any:
    """An input with its row so many times, floating-point ones in the type of the model."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(dtype) if value.is_floating_point() else value
    return torch.cat([value] * rows)


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = module_parser("research.studies.half_precision", __doc__, EPILOG)
    parser.add_argument("--models", type=split_commas, default=["scenes"], metavar="M,M", help="folders, or scenes")
    parser.add_argument("--types", type=split_commas, default=["float32", "bfloat16", "float16"], metavar="T,T")
    parser.add_argument("--prompts", type=positive_int, default=1, metavar="N", help="of each task")
    parser.add_argument("--tokens", type=positive_int, default=48, metavar="N")
    parser.add_argument("--drafter", default="hybrid", metavar="D")
    options = parser.parse_args(argv)
    print(f"| model | type | answers | batch of two = one row | `none` = one row | `{options.drafter}` = `none` |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        for dtype in options.types:
            print(study(name, dtype, options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
