"""Rounds behind a context of a given length: plain `generate`, our loop, trees of some sizes, on a CPU llama.cpp.

Keys and values of the context are random, so no prompt is computed; every call begins behind the same ones. Shapes with
layers of several kinds read a prompt, which is not timed. The next token of the random model is known, and no draft is
accepted, so a call of n tokens is n rounds. All ways take turns.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

import mmspec
from mmspec.app.errors import one_line
from mmspec.app.modeling.load import clone
from mmspec.cpu import huge_pages
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from research.bench.bandwidth import text_weight_bytes
from research.bench.peers.base import PeerError
from research.bench.peers.process import LLAMA_CPP, WorkerPeer, find_python
from research.bench.shape.models import TextShape
from research.bench.shape.simulated import Oracle, SimulatedAcceptance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NODES = {"cpu": (1, 2, 4, 8, 16, 32), "cuda": (1, 8, 16, 32, 64)}
"""Nodes of the rounds, the root included."""
FEW_NODES = (1, 8)
"""The same for shapes with layers of several kinds, where each call reads a prompt."""
BACKENDS = {"cpu": {"": "auto"}, "cuda": {"": "torch", ", recorded": "recorded"}}
"""What the name of a way ends with -> the backend."""
LLAMA_TYPES = {torch.float32: ("f32",), torch.bfloat16: ("bf16", "q8_0", "q4_0"), torch.float16: ("q8_0", "q4_0")}
"""Types of GGUF files beside a dtype of ours."""
COPY_NODES = (4, 8, 16)
"""Sizes of trees that the model's own 4-bit copy drafts, a chain each."""
ACCEPTANCE = (0.9, 0.92, 0.95)
"""Simulated: the share of a chain's tokens that is accepted, given that those before it are."""
NUM_STEPS = 10
WRITER = Path(__file__).parents[1] / "peers" / "write_shape_gguf.py"
PEAK_SIZE = 1024
"""Rows and columns of the product that measures the peak: its weights stay in the cache."""


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of a round.

    Attributes:
        context: positions before it.
        way: who computed it.
        ms: median of the repeats; low, high: smallest and largest of them.
        roof_ms: the least time of the bytes that are read, or of the products at the measured peak; None for peers.
    """

    context: int
    way: str
    ms: float
    low: float
    high: float
    roof_ms: float | None = None


def random_cache(model: PreTrainedModel, context: int) -> Any:
    """A cache of transformers that holds `context` random positions; None for layers of several kinds."""
    from transformers import DynamicCache

    config = model.config
    if len(set(getattr(config, "layer_types", None) or [""])) > 1:
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 1, config.num_key_value_heads, context, head
    cache, generator = DynamicCache(config=config), torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(size, generator=generator).to(model.device, model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def full_attention_layers(config: Any) -> list[Any]:
    """The config of each layer that reads all positions: one for all of them, but where their sizes differ."""
    configs = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [one for one, kind in zip(configs, kinds, strict=True) if kind == "full_attention"]


def measure_peak(dtype: torch.dtype, rows: int) -> float:
    """Multiplications with addition per second of products of so many rows, on weights in the cache."""
    weight = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
    vectors = torch.randn(rows, PEAK_SIZE).to(dtype)
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        torch.nn.functional.linear(vectors, weight)
        seconds.append(time.perf_counter() - start)
    return rows * PEAK_SIZE * PEAK_SIZE / min(seconds)


class _Clock:
    """A logits processor that notes when it is called, once a step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        self.times.append(time.perf_counter())
        return scores


class ContextBench:
    """All ways of one shape."""

    def __init__(self, model: PreTrainedModel, shape: TextShape, pythons: Sequence[str]) -> None:
        self.model, self.shape = model, shape
        self.ways: dict[str, Callable[[int, Any], float]] = {"generate": self._plain}
        self.notes: list[str] = []
        kind = model.device.type
        for ending, backend in BACKENDS[kind].items():
            for nodes in FEW_NODES if shape.config else NODES[kind]:
                self.ways[("none" if nodes == 1 else f"{nodes} nodes") + ending] = self._patched(nodes, backend)
        if kind == "cpu" and not shape.config:
            self._add_copy()
        self._folder = tempfile.TemporaryDirectory(prefix="mmspec-shape-")
        self.engines: dict[str, WorkerPeer] = {}
        python = find_python(LLAMA_CPP.module, pythons)
        if kind != "cpu":
            return
        if python is None:
            self.notes.append("llama.cpp is not installed: pip install llama-cpp-python gguf (--peer-python names it)")
            return
        for kind in LLAMA_TYPES[model.dtype][: 1 if shape.config else None]:
            self._add_engine(kind, python, pythons)

    def measure(self, contexts: Sequence[int], repeats: int, tick: Callable[[], Any]) -> list[RoundTime]:
        """Medians of interleaved repeats after a warm-up, which moves all weights into huge pages, where there are."""
        found = []
        for context in contexts:
            cache = random_cache(self.model, context)
            seconds: dict[str, list[float]] = {way: [] for way in self.ways}
            for repeat in range(repeats + 1):
                for way, run in list(self.ways.items()):
                    pages = (
                        nullcontext()
                        if repeat
                        else mock.patch.multiple(huge_pages, GAIN_S=math.inf, MAX_CALL_S=math.inf)
                    )
                    try:
                        with pages:
                            taken = run(context, cache)
                    except (RuntimeError, ValueError, PeerError) as error:
                        self.notes.append(f"{way} behind {context}: {one_line(error)}")
                        del self.ways[way]
                        continue
                    finally:
                        tick()
                    if repeat:
                        seconds[way].append(1e3 * taken)
            found += [RoundTime(context, way, median(one), min(one), max(one)) for way, one in seconds.items() if one]
        return found

    def roofs(self, rows: Sequence[RoundTime], bytes_per_s: float) -> list[RoundTime]:
        """The same with roofs: weights, keys and values read once, and their products with every node."""
        config, weights, itemsize = self.model.config, text_weight_bytes(self.model), self.model.dtype.itemsize
        keys_and_values = attention = 0
        for layer in full_attention_layers(config):  # what others read does not grow
            head = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
            keys_and_values += 2 * layer.num_key_value_heads * head
            attention += 2 * layer.num_attention_heads * head
        kind = self.model.device.type
        nodes = {"generate": 1, "none": 1} | {f"{count} nodes": count for count in NODES[kind]}
        dtypes = {torch.float32, self.model.dtype}  # a processor without instructions for 16 bits widens them
        peak = max(measure_peak(one, 64) for one in dtypes) if kind == "cpu" else math.inf  # a GPU's is far away
        done = []
        for row in rows:
            count = nodes.get(row.way.partition(",")[0]) if not row.way.startswith("copy") else None
            if count is None:
                done.append(row)
                continue
            read = (weights + row.context * keys_and_values * itemsize) / bytes_per_s
            multiplied = count * (weights / itemsize + (row.context + count) * attention)
            roof = 1e3 * max(read, multiplied / peak)
            done.append(RoundTime(row.context, row.way, row.ms, row.low, row.high, roof))
        return done

    def close(self) -> None:
        """End the processes."""
        for engine in self.engines.values():
            engine.close()
        self._folder.cleanup()

    def _plain(self, context: int, cache: Any) -> float:
        """Seconds of a step of plain `generate`: what lies between two calls of a logits processor."""
        clock = _Clock()
        self._call(self.model, context, cache, logits_processor=[clock])
        return (clock.times[-1] - clock.times[0]) / NUM_STEPS

    def _patched(self, nodes: int, backend: str) -> Callable[[int, Any], float]:
        drafter: Any = "none"
        if nodes > 1:
            generator = torch.Generator().manual_seed(0)
            drafter = SimulatedAcceptance("oracle", Oracle(nodes), 1.0, nodes - 1, self.shape.vocab_size, generator)
        model = mmspec.patch(clone(self.model), drafter, tree_size=nodes, backend=backend)

        def run(context: int, cache: Any) -> float:
            self._call(model, context, cache)
            return mmspec.stats(model, last=True).round_s

        return run

    def _add_copy(self) -> None:
        """Rounds whose tree the model's own copy in few bits drafts; none of it is accepted."""
        generator = torch.Generator().manual_seed(0)
        layers, depth = range(self.model.config.num_hidden_layers), max(COPY_NODES) - 1
        inner = QuantizedDrafter(layers=layers, max_length=depth)
        drafter = SimulatedAcceptance("copy", inner, 1.0, depth, self.shape.vocab_size, generator)
        start = time.perf_counter()
        try:
            model = mmspec.patch(clone(self.model), drafter)
        except ValueError as error:
            self.notes.append(f"no 4-bit copy: {error}")
            return
        self.notes.append(f"the 4-bit copy was made in {time.perf_counter() - start:.1f} s")

        def run(context: int, cache: Any, nodes: int) -> float:
            self._call(model, context, cache, mmspec={"tree_size": nodes})
            return mmspec.stats(model, last=True).round_s

        self.ways |= {copy_way(nodes): partial(run, nodes=nodes) for nodes in COPY_NODES}

    def _call(self, model: PreTrainedModel, context: int, cache: Any, **options: Any) -> None:
        """A call of `NUM_STEPS` rounds behind the context."""
        ids = torch.full((1, context + 1), 7, device=model.device)
        if cache is not None and cache.get_seq_length() > context:
            cache.crop(context - cache.get_seq_length())
        options |= {"do_sample": False, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
        model.generate(ids, max_new_tokens=1 + NUM_STEPS, **options)

    def _add_engine(self, kind: str, python: str, pythons: Sequence[str]) -> None:
        file = Path(self._folder.name) / f"{kind}.gguf"
        command = [python, str(WRITER), str(file), kind, json.dumps(asdict(self.shape))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.notes.append(f"llama.cpp {kind}: {done.stderr.strip().splitlines()[-1][:200]}")
            return
        engine = WorkerPeer(f"llama.cpp {kind}", LLAMA_CPP, lambda _: file, pythons, context=4096 + 64)
        engine.half_cache = self.model.dtype != torch.float32
        try:
            engine.start()
        except PeerError as error:
            self.notes.append(f"{engine.name}: {error}")
            engine.close()
            return
        self.engines[kind] = engine
        self.ways[engine.name] = lambda context, _: median(engine.time_steps(context, NUM_STEPS))


def copy_way(nodes: int) -> str:
    """Name of a round in which a 4-bit copy has drafted all nodes but the root."""
    return f"copy, {nodes} nodes"


def format_copy(rows: Sequence[RoundTime]) -> list[str]:
    """A table of milliseconds a token with a 4-bit copy at simulated acceptance, for the best length of its drafts."""
    times = {(row.context, row.way): row.ms for row in rows}
    if not any(way == copy_way(COPY_NODES[0]) for _, way in times):
        return []
    names = [f"{share:.0%} accepted" for share in ACCEPTANCE]
    lines = [
        f"| context | {' | '.join(names)} (simulated), ms a token (times `none`) |",
        "|" + "---|" * (len(names) + 1),
    ]
    for context in dict.fromkeys(row.context for row in rows):
        cells = []
        for share in ACCEPTANCE:
            best = min(
                times[context, copy_way(nodes)] / sum(share**index for index in range(nodes)) for nodes in COPY_NODES
            )
            cells.append(f"{best:.1f} ({times[context, 'none'] / best:.2f})")
        lines.append(f"| {context} | {' | '.join(cells)} |")
    return lines


def format_rounds(rows: Sequence[RoundTime]) -> list[str]:
    """A table: a line for each context, milliseconds of each way, and the share of the roof."""
    ways = list(dict.fromkeys(row.way for row in rows))
    lines = [f"| context | {' | '.join(ways)} |", "|" + "---|" * (len(ways) + 1)]
    for context in dict.fromkeys(row.context for row in rows):
        cells = []
        for way in ways:
            row = next(one for one in rows if (one.context, one.way) == (context, way))
            share = "" if row.roof_ms is None else f" ({100 * row.roof_ms / row.ms:.0f}%)"
            cells.append(f"{row.ms:.1f} [{row.low:.1f}, {row.high:.1f}]{share}")
        lines.append(f"| {context} | {' | '.join(cells)} |")
    return lines
