"""Time to the first token of prompts of text, with and without mmspec, by shape, type and length.

Text models of real shapes with random weights, in one process and in turn; medians behind a warm-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.modeling.load import clone
from research.arguments import module_parser
from research.bench.shape.models import build_shape_model, find_shape

EPILOG = """
examples
  OMP_NUM_THREADS=2 python -m research.studies.prompt_time --shapes smollm2-135m --dtypes float32,bfloat16
"""


def measure(shape: str, dtype: torch.dtype, length: int, repeats: int) -> tuple[float, float]:
    """Seconds of plain `generate` for one token, and of the patched model."""
    model = build_shape_model(find_shape(shape), dtype, torch.device("cpu"), 0)
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    models = (model, mmspec.patch(clone(model), "none"))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            models[which].generate(ids, max_new_tokens=1, do_sample=False)
            if turn:
                seconds[which].append(time.perf_counter() - start)
    return median(seconds[0]), median(seconds[1])


def main(argv: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command line."""
    parser = module_parser("research.studies.prompt_time", __doc__, EPILOG)
    parser.add_argument("--shapes", type=split_commas, default=["smollm2-135m"])
    parser.add_argument("--dtypes", type=split_commas, default=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--lengths", type=split_commas, default=["16", "64", "300", "1200"], help="tokens of the prompts"
    )
    parser.add_argument("--repeats", type=positive_int, default=5)
    args = parser.parse_args(argv)
    write(f"| shape, type | {' | '.join(args.lengths)} |\n|{'---|' * (1 + len(args.lengths))}")
    for shape in args.shapes:
        for name in args.dtypes:
            pairs = [measure(shape, getattr(torch, name), int(length), args.repeats) for length in args.lengths]
            cells = [f"{1e3 * plain:.0f}, {1e3 * ours:.0f} ({ours / plain:.2f})" for plain, ours in pairs]
            write(f"| {shape}, {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
