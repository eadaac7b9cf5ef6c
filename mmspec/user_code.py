"""Drafters and compressors of the user: what they return is checked."""

from __future__ import annotations

import copy
import inspect
import logging

import torch
from torch import nn

from mmspec.engine.draws import PrivateDraws
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt
from mmspec.interfaces.drafter import DRAFTER_CONTRACT, UserDrafter

logger = logging.getLogger("mmspec")

TRIAL_TOKENS = 4
"""Length of the prompt with which a drafter is tried."""


def is_builtin(part: object) -> bool:
    """Whether a drafter or compressor is part of mmspec."""
    return type(part).__module__.startswith("mmspec.") and not isinstance(part, UserDrafter)


def check_trees(drafter: Drafter, vocab_size: int, hidden_size: int) -> None:
    """Refuse a drafter of the user whose `propose` returns something else than a tree, before the first call.

    An annotation settles it; without one a copy of the drafter is asked for a tree after a prompt of four tokens. What
    cannot be copied, holds modules or fails on such a prompt is checked in calls only.

    Args:
        vocab_size: V of the target.
        hidden_size: D of the target.

    Raises:
        TypeError: it returns something else.
    """
    annotation = inspect.signature(drafter.propose).return_annotation
    if is_builtin(drafter) or str(annotation).endswith("DraftTree'>") or str(annotation).endswith("DraftTree"):
        return
    inner = drafter.inner if isinstance(drafter, UserDrafter) else drafter
    if any(isinstance(value, nn.Module) for value in getattr(inner, "__dict__", {}).values()):
        return
    ids = torch.arange(TRIAL_TOKENS)[None] % vocab_size
    states = {index: torch.zeros(1, TRIAL_TOKENS, hidden_size) for index in drafter.requirements.hidden_state_indices}
    real = torch.ones_like(ids, dtype=torch.bool)
    prompt = Prompt(ids, real, ~real, ids, hidden_states=states, vocab_size=vocab_size, reference_ids=[[]])
    try:
        with PrivateDraws():
            twin = drafter.replicate() or copy.deepcopy(drafter)
            tree = twin.propose(twin.begin(prompt), 2, [True])
    except Exception as error:  # it may need more of a prompt than there is in this one
        logger.info("mmspec: drafter %r could not be tried: %s", drafter.name, error)
        return
    if not isinstance(tree, DraftTree):
        kind = type(inner).__name__
        raise TypeError(f"{DRAFTER_CONTRACT}; got {kind}, whose propose returned {type(tree).__name__}.")
