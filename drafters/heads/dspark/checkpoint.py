"""DSpark and DFlash heads in published layouts: reading them, and writing that of `speculators`, which vLLM reads.

Layouts: `speculators` (`speculators_model_type` "dspark" or "dflash"), and the flat ones of their authors (z-lab's
DFlash with `dflash_config`, DeepSeek's DSpark). Tensor names are the same in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.drafters.checkpoints.draft_vocab import (
    draft_vocabulary_tensors,
    layer_keys,
    speculators_section,
    take_draft_ids,
)
from mmspec.drafters.checkpoints.format import write_checkpoint
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.own_embeddings import EMBED_TENSOR
from mmspec.drafters.checkpoints.published import MASK_EMBEDDING
from mmspec.drafters.checkpoints.rope import order_rotated_rows
from mmspec.drafters.checkpoints.state_dict import check_numbers, drop_unused, read_head, to_stored
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkHead
from mmspec.drafters.heads.dspark.published_config import (
    block_attention,
    check_projector,
    hidden_state_layers_of,
    keep_confidence_head,
    markov_rank,
    samples_from_anchor,
    warn_missing_theta,
)
from mmspec.interfaces import SharedEmbeddings, TargetInfo

if TYPE_CHECKING:
    from mmspec.drafters.heads.dspark.recipe import Dspark

NOT_STORED = ("mask_embedding",)
"""Of published heads it is the embedding of `mask_token_id`, or a file of its own."""
OTHER_NAMES = {
    r"logit_head\.": "",
    r"midlayer\.": "layers.0.",
    r"encoder\.fc\.": "fc.",
    r"encoder\.output_norm_enc\.": "hidden_norm.",
    r"lilicorr\.feature_mlp\.0\.": "lilicorr.feature_norm.",
    r"lilicorr\.feature_mlp\.1\.": "lilicorr.feature_mlp.up_proj.",
    r"lilicorr\.feature_mlp\.3\.": "lilicorr.feature_mlp.down_proj.",
    r"(lilicorr\.layers\.\d+\.mlp)\.0\.": r"\1.up_proj.",
    r"(lilicorr\.layers\.\d+\.mlp)\.2\.": r"\1.down_proj.",
}
"""Beginnings of tensor names: early heads of SpecForge; Muse Glimmer's assistant; Model-Optimizer's LiLiCorr, whose
layers are numbered -> as others have them."""


def load_dspark(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str, method: Dspark
) -> DsparkDrafter:
    """The drafter of a DSpark or DFlash head, or of a method that extends it.

    Args:
        values: its config.
        weights: its tensors.
        target: facts about the target.
        name: of the drafter.
        method: of the head.

    Raises:
        ValueError: the head does not fit the target, is incomplete, or uses an unsupported setting.
    """
    classes, layer_values = method.classes(), dict(values.get("transformer_layer_config") or values)
    settings = {**layer_values, **values, **(values.get("dflash_config") or {})}
    check_projector(settings, method.projectors)
    weights = rename_tensors(weights)
    shape = parse_published_config(layer_values, target, values.get("architectures"), weights=weights)
    warn_missing_theta(layer_values)
    layers = hidden_state_layers_of(settings, target)
    block_size, mask_token_id = settings.get("block_size"), settings.get("mask_token_id")
    if not isinstance(block_size, int) or not isinstance(mask_token_id, int):
        missing = "block_size" if not isinstance(block_size, int) else "mask_token_id"
        raise ValueError(f"{missing} is missing in the config of a block drafter.")
    from_anchor = samples_from_anchor(values, settings, block_size)
    vocab_size = int(values.get("draft_vocab_size") or target.vocab_size)
    mask_embedding = weights.pop(MASK_EMBEDDING, None)
    _check_mask_token(mask_token_id, mask_embedding, weights, target, shape.hidden_size)
    draft_ids = take_draft_ids(weights, vocab_size, target)
    weights = order_rotated_rows(weights, settings, shape.head_dim, shape.rotary_dim)
    num_layers = int(layer_values.get("num_hidden_layers") or 1)
    windows, is_causal = block_attention(settings, num_layers)
    config = classes.config.of(
        shape,
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        block_size=block_size if from_anchor else block_size - 1,
        sample_from_anchor=from_anchor,
        markov_rank=markov_rank(settings, weights),
        draft_vocab_size=vocab_size if "lm_head.weight" in weights else 0,
        hidden_state_layers=layers,
        num_hidden_layers=num_layers,
        confidence_head=keep_confidence_head(weights, shape.hidden_size),
        sliding_windows=windows,
        causal_layers=is_causal,
        **method.published_settings(settings, weights),
    )
    build: Any = classes.head
    head = read_head(lambda: build(config, has_table=True), drop_unused(weights), f"a {method.title} head", NOT_STORED)
    scale = float(settings.get("input_embedding_scale") or 1.0)
    mask = torch.zeros(config.hidden_size) if mask_embedding is None else scale * mask_embedding.float()
    head.mask_embedding = torch.nn.Parameter(mask)
    drafter = classes.drafter(head, "coupled", num_layers=target.num_layers, name=name, draft_ids=draft_ids)
    assert isinstance(drafter, DsparkDrafter)
    drafter.mask_token_id = mask_token_id if mask_embedding is None else None
    drafter.embedding_scale = scale
    return drafter


def rename_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of other heads, where they begin with one of `OTHER_NAMES`."""
    renamed, before = dict[str, Tensor](), dict[str, str]()
    for name, value in weights.items():
        pattern = next((one for one in OTHER_NAMES if re.match(one, name)), "")
        new = re.sub(f"^{pattern}", OTHER_NAMES[pattern], name) if pattern else name
        if new in renamed:
            raise ValueError(f"the weights hold {new} twice, as {before[new]} and as {name}.")
        renamed[new], before[new] = value, name
    return renamed


def _check_mask_token(
    token: int, embedding: Tensor | None, weights: Mapping[str, Tensor], target: TargetInfo, hidden_size: int
) -> None:
    """Refuse a mask token that has no embedding.

    Raises:
        ValueError: names the id and the number of embeddings, or the shape of its own.
    """
    if embedding is not None:
        if embedding.shape != (hidden_size,):
            raise ValueError(f"{MASK_EMBEDDING} must be [{hidden_size}]; got {list(embedding.shape)}.")
        check_numbers(MASK_EMBEDDING, embedding)
        return
    shared = getattr(getattr(target.shared_embeddings, "embed_tokens", None), "weight", None)
    tables = [table for table in (shared, weights.get(EMBED_TENSOR)) if isinstance(table, Tensor) and table.dim() == 2]
    rows = max(len(table) for table in tables) if tables else target.vocab_size
    if not 0 <= token < rows:
        raise ValueError(f"mask_token_id must be one of the {rows} ids that have embeddings; got {token}.")


def export_dspark(folder: Path, drafter: HeadDrafter, target: TargetInfo, shared_embeddings: SharedEmbeddings) -> None:
    """Write a DSpark head in the `speculators` layout.

    What the layout has no tensor for is computed: the table of the bigram head, `fc` of a learned mixture, and a copy
    of the target's embeddings, in which the row of an id that is never drafted is the learned mask embedding.

    Args:
        folder: to write to.
        drafter: with its head on the CPU.
        target: facts about the target.
        shared_embeddings: of the target.
    """
    head, mask_token_id = drafter.head, next(iter(target.media_token_ids), 0)
    assert isinstance(head, DsparkHead)
    config = head.config
    weights = to_stored(head)
    for name in ("mask_embedding", "bigram_head.token_norm.weight", "bigram_head.token_proj.weight"):
        weights.pop(name, None)
    if (mixture := weights.pop("mixture", None)) is not None:
        weights["fc.weight"] = torch.cat([share * weights["fc.weight"] for share in mixture], dim=1)
    with torch.no_grad():
        ids = torch.arange(target.vocab_size)
        embeddings = shared_embeddings.embed(ids).float().clone()
        if head.bigram_head is not None:
            weights["markov_head.markov_w1.weight"] = head.bigram_head.to_table(shared_embeddings, target.vocab_size)
        embeddings[mask_token_id] = head.mask_embedding
    weights["embed_tokens.weight"] = embeddings
    if head.lm_head is not None:
        weights |= draft_vocabulary_tensors(drafter.draft_ids, target.vocab_size)
    elif drafter.draft_ids is not None:
        raise ValueError("--set draft_vocab of a dspark head limits what mmspec drafts; the layout has no counterpart.")
    else:
        weights["lm_head.weight"] = shared_embeddings.lm_head_rows(ids).float().clone()
    values = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": config.block_size,
        "sample_from_anchor": True,
        "mask_token_id": mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head,
        "aux_hidden_state_layer_ids": list(drafter.hidden_state_indices),
        "draft_vocab_size": config.draft_vocab_size or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "transformer_layer_config": layer_keys(config, target, "qwen3"),
        "speculators_config": speculators_section("dspark", config.block_size, target),
    }
    write_checkpoint(folder, weights, values)
