"""Prefill cost of a draft head of any shape, with and without a compressor: time, operations, memory.

Weights and prompts are random: none of the three depends on them. The default shape is that of a 7B LLaVA.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

import research.compressors  # noqa: F401  - by name
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.errors import UsageError
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.engine.tree import root_only
from mmspec.interfaces import ObservedRound, Prompt, SharedEmbeddings, VerifyResult, VisualGrid
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.vision.registry import init_compressor
from research.arguments import config_from_args, module_parser, positive_ints
from research.bench.measure import median_ci
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.studies.intervals import format_ci
from research.studies.prefill_recorder import PrefillCost, PrefillRecorder

EPILOG = """
method
  A prompt of --text tokens and --frames grids of --grid x --grid visual tokens. The head prefills it --repeats times
  with each compressor in turn, after a warm-up. "over" are ratios to the head without a compressor, run by run, the
  median and its 95% interval. The compressor's own work is counted.

examples
  python -m research.studies.prefill --frames 1,2,8 --compressors pool:64,stride:64,latent:64
  python -m research.studies.prefill --hidden 384 --heads 6 --kv-heads 2 --ffn 688 --grid 12 --frames 1,8,27
"""
NUM_LAYERS, HEAD_VOCAB_SIZE = 2, 256
HEAD_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_COMPRESSOR = "-"
"""Row without a compressor."""


@dataclass(frozen=True)
class PrefillConfig:
    """Options of the study, named like its flags.

    Attributes:
        hidden, ffn, heads, kv_heads: shape of the head, as in `EagleConfig`.
        grid: visual tokens along an edge of a frame. frames: numbers of frames, one prompt for each.
        text: text tokens of a prompt.
        compressors: with their budgets.
        repeats: measured prefills. dtype, device: of head and prompt.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    grid: int
    frames: tuple[int, ...]
    text: int
    compressors: tuple[str, ...]
    repeats: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PrefillConfig:
        """Validate the parsed options.

        Raises:
            UsageError: an unknown compressor or device, or a shape that no head can have.
        """
        try:
            device = torch.device(args.device)
            for name in args.compressors:
                init_compressor(name, 8)
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error).splitlines()[0]) from error
        if args.hidden % args.heads or args.heads % args.kv_heads:
            raise UsageError(
                f"--hidden must be a multiple of --heads, and that of --kv-heads; got {args.hidden}, {args.heads} and "
                f"{args.kv_heads}"
            )
        return config_from_args(cls, args, dtype=HEAD_DTYPES[args.dtype], device=device)


def build_prompt(config: PrefillConfig, frames: int) -> Prompt:
    """A random prompt: text tokens around the visual tokens of `frames` grids."""
    frame_size, hidden = config.grid**2, config.hidden
    num_tokens = config.text + frames * frame_size
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        shared_embeddings = SharedEmbeddings(
            nn.Embedding(HEAD_VOCAB_SIZE, hidden).to(config.device, config.dtype),
            nn.Linear(hidden, HEAD_VOCAB_SIZE, bias=False).to(config.device, config.dtype),
        )
    visual_mask = torch.zeros(1, num_tokens, dtype=torch.bool)
    start = max(1, config.text // 2)
    visual_mask[:, start : start + frames * frame_size] = True
    hidden_states = [torch.randn(1, num_tokens, hidden, generator=rng) for _ in range(2)]
    first, last = (states.to(config.device, config.dtype) for states in hidden_states)
    input_ids = torch.randint(0, HEAD_VOCAB_SIZE, visual_mask.shape, generator=rng).to(config.device)
    grids = [
        VisualGrid(0, start + frame * frame_size, config.grid, config.grid, 0, role="frame", frame=frame)
        for frame in range(frames)
    ]
    return Prompt(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids, dtype=torch.bool),
        visual_mask=visual_mask.to(config.device),
        position_ids=input_ids,
        grids=tuple(grids),
        hidden_states={0: first, NUM_LAYERS: last},
        vocab_size=HEAD_VOCAB_SIZE,
        shared_embeddings=shared_embeddings,
    )


def prefill_result(device: torch.device) -> VerifyResult:
    """The result of the target's prefill: one emitted token."""
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    return VerifyResult(root_only(1, device), token, token[0] + 1, token, [[0]], [[0]])


def measure_prefill(drafter: EagleDrafter, prompt: Prompt, device: torch.device, count_flops: bool) -> PrefillCost:
    """Prefill of one prompt with a fresh state."""
    recorder = PrefillRecorder(drafter, device)
    recorder(ObservedRound(prompt, prefill_result(device)))
    return recorder.measure(count_flops)


def measure_prefill_rows(config: PrefillConfig) -> Iterator[ResultRow]:
    """A row for each number of frames and each compressor."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head_config = EagleConfig(config.hidden, config.ffn, config.heads, config.kv_heads, HEAD_VOCAB_SIZE)
        head = EagleHead(head_config).to(config.device, config.dtype)
        drafter = EagleDrafter(head, "decoupled", num_layers=NUM_LAYERS)
        compressors: dict[str, RecordingCompressor | None] = {NO_COMPRESSOR: None}
        for name in config.compressors:
            compressors[name] = RecordingCompressor(init_compressor(name, config.hidden))
    for frames in config.frames:
        prompt = build_prompt(config, frames)
        costs: dict[str, list[PrefillCost]] = {name: [] for name in compressors}
        for repeat in range(config.repeats + 1):  # the first one warms up; its operations are counted
            for name, compressor in compressors.items():
                compressed = replace(prompt, compressor=compressor)
                costs[name].append(measure_prefill(drafter, compressed, config.device, count_flops=not repeat))
        for row in _build_rows(costs):
            yield {"frames": frames, "num_visual_tokens": frames * config.grid**2} | row


def _build_rows(costs: Mapping[str, Sequence[PrefillCost]]) -> Iterator[ResultRow]:
    """A row for each compressor; ratios are to the head without one. The first cost of each has the operations."""
    counted_base, *timed_base = costs[NO_COMPRESSOR]
    for name, (counted, *timed) in costs.items():
        ratios = [cost.seconds / base.seconds for cost, base in zip(timed, timed_base, strict=True)]
        yield {
            "compressor": name,
            "prefill_ms": 1e3 * median(cost.seconds for cost in timed),
            "prefill_over": [median(ratios), *median_ci(ratios)],
            "gflops": counted.flops / 1e9,
            "flops_over": counted.flops / counted_base.flops,
            "kv_mib": counted.kv_bytes / 2**20,
            "kv_over": counted.kv_bytes / counted_base.kv_bytes,
        }


def format_prefill_row(row: ResultRow) -> str:
    """A row as it is printed."""
    form = "{num_visual_tokens:>6} visual tokens  {compressor:<14} {prefill_ms:9.1f} ms (x{over})  "
    form += "{gflops:8.2f} GFLOP (x{flops_over:.3f})  KV {kv_mib:7.2f} MiB (x{kv_over:.3f})"
    return form.format(**row, over=format_ci(row["prefill_over"], 3))


def _build_parser() -> argparse.ArgumentParser:
    parser = module_parser("research.studies.prefill", __doc__, EPILOG)
    add = parser.add_argument
    add("--hidden", type=positive_int, default=4096, metavar="D", help="hidden size (default 4096)")
    add("--heads", type=positive_int, default=32, metavar="H", help="attention heads (default 32)")
    add("--kv-heads", type=positive_int, default=32, metavar="H", help="key and value heads (default 32)")
    add("--ffn", type=positive_int, default=11008, metavar="F", help="intermediate size (default 11008)")
    grid_help = "visual tokens along an edge (default 24: 576 per frame)"
    add("--grid", type=positive_int, default=24, metavar="G", help=grid_help)
    add("--frames", type=positive_ints, default=[1, 2, 8], metavar="N,N", help="frames per prompt (default 1,2,8)")
    add("--text", type=positive_int, default=64, metavar="N", help="text tokens per prompt (default 64)")
    compressors_help = "compressors with their budgets (default pool:64,stride:64)"
    add("--compressors", type=split_commas, default=["pool:64", "stride:64"], metavar="C,C", help=compressors_help)
    add("--repeats", type=positive_int, default=5, metavar="N", help="measured prefills (default 5)")
    add("--dtype", choices=tuple(HEAD_DTYPES), default="float32", help="default float32")
    add("--device", default="cpu", metavar="DEV", help="default cpu")
    add_result_options(parser, json_help="write the rows")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args = parser.parse_args(arguments)
    files = ResultFiles.from_args(args)
    try:
        files.check()
        config = PrefillConfig.from_args(args)
    except UsageError as error:
        parser.error(str(error))
    run = provenance(f"{parser.prog} {shlex.join(arguments)}", config.device)
    rows: list[ResultRow] = []
    total = len(config.frames) * (1 + len(config.compressors))
    for row in tqdm(measure_prefill_rows(config), total=total, disable=not sys.stderr.isatty()):
        rows.append(row | {"run": run})
        print(format_prefill_row(row), flush=True)
    files.write(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
