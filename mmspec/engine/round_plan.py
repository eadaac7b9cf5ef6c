"""`RoundPlan`: what the coming round scores, and `RowState`, what it reads of the rows before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import DraftTree

if TYPE_CHECKING:
    from mmspec.interfaces.round import DraftPart


class RowTensors(NamedTuple):
    """`RowState` on the sampling device: [B] int64 each, and [B] bool or None."""

    root_ids: Tensor
    num_emitted: Tensor
    max_emit: Tensor
    finished: Tensor | None


@dataclass
class RowState:
    """The rows before a round: lists on the host, and the same on the device after one transfer, if needed.

    Attributes:
        root_ids: last emitted tokens; 0 before the first.
        num_emitted: emitted tokens.
        max_emit: tokens that each row may emit in this round.
        finished: rows that emit padding; empty if there are none.
        device: on which ids are sampled.
    """

    root_ids: list[int]
    num_emitted: list[int]
    max_emit: list[int]
    finished: list[bool]
    device: torch.device

    @cached_property
    def on_device(self) -> RowTensors:
        """The same there."""
        lists = [self.root_ids, self.num_emitted, self.max_emit, *([self.finished] if self.finished else [])]
        root_ids, num_emitted, max_emit, *finished = from_host(lists, self.device, torch.long).unbind()
        return RowTensors(root_ids, num_emitted, max_emit, finished[0].bool() if finished else None)


@dataclass
class RoundPlan:
    """What the coming round scores.

    Attributes:
        num_nodes: N.
        rows: the rows before it.
        tree: the tree, not sanitized; None if it is drafted within the round.
        part: the draft within the round, where that is one recorded function; else None.
        num_proposed: nodes that the drafter proposed for it; None if it was not called.
    """

    num_nodes: int
    rows: RowState
    tree: DraftTree | None = None
    part: DraftPart | None = None
    num_proposed: int | None = None
