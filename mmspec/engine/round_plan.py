"""`RowState`: what a round reads of the rows before it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mmspec.engine.host_copy import from_host


class RowState:
    """The rows before a round: lists on the host, and the same on the sampling device after one transfer, if needed.

    Attributes:
        host_root_ids: last emitted tokens; 0 before the first.
        host_num_emitted: emitted tokens.
        host_max_emit: tokens that each row may emit in this round.
        host_finished: rows that emit padding; empty if there are none.
    """

    def __init__(
        self,
        root_ids: list[int],
        num_emitted: list[int],
        max_emit: list[int],
        finished: list[bool],
        device: torch.device,
    ) -> None:
        """Arguments: see the attributes."""
        self.host_root_ids, self.host_num_emitted, self.host_max_emit = root_ids, num_emitted, max_emit
        self.host_finished = finished if any(finished) else []
        self._device = device

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`root_ids`, `num_emitted`, `max_emit` and `finished`."""
        lists = [self.host_root_ids, self.host_num_emitted, self.host_max_emit]
        if self.host_finished:
            lists.append([int(one) for one in self.host_finished])
        root_ids, num_emitted, max_emit, *finished = from_host(lists, self._device).unbind()
        return root_ids, num_emitted, max_emit, finished[0].bool() if finished else None

    @property
    def root_ids(self) -> Tensor:
        """[B] int64."""
        return self.on_device[0]

    @property
    def num_emitted(self) -> Tensor:
        """[B] int64."""
        return self.on_device[1]

    @property
    def max_emit(self) -> Tensor:
        """[B] int64."""
        return self.on_device[2]

    @property
    def finished(self) -> Tensor | None:
        """[B] bool, or None."""
        return self.on_device[3] if self.host_finished else None
