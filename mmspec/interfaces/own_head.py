"""The draft head in a target's own checkpoint (multi-token prediction, MTP): what a drafter needs of it.

A row p of the head reads the target's hidden state of token p and the embedding of token p + 1:

    u = fc([embedding_norm(embedding) ; hidden_norm(hidden state)])
    z = block(u);  o = output_norm(z);  the logits of token p + 2 are those of o

A second draft token repeats the head with o of the row before in place of the hidden state, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


class OwnHeadError(ValueError):
    """The checkpoint of a target has no head that can be used; the message says why.

    Attributes:
        is_expected: whether checkpoints of this family have one, so that users are told of it.
    """

    def __init__(self, message: str, is_expected: bool = False) -> None:
        super().__init__(message)
        self.is_expected = is_expected


@dataclass(frozen=True)
class HeadFiles:
    """How a head is stored, so that it can be written in the layout of its checkpoint.

    Attributes:
        tensors: {weight of the parts, such as "fc.weight": names of the tensors that it is stored as, in order}.
        copies: {name: "embeddings", "lm_head" or "own_lm_head"}: what serving engines read beside these tensors.
        config: values of `config.json` of the target, without how its weights are quantised.
    """

    tensors: Mapping[str, tuple[str, ...]]
    copies: Mapping[str, str]
    config: Mapping[str, Any]


class HeadCache(Protocol):
    """Keys and values of the head's block."""

    def update(self, keys: Tensor, values: Tensor, *others: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store those of new rows [B, H, n, d]; returns all [B, H, keys, d]. What else layers give is not read."""


@dataclass
class OwnHead:
    """The parts of a head, with its weights.

    Attributes:
        visual_modes: keys of `VISUAL_MODES`: what the head reads at image positions, that of its family first;
            it may be trained in all.
        zeroes_first: whether the embedding in row 0 is zero.
        description: what was found, in a few words.
        fc: [D, 2 D].
        embedding_norm: of the embedding.
        hidden_norm: of the hidden state.
        block: the decoder layer: (inputs [B, n, D]; cos and sin [B or 1, n or 1, d] of the rows' positions; mask
            [B or 1, 1, n, keys] bool, True where a row attends, None for a causal prompt or one row that attends to all
            keys; `HeadCache`) -> [B, n, D]. Its `c_weights()` are those that C reads; None if it has other parts.
        output_norm: before the LM head.
        lm_head: the head's own, [V, D]; None for the target's.
        rotary_embedding: (position ids [B, n] or [3, B, n], dtype) -> cos and sin [B, n, d], of the target.
        mrope_section: frequencies of each position axis; empty for one axis.
        window: rows that a row attends to, its own included; None for all.
        hidden_size: D.
        vocab_size: V.
        num_layers: decoder layers of the target.
        files: how it is stored.
    """

    visual_modes: tuple[str, ...]
    zeroes_first: bool
    description: str
    fc: nn.Module
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    block: nn.Module
    output_norm: nn.Module
    lm_head: Tensor | None
    rotary_embedding: Callable[..., tuple[Tensor, Tensor]]
    mrope_section: tuple[int, ...]
    window: int | None
    hidden_size: int
    vocab_size: int
    num_layers: int
    files: HeadFiles


class TargetKeys(Protocol):
    """The target's keys and values of the positions that it has committed, during one call.

    Attributes:
        window: positions that its sliding layers see; None for all.
        padding: [B, P] bool, False at left pads; None if there are none.
    """

    @property
    def window(self) -> int | None: ...

    @property
    def padding(self) -> Tensor | None: ...

    @property
    def lengths(self) -> list[int]:
        """Committed positions of each row, left pads included."""

    def read(self, layer_type: str) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, H, S, d] of its last layer of a type, and [B, 1, 1, S] bool which of them are seen.

        Seen are those of a row's text that the window of the type contains; not padding, nor what was rejected.
        """

    def buffers(self, layer_types: Sequence[str]) -> list[Tensor | None] | None:
        """[2, B, H, C, d] keys and values of its last layer of each type, where they lie; None if they are apart."""

    def fixed_tensors(self) -> dict[str, Tensor] | None:
        """{name: what `read` reads}, where recorded functions write it; None if it has no fixed address."""

    def call_tensors(self, capacity: int) -> dict[str, Tensor]:
        """{name: what else `read` needs}, for rows of at most `capacity` positions; there are `fixed_tensors`."""

    def over(self, named: Mapping[str, Tensor], lengths: Tensor, bucket: int) -> TargetKeys:
        """The same in a recorded function: over tensors of these names, rows of `lengths` [B], at most `bucket`."""


@dataclass
class AssistantParts:
    """The parts of an assistant, a small model that drafts over the target's keys and values (Gemma 4).

        u = pre_projection([embedding of token t ; hidden state before it])
        y = body(u);  the logits of the next token are those of y;  the next hidden state is post_projection(y)

    Attributes:
        description: what was found, in a few words.
        pre_projection: [d, 2 D].
        body: (inputs [B, n, d], position ids [B, 1], {layer type: `TargetKeys.read`}) -> y [B, n, d]; its
            `layer_types` are those it reads.
        post_projection: [D, d].
        lm_head: [V, d].
        centroids: [C, d]: only ids of the `top_centroids` best ones have logits; None: all ids have.
        token_ordering: [C, V / C] int64, the ids of each centroid, or None.
        top_centroids: how many.
        suppressed_ids: ids that it must not draft.
        hidden_size: d.
        vocab_size: V.
        num_layers: decoder layers of the target.
    """

    description: str
    pre_projection: nn.Module
    body: nn.Module
    post_projection: nn.Module
    lm_head: nn.Module
    centroids: nn.Module | None
    token_ordering: Tensor | None
    top_centroids: int
    suppressed_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
