"""The table of real weights: ten text tasks with each model in each number type, every way to decode them, in turn.

Each model and type is a part (`research.parts`) of its own: `research.bench --suite text`, whose ratios are medians
over the tasks with 95% intervals, taken within rounds that begin and end with `generate`. Rows are kept as they finish.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.app.cli.arguments import output_path, positive_int, split_commas
from mmspec.app.errors import UsageError
from research.arguments import module_parser
from research.bench.suite.report import markdown_table
from research.parts import Part, run_parts

DRAFTERS = ["none", "hybrid", "quantized", "auto"]
PEERS = ["hf-lookup", "hf-assisted", "llama.cpp", "llama.cpp-lookup"]
DTYPES = ["float32", "bfloat16"]
EPILOG = """\
  python -m research.real_weights models/smollm2 models/qwen-0.5b --minutes 12 --out real.jsonl
  python -m research.real_weights models/qwen-1.5b --assistant models/qwen-0.5b --out pair.jsonl
  python -m research.real_weights --table real.jsonl       the table of a run, or of what there is of one
--assistant names a smaller model with the same tokenizer, which drafts for mmspec and for transformers
"""
COLUMNS = ("model", "type", "way", "same", "first token, ms", "ms a token", "x generate", "whole calls", "MiB")


def parts(args: argparse.Namespace) -> list[Part]:
    """A part for each type and model, each with a share of the time by its weights.

    Raises:
        UsageError: a folder without weights.
    """
    sizes = {model: _weight_bytes(model) for model in args.models}
    bench = ["-m", "research.bench", "--suite", "text", "--no-progress", "--json", "{json}"]
    bench += ["--limit", str(args.limit)] if args.limit else []
    drafters = [*args.drafters, *([args.assistant] if args.assistant else [])]
    peers = [name for name in args.peers if args.assistant or name != "hf-assisted"]
    bench += ["--drafters", ",".join(drafters), "--peers", ",".join(peers), "--new-tokens", str(args.new_tokens)]
    bench += ["--peer-python", args.peer_python] if args.peer_python else []
    bench += ["--assistant", args.assistant] if args.assistant else []
    weights = {(dtype, model): size for dtype in args.dtypes for model, size in sizes.items()}
    share = 60 * args.minutes / max(1, sum(weights.values()))
    return [
        Part(
            f"{Path(model).name}-{dtype}",
            [*bench, "--model", model, "--dtype", dtype, "--minutes", str(max(1, round(weight * share / 60)))],
            weight * share,
            {"model": Path(model).name, "dtype": dtype},
        )
        for (dtype, model), weight in weights.items()
    ]


def _weight_bytes(model: str) -> int:
    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    if not size:
        raise UsageError(f"{model} is no folder with weights (*.safetensors): name one")
    return size


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and below it the parts and ways that are missing, with the reason."""
    table, missing = [list(COLUMNS)], []
    for row in rows:
        about = [row.get("model", ""), row.get("dtype", "")]
        if row.get("speedup_decode") is not None:
            low, high = row["speedup_decode_ci"]
            numbers = (row["ttft_ms"], row["ms_per_token"], row["memory_mib"])
            first, token, memory = ("" if one is None else f"{one:.1f}" for one in numbers)
            whole = "" if row["speedup_whole"] is None else f"{row['speedup_whole']:.2f}"
            speed = f"{row['speedup_decode']:.2f} [{low:.2f}, {high:.2f}]"
            same = f"{row['same']}/{row['calls']}"
            table.append([*about, Path(row["peer"]).name, same, first, token, speed, whole, memory])
        elif row.get("error") or row.get("status", "ok") != "ok":
            what = row.get("peer", "the part")
            reason = row.get("error") or f"{row['status']}; {row.get('output') or ''}"
            missing.append(f"- {' '.join(about)}, {what}: {reason}")
    return "\n".join([markdown_table(table), "", *missing])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = module_parser("research.real_weights", __doc__, EPILOG)
    add = parser.add_argument
    add("models", nargs="*", metavar="FOLDER", help="models of transformers, with their tokenizers")
    add("--out", type=output_path, default=Path("real-weights.jsonl"), metavar="FILE", help="rows, as they finish")
    add("--minutes", type=positive_int, default=12, metavar="M", help="for all parts together (default 12)")
    add("--dtypes", type=split_commas, default=DTYPES, metavar="A,B", help=f"default {','.join(DTYPES)}")
    add("--drafters", type=split_commas, default=DRAFTERS, metavar="A,B", help=f"default {','.join(DRAFTERS)}")
    add("--peers", type=split_commas, default=PEERS, metavar="A,B", help=f"default {','.join(PEERS)}")
    add("--peer-python", default=None, metavar="PATH", help="interpreter with llama.cpp (default: this one)")
    add("--assistant", default=None, metavar="FOLDER", help="a smaller model with the same tokenizer")
    add("--new-tokens", type=positive_int, default=32, metavar="N", help="of an answer, at most (default 32)")
    add("--limit", type=positive_int, default=None, metavar="N", help="tasks of each kind (default: all)")
    add(
        "--table",
        type=Path,
        default=None,
        metavar="FILE",
        help="print the table of a file of rows, and measure nothing",
    )
    args = parser.parse_args(argv)
    if args.table is not None:
        print(format_rows([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    try:
        chosen = parts(args)
    except UsageError as error:
        parser.error(str(error))
    if not chosen:
        parser.error("name at least one folder of a model")
    print(format_rows(run_parts(chosen, args.out, 60 * args.minutes + 5)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
