"""Tiny models and their drafters, trained for a few minutes on descriptions of scenes: what both tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.app.scenes.grammar import generate_qa_turns
from mmspec.app.scenes.world import generate_scene

NUM_SCENES, NUM_TURNS = 600, 6
FIRST_ID, LENGTH, BATCH, STEPS, DEPTH, VOCAB = 7, 64, 12, 500, 3, 120
HELD_OUT = 2000
"""Characters at the end that are not trained on."""


@cache
def corpus() -> Tensor:
    """[n] int64, the characters of questions and answers about scenes, as the toy model is trained on."""
    rng, turns = random.Random(0), list[str]()
    for seed in range(NUM_SCENES):
        turns += [f"{turn.question} {turn.answer}" for turn in generate_qa_turns(generate_scene(seed), rng, NUM_TURNS)]
    ids = torch.tensor([ord(letter) for letter in " ".join(turns).lower() if " " <= letter <= "~"])
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
