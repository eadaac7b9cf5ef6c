"""What the losses of heads over pairs of tokens read, beside drafts from the same anchors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_target import FakeTarget, begin_decoding, build_layers_batch, build_layers_prompt
from torch import Tensor

from mmspec.drafters.heads.base.expand import PairExpander
from mmspec.drafters.training.batch import DraftModel
from mmspec.drafters.training.losses import LossAccumulator, LossInputs


def scores_beside_drafts(
    target: FakeTarget, name: str, drafter: Any, loss_of: Callable[[LossInputs], Any], bans_ids: bool
) -> Iterator[tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor | None]]]:
    """Of each label behind the anchors 7 to 11 the candidates and their scores in the loss, and those of a draft there.

    Yields:
        (slot of the label, (ids, scores) in the loss, (ids, scores) of the draft behind the text's own tokens). The
        latter are None behind a token that is no candidate.
    """
    batch, recorded, head = build_layers_batch(target), list[Any](), drafter.head
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LossAccumulator,
            "add",
            lambda self, slot, outputs, labels, mask, choose: recorded.append(
                (slot, outputs, labels.hidden_states, choose)
            ),
        )
        patch.setattr(LossAccumulator, "result", lambda self: (torch.zeros(()), {}))
        loss_of(LossInputs(DraftModel(head, "coupled", name), batch, target.shared_embeddings, torch.zeros(32)))
    expanders: dict[int, PairExpander] = {}
    for anchor in range(7, 12):
        state = begin_decoding(target, drafter, build_layers_prompt(target, anchor, (0, 0)))
        state.logit_bias = state.logit_bias if bans_ids else torch.zeros(40)
        expanders[anchor] = drafter.expander(state, 3)
    places = {tuple(batch.hidden_states[b, p].tolist()): (b, p) for b in range(2) for p in range(14)}
    for slot, outputs, labels, choose in recorded:
        candidates, scores = choose(head.logits(outputs, target.shared_embeddings, None))
        for index, label in enumerate(labels):
            row, position = places[tuple(label.tolist())]
            if (expander := expanders.get(position - slot)) is None:
                continue
            tokens, hidden, drafted = target.input_ids[:, position, None], expander.root_hidden, None
            if not slot or int(tokens[row]) in expander.candidates[row, slot - 1]:
                hidden = expander.expand(slot, expander.embed(tokens), hidden) if slot else hidden
                drafted = expander.logits(slot, hidden)[row, 0]
            yield slot, (candidates[index], scores[index]), (expander.candidates[row, slot], drafted)
