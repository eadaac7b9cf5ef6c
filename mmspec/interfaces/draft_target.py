"""What a drafter needs to draft with a whole model: `DraftTarget`, and where it comes from.

A model that drafts is decoded like a target: it scores chains behind a KV cache with one length per row, commits and
crops. `LayerSubsets` opens the target itself with fewer layers, `DraftModelSource`
another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from mmspec.cpu.chain_types import ChainRequest, DraftedChains
from mmspec.interfaces.target import Target


class DraftTarget(Target, Protocol):
    """A target that a drafter decodes with."""

    @property
    def cached_lengths(self) -> list[int]:
        """Positions after the prompt that the cache of each row holds."""

    def draft_chain(self, request: ChainRequest) -> DraftedChains | None:
        """Draft a chain per row in one call, and commit what was read.

        Args:
            request: which chains.

        Returns:
            None, and nothing is done, where chains take one `score` after the other.
        """


class LayerSubsets(Protocol):
    """Opens the target of a call with some of its decoder layers, over the target's own KV cache.

    Committed positions have the keys and values that the whole target computed. The positions of a draft are written
    behind them, where the target's next `score` overwrites them: nothing but `cached_lengths` is to be restored.

    Attributes:
        num_layers: decoder layers of the target.
        exit_limit: number of layers before the first one that reads the keys and values of another layer, so that it
            may need a layer that is left out; None if there is none.
    """

    num_layers: int
    exit_limit: int | None

    @property
    def byte_share(self) -> float:
        """Bytes of the weights that a forward of all layers reads, as a fraction of the target's: of a copy below 1."""

    @property
    def is_made(self) -> bool:
        """Whether there is nothing to make."""

    def make(self) -> bool:
        """Make the copy that has these layers, if that is to be done; whether they can be opened now."""

    def open(self, layers: Sequence[int]) -> DraftTarget:
        """The target that runs these decoder layers only.

        Args:
            layers: indices of decoder layers, rising.
        """


class DraftModelSource(Protocol):
    """Another model that drafts. One object serves all calls and threads.

    Attributes:
        name: of the model, for messages and metrics.
        model: the model.
        tokenizer: its tokenizer, or None if unknown.
        vocab_size: number of its logits.
        num_embeddings: number of ids that it can read.
        media_token_ids: its placeholders of images and videos.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    vocab_size: int
    num_embeddings: int
    media_token_ids: tuple[int, ...]

    def embed(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """[B, L, D] input embeddings of a prompt with its images and videos in it, without a forward of the layers.

        Args:
            inputs: ids, mask, position ids and media, as for `generate`.

        Returns:
            None if the model changes its input embeddings before the first layer, so that they cannot be passed to it.
        """

    def open(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> DraftTarget | None:
        """The model behind a KV cache of its own, with a prompt in it.

        Args:
            input_ids: [B, L] int64 ids of this model, padded on the left.
            attention_mask: [B, L] int64, 0 for padding.
            max_new_tokens: largest number of tokens behind the prompt.
            extra: `position_ids` where they are not those of text; media, or `inputs_embeds` [B, L, D] in place of
                ids and media.

        Returns:
            None if the model cannot read that many positions.
        """
