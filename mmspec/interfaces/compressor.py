"""What a drafter needs of a compressor: `Compressor`, one with a gate, and `VisualTokens`, which it reduces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

NO_LIMIT = 1 << 30
"""`Compressor.max_tokens` of compressors that may keep every token."""


@dataclass(frozen=True)
class VisualGrid:
    """A run of visual tokens of one prompt row that forms a grid. Only separators of lines are in between.

    Attributes:
        row: batch row.
        start: index of its first token in the prompt as passed to `generate` (padding included).
        height: lines of the grid, in tokens.
        width: columns of the grid, in tokens, newline tokens excluded.
        media_index: index of the image or video, counted over the batch in input order.
        role: `base` (whole image), `tiles` (high-resolution crops), `frame` (one time step of a video) or `newline`
            (a lone separator token, a 1 x 1 grid).
        has_newlines: whether a newline token follows each line (LLaVA-NeXT, LLaVA-OneVision).
        frame: frame index within the video; 0 for images.
        line_gap: text tokens between two lines, which the grid does not contain ([IMG_BREAK] of Mistral 3). 0 once
            `start` counts visual tokens only, as for compressors.
    """

    row: int
    start: int
    height: int
    width: int
    media_index: int
    role: str = "base"
    has_newlines: bool = False
    frame: int = 0
    line_gap: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of visual tokens, newline tokens included."""
        return self.height * (self.width + int(self.has_newlines))

    @property
    def token_indices(self) -> tuple[int, ...]:
        """Index of each visual token in the prompt row, newline tokens included."""
        line = self.width + int(self.has_newlines)
        starts = range(self.start, self.start + self.height * (line + self.line_gap), line + self.line_gap)
        return tuple(index for start in starts for index in range(start, start + line))


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of one batch, input and output of a compressor.

    Attributes:
        inputs_embeds: [B, M, D] projected visual embeddings.
        hidden_states: [B, M, D] target hidden states that a drafter pairs with them: those one position before.
        mask: [B, M] bool, True for tokens, False for padding.
        position_ids: [B, M] or [axes, B, M] int64.
        grids: the grids that the tokens form, `start` counted in M.
        source_indices: set by a compressor, [B, K] int64: index in M of each output token, -1 for mixtures; None if
            unknown.
        choices: set by a compressor that chooses per row: label of each row's choice, such as "pool:49".
    """

    inputs_embeds: Tensor
    hidden_states: Tensor
    mask: Tensor
    position_ids: Tensor
    grids: tuple[VisualGrid, ...] = ()
    source_indices: Tensor | None = None
    choices: tuple[str, ...] | None = None


@runtime_checkable
class Compressor(Protocol):
    """Reduces the visual tokens that the drafter reads. The target reads all of them, so the output cannot change.

    It may have two further attributes: `hidden_size`, D of the hidden states and embeddings for which it has weights;
    and `needs_grids`, True if it merges neighbours in the grid of an image or frame, and is refused for a model family
    whose grids are unknown. Rows of other families without grids, as in a continued conversation, are merged as one
    line.
    """

    @property
    def name(self) -> str:
        """Name as accepted by `mmspec.patch(compressor=...)`, without the number of tokens."""

    @property
    def max_tokens(self) -> int:
        """Upper bound of tokens per row, passed back to `compress`; `NO_LIMIT` if it may keep all of them."""

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Reduce to at most `max_tokens` tokens per row. The same operator acts on embeddings and hidden states.

        Args:
            visual_tokens: M tokens per row.
            query: [B, D] hidden state of the last prompt token, or None.
            max_tokens: K.
        """


@dataclass(frozen=True)
class GateObservation:
    """Input of a `GatedCompressor`'s gate and the penalty of the branch taken.

    Attributes:
        features: [B, F] float32, input of the gate.
        penalty: [B] float32, in units of the training loss.
    """

    features: Tensor
    penalty: Tensor


@runtime_checkable
class GatedCompressor(Compressor, Protocol):
    """A compressor that chooses one of several branches per row, with a trainable gate."""

    @property
    def branches(self) -> Sequence[Compressor]:
        """The compressors it chooses from."""

    def force_branch(self, branch: int) -> AbstractContextManager[list[GateObservation]]:
        """Use one branch for every row within the context.

        Returns:
            A context that yields a list with one `GateObservation` per call of `compress`.
        """

    def fit_gate(self, features: Tensor, costs: Tensor) -> None:
        """Fit the gate to the costs [n, branches] of each branch at features [n, F]."""
