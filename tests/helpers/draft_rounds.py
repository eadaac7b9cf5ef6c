"""Every draft of a call with a head from a folder, and the text with what a slow reader needs to draft the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz
import torch
from slow_heads import Sequences
from tiny_models import Inputs
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.interfaces import VerifyResult
from mmspec.metrics.stats import Stats
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

MEDIA_IDS = ("image_token_id", "video_token_id")
"""Keys of a model's config, of which it has one or both."""


@dataclass
class DraftedRound:
    """One draft of one row: a chain.

    Attributes:
        num_known: tokens of the text before it, prompt included, padding not.
        tokens: of the chain.
        logits: [levels, V'] that they come from, -inf where nothing is drafted; empty if the tree grew in C.
    """

    num_known: int
    tokens: list[int]
    logits: Tensor


@dataclass
class DraftedCall:
    """A call.

    Attributes:
        rows: the drafts of each row.
        sequences: [B, T] the output, prompt included.
        drafter: that drafted.
        num_c: prompts after which the head ran in C.
        stats: of the call.
    """

    rows: list[list[DraftedRound]]
    sequences: Tensor
    drafter: HeadDrafter
    num_c: int = 0
    stats: Stats = field(default_factory=Stats)


def run_call(model: PreTrainedModel, folder: Path, inputs: Inputs, *, num_tokens: int, in_c: bool) -> DraftedCall:
    """Generate greedily with chains of a head, in the head's own forward or in C."""
    drafter: Any = resolve_drafter(str(folder), find_adapter(model))
    drafter.top_k = 1
    mask = inputs["attention_mask"]
    known = mask.sum(1).tolist()
    call = DraftedCall([[] for _ in known], torch.zeros(0), drafter)
    found: list[Tensor] = []
    propose, observe, logits, c_draft = drafter.propose, drafter.observe, drafter.logits, drafter.c_draft
    block = getattr(drafter, "block", None)

    def spy_logits(*args: Any) -> Tensor:
        found.append(logits(*args))  # of one level, or of all positions of a block
        return found[-1]

    def spy_block(state: Any) -> Any:
        features, raw = block(state)
        found.append(raw + state.logit_bias)
        return features, raw

    def spy_propose(state: Any, max_nodes: int, active: Any) -> Any:
        found.clear()
        tree = propose(state, max_nodes, active)
        for row, rounds in enumerate(call.rows):
            if active[row]:
                levels = torch.cat([part[row] for part in found]) if found else torch.zeros(0)
                rounds.append(DraftedRound(known[row], tree.tokens[row, 1:].tolist(), levels))
        return tree

    def spy_observe(state: Any, result: VerifyResult, hidden_states: Any) -> None:
        for row, emitted in enumerate(result.emitted_ids):
            known[row] += len(emitted)
        observe(state, result, hidden_states)

    def spy_c(state: Any) -> Any:
        found_draft = c_draft(state) if in_c else None
        call.num_c += found_draft is not None
        return found_draft

    media_ids = [getattr(model.config, name) for name in MEDIA_IDS if hasattr(model.config, name)]
    drafter.propose, drafter.observe, drafter.logits, drafter.c_draft = (
        spy_propose,
        spy_observe,
        spy_logits,
        spy_c,
    )
    if block is not None:
        drafter.block = spy_block
    with (
        fuzz.override_generation_config(model, None),
        fuzz.patch_model(model, drafter, tree_size=drafter.max_depth + 1),
    ):
        call.sequences = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, suppress_tokens=media_ids)
        call.stats = mmspec.stats(model)
    return call


@torch.no_grad()
def read_text(model: PreTrainedModel, inputs: Inputs, call: DraftedCall, row: int = 0) -> Sequences:
    """The text of a row, without padding, from one forward of the whole of it.

    The images of a batch are those of its rows in order; all of them are given with the row, which must be the only one
    that has any.
    """
    prompt_length = inputs["input_ids"].shape[1]
    mask = inputs["attention_mask"][row].bool()
    ids = torch.cat((call.sequences[row, :prompt_length][mask], call.sequences[row, prompt_length:]))
    media = {name: value for name, value in inputs.items() if "pixel" in name or "grid" in name or "sizes" in name}
    image_id, video_id = (getattr(model.config, name, -1) for name in MEDIA_IDS)
    is_visual = (ids == image_id) | (ids == video_id)
    whole: dict[str, Any] = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
    whole |= media if bool(is_visual.any()) else {}
    if "mm_token_type_ids" in inputs:
        whole["mm_token_type_ids"] = is_visual[None].int() + (ids[None] == video_id).int()
    received: dict[int, Tensor] = {}  # by layers, where deepstack adds features to what the one below returns
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, index=index: received.setdefault(index, args[0]))
        for index, layer in enumerate(model.model.language_model.layers)
        if hasattr(model.model.language_model, "_deepstack_process")
    ]
    outputs = model(**whole, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    states = [received.get(index, state) for index, state in enumerate(outputs.hidden_states)]
    positions = [(index, index, index) for index in range(len(ids))]
    if hasattr(model.model, "get_rope_index") and bool(is_visual.any()):
        given = {name: value for name, value in whole.items() if "pixel" not in name}
        found, _ = model.model.get_rope_index(**given)
        positions = [(time, height, width) for time, height, width in found[:, 0].T.tolist()]
    return Sequences(
        ids=ids,
        embeds=outputs.hidden_states[0][0],
        states=tuple(state[0] for state in states),
        is_visual=is_visual,
        positions=positions,
        embedding=model.get_input_embeddings().weight.detach(),
        lm_head=model.get_output_embeddings().weight.detach(),
    )


__all__ = ["DraftedCall", "DraftedRound", "read_text", "run_call"]
