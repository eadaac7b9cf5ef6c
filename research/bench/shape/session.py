"""One run of `research.bench --shape`: rounds on random weights of a shape, beside `generate` of transformers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import mmspec
from mmspec.app.cli.arguments import hide_progress_bars
from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import clone, resolve_device
from research.bench.bandwidth import measure_bandwidth, measure_weight_reading
from research.bench.measure import MIN_ROUNDS
from research.bench.peers.base import TEXT, Peer, PeerPrompt
from research.bench.peers.in_process import PatchedPeer, transformers_peers
from research.bench.peers.process import peer_pythons
from research.bench.peers.registry import baseline_peer
from research.bench.results import ResultFiles
from research.bench.session import provenance
from research.bench.shape.contexts import ContextBench, format_copy, format_rounds
from research.bench.shape.models import DRAFT_DEPTH, TextShape, build_shape_drafter, build_shape_model, find_shape
from research.bench.shape.notes import bandwidth_notes, round_notes, runtime_notes
from research.bench.shape.phases import check_notes
from research.bench.shape.simulated import Oracle, SimulatedAcceptance
from research.bench.suite.config import SuiteConfig
from research.bench.suite.items import SuiteItem
from research.bench.suite.prompts import History
from research.bench.suite.report import format_markdown, write_json
from research.bench.suite.runner import SuiteRun
from research.bench.suite.session import Keep, SuiteResult, collect
from research.bench.suite.summary import summarise_calls

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE_TREE_SIZE = 16
DEFAULT_TAUS = (1.0, 2.6, 3.6)
DEFAULT_PROMPTS = (600, 2000)
CHECK_TOKENS = 16
"""New tokens of the calls whose launches, phases and logits are reported."""
LABEL = "simulated acceptance, random weights of the shape: the text means nothing, tau is given, all kernels run"


@dataclass(frozen=True)
class ShapePrompts:
    """Prompts of random ids; the last is drawn as well, so that the known continuation differs.

    Attributes:
        model: for its vocabulary and device. lengths: of the prompts, one category for each.
    """

    model: PreTrainedModel
    lengths: Sequence[int]

    def items(self, count: int) -> list[SuiteItem]:
        """`count` items of each length."""
        return [
            SuiteItem(f"{length}-{i}", (str(length),), f"prompt {length}")
            for length in self.lengths
            for i in range(count)
        ]

    def build(self, items: Sequence[SuiteItem], histories: Sequence[History], turn: int, form: str) -> PeerPrompt:
        """One prompt, a row per item; the id of an item seeds its row."""
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        rows = []
        for item in items:
            generator = torch.Generator().manual_seed(int(item.id.replace("-", "")))
            rows.append(torch.randint(vocab_size, (int(item.turns[0]),), generator=generator))
        ids = torch.stack(rows).to(self.model.device)
        return PeerPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ())

    def decode(self, ids: Sequence[int]) -> str:
        """Not needed: one turn."""
        return ""


def simulated_peers(
    names: Sequence[str], model: PreTrainedModel, shape: TextShape, taus: Sequence[float], tree_size: int, seed: int
) -> list[Peer]:
    """Our loop without drafts, then each drafter at each tau; on CUDA each of them recorded as well."""
    on_gpu = model.device.type == "cuda"
    ways = (("", "torch"), ("+graph", "recorded")) if on_gpu else (("", "auto"),)
    peers: list[Peer] = []
    for suffix, backend in ways:
        none = mmspec.patch(clone(model), "none", backend=backend, tree_size=1)
        peers.append(PatchedPeer(f"none{suffix}", none))
        for name in (name for name in dict.fromkeys(names) if name not in ("none", "auto")):
            for tau in taus:
                depth = tree_size - 1 if name == "oracle" else min(DRAFT_DEPTH, tree_size - 1)
                if tau > depth + 1:
                    continue
                is_oracle = name == "oracle"
                inner = (
                    Oracle(tree_size)
                    if is_oracle
                    else build_shape_drafter(name, shape, model.dtype, model.device, tree_size)
                )
                drafter = SimulatedAcceptance(
                    name, inner, tau, depth, shape.vocab_size, torch.Generator().manual_seed(seed)
                )
                patched = mmspec.patch(clone(model), drafter, backend=backend, tree_size=tree_size)
                peers.append(PatchedPeer(f"{drafter.name}{suffix}", patched))
    return peers


def measure_shape(args: argparse.Namespace, keep: Keep = lambda result: None) -> SuiteResult:
    """Build the model and measure every batch size; `keep` gets the rows so far."""
    shape, device = find_shape(args.shape), resolve_device(args.device)
    precision = {"cpu": "float32"}.get(device.type, "bfloat16") if args.dtype == "auto" else args.dtype
    dtype: torch.dtype = getattr(torch, precision)
    tree_size, new_tokens = args.nodes or SHAPE_TREE_SIZE, args.new_tokens or 64
    lengths = tuple(args.prompt_tokens or DEFAULT_PROMPTS)
    if max(lengths) + new_tokens > shape.max_position_embeddings:
        raise UsageError(f"prompt and new tokens must fit into {shape.max_position_embeddings} positions")
    config = _describe(args, dtype, device, tree_size, new_tokens)
    model = build_shape_model(shape, dtype, device, args.seed)
    result = SuiteResult(config, provenance(args.command, device) | {"dtype": str(dtype).removeprefix("torch.")})
    variants = transformers_peers(lambda: clone(model), None)
    names = ["hf-static", *(name for name in args.peers if name == "hf-compile" and device.type != "cuda")]
    peers: list[Peer] = [variants[name]() for name in names]
    drafters = ["oracle", "msd", "flash"] if args.drafters == ["none", "auto"] else args.drafters
    peers += simulated_peers(drafters, model, shape, args.tau or DEFAULT_TAUS, tree_size, args.seed)
    prompts = ShapePrompts(model, lengths)
    suite = SuiteRun(baseline_peer(model), peers, prompts, new_tokens)
    items = {batch: prompts.items(batch * (args.repeats or MIN_ROUNDS)) for batch in args.batch_sizes}
    total = sum(suite.count_calls(items[batch], TEXT, batch) for batch in args.batch_sizes)
    is_hidden = not (sys.stderr.isatty() if args.progress is None else args.progress)
    checks = check_notes(model, peers, prompts.build(items[args.batch_sizes[0]][:1], [()], 0, TEXT), CHECK_TOKENS)
    with tqdm(total=total, desc="bench", unit="call", disable=is_hidden, file=sys.stderr) as bar:
        suite.tick = bar.update
        result.reading.append(measure_weight_reading(model))
        for batch in args.batch_sizes:
            collect(result, suite.run_series(items[batch], TEXT, batch), keep)
        result.reading.append(measure_weight_reading(model))
    result.left_out, result.rows = suite.left_out, summarise_calls(result.calls)
    result.notes += [LABEL, *round_notes(result.rows, result.calls), *bandwidth_notes(result.rows, result.reading[-1])]
    result.notes += runtime_notes(
        [suite.baseline, *peers], prompts.build(items[args.batch_sizes[0]][:1], [()], 0, TEXT), CHECK_TOKENS
    )
    result.notes += checks
    return result


def _describe(
    args: argparse.Namespace, dtype: torch.dtype, device: torch.device, tree_size: int, new_tokens: int
) -> SuiteConfig:
    """What the report says was measured."""
    return SuiteConfig(
        model=args.shape,
        dtype=str(dtype),
        device=str(device),
        drafters=tuple(args.drafters),
        nodes=tree_size,
        suite="shape",
        data=None,
        categories=(),
        limit=args.repeats or MIN_ROUNDS,
        scene_seed=0,
        batch_sizes=tuple(args.batch_sizes),
        new_tokens=new_tokens,
        peers=tuple(args.peers),
        peer_python=(),
        assistant=None,
        minutes=None,
    )


def run_contexts(args: argparse.Namespace, files: ResultFiles) -> int:
    """`research.bench --shape S,S --contexts C,C`: rounds behind contexts, a table for each shape."""
    device = resolve_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--contexts measures rounds on a CPU or on CUDA; got --device {args.device}")
    names = args.shape.split(",")
    shapes = [find_shape(name) for name in names]
    contents = []
    for name, shape in zip(names, shapes, strict=True):
        contents.append(measure_contexts(args, name, shape, device))
        if files.json is not None:  # what has been measured so far
            files.json.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_contexts(args: argparse.Namespace, name: str, shape: TextShape, device: torch.device) -> dict[str, Any]:
    """Measure and print one shape; what goes into the file."""
    dtype: torch.dtype = getattr(torch, "bfloat16" if args.dtype == "auto" else args.dtype)
    model = build_shape_model(shape, dtype, device, args.seed)
    bench = ContextBench(model, shape, peer_pythons(args.peer_python))
    repeats = args.repeats or MIN_ROUNDS
    is_hidden = not (sys.stderr.isatty() if args.progress is None else args.progress)
    total = len(args.contexts) * len(bench.ways) * (repeats + 1)
    try:
        readings = [measure_bandwidth(device)]
        with tqdm(total=total, desc=f"bench {name}", unit="call", disable=is_hidden, file=sys.stderr) as bar:
            rows = bench.measure(args.contexts, repeats, bar.update)
        readings.append(measure_bandwidth(device))
        rows = bench.roofs(rows, max(readings))
    finally:
        bench.close()
    speeds = " and ".join(f"{reading / 1e9:.1f}" for reading in readings)
    about = f"{name}, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads: ms a round"
    lines = [
        f"{about}; {speeds} GB/s read before and after",
        "",
        *format_rounds(rows),
        "",
        *format_copy(rows),
        "",
        *bench.notes,
    ]
    print("\n".join(lines))
    content = {"provenance": provenance(args.command, device), "shape": name, "dtype": str(dtype)}
    return content | {"bytes_per_s": readings, "rows": [asdict(row) for row in rows], "notes": bench.notes}


def run_shape(args: argparse.Namespace) -> int:
    """Carry out `research.bench --shape`; returns the exit code."""
    files = ResultFiles.from_args(args)
    files.check()
    hide_progress_bars(args.progress)
    if args.contexts:
        return run_contexts(args, files)
    result = measure_shape(args, lambda result: write_json(result, files))
    print(format_markdown(result))
    write_json(result, files)
    return 0 if result.calls and not any(row.failed for row in result.rows) else 1
