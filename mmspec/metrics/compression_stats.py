"""Records, per prompt row, how a compressor reduced the visual tokens that the drafter reads.

`RecordingCompressor` wraps a compressor and stores the result on the device; one small copy to the host after the call
yields the records. Independent of particular drafters and compressors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.interfaces import NO_LIMIT, Compressor, VisualGrid, VisualTokens

_MIXTURE = -1  # source index of a token that mixes several
_PADDING = -2


@dataclass(frozen=True)
class CompressionRecord:
    """Result of a compressor for one row.

    Attributes:
        choice: label of the compressor, or of what it chose for this row, such as "pool:49".
        num_visual_tokens: visual tokens of the prompt row.
        num_compressed_tokens: tokens that the drafter reads instead.
        kept_indices: which visual tokens these are, counted from 0 within the row; None if tokens were mixed.
        grids: grids of the row's visual tokens, `start` counted within the row; empty if the adapter cannot derive
            them.
    """

    choice: str
    num_visual_tokens: int
    num_compressed_tokens: int
    kept_indices: tuple[int, ...] | None = None
    grids: tuple[VisualGrid, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "choice": self.choice,
            "num_visual_tokens": self.num_visual_tokens,
            "num_compressed_tokens": self.num_compressed_tokens,
            "kept_indices": None if self.kept_indices is None else list(self.kept_indices),
            "grids": [asdict(grid) for grid in self.grids],
        }


def compressor_label(compressor: Compressor) -> str:
    """Name of a compressor, with the number of tokens if it takes one: "pool:49", "drop"."""
    takes_no_number = compressor.max_tokens in (0, NO_LIMIT)
    return compressor.name if takes_no_number else f"{compressor.name}:{compressor.max_tokens}"


class RecordingCompressor:
    """A compressor that delegates to another one and records its result, for one call.

    Attributes:
        inner: the compressor that it delegates to.
    """

    def __init__(self, inner: Compressor, context: AbstractContextManager[Any] | None = None) -> None:
        """
        Args:
            inner: see the attribute.
            context: in which it runs, more than once; None for none.
        """
        self.inner = inner
        self._context = nullcontext() if context is None else context
        self.name = inner.name
        self.max_tokens = inner.max_tokens
        self._choices: tuple[str, ...] = ()
        self._result: tuple[Tensor, Tensor, Tensor] | None = None  # (tokens per row, mask, source indices)
        self._grids: tuple[VisualGrid, ...] = ()

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        if isinstance(self.inner, nn.Module):  # loaded on the CPU, or in train mode
            self.inner.to(visual_tokens.hidden_states.device).eval()
        with self._context:
            compressed = self.inner.compress(visual_tokens, query, max_tokens)
        mask = compressed.mask
        source_indices = compressed.source_indices
        if compressed is visual_tokens:
            source_indices = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        if source_indices is None:
            source_indices = torch.full_like(mask, _MIXTURE, dtype=torch.long)
        self._choices = compressed.choices or (compressor_label(self.inner),) * len(mask)
        self._result = visual_tokens.mask.sum(1), mask, source_indices
        self._grids = visual_tokens.grids
        return compressed

    def records(self) -> list[CompressionRecord]:
        """One record per row; empty if `compress` was not called. Synchronises with the device."""
        if self._result is None:
            return []
        num_visual, mask, source_indices = self._result
        # One copy to the host per call: [B, 1 + K], the number of visual tokens and the source indices.
        host = torch.cat((num_visual[:, None], torch.where(mask, source_indices, _PADDING)), dim=1).tolist()
        return [self._record(row, *numbers) for row, numbers in enumerate(host)]

    def _record(self, row: int, num_visual: int, *source_indices: int) -> CompressionRecord:
        indices = tuple(index for index in source_indices if index != _PADDING)
        grids = tuple(grid for grid in self._grids if grid.row == row)
        kept_indices = None if _MIXTURE in indices else indices
        return CompressionRecord(self._choices[row], num_visual, len(indices), kept_indices, grids)
