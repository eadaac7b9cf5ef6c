"""A tree over the scores of pairs against the single path through them, at equal numbers of nodes: tokens a round.

Counts only: greedy calls about the same held-out scenes, one at a time, by heads whose positions depend on the token
before (dspark, dflash2, lilicorr). A path has the likeliest child of each node, as serving engines walk; a tree the
best nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import mmspec
from mmspec.app.cli.arguments import add_model_option, positive_int
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone, load_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.metrics.stats import Stats
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter
from research.arguments import module_parser, positive_ints
from research.bench.measure import bootstrap_interval
from research.bench.requests import build_scene_requests
from research.studies.draft_heads import MAX_ANSWER_TOKENS
from research.studies.intervals import format_ci

HEADINGS = ["head", "nodes", "path", "tree", "tree / path", "same text"]
EPILOG = """\
examples
  mmspec train --data drawings/requests.jsonl --drafter dspark,dflash2,lilicorr --set block=7 --steps 350 --out run
  python -m research.studies.pair_trees run/dspark run/dflash2 run/lilicorr --nodes 8
"""


@dataclass(frozen=True)
class Calls:
    """Statistics and outputs of the calls with one kind of draft."""

    stats: list[Stats]
    outputs: list[list[int]]

    def tau(self, indices: Sequence[int]) -> float:
        """Tokens a round of these calls."""
        whole = Stats()
        for index in indices:
            whole.add(self.stats[index])
        return whole.tau


def ratio_of(above: Calls, below: Calls, indices: Sequence[int]) -> float:
    """Of tokens a round."""
    return above.tau(indices) / below.tau(indices)


def run_calls(model: Any, requests: Sequence[Any], processor: Any, head: str, nodes: int, is_path: bool) -> Calls:
    """Greedy calls with a head and trees of that many nodes, the root included.

    Args:
        model: the target, not patched.
        requests: inputs of the calls.
        processor: of the target.
        head: folder.
        nodes: size of every tree.
        is_path: whether each node has its likeliest child alone.
    """
    model = clone(model)
    drafter: Any = resolve_drafter(head, find_adapter(model), processor.tokenizer)
    if is_path:
        drafter.top_k = 1
    mmspec.patch(model, drafter, processor=processor, tree_size=nodes)
    calls = Calls([], [])
    for inputs in requests:
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        calls.stats.append(mmspec.stats(model, last=True))
        calls.outputs.append(output[0].tolist())
    return calls


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser: argparse.ArgumentParser = module_parser("research.studies.pair_trees", __doc__, EPILOG)
    add = parser.add_argument
    add("heads", nargs="+", metavar="FOLDER", help="trained heads of blocks whose positions are scored in pairs")
    add_model_option(parser)
    add("--nodes", type=positive_ints, default=[8], metavar="N,N", help="sizes of trees, the root included (default 8)")
    add("--count", type=positive_int, default=24, metavar="N", help="requests (default 24)")
    args = parser.parse_args(argv)
    model, processor = load_model(args.model)
    captioner = Captioner(model, processor)
    requests = build_scene_requests(captioner, "describe", FIRST_HELD_OUT_SEED, 1, args.count)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for head in args.heads:
        for nodes in args.nodes:
            path, tree = (
                run_calls(model, requests[: args.count], processor, head, nodes, is_path) for is_path in (True, False)
            )
            ratio = bootstrap_interval(partial(ratio_of, tree, path), args.count)
            taus = [format_ci(bootstrap_interval(calls.tau, args.count)) for calls in (path, tree)]
            same = "yes" if path.outputs == tree.outputs else "NO"
            print(f"| {head} | {nodes} | {' | '.join(taus)} | {format_ci(ratio)} | {same} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
