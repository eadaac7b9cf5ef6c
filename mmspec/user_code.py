"""Drafters and compressors of the user: what they return is checked, and their draws must not change sampled tokens."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.engine.draws import PrivateDraws
from mmspec.engine.recordings import Recordings
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, ReplicableDrafter, VerifyResult
from mmspec.interfaces.drafter import DRAFTER_CONTRACT
from mmspec.interfaces.round import pass_recordings

logger = logging.getLogger("mmspec")

TRIAL_TOKENS = 4
"""Length of the prompt with which a drafter is tried."""


def is_builtin(part: object) -> bool:
    """Whether a drafter or compressor is part of mmspec."""
    return type(part).__module__.startswith("mmspec.")


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
    if any(isinstance(value, nn.Module) for value in getattr(drafter, "__dict__", {}).values()):
        return
    ids = torch.arange(TRIAL_TOKENS)[None] % vocab_size
    states = {index: torch.zeros(1, TRIAL_TOKENS, hidden_size) for index in drafter.requirements.hidden_state_indices}
    real = torch.ones_like(ids, dtype=torch.bool)
    prompt = Prompt(ids, real, ~real, ids, hidden_states=states, vocab_size=vocab_size, reference_ids=[[]])
    try:
        with PrivateDraws():
            twin = drafter.replicate() if isinstance(drafter, ReplicableDrafter) else copy.deepcopy(drafter)
            tree = twin.propose(twin.begin(prompt), 2, [True])
    except Exception as error:  # it may need more of a prompt than there is in this one
        logger.info("mmspec: drafter %r could not be tried: %s", drafter.name, error)
        return
    _checked_tree(drafter, tree)


def _checked_tree(drafter: Drafter, tree: object) -> DraftTree:
    if not isinstance(tree, DraftTree):
        kind = type(drafter).__name__
        raise TypeError(f"{DRAFTER_CONTRACT}; got {kind}, whose propose returned {type(tree).__name__}.")
    return tree


def _checked_shapes(tree: DraftTree, num_rows: int) -> DraftTree:
    parts = {"tokens": tree.tokens, "parents": tree.parents, "node_mask": tree.node_mask}
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    if len({*shapes.values()}) > 1 or tree.tokens.dim() != 2 or len(tree.tokens) != num_rows:
        raise ValueError(f"a tree has tokens, parents and node_mask of shape [{num_rows}, N]; got {shapes}.")
    if tree.tokens.is_floating_point() or tree.parents.is_floating_point():
        raise ValueError("tokens and parents of a tree are integers; got floating point numbers.")
    return tree


class RngIsolatedDrafter:
    """A user's drafter, which draws from generators of its own, so that it cannot change sampled tokens."""

    def __init__(self, drafter: Drafter, private_draws: PrivateDraws) -> None:
        self.drafter = drafter
        self.private_draws = private_draws
        self.name = drafter.name
        self.requirements = drafter.requirements
        self.vocab_size = drafter.vocab_size

    def begin(self, prompt: Prompt) -> Any:
        with self.private_draws:
            return self.drafter.begin(prompt)

    def use_recordings(self, state: Any, recordings: Recordings) -> None:
        with self.private_draws:
            pass_recordings(self.drafter, state, recordings)

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        with self.private_draws:
            tree = _checked_tree(self.drafter, self.drafter.propose(state, max_nodes, active))
            return _checked_shapes(tree, len(active))

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        with self.private_draws:
            self.drafter.observe(state, result, hidden_states)
