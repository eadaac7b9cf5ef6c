"""What a machine with a GPU is to show first, in at most nine minutes: exactness, rounds, memory. See `gpu_trial.sh`.

Parts: versions; calls in float32 and bfloat16 compared with plain `generate`, eager and recorded; the toy model's
drafters; rounds of shapes of 2 and 7 B with random weights; whole calls beside the static compiled cache of
transformers. `--small` is the same on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import mmspec
from mmspec.app.cli.arguments import hide_progress_bars, output_path
from mmspec.app.errors import one_line
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import clone, load_model
from mmspec.files import atomic_write
from research.arguments import module_parser
from research.bench.shape.models import TEXT_SHAPES, build_shape_model
from research.parts import Part, run_parts
from research.synthetic_images import draw_image

LIMIT_S = 540.0
EPILOG = """\
  research/gpu_trial.sh OUT.jsonl            on a machine with torch for CUDA, transformers and nothing of ours
  python -m research.gpu_trial --small OUT.jsonl
"""
TEXT_TYPES, TEXT_DRAFTERS = ("llama", "qwen2", "qwen3"), ("none", "hybrid")
CHECKED = (("tiny", ("none", "hybrid")), ("scenes", ("none", "hybrid", "msd", "flash")))
"""Models with images, and the drafters whose calls are compared."""
QUESTION = "Describe the image."
NEW_TOKENS = 24


def parts(device: str, small: bool) -> list[Part]:
    """The parts in the order of their use: what comes first is worth most if time runs out."""
    bench = ("-m", "research.bench", "--device", device, "--no-progress", "--json", "{json}")
    two, seven = ("tiny", "tiny") if small else ("qwen3-vl-2b", "qwen2.5-vl-7b")
    contexts = ("--contexts", "40" if small else "64,1200", "--repeats", "1" if small else "5")
    length, tokens, repeats = ("20", "8", "1") if small else ("600", "64", "5")
    calls = ("--prompt-tokens", length, "--new-tokens", tokens, "--repeats", repeats, "--drafters", "oracle")
    size = ("--small",) if small else ()
    bfloat16 = (*bench, "--dtype", "bfloat16")
    scenes = ("--suite", "scenes", "--drafters", "none,msd,flash", "--limit", "1" if small else "4")
    new_tokens = ("--new-tokens", tokens) if small else ()
    return [
        Part("versions", ("-m", "research.gpu_trial", "--part", "versions", "--device", device, "{json}"), 30, {}),
        Part(
            "exactness",
            ("-m", "research.gpu_trial", "--part", "exactness", "--device", device, *size, "{json}"),
            120,
            {},
        ),
        Part("rounds-2b", (*bfloat16, "--shape", two, *contexts), 70, {"size": "2B"}),
        Part("rounds-7b", (*bfloat16, "--shape", seven, *contexts), 100, {"size": "7B"}),
        Part("calls-7b", (*bfloat16, "--shape", seven, *calls, "--tau", "3.6"), 140, {"size": "7B"}),
        Part("scenes", (*bench, "--model", "scenes", *scenes, *new_tokens), 70, {}),
    ]


def versions(device: torch.device) -> Iterator[dict[str, Any]]:
    """One row about the machine."""
    row: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "device": str(device)}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        row |= {"gpu": found.name, "memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    yield row


def exactness(device: torch.device, small: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each model, type, backend and drafter: calls whose tokens are those of plain `generate`."""
    for name, model, processor, drafters in _targets(device, small):
        for dtype in (torch.float32, torch.bfloat16):
            target = model.to(dtype)
            for backend in ("torch", "recorded") if device.type == "cuda" else ("auto",):
                for drafter in drafters:
                    row = {"model": name, "dtype": str(dtype).removeprefix("torch."), "backend": backend}
                    try:
                        yield row | {"drafter": drafter} | _compare(target, processor, drafter, backend)
                    except (RuntimeError, ValueError, TypeError) as error:
                        yield row | {"drafter": drafter, "error": one_line(error)}


def _targets(device: torch.device, small: bool) -> Iterator[tuple[str, Any, Any, Sequence[str]]]:
    for kind in TEXT_TYPES[: 1 if small else None]:
        shape = replace(TEXT_SHAPES["tiny"], model_type=kind)
        yield kind, build_shape_model(shape, torch.float32, device), None, TEXT_DRAFTERS
    for name, drafters in () if small else CHECKED:
        yield (name, *load_model(name, "float32", str(device)), drafters)


def _compare(model: Any, processor: Any, drafter: str, backend: str) -> dict[str, Any]:
    """Greedy and sampled calls of one row and of three; how many are the same, and how many left our loop."""
    patched = mmspec.patch(clone(model), drafter, processor=processor, backend=backend)
    same = calls = left = 0
    for rows in (1, 3):
        if processor is None:
            ids = torch.randint(5, 500, (rows, 20), generator=torch.Generator().manual_seed(rows)).to(model.device)
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            pictures = [draw_image(number)[0] for number in range(rows)]
            inputs = build_inputs(model, processor, pictures, [QUESTION] * rows)
        for sampled in (False, True):
            options = {"do_sample": sampled, "max_new_tokens": NEW_TOKENS} | ({"temperature": 1.0} if sampled else {})
            found = []
            for one in (model, patched):
                torch.manual_seed(3)
                found.append(one.generate(**inputs, **options))
            calls, same = calls + 1, same + int(torch.equal(*found))
            left += mmspec.stats(patched, last=True).fallback_calls
    mmspec.unpatch(patched)
    return {"calls": calls, "same": same, "left_to_transformers": left}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or one in this process; returns the exit code."""
    parser = module_parser("research.gpu_trial", __doc__, EPILOG)
    parser.add_argument("out", type=output_path, metavar="OUT", help="JSON lines; beside it a log for each part")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default cuda, else cpu"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes: whether the trial itself works")
    parser.add_argument("--part", choices=("versions", "exactness"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is None:
        rows = run_parts(parts(args.device, args.small), args.out, LIMIT_S)
        return int(any(row.get("status", "ok") != "ok" for row in rows))
    hide_progress_bars(False)
    found: list[dict[str, Any]] = []
    device = torch.device(args.device)
    for row in versions(device) if args.part == "versions" else exactness(device, args.small):
        found.append(row)
        write(args.out, found)
    return int(any(row.get("error") or (row.get("dtype") == "float32" and row["same"] < row["calls"]) for row in found))


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows so far, whole."""
    with atomic_write(file) as part:
        part.write_text(json.dumps({"rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
