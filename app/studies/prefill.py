"""Prefill cost of a draft head of any shape, with and without a compressor: time, operations, memory.

Weights and prompts are random: none of the three depends on them. The default shape is that of a 7B LLaVA.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from mmspec.app.bench.config import check_writable
from mmspec.app.bench.measure import median_ci
from mmspec.app.bench.session import provenance
from mmspec.app.caption.command import positive_int
from mmspec.app.errors import UsageError
from mmspec.app.studies.prefill_recorder import PrefillCost, PrefillRecorder
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.engine.tree import root_only
from mmspec.interfaces import Prompt, SharedEmbeddings, VerifyResult, VisualGrid
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.vision.registry import init_compressor

EPILOG = """
how
  A prompt of --text words and --frames grids of --grid x --grid visual tokens; the head reads it --repeats times in
  each way in turn, after a warm-up. "over" are ratios to the head without a compressor, run by run, the median and its
  95% interval. The compressor's own work is counted.

examples
  python -m mmspec.app.studies.prefill --frames 1,2,8 --compressors pool:64,stride:64,latent:64
  python -m mmspec.app.studies.prefill --hidden 384 --heads 6 --kv-heads 2 --ffn 688 --grid 12 --frames 1,8,27
"""
NUM_LAYERS, VOCAB_SIZE = 2, 256
NO_COMPRESSOR = "-"
"""Row without a compressor."""


def build_prompt(frames: int, grid: int, text: int, hidden: int, like: dict[str, Any]) -> Prompt:
    """A prompt of `text` text tokens around the visual tokens of `frames` grids of `grid` x `grid`."""
    visual = frames * grid * grid
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        words = SharedEmbeddings(
            nn.Embedding(VOCAB_SIZE, hidden).to(**like), nn.Linear(hidden, VOCAB_SIZE, bias=False).to(**like)
        )
    mask = torch.zeros(1, text + visual, dtype=torch.bool)
    start = max(1, text // 2)
    mask[:, start : start + visual] = True
    parts = [torch.randn(1, text + visual, hidden, generator=rng).to(**like) for _ in range(2)]
    ids = torch.randint(0, VOCAB_SIZE, mask.shape, generator=rng).to(like["device"])
    grids = [VisualGrid(0, start + t * grid * grid, grid, grid, 0, role="frame", frame=t) for t in range(frames)]
    return Prompt(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        visual_mask=mask.to(like["device"]),
        position_ids=ids,
        grids=tuple(grids),
        hidden_states={0: parts[0], NUM_LAYERS: parts[1]},
        vocab_size=VOCAB_SIZE,
        shared_embeddings=words,
    )


def first_result(device: torch.device) -> VerifyResult:
    """The result of the target's prefill: one emitted token."""
    word = torch.zeros(1, 1, dtype=torch.long, device=device)
    return VerifyResult(root_only(1, device), word, word[0] + 1, word, [[0]], [[0]])


def measure_prefill(drafter: EagleDrafter, prompt: Prompt, device: torch.device, count: bool) -> PrefillCost:
    """Prefill of one prompt with a fresh state."""
    reader = PrefillRecorder(drafter, device)
    reader.observe(reader.begin(prompt), first_result(device), {})
    if count:
        reader.count_flops()
    return reader.cost


def measure_prefill_rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each number of frames and each way."""
    like: dict[str, Any] = {"device": device, "dtype": getattr(torch, args.dtype)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = HeadConfig(args.hidden, args.ffn, args.heads, args.kv_heads, VOCAB_SIZE)
        drafter = EagleDrafter(EagleHead(config).to(**like), "decoupled", num_layers=NUM_LAYERS)
        ways = {NO_COMPRESSOR: None} | {
            name: RecordingCompressor(init_compressor(name, args.hidden)) for name in args.compressors
        }
    for frames in args.frames:
        prompt = build_prompt(frames, args.grid, args.text, args.hidden, like)
        readings: dict[str, list[PrefillCost]] = {name: [] for name in ways}
        for turn in range(args.repeats + 1):
            for name, way in ways.items():
                given = Prompt(**{**vars(prompt), "compressor": way})
                readings[name].append(measure_prefill(drafter, given, device, count=not turn))
        whole = readings[NO_COMPRESSOR]
        for name, mine in readings.items():
            over = [one.seconds / other.seconds for one, other in zip(mine[1:], whole[1:], strict=True)]
            yield {
                "frames": frames,
                "visual": frames * args.grid**2,
                "way": name,
                "prefill_ms": 1e3 * median(one.seconds for one in mine[1:]),
                "prefill_over": [median(over), *median_ci(over)],
                "gflops": mine[0].flops / 1e9,
                "flops_over": mine[0].flops / whole[0].flops,
                "kv_mib": mine[0].kv_bytes / 2**20,
                "kv_over": mine[0].kv_bytes / whole[0].kv_bytes,
            }


def format_prefill_row(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    form = "{visual:>6} visual tokens  {way:<14} {prefill_ms:9.1f} ms (x{over[0]:.3f} [{over[1]:.3f}, {over[2]:.3f}])  "
    form += "{gflops:8.2f} GFLOP (x{flops_over:.3f})  KV {kv_mib:7.2f} MiB (x{kv_over:.3f})"
    return form.format(**row, over=row["prefill_over"])


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers above 0."""
    return [positive_int(word.strip()) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m mmspec.app.studies.prefill",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--hidden", type=positive_int, default=4096, metavar="D")
    add("--heads", type=positive_int, default=32, metavar="H")
    add("--kv-heads", type=positive_int, default=32, metavar="H")
    add("--ffn", type=positive_int, default=11008, metavar="F")
    add(
        "--grid",
        type=positive_int,
        default=24,
        metavar="G",
        help="visual tokens along an edge (default 24: 576 a frame)",
    )
    add("--frames", type=numbers, default=[1, 2, 8], metavar="N,N")
    add("--text", type=positive_int, default=64, metavar="N", help="words of the prompt")
    add("--compressors", type=lambda text: text.split(","), default=["pool:64", "stride:64"], metavar="C,C")
    add("--repeats", type=positive_int, default=5, metavar="N")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu", metavar="DEV")
    add("--json", metavar="FILE")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    from tqdm import tqdm

    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    try:
        if args.json:
            check_writable(args.json)
        device = torch.device(args.device)
        for name in args.compressors:
            init_compressor(name, 8)
        if args.hidden % args.heads or args.heads % args.kv_heads:
            raise UsageError(
                f"--hidden must be a multiple of --heads, and that of --kv-heads; got {args.hidden}, {args.heads} and "
                f"{args.kv_heads}"
            )
    except (RuntimeError, UsageError, ValueError) as error:
        parser().error(str(error).splitlines()[0])
    about = provenance(shlex.join(["python", "-m", "mmspec.app.studies.prefill", *given]), device)
    rows = []
    total = len(args.frames) * (1 + len(args.compressors))
    for row in tqdm(measure_prefill_rows(args, device), total=total, disable=not sys.stderr.isatty()):
        rows.append(row | {"run": about})
        print(format_prefill_row(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
