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

from mmspec.interfaces import NO_LIMIT, Compressor, VisualGrid, VisualTokens


@dataclass(frozen=True)
class CompressionRecord:
    """What a compressor made of the visual tokens of one row.

    Attributes:
        way: the compressor, or what it chose for this row, as in "pool:49".
        visual: visual tokens of the prompt. kept: tokens that the drafter was shown instead.
        numbers: which ones they are, counted from 0 over the row's visual tokens; None if they were mixed.
        grids: how the visual tokens lie, `start` counted over the row's; empty if the family cannot tell.
    """

    choice: str
    num_visual_tokens: int
    num_compressed_tokens: int
    kept_indices: tuple[int, ...] | None = None
    grids: tuple[VisualGrid, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        numbers = None if self.kept_indices is None else list(self.kept_indices)
        grids = [asdict(one) for one in self.grids]
        return {
            "way": self.choice,
            "visual": self.num_visual_tokens,
            "kept": self.num_compressed_tokens,
            "numbers": numbers,
            "grids": grids,
        }


def compressor_label(compressor: Compressor) -> str:
    """Its name, with the number of tokens if that can be chosen: "pool:49", "drop"."""
    fixed = compressor.max_tokens in (0, NO_LIMIT)
    return compressor.name if fixed else f"{compressor.name}:{compressor.max_tokens}"


class RecordingCompressor:
    """A compressor that notes what another one keeps, for one call.

    Attributes:
        guard: makes the context in which the other one works.
    """

    def __init__(self, inner: Compressor) -> None:
        self.inner, self.name, self.max_tokens = inner, inner.name, inner.max_tokens
        self.context_factory: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._ways: tuple[str, ...] = ()
        self._noted: tuple[Tensor, Tensor, Tensor] | None = None
        self._grids: tuple[VisualGrid, ...] = ()

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """See `mmspec.interfaces.Compressor`."""
        if isinstance(self.inner, nn.Module):  # made where its file was read, or fresh from its class
            self.inner.to(visual_tokens.hidden_states.device).eval()
        with self.context_factory():
            few = self.inner.compress(visual_tokens, query, max_tokens)
        origin = few.source_indices
        if few is visual_tokens:
            origin = torch.arange(few.mask.shape[1], device=few.mask.device).expand(few.mask.shape)
        if origin is None:
            origin = torch.full_like(few.mask, -1, dtype=torch.long)
        self._ways = few.choices or (compressor_label(self.inner),) * len(few.mask)
        self._noted = visual_tokens.mask.sum(1), few.mask, origin
        self._grids = visual_tokens.grids
        return few

    def records(self) -> list[CompressionRecord]:
        """What was noted; empty if nothing was asked. Waits for the device."""
        if self._noted is None:
            return []
        counts, mask, origin = self._noted
        # In one copy: the count, and of each token its number, -1 for a mixture, -2 where none stands.
        host = torch.cat((counts[:, None], torch.where(mask, origin, -2)), dim=1).tolist()
        return [self._shown(row, *numbers) for row, numbers in enumerate(host)]

    def _shown(self, row: int, visual: int, *numbers: int) -> CompressionRecord:
        kept = tuple(number for number in numbers if number > -2)
        grids = tuple(one for one in self._grids if one.row == row)
        return CompressionRecord(self._ways[row], visual, len(kept), None if -1 in kept else kept, grids)


__all__ = ["CompressionRecord", "RecordingCompressor", "compressor_label"]
