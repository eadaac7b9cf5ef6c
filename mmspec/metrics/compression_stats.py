"""What a drafter was shown of the pictures, row by row: which compressor, how many tokens, which ones.

`Watch` is a compressor that does what another one does and notes it, on the device; one small copy to the host, after
the call, tells the rest. Knows no drafter and no compressor by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.interfaces import EVERY_TOKEN, Compressor, Segment, VisualTokens


@dataclass(frozen=True)
class Shown:
    """What a compressor made of the visual tokens of one row.

    Attributes:
        way: the compressor, or what it chose for this row, as in "pool:49".
        visual: visual tokens of the prompt. kept: tokens that the drafter was shown instead.
        numbers: which ones they are, counted from 0 over the row's visual tokens; None if they were mixed.
        grids: how the visual tokens lie, `start` counted over the row's; empty if the family cannot tell.
    """

    way: str
    visual: int
    kept: int
    numbers: tuple[int, ...] | None = None
    grids: tuple[Segment, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        numbers = None if self.numbers is None else list(self.numbers)
        grids = [asdict(one) for one in self.grids]
        return {"way": self.way, "visual": self.visual, "kept": self.kept, "numbers": numbers, "grids": grids}


def label(compressor: Compressor) -> str:
    """Its name, with the number of tokens if that can be chosen: "pool:49", "drop"."""
    fixed = compressor.tokens in (0, EVERY_TOKEN)
    return compressor.name if fixed else f"{compressor.name}:{compressor.tokens}"


class Watch:
    """A compressor that notes what another one keeps, for one call.

    Attributes:
        guard: makes the context in which the other one works.
    """

    def __init__(self, inner: Compressor) -> None:
        self.inner, self.name, self.tokens = inner, inner.name, inner.tokens
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._ways: tuple[str, ...] = ()
        self._noted: tuple[Tensor, Tensor, Tensor] | None = None
        self._grids: tuple[Segment, ...] = ()

    def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
        """See `mmspec.interfaces.Compressor`."""
        if isinstance(self.inner, nn.Module):  # made where its file was read, or fresh from its class
            self.inner.to(visual.states.device).eval()
        with self.guard():
            few = self.inner.compress(visual, query, budget)
        origin = few.origin
        if few is visual:
            origin = torch.arange(few.mask.shape[1], device=few.mask.device).expand(few.mask.shape)
        if origin is None:
            origin = torch.full_like(few.mask, -1, dtype=torch.long)
        self._ways = few.ways or (label(self.inner),) * len(few.mask)
        self._noted = visual.mask.sum(1), few.mask, origin
        self._grids = visual.segments
        return few

    def rows(self) -> list[Shown]:
        """What was noted; empty if nothing was asked. Waits for the device."""
        if self._noted is None:
            return []
        counts, mask, origin = self._noted
        # In one copy: the count, and of each token its number, -1 for a mixture, -2 where none stands.
        host = torch.cat((counts[:, None], torch.where(mask, origin, -2)), dim=1).tolist()
        return [self._shown(row, *numbers) for row, numbers in enumerate(host)]

    def _shown(self, row: int, visual: int, *numbers: int) -> Shown:
        kept = tuple(number for number in numbers if number > -2)
        grids = tuple(one for one in self._grids if one.row == row)
        return Shown(self._ways[row], visual, len(kept), None if -1 in kept else kept, grids)


__all__ = ["Shown", "Watch", "label"]
