"""Draft heads with random weights for a tiny target: the drafts are random, the code paths are real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tiny_models as tiny
import torch
from torch.nn import Module

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.drafters.heads.falcon.head import FalconDrafter, FalconHead
from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead
from mmspec.drafters.heads.parallel.head import ParallelConfig, ParallelDrafter, ParallelHead
from mmspec.drafters.heads.registry import methods
from mmspec.drafters.heads.vispec.head import VispecConfig, VispecDrafter, VispecHead
from mmspec.vision.compressors.latent import LatentCompressor
from mmspec.vision.registry import init_compressor

BLOCK_DRAFTERS = ("flash", "chained", "parallel", "linked", "falcon")
"""Block drafters that read one hidden state."""
SELECTING_COMPRESSORS = ("stride:3", "stride:2", "relevant:3", "relevant:2", "identity", "drop")
COMPRESSOR_SPECS = ("conv:3", "resampler:2", "elastic:4", "pool:3", *SELECTING_COMPRESSORS)
PAIR_DRAFTERS = ("dflash2", "domino", "lilicorr")
"""Block drafters whose tokens depend on those before them otherwise than by a table."""
_VISUAL_KINDS = ("latent", "dspark", *PAIR_DRAFTERS, "compressed")
DRAFTER_KINDS = (*VISUAL_MODES, "trimmed", "eagle3", "vispec", *BLOCK_DRAFTERS, *_VISUAL_KINDS)
ECHOING_PREFIX = "leaning-"
"""Prefix of a kind: its head often predicts what a target with weak attention generates after the last token."""


def build_drafter(kind: str, spec: tiny.ModelSpec, seed: int = 0, vocab_size: int = 0) -> HeadDrafter:
    """A drafter of the kind for the target of `spec`; `vocab_size` 0 is that of the target."""
    if kind.startswith(ECHOING_PREFIX):
        drafter = build_drafter(kind.removeprefix(ECHOING_PREFIX), spec, seed, vocab_size)
        weight, identity = _echoing_weight(drafter.head), 3 * torch.eye(spec.hidden)
        if isinstance(drafter.head, Eagle3Head):
            weight[:, -spec.hidden :] += identity
            drafter.head.lm_head.weight.data = (
                tiny.build_model(spec).get_output_embeddings().weight.data[drafter.draft_ids]
            )
        else:
            weight[:, : spec.hidden] += identity
        return drafter
    vocab_size = vocab_size or spec.vocab
    config = EagleConfig(spec.hidden, 2 * spec.hidden, spec.heads, spec.kv_heads, vocab_size, qkv_bias=bool(seed % 2))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind == "vispec":
            return VispecDrafter(
                VispecHead(VispecConfig.of(config, num_queries=2 + seed % 3)),
                num_layers=spec.layers,
                max_depth=3,
                top_k=3,
            )
        if kind == "eagle3":
            return build_eagle3_drafter(config, spec)
        if kind in PAIR_DRAFTERS:
            return build_pair_drafter(kind, config, spec.layers, seed)
        if kind in (*BLOCK_DRAFTERS, "dspark"):
            return build_block_drafter(kind, config, spec.layers, seed)
        if kind == "latent":
            drafter = build_block_drafter(BLOCK_DRAFTERS[seed % 5], config, spec.layers, seed)
            drafter.compressor = LatentCompressor(spec.hidden, 1 + seed % 5).eval()
            return drafter
        if kind == "compressed":
            drafter = EagleDrafter(
                EagleHead(config), list(VISUAL_MODES)[seed % 2], num_layers=spec.layers, max_depth=3, top_k=3
            )
            drafter.compressor = init_compressor(COMPRESSOR_SPECS[seed % len(COMPRESSOR_SPECS)], spec.hidden)
            for name, weight in drafter.compressor.named_parameters() if isinstance(drafter.compressor, Module) else ():
                weight.data.normal_(0, 2 if name.startswith("gate") else 0.3)  # each row chooses another branch
            if isinstance(drafter.compressor, Module):
                drafter.compressor.eval()
            return drafter
        ids = torch.arange(0, vocab_size, 2) if kind == "trimmed" else None
        rule = "decoupled" if kind == "trimmed" else kind
        return EagleDrafter(EagleHead(config), rule, num_layers=spec.layers, max_depth=4, top_k=4, draft_ids=ids)


def build_eagle3_drafter(config: EagleConfig, spec: tiny.ModelSpec) -> Eagle3Drafter:
    """A drafter over three hidden states, with a draft vocabulary of half the size."""
    size, layers = config.vocab_size // 2, (0, 1, spec.layers)
    config = Eagle3Config.of(config, draft_vocab_size=size, hidden_state_layers=layers)
    ids = torch.arange(1, size + 1)
    return Eagle3Drafter(Eagle3Head(config), "coupled", num_layers=spec.layers, max_depth=4, top_k=3, draft_ids=ids)


def build_dspark_drafter(config: EagleConfig, layers: int, seed: int) -> DsparkDrafter:
    """A drafter of a block over hidden states of several layers; some without the two small heads, which is DFlash."""
    has_markov = bool(seed % 3)
    head = DsparkHead(
        DsparkConfig.of(
            config,
            block_size=(4, 3, 6, 9)[seed % 4],
            markov_rank=8 if has_markov else 0,
            confidence_head=has_markov and bool(seed % 2),
            hidden_state_layers=((1, layers), (0,), (layers - 1, 1, layers))[seed % 3],
            num_hidden_layers=1 + seed % 3,
            layer_mixture=bool(seed % 2),
            sliding_windows=(3, 0, 6)[: 1 + seed % 3] if seed % 4 == 2 else (),
            causal_layers=(True, False, False)[: 1 + seed % 3] if seed % 4 == 2 else (),
        )
    )
    if head.bigram_head is not None:
        head.bigram_head.vocab_proj.weight.data.normal_()
    ids = torch.arange(0, config.vocab_size, 2) if seed % 5 == 0 else None
    mode = list(VISUAL_MODES)[seed % len(VISUAL_MODES)]
    return DsparkDrafter(head, mode, num_layers=layers, top_k=3, draft_ids=ids)


def build_pair_drafter(kind: str, config: EagleConfig, layers: int, seed: int) -> HeadDrafter:
    """A drafter of `PAIR_DRAFTERS`; what such heads begin training with as zeros is random."""
    shape: dict[str, Any] = {
        "block_size": (4, 3, 6)[seed % 3],
        "hidden_state_layers": ((1, layers), (layers - 1, 1, layers))[seed % 2],
        "num_hidden_layers": 1 + seed % 2,
        "sample_from_anchor": kind == "domino" and bool(seed % 2),
    }
    convolution = {"conv_kernel_size": 2 + seed % 2, "conv_group_size": config.hidden_size // 4}
    classes = methods()[kind].classes()
    own: dict[str, Any] = {
        "dflash2": convolution | {"selector_rank": 6, "selector_top_k": 4},
        "domino": {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": seed % 2},
        "lilicorr": (convolution if seed % 2 else {}) | {"candidate_topk": 4, "lattice_size": 8, "factor_dim": 5},
    }
    head: Any = classes.head(classes.config.of(config, **shape, **own[kind]))
    for weight in head.parameters():
        if not bool(weight.any()):
            weight.data.normal_()
    ids = torch.arange(0, config.vocab_size, 2) if seed % 5 == 0 else None
    return classes.drafter(head, "coupled", num_layers=layers, top_k=3, draft_ids=ids)


def _echoing_weight(head: DraftHead) -> torch.Tensor:
    """The weight whose first columns map the embedding of the last token to the head's output (to its first slot)."""
    return head.fc.weight.data


def build_block_drafter(kind: str, config: EagleConfig, layers: int, seed: int) -> HeadDrafter:
    """A drafter of a kind that drafts several tokens per forward."""
    if kind == "dspark":
        return build_dspark_drafter(config, layers, seed)
    rule, ids = (
        list(VISUAL_MODES)[seed % len(VISUAL_MODES)],
        None if seed % 3 else torch.arange(0, config.vocab_size, 2),
    )
    size = (2, 3, 4, 5, 8)[seed % 5]
    if kind in ("flash", "chained"):
        wide = FlashConfig.of(
            config, intermediate_size=0, block_size=size, block_ffn_size=24, markov_rank=12 if kind == "chained" else 0
        )
        head = FlashHead(wide)
        if head.markov_head is not None:
            head.markov_head.vocab_proj.weight.data.normal_()
        return FlashDrafter(head, rule, num_layers=layers, draft_ids=ids)
    if kind == "falcon":
        falcon = FalconHead(replace(config, block_size=size))
        return FalconDrafter(falcon, rule, num_layers=layers, max_forwards=1 + seed % 3, top_k=3, draft_ids=ids)
    parallel = ParallelHead(
        ParallelConfig.of(config, block_size=size if seed % 7 else 1, block_ffn_size=16 if kind == "linked" else 0)
    )
    return ParallelDrafter(parallel, rule, num_layers=layers, top_k=3, draft_ids=ids)
