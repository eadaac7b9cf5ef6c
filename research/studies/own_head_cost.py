"""What a draft of the head in a checkpoint costs beside the target's round, with a full and a reduced LM head.

Real shapes and random weights, on which no cost depends; processor time of one thread.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.drafters.mtp.assistant import AssistantDrafter
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.drafters.mtp.vocabulary import FrequentIds
from mmspec.targets.assistant import assistant_parts
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter
from research.arguments import module_parser

EPILOG = """
method
  A target of the published shape, but for --layers, decodes --rounds rounds behind a prompt of 64 tokens with chains of
  --depth draft tokens; nothing is accepted. Each kind of LM head in turn, --repeats times; the medians of all rounds,
  and of steps without drafts between them.
  By bytes: the weights that a draft reads (the head, LM head included, once per token) over those of the target's round
  (its layers and its LM head, once), at the depth of the run and at the published one.

examples
  python -m research.studies.own_head_cost --models qwen3.5-0.8b,gemma4-e2b --layers 24,10
"""
PROMPT = 64
NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")


@dataclass
class Costs:
    """Seconds of processor time of the drafts and of the rounds, drafts included."""

    drafts: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)


def qwen_config(num_layers: int) -> Any:
    """The text model of Qwen3.5-0.8B."""
    from transformers import Qwen3_5TextConfig

    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers)]
    return Qwen3_5TextConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=num_layers, layer_types=kinds, head_dim=256,
        num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True,
    )  # fmt: skip


def gemma_config(num_layers: int) -> Any:
    """The text model of Gemma 4 E2B, of whose 35 layers the last 20 read the keys and values of others."""
    from transformers import Gemma4TextConfig

    kinds = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(num_layers)]
    return Gemma4TextConfig(
        hidden_size=1536, intermediate_size=6144, num_hidden_layers=num_layers, layer_types=kinds, head_dim=256,
        global_head_dim=512, num_attention_heads=8, num_key_value_heads=1, use_double_wide_mlp=True,
        num_kv_shared_layers=num_layers * 4 // 7 // 5 * 5,
    )  # fmt: skip


def qwen_drafter(model: Any, **options: Any) -> OwnDrafter:
    """Its MTP head, written under the published names and read."""
    adapter = find_adapter(model)
    config = copy.deepcopy(adapter.text_config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    size = config.hidden_size
    layer = type(adapter.text_model.layers[0])(config, 0)
    shapes = {"fc.weight": (size, 2 * size), **dict.fromkeys(NORMS, (size,))}
    shapes |= {f"layers.0.{name}": tuple(value.shape) for name, value in layer.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {f"mtp.{name}": torch.randn(shape) / size**0.5 for name, shape in shapes.items()}
        save_file(tensors, Path(folder) / "model.safetensors")
        return MTPDrafter(read_own_head(adapter, folder), **options)


def gemma_drafter(model: Any, centroids: bool = True, **options: Any) -> OwnDrafter:
    """E2B's assistant."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    own = {
        "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
    }  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=own, backbone_hidden_size=1536, use_ordered_embeddings=centroids, num_centroids=2048
    )
    assistant = Gemma4AssistantForCausalLM(config).eval().requires_grad_(False).to(model.dtype)
    if centroids:
        ordering = assistant.masked_embedding.token_ordering
        ordering.copy_(torch.randperm(len(ordering)))
    return AssistantDrafter(assistant_parts(assistant, find_adapter(model)), **options)


def kinds_of(reduced: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Arguments of the drafters, by model and kind of LM head."""
    ids = {"frequent_ids": FrequentIds(reduced)}
    return {
        "qwen3.5-0.8b": {"full": {}, f"{reduced} ids": ids},
        "gemma4-e2b": {"full": {"centroids": False}, f"{reduced} ids": {"centroids": False, **ids}, "centroids": {}},
    }


SHAPES: dict[str, tuple[int, Callable[[int], Any], Callable[..., OwnDrafter]]] = {
    "qwen3.5-0.8b": (24, qwen_config, qwen_drafter),
    "gemma4-e2b": (35, gemma_config, gemma_drafter),
}


def measure(model: Any, drafter: OwnDrafter, depth: int, rounds: int, costs: Costs) -> None:
    """Decode once; the first draft, which reads the prompt, is left out."""
    propose, starts, drafts = drafter.propose, list[float](), list[float]()

    def timed(*args: Any) -> Any:
        starts.append(time.process_time())
        tree = propose(*args)
        drafts.append(time.process_time() - starts[-1])
        return tree

    vars(drafter)["propose"] = timed
    mmspec.patch(model, drafter=drafter, tree_size=depth + 1, deterministic=True)
    try:
        ids = torch.randint(1000, 100_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        model.generate(ids, max_new_tokens=rounds + 2, min_new_tokens=rounds + 2, do_sample=False)
    finally:
        mmspec.unpatch(model)
        del vars(drafter)["propose"]
    costs.drafts += drafts[1:-1]
    costs.rounds += [after - before for before, after in pairwise(starts[1:])]


def plain_step(model: Any, rounds: int) -> float:
    """Seconds of processor time of a step without drafts."""
    ids, spent = torch.randint(1000, 100_000, (1, PROMPT), generator=torch.Generator().manual_seed(0)), list[float]()
    mmspec.patch(model, drafter="none")
    try:
        for count in (2, 2, rounds + 2):  # what the first call finds out is kept
            start = time.process_time()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            spent.append(time.process_time() - start)
    finally:
        mmspec.unpatch(model)
    return max(1e-6, spent[2] - spent[1]) / rounds


def read_bytes(drafter: OwnDrafter, kind: str, depth: int, model: Any) -> int:
    """Bytes of weights that a draft reads."""
    head: Any = drafter.head
    own_lm_head = head.lm_head if isinstance(drafter, AssistantDrafter) else model.get_output_embeddings()
    weight = own_lm_head.weight
    rows = len(weight)
    if drafter.frequent_ids is not None:
        rows = drafter.frequent_ids.size
    if kind == "centroids":
        rows = head.centroids.weight.shape[0] + head.top_centroids * (rows // head.centroids.weight.shape[0])
    lm_head = rows * weight.shape[1] * weight.element_size()
    body = sum(value.nbytes for name, value in head.named_parameters() if "lm_head" not in name and "centr" not in name)
    return depth * (body + lm_head)


def target_bytes(model: Any, num_layers: int) -> int:
    """Bytes of weights that a round of the target reads, with so many layers of the mean size."""
    layers: nn.ModuleList = model.get_decoder().layers
    mean = sum(value.nbytes for value in layers.parameters()) / len(layers)
    weight: Tensor = model.get_output_embeddings().weight
    return round(num_layers * mean) + weight.nbytes


def study(name: str, num_layers: int, options: argparse.Namespace) -> Iterator[str]:
    """Rows of the table for one model."""
    published, config, build = SHAPES[name]
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(num_layers), dtype=getattr(torch, options.dtype))
    model.eval().requires_grad_(False)
    kinds = kinds_of(options.reduced)[name]
    drafters = {kind: build(model, max_depth=options.depth, top_k=1, **given) for kind, given in kinds.items()}
    costs = {kind: Costs() for kind in drafters}
    plain = list[float]()
    for repeat in range(options.repeats + 1):
        plain += [plain_step(model, options.rounds)] if repeat else []
        for kind, drafter in drafters.items():
            measure(model, drafter, options.depth, options.rounds, costs[kind] if repeat else Costs())
    for kind, drafter in drafters.items():
        draft, whole, step = median(costs[kind].drafts), median(costs[kind].rounds), median(plain)
        read = read_bytes(drafter, kind, options.depth, model)
        shares = [read / target_bytes(model, layers) for layers in (num_layers, published)]
        yield (
            f"| {name} | {num_layers} of {published} | {kind} | {1e3 * draft:.0f} | {1e3 * (whole - draft):.0f} | "
            f"{1e3 * step:.0f} | {draft / step:.2f} | {shares[0]:.2f} | {shares[1]:.2f} |"
        )


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = module_parser("research.studies.own_head_cost", __doc__, EPILOG)
    parser.add_argument("--models", type=split_commas, default=list(SHAPES), metavar="M,M")
    parser.add_argument("--layers", type=split_commas, default=["24", "10"], metavar="N,N", help="of each model")
    parser.add_argument("--reduced", type=positive_int, default=32768, metavar="N", help="ids of a reduced head")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--depth", type=positive_int, default=4, metavar="N", help="draft tokens")
    parser.add_argument("--rounds", type=positive_int, default=12, metavar="N")
    parser.add_argument("--repeats", type=positive_int, default=2, metavar="N")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = "model | layers | LM head | draft, ms | target, ms | plain step, ms | draft / plain step | by bytes"
    print(f"| {names} | by bytes, all layers |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, layers in zip(options.models, options.layers, strict=True):
        for row in study(name, int(layers), options):
            print(row, flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
