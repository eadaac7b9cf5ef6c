"""What the decode loop needs of a target: `Target`, and the results and properties that others read of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.engine.tree import DraftTree
from mmspec.interfaces.own_head import AssistantParts, OwnHead


class Target(Protocol):
    """The model being decoded, behind a KV cache with one length per row.

    Attributes:
        vocab_size: V.
        chains_only: whether `score` accepts chains only, no trees with branches; asked for before each draft is scored.
        skips_rows: whether rows that are not active cost `score` nothing.
    """

    vocab_size: int
    chains_only: bool
    skips_rows: bool

    @property
    def setup_s(self) -> float:
        """Seconds so far that were spent once per shape (recording, compiling), by drafters too: no cost of a round."""

    def score(
        self, tree: DraftTree, hidden_state_indices: Sequence[int] = (), active: Sequence[bool] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward over the nodes of all rows: logits [B, N, V] and hidden states {index: [B, N, D]}.

        Args:
            tree: the sanitized tree.
            hidden_state_indices: hidden states to return.
            active: per row, whether anything of it is read; of the others the results are any finite numbers, and the
                keys and values behind the committed positions may be left as they are. None: all are active.
        """

    def commit(self, result: VerifyResult) -> None:
        """Keep the keys and values of the accepted nodes and discard the others."""

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        """Truncate each row's cache.

        Args:
            lengths: per row, largest number of positions after the prompt that remain.
            zero_tail: also zero what lies beyond: nan there would reach attention outputs (0 * nan is nan).
        """


@dataclass
class VerifyResult:
    """Result of one verification: accepted nodes and emitted tokens.

    Attributes:
        tree: the scored tree; of a round recorded with its draft only its size is real: see `tree_sizes`.
        path: [B, N] int64, accepted nodes of each row, node 0 first; valid up to `counts`.
        counts: [B] int64, tokens emitted by each row; 0 for inactive rows.
        tokens: [B, N] int64, emitted tokens; valid up to `counts`.
        emitted_ids: host copy of the emitted tokens, a list per row (empty for inactive rows).
        accepted_nodes: host copy of `path`, a list per row, same lengths as `emitted_ids`.
        top_ids: `[B][N][k]` nested lists, ids of the largest raw logits (`DrafterRequirements.top_k`), or None.
        scored_ids: `[B][N]` tokens of the scored nodes, -1 for padding; set together with `top_ids`.
        tree_sizes: number of nodes of each row's tree, padding excluded, root included.
    """

    tree: DraftTree
    path: Tensor
    counts: Tensor
    tokens: Tensor
    emitted_ids: list[list[int]]
    accepted_nodes: list[list[int]]
    top_ids: list[list[list[int]]] | None = None
    scored_ids: list[list[int]] | None = None
    tree_sizes: list[int] = field(default_factory=list)

    def own_copy(self) -> VerifyResult:
        """A result that user code may write into: the loop goes on to read this one."""
        return replace(
            self,
            tree=replace(self.tree, **own_copies(vars(self.tree))),
            **own_copies({"path": self.path, "counts": self.counts, "tokens": self.tokens}),
            emitted_ids=[list(row) for row in self.emitted_ids],
            accepted_nodes=[list(row) for row in self.accepted_nodes],
            tree_sizes=list(self.tree_sizes),
        )

    def of_rows(self, active: Sequence[bool], finished: Tensor | None) -> VerifyResult:
        """The result for the drafter: without the padding that finished rows emit, and what was not scored.

        Args:
            active: rows that are not finished and may emit.
            finished: [B] bool, rows that emit padding, or None.
        """
        if all(active):
            return self

        def chosen(rows: list[list[int]]) -> list[list[int]]:
            return [row if on else [] for row, on in zip(rows, active, strict=True)]

        scored = self.scored_ids or []
        return replace(
            self,
            emitted_ids=chosen(self.emitted_ids),
            accepted_nodes=chosen(self.accepted_nodes),
            scored_ids=[ids if on else [-1] * len(ids) for ids, on in zip(scored, active, strict=bool(scored))] or None,
            counts=self.counts if finished is None else torch.where(finished, 0, self.counts),
        )


def own_copies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs whose tensors user code may write into."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


@dataclass(frozen=True)
class TargetInfo:
    """Properties of a target that a drafter trained for one target can be checked against.

    Attributes:
        model_type: `config.model_type` of the whole model.
        hidden_size: D of the text model.
        vocab_size: V of the text model.
        num_layers: decoder layers of the text model.
        tokenizer: an object with `get_vocab`, or None.
        name: hub id or folder that the model was loaded from, or "".
        media_token_ids: ids of the image and video placeholders.
        device: device type as torch names it ("cpu", "cuda").
        shared_embeddings: its embeddings, with which those in a head are compared; None if it is not loaded.
        read_own_head: reads the draft head in its checkpoint, or in a folder, or raises `OwnHeadError`; None if the
            target is not loaded.
        find_assistant: the same for the assistant that was published for it.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer: Any = None
    name: str = ""
    media_token_ids: tuple[int, ...] = ()
    device: str = "cpu"
    shared_embeddings: SharedEmbeddings | None = field(default=None, compare=False, repr=False)
    read_own_head: Callable[..., OwnHead] | None = field(default=None, compare=False, repr=False)
    find_assistant: Callable[[], AssistantParts] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SharedEmbeddings:
    """Input and output embeddings of the target: its own modules, not copies, and what the target applies around them.

    Attributes:
        embed_tokens: ids [...] -> [..., D].
        lm_head: output of the final norm [..., D] -> [..., V]. Its `weight` is [V, D].
        embed_scale: factor of the embeddings before the first layer (Granite's `embedding_multiplier`).
        logit_scale: factor of the logits (Cohere's `logit_scale`).
        logit_softcap: c of `c * tanh(logits / c)` (Gemma's `final_logit_softcapping`), or None.
    """

    embed_tokens: nn.Module
    lm_head: nn.Module
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D] embeddings of ids [...], as the first layer receives them (index 0 of the hidden states)."""
        embeds: Tensor = self.embed_tokens(ids)
        return embeds if self.embed_scale == 1.0 else embeds * self.embed_scale

    def logits(self, hidden_states: Tensor, lm_head_rows: Tensor | None = None) -> Tensor:
        """Logits as the target returns them.

        Args:
            hidden_states: [..., D] outputs of the final norm.
            lm_head_rows: [n, D] of `lm_head_rows`, for the logits [..., n] of some ids; None for all [..., V].
        """
        logits: Tensor
        if lm_head_rows is None:
            logits = self.lm_head(hidden_states)
        else:
            logits = functional.linear(hidden_states, lm_head_rows)
        return self.scale_logits(logits)

    def logits_of(self, hidden_states: Tensor, ids: Tensor | None) -> Tensor:
        """[..., n] logits of these ids as the target returns them, of all if None; the bias of an LM head included."""
        if ids is None or type(self.lm_head) is not nn.Linear or self.lm_head.bias is not None:
            logits = self.logits(hidden_states)
            return logits if ids is None else logits[..., ids]
        return self.logits(hidden_states, self.lm_head_rows(ids))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the target applies to the products of its LM head."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = (logits / self.logit_softcap).tanh() * self.logit_softcap
        return logits

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """[n, D], the rows of the output embedding for ids [n]."""
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        is_plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
        if is_plain and weight.device.type != "meta":
            return weight[ids]
        # Offloaded or quantised: only the module's forward has the weight, which is its output for unit vectors.
        example = self.embed_tokens(ids[:1])
        units = torch.eye(example.shape[-1], device=ids.device, dtype=example.dtype)
        outputs = self.lm_head(torch.cat([torch.zeros_like(units[:1]), units]))
        rows: Tensor = (outputs[1:] - outputs[:1])[:, ids].t()
        return rows
