"""Tiny models and their drafters, trained for a few minutes on a text that does not change: what both tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz import patch_model
from torch import Tensor
from transformers import PreTrainedModel

import mmspec

TEXT = Path(__file__).resolve().parents[2] / "research" / "changelog-before-0.1.0.md"
TEXT_SHA256 = "27c93be9db71c4fd8d7982ba11de136114e78c51b307e84ead8ec5bf6d20e405"
FIRST_ID, BATCH, STEPS, DEPTH, VOCAB = 7, 8, 500, 3, 120
PROMPT, ANSWER = 48, 64
"""Tokens of the calls whose acceptance is measured."""
LENGTH = PROMPT + ANSWER
"""Of the pieces that are trained on, since a model that has seen fewer positions does not know those behind them."""
HELD_OUT = 2000
"""Characters at the end that are not trained on."""


@cache
def corpus() -> Tensor:
    """[n] int64, the characters of the changelog before the first version, which nobody edits any more.

    Raises:
        AssertionError: it was edited.
    """
    content = TEXT.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(content).hexdigest() == TEXT_SHA256, (
        f"{TEXT.name} was edited, but slow tests train on it, and their figures are of the text as it was. Undo "
        "the edit; or run tests/drafters/mtp/test_*_learns.py (-m slow) and store the file's new SHA-256 here."
    )
    text = " ".join(content.decode("utf-8").lower().split())
    ids = torch.tensor([ord(letter) for letter in text if " " <= letter <= "~"])
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
    prompts = torch.stack([text[at : at + PROMPT] for at in range(0, 1600, 200)])
    found = []
    for size in (2, 4):
        drafter = build()
        with context(drafter), patch_model(model, drafter=drafter, tree_size=size):
            model.generate(prompts, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
            stats = mmspec.stats(model)
        assert not stats.fallback_reason
        found.append(stats.acceptance_rate if size == 2 else stats.tau)
    return found[0], found[1]
