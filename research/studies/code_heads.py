"""Draft heads of a language model on code tasks that were held out of their training, beside drafters without training.

The tasks ask for functions of Python's standard library, from the first paragraphs of their docstrings. `--write`
makes the file of prompts for `mmspec train`, whose last requests are the held-out ones; without it every drafter
answers the last --count of them, in turn, and each task begins with another drafter.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch

import mmspec
from mmspec.app.cli.arguments import output_path, positive_int, split_commas
from mmspec.app.modeling.load import clone, load_text_model
from research.arguments import module_parser
from research.bench.suite.report import markdown_table

EPILOG = """\
  python -m research.studies.code_heads --write prompts.jsonl
  mmspec train --target MODEL --dtype bfloat16 --data prompts.jsonl --drafter flash,eagle3 --max-new-tokens 96 \\
      --batch-size 8 --steps 500 --evaluate 24 --set draft_vocab=16000 cache_gib=5 --out run
  python -m research.studies.code_heads --model MODEL --prompts prompts.jsonl --drafters quantized,run/flash
"""
_MODULES = """
textwrap string random statistics bisect heapq itertools functools collections operator math cmath fractions
decimal datetime calendar re difflib json csv os.path shutil glob fnmatch tempfile pathlib urllib.parse html
base64 binascii struct hashlib hmac secrets uuid copy pprint enum graphlib colorsys keyword ast dis inspect
types traceback logging threading queue time zipfile gzip configparser shlex getpass locale unicodedata
ipaddress email.utils mimetypes quopri numbers array weakref contextlib"""
MODULES = _MODULES.split()
FORMS = (
    "Write a Python function `{name}`. {text} Answer with code only.",
    "Implement `{name}` in plain Python without imports: {text}",
    "Write a Python function like `{name}` ({text}) and a short usage example.",
    "Write unit tests with pytest for a Python function `{name}`: {text}",
)
FUNCTIONS, HELD_OUT = 290, 32
PLAIN = "generate"


def code_prompts() -> list[str]:
    """Two tasks for each of 258 functions, then one for each of the held-out 32."""
    documented = list(_documented_functions())
    random.Random(5).shuffle(documented)
    texts: dict[str, str] = {}
    for name, text in documented:
        texts.setdefault(name, text)
    functions = list(texts.items())[:FUNCTIONS]
    trained, held_out = functions[:-HELD_OUT], functions[-HELD_OUT:]
    numbered = [(number + turn, one) for turn in (0, 2) for number, one in enumerate(trained)]
    numbered += list(enumerate(held_out))
    return [FORMS[number % len(FORMS)].format(name=name, text=text) for number, (name, text) in numbered]


def _documented_functions() -> Iterator[tuple[str, str]]:
    """Names and first paragraphs of the public functions of `MODULES`."""
    for module in MODULES:
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            is_own = getattr(function, "__module__", module) in (module, None, f"_{module}")
            if name.startswith("_") or not callable(function) or inspect.isclass(function) or not is_own:
                continue
            text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").strip()
            if 30 < len(text) < 220:
                yield name, text


class TokenClock:
    """A streamer of `generate` that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the prompt comes first
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def answer(model: Any, inputs: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """One greedy answer: its ids, milliseconds a token after the first, and tau."""
    clock = TokenClock()
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
    seconds = time.perf_counter() - clock.first
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    tau = mmspec.stats(model, last=True).tau if mmspec.is_patched(model) else 1.0
    return {"ids": ids, "ms_per_token": 1000 * seconds / max(1, len(ids) - 1), "tau": tau}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way to decode; the first two tasks are answered once more before, to warm up."""
    model, tokenizer = load_text_model(args.model, args.dtype)
    models = {name: clone(model) for name in (PLAIN, "none", *args.drafters)}
    for name, one in models.items():
        if name != PLAIN:
            mmspec.patch(one, drafter=name)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = prompts[-args.count :]
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for number, prompt in enumerate([*prompts[:2], *prompts]):
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        turn = number % len(models)
        for name in (*list(models)[turn:], *list(models)[:turn]):
            answers[name].append(answer(models[name], dict(inputs), args.new_tokens))
    rows = []
    for name, given in answers.items():
        given, plain, none = given[2:], answers[PLAIN][2:], answers["none"][2:]
        ratios = [b["ms_per_token"] / a["ms_per_token"] for a, b in zip(given, none, strict=True)]
        rows.append(
            {
                "drafter": Path(name).name,
                "tau": fmean(one["tau"] for one in given),
                "ms_per_token": median(one["ms_per_token"] for one in given),
                "x_none": median(ratios),
                "quartiles": quantiles(ratios, n=4)[::2],
                "x_generate": median(b["ms_per_token"] / a["ms_per_token"] for a, b in zip(given, plain, strict=True)),
                "same_as_none": sum(a["ids"] == b["ids"] for a, b in zip(given, none, strict=True)),
                "answers": len(given),
            }
        )
    return rows


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    table = [["drafter", "tau", "ms a token", "x `none` [quartiles]", "x `generate`", "same text as `none`"]]
    for row in rows:
        low, high = row["quartiles"]
        speed = f"{row['x_none']:.2f} [{low:.2f}, {high:.2f}]"
        same = f"{row['same_as_none']}/{row['answers']}"
        numbers = f"{row['tau']:.2f}", f"{row['ms_per_token']:.1f}"
        table.append([f"`{row['drafter']}`", *numbers, speed, f"{row['x_generate']:.2f}", same])
    return markdown_table(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = module_parser("research.studies.code_heads", __doc__, EPILOG)
    add = parser.add_argument
    add("--write", type=output_path, default=None, metavar="FILE", help="write the prompts, and measure nothing")
    add("--model", default=None, metavar="M", help="hub id, folder or GGUF file of a language model")
    add("--dtype", default="bfloat16", metavar="TYPE", help="of the model (default bfloat16)")
    add("--prompts", type=Path, default=None, metavar="FILE", help="what --write has written")
    add("--drafters", type=split_commas, default=["quantized", "hybrid", "auto"], metavar="A,B", help="beside `none`")
    add("--count", type=positive_int, default=24, metavar="N", help="tasks, at least 2 (default 24)")
    add("--new-tokens", type=positive_int, default=64, metavar="N", help="of an answer, at most (default 64)")
    add("--json", type=output_path, default=None, metavar="FILE", help="where the rows are written")
    args = parser.parse_args(argv)
    if args.write:
        rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(code_prompts())]
        args.write.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return 0
    if args.model is None or args.prompts is None or args.count < 2:
        parser.error("name --model and --prompts, and a --count of at least 2; or --write FILE")
    torch.manual_seed(0)
    rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(format_rows(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
