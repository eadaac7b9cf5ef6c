"""Tiny models and their drafters, trained for a few minutes on the text of our documents: what both tests share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import mmspec

ROOT = Path(__file__).resolve().parents[2]
FIRST_ID, LENGTH, BATCH, STEPS, DEPTH, VOCAB = 7, 64, 12, 500, 3, 120
HELD_OUT = 2000
"""Characters at the end that are not trained on."""


def corpus() -> Tensor:
    """[n] int64, the characters of the documents."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = torch.tensor([ord(letter) for letter in " ".join(text.lower().split()) if " " <= letter <= "~"])
    return (ids - ord(" ")).clamp(max=VOCAB - FIRST_ID - 1) + FIRST_ID


def train(parameters: list[Tensor], loss_of: Callable[[Tensor], Tensor], steps: int = STEPS) -> None:
    """Optimiser steps on random pieces [B, LENGTH + DEPTH + 1] of the text."""
    text = corpus()[:-HELD_OUT]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = torch.randint(len(text) - LENGTH - DEPTH - 2, (BATCH,), generator=rng)
        loss = loss_of(text[start[:, None] + torch.arange(LENGTH + DEPTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def acceptance(
    model: PreTrainedModel, build: Callable[[], Any], context: Callable[[Any], AbstractContextManager[None]]
) -> tuple[float, float]:
    """Share of first tokens that are accepted, and tokens per round and row of drafts of three.

    Args:
        model: the target.
        build: a new drafter.
        context: of its calls.
    """
    text = corpus()[-HELD_OUT:]
    prompts = torch.stack([text[at : at + 48] for at in range(0, 1600, 200)])
    found = []
    for size in (2, 4):
        drafter = build()
        with context(drafter):
            mmspec.patch(model, drafter=drafter, tree_size=size)
            try:
                model.generate(prompts, max_new_tokens=64, do_sample=False, eos_token_id=None)
                stats = mmspec.stats(model)
            finally:
                mmspec.unpatch(model)
        assert not stats.fallback_reason
        found.append(stats.acceptance_rate if size == 2 else stats.tau)
    return found[0], found[1]
