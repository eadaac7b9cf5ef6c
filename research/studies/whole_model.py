"""Drafting with a whole model: tau and speed of `self` and of draft models beside plain `generate`.

Every request is decoded by plain generate, by the loop without drafts and by each drafter, in turn; the first request
warms up and is not counted. One thread and its own processor time, so
that other jobs on the machine do not count; the controllers still measure wall-clock time.

    python -m research.studies.whole_model --target FOLDER --drafters self,FOLDER
    python -m research.studies.whole_model --target scenes --drafters self,FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.modeling.text import is_text_model
from mmspec.app.train.datasets import read_questions
from mmspec.patching import patch_state
from mmspec.targets.patched_class import KEY, change_class, restore_class

FIRST_SCENE = 50_000_000
"""Seed of the first scene; held out from all trainings."""
QUESTIONS = (
    "What should I pack for a week of hiking in the mountains?",
    "Explain in a few sentences why the sky is blue.",
    "How do I make a simple tomato soup?",
    "What are three good habits for learning a language?",
    "Write a short story about a fox who is afraid of the dark.",
    "What is the difference between weather and climate?",
)
"""Requests to a language model, unless --data names others."""


def load_target(name: str, count: int, data: Sequence[str]) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The model, its processor or tokenizer, and the inputs of `count` requests."""
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.load import load_model, load_text_model

    if is_text_model(name):
        model, tokenizer = load_text_model(name)
        processor: Any = tokenizer
        questions = read_questions(data) if data else list(QUESTIONS)
        texts = Captioner(model, processor)
        return model, processor, [texts.build_inputs([()], [one]) for one in questions[:count]]
    from research.scenes.tasks import generate_requests

    model, processor = load_model(name)
    captioner = Captioner(model, processor)
    requests = [next(generate_requests("describe", FIRST_SCENE + 2 * index)) for index in range(count)]
    return model, processor, [captioner.build_inputs([one.images[0]], [one.question]) for one in requests]


def measure(model: Any, inputs: dict[str, Any], new_tokens: int) -> tuple[float, list[int]]:
    """(seconds of processor time for each token, emitted ids) of one greedy call."""
    start = time.process_time()
    output = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
    )
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return (time.process_time() - start) / len(ids), ids


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each drafter."""
    parser = argparse.ArgumentParser(prog="python -m research.studies.whole_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", default="scenes", help="scenes, a vision-language model, or a language model")
    parser.add_argument("--drafters", type=split_commas, default=["self"], help="names or folders (default self)")
    parser.add_argument("--data", nargs="+", default=[], help="text files of requests to a language model")
    parser.add_argument("--count", type=positive_int, default=5, help="requests, the first one warms up")
    parser.add_argument("--new-tokens", type=positive_int, default=64)
    parser.add_argument("--tree-size", type=positive_int, help="of every round (default: what pays)")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    model, processor, requests = load_target(args.target, args.count, args.data)
    names = ["none", *args.drafters]
    states = {name: PatchedState(model, name, processor, args.tree_size) for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in (*names, "plain again")}
    num_identical = dict.fromkeys(names, 0)
    for index, inputs in enumerate(requests):
        plain_s, expected = measure(model, inputs, args.new_tokens)
        for name in names:
            with states[name]:
                seconds, ids = measure(model, inputs, args.new_tokens)
            num_identical[name] += ids == expected
            ratios[name] += [plain_s / seconds] if index else []
        again_s, _ = measure(model, inputs, args.new_tokens)
        ratios["plain again"] += [plain_s / again_s] if index else []
        print(f"{index + 1} of {len(requests)}: plain {1e3 * plain_s:.1f} ms a token", flush=True)
    for name, values in ratios.items():
        line = f"{name:24} x{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else name
        if name in states:
            total = states[name].total
            line += f"  tau {total.tau:.2f}  drafted {total.drafted_rounds / max(1, total.rounds):.0%} of rounds"
            line += f"  accepted {total.acceptance_rate:.0%}  identical {num_identical[name]} of {len(requests)}"
        print(line)
    return 0


class PatchedState:
    """Context in which a model is patched with a drafter; what its controller has learned stays between contexts."""

    def __init__(self, model: Any, name: str, processor: Any, tree_size: int | None) -> None:
        self.model = model
        mmspec.patch(model, drafter=name, processor=processor, tree_size=tree_size)
        self._state = patch_state(model)
        self._remove()

    @property
    def total(self) -> Any:
        """Counters of all calls."""
        return self._state.total

    def __enter__(self) -> None:
        change_class(self.model, self._state)

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _remove(self) -> None:
        restore_class(self.model)
        del self.model.__dict__[KEY]


if __name__ == "__main__":
    raise SystemExit(main())
