"""Peers by name, for one model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import clone
from research.bench.drafter_specs import patch_model
from research.bench.peers.base import Peer
from research.bench.peers.export import Exports
from research.bench.peers.in_process import PatchedPeer, TransformersPeer, transformers_peers
from research.bench.peers.process import ENGINES, LLAMA_CPP, LOOKUP_TOKENS, WorkerPeer, peer_pythons

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

BASELINE_PEER = "hf"
LOOKUP_SUFFIX = "-lookup"
"""Drafts n-gram matches in the prompt and the output, by the engine's own implementation."""
PEER_NAMES = (
    BASELINE_PEER,
    *("hf-static", "hf-compile", "hf-lookup", "hf-assisted"),
    *(engine.name + suffix for engine in ENGINES for suffix in ("", LOOKUP_SUFFIX)),
)
"""`hf` is the baseline and always runs."""


def check_peer_names(names: Sequence[str]) -> None:
    """Refuse an unknown peer before anything is loaded.

    Raises:
        UsageError: an unknown name.
    """
    unknown = [name for name in names if name not in PEER_NAMES]
    if unknown:
        raise UsageError(f"unknown peer {unknown[0]!r}; known are {', '.join(PEER_NAMES)}")


def build_peers(
    names: Sequence[str],
    model: PreTrainedModel,
    exports: Exports,
    *,
    pythons: Sequence[str] = (),
    assistant: PreTrainedModel | None = None,
    context: int = 1024,
) -> list[Peer]:
    """The named peers, except the baseline; nothing is started.

    Args:
        exports: converts the weights of `model` for other engines.
        pythons: interpreters of other environments.
        assistant: for assisted generation.
        context: most tokens of a prompt and its output.
    """
    search = peer_pythons(pythons)
    variants = transformers_peers(lambda: clone(model), assistant)
    engines = {engine.name: engine for engine in ENGINES}

    def build(name: str) -> Peer:
        if name in variants:
            return variants[name]()
        engine = engines[name.removesuffix(LOOKUP_SUFFIX)]
        lookup = LOOKUP_TOKENS if name.endswith(LOOKUP_SUFFIX) else 0
        peer = WorkerPeer(name, engine, partial(exports.get, engine.model_format), search, lookup, context)
        peer.half_cache = engine is LLAMA_CPP and model.dtype != torch.float32
        return peer

    return [build(name) for name in dict.fromkeys(names) if name != BASELINE_PEER]


def build_patched_peers(
    names: Sequence[str],
    model: PreTrainedModel,
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    tree_size: int | None = None,
) -> list[PatchedPeer]:
    """A patched clone of `model` for each spec of a drafter, "none" first."""
    return [
        PatchedPeer(name, patch_model(clone(model), name, processor, tree_size))
        for name in dict.fromkeys(("none", *names))
    ]


def baseline_peer(model: PreTrainedModel) -> TransformersPeer:
    """Plain `generate` on a clone that is never patched."""
    return TransformersPeer(BASELINE_PEER, clone(model))
