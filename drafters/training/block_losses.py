"""The losses of heads that say several tokens a pass: FLASH, parallel, Falcon. Knows tensors only.

All sum what a head of one token is taught (`training_losses.Sum`) over the places of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.block.falcon import FalconHead
from mmspec.drafters.training.losses import (
    Asked,
    Lesson,
    Memory,
    Pupil,
    Rows,
    Sum,
    Weights,
    When,
    learned,
    rows_of,
    shifted,
)
from mmspec.interfaces import SharedEmbeddings

Told = tuple[Tensor, dict[str, float]]


def flash_losses(
    pupil: Pupil, lesson: Lesson, words: SharedEmbeddings, placeholder: Tensor, weights: Weights, when: When
) -> Told:
    """Every slot says the state as many places on (FLASH, section 3.3); a chain adds to its scores what the word does
    that the target said before it."""
    head, data = pupil.head, rows_of(pupil, lesson, placeholder)
    asked, told = Asked(data), Sum(words, weights, data.cost)
    features = head.block(Memory(head, asked).read(data.rows, data.positions))
    for slot in range(head.config.block):
        learn, added = asked.learned(slot), None
        said = features[:, :, slot][learn]
        if slot and head.chain is not None:
            added = head.chain(said, asked.of(shifted(data.following, slot))[learn].to(said.dtype))
        told.add(slot, said, asked.of(shifted(data.goal, slot))[learn], added)
    return told.result()


def parallel_losses(
    pupil: Pupil, lesson: Lesson, words: SharedEmbeddings, placeholder: Tensor, weights: Weights, when: When
) -> Told:
    """Behind every row its own learned rows, which see the text up to it and each other (ParallelSpec, section 3)."""
    head, data = pupil.head, rows_of(pupil, lesson, placeholder)
    asked, told = Asked(data), Sum(words, weights, data.cost)
    memory, rows = Memory(head, asked), data.rows
    for slot in range(head.config.block):
        out = memory.read(rows, data.positions + slot)
        if slot and head.link is not None:
            out = head.link(out, asked.of(shifted(data.following, slot)).to(out.dtype))
        learn = asked.learned(slot)
        told.add(slot, out[learn], asked.of(shifted(data.goal, slot))[learn])
        if slot + 1 < head.config.block:
            rows = head.slots[slot].to(data.rows.dtype).expand_as(out)
    return told.result()


SHOWN = 0.4
"""Share of the wrong rows that are shown the answer when the training begins; it falls evenly to none."""


def falcon_losses(
    pupil: Pupil, lesson: Lesson, words: SharedEmbeddings, placeholder: Tensor, weights: Weights, when: When
) -> Told:
    """Coupled sequential glancing distillation (Falcon, section 3.2).

    A first look finds how many rows are wrong; as many, times a share that falls over the training, are shown their own
    answer, so that the others of their block learn with it. Then blocks are drafted behind blocks, as in a tree.
    """
    head, data, k = pupil.head, rows_of(pupil, lesson, placeholder), pupil.head.config.block
    n = data.rows.shape[1]
    start = int(torch.randint(k, (), generator=when.rng))
    block = (torch.arange(n, device=data.rows.device) + start) // k
    shown = torch.zeros_like(data.learn)
    if (share := SHOWN * (1 - when.done)) > 0:
        with torch.no_grad():
            out = _Blocks(head, data, block).read(data.rows, data.positions)
            shown = _glanced(out, data, words, block, k, share, when.rng)
    answers = head.fuse(shifted(data.following, k), shifted(data.goal, k - 1))
    rows = torch.where(shown[..., None], answers, data.rows)
    memory, told = _Blocks(head, data, block), Sum(words, weights, data.cost)
    # A whole block further per step; the step after the first reads what the head said itself.
    for step in range(1 + min(1, weights.rollout)):
        out = memory.read(rows, data.positions + step * k)
        place = (torch.arange(n, device=block.device) + start) % k
        for slot in range(k):
            far = k - 1 + step * k
            learn = learned(data, far) & ~shown & (place == slot)
            told.add(slot + step * k, out[learn], shifted(data.goal, far)[learn])
        rows = head.fuse(shifted(data.following, (step + 1) * k), out)
    return told.result()


def _glanced(
    out: Tensor, data: Rows, words: SharedEmbeddings, block: Tensor, k: int, share: float, rng: torch.Generator
) -> Tensor:
    """[B, n] bool, which rows are shown their answer: of blocks drawn by chance a first part, never all."""
    learn, goal = learned(data, k - 1), shifted(data.goal, k - 1)
    wrong = (words.lm_head(out).argmax(-1) != words.lm_head(goal).argmax(-1)) & learn
    rate = share * wrong.sum(1, keepdim=True) / learn.sum(1, keepdim=True).clamp(min=1)
    blocks = int(block[-1]) + 1
    # A chosen block shows 1 to k - 1 of its rows, k / 2 in the mean.
    chance = torch.rand(len(out), blocks, generator=rng).to(out.device)
    many = torch.randint(1, k, (len(out), blocks), generator=rng).to(out.device)
    many = torch.where(chance < 2 * rate, many, 0)
    place = torch.arange(len(block), device=out.device) - torch.searchsorted(block, block)
    return learn & (place < many[:, block])


class _Blocks(Memory):
    """In step 0 a row sees all blocks up to its own; later also what its block was in the steps between. All rows are
    asked."""

    def __init__(self, head: FalconHead, data: Rows, block: Tensor) -> None:
        super().__init__(head, Asked(data, torch.ones_like(data.learn)))
        self.before, self.own = block <= block[:, None], block == block[:, None]

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._keep(queries.shape[1] // keys.shape[1], keys, values)
        mask = torch.cat([self.before, *[self.own] * (len(self.keys) - 1)], dim=1)
        return functional.scaled_dot_product_attention(
            queries, torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2), mask
        )


__all__ = ["falcon_losses", "flash_losses", "parallel_losses"]
