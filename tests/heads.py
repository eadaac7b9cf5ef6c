"""Draft heads with random weights, in the shape of a tiny target: their guesses are noise, their machinery is not."""

from __future__ import annotations

import torch

import tiny
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.head import Eagle3Head, EagleHead, HeadConfig
from mmspec.drafters.rules import RULES
from mmspec.drafters.vispec import VispecDrafter, VispecHead

KINDS = (*RULES, "trimmed", "eagle3", "vispec")


def drafter(kind: str, spec: tiny.Spec, seed: int = 0, vocab: int = 0) -> EagleDrafter:
    """A drafter of that kind for the target of `spec`; another size of vocabulary may be said."""
    vocab = vocab or spec.vocab
    wide = kind == "eagle3"
    config = HeadConfig(
        spec.hidden, 2 * spec.hidden, spec.heads, spec.kv_heads, vocab, wide=wide, qkv_bias=bool(seed % 2)
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind == "vispec":
            return VispecDrafter(VispecHead(config, 2 + seed % 3), layers=spec.layers, depth=3, width=3)
        if kind == "eagle3":
            head = Eagle3Head(config, vocab // 2, spec.hidden)
            made = EagleDrafter(head, "coupled", layers=8, depth=4, width=3, draft_ids=torch.arange(1, vocab // 2 + 1))
            made.tap((0, 1, spec.layers), spec.layers)
            return made
        ids = torch.arange(0, vocab, 2) if kind == "trimmed" else None
        rule = "decoupled" if kind == "trimmed" else kind
        return EagleDrafter(EagleHead(config), rule, layers=spec.layers, depth=4, width=4, draft_ids=ids)
