"""What `research.bench` compares: a `Peer` decodes one prompt greedily and says how long that took.

A peer is a way to decode: plain `generate`, one of its variants, a patched model, or another engine in a process of its
own. This module knows no engine and no file format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mmspec.metrics.stats import Stats

MEDIA, EMBEDDINGS, TEXT = "images", "embeddings", "text"
"""What a peer reads: the inputs of `generate`; the prompt's embeddings, images encoded; token ids without images."""


class PeerError(Exception):
    """A peer cannot decode a prompt; the message is one line."""


@dataclass(frozen=True)
class PeerPrompt:
    """One request, in the forms that peers read.

    Attributes:
        inputs: keyword arguments of `generate`; `input_ids` is [B, L].
        eos_ids: ids that end a row; empty if rows continue to the limit.
        has_media: whether `inputs` holds images or videos.
        embeddings: [L, D] float32, the prompt with its images encoded; None if no peer needs it.
    """

    inputs: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    has_media: bool = False
    embeddings: Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.inputs["input_ids"].shape[0])

    @property
    def token_ids(self) -> list[int]:
        """Ids of a prompt of one row, without padding."""
        ids, mask = self.inputs["input_ids"][0], self.inputs.get("attention_mask")
        return (ids if mask is None else ids[mask[0].bool()]).tolist()


@dataclass(frozen=True)
class PeerRun:
    """One decoded prompt.

    Attributes:
        output_ids: new tokens of each row, up to and including the end token.
        total_s: seconds of the whole call.
        ttft_s: seconds to the first tokens.
        decode_s: seconds from the first tokens to the last.
        num_decoded: tokens of all rows in `decode_s`.
        stats: counters of a patched model.
        memory_mib: most memory during the call beyond that before it; None if unknown.
        without_media: images were encoded before the call: `total_s` and `ttft_s` are no whole call.
    """

    output_ids: list[list[int]]
    total_s: float
    ttft_s: float
    decode_s: float
    num_decoded: int
    stats: Stats | None = None
    memory_mib: float | None = None
    without_media: bool = False

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.output_ids))

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of decoding per token; NaN if nothing was left to decode after the first tokens."""
        return 1e3 * self.decode_s / self.num_decoded if self.num_decoded else math.nan


class Peer(Protocol):
    """A way to decode.

    Attributes:
        name: of its row.
        max_batch: most rows of a call; None for any number.
        warm_up_calls: calls before the first one that is measured.
    """

    name: str
    max_batch: int | None
    warm_up_calls: int

    @property
    def reads(self) -> str:
        """`MEDIA`, `EMBEDDINGS` or `TEXT`. With `EMBEDDINGS` a prompt without images is read as token ids."""

    def unavailable_reason(self) -> str | None:
        """Why it cannot run here, in one line, or None. Loads nothing."""

    def start(self) -> None:
        """Load what it needs.

        Raises:
            PeerError: it cannot be loaded.
        """

    def generate(self, prompt: PeerPrompt, max_new_tokens: int) -> PeerRun:
        """Decode greedily.

        Raises:
            PeerError: it cannot.
        """

    def close(self) -> None:
        """Free what `start` has loaded; may be called twice."""
