"""Protocols between targets, drafters and compressors, and the data that they exchange.

Depends on neither transformers, a KV cache nor the decode loop. Shape symbols used in the whole project: B batch rows,
L prompt length, S committed length, N nodes of a draft tree, A accepted nodes, V vocabulary size, D hidden size,
M visual tokens before compression, K visual tokens after it.

Longer than other files, since these definitions refer to each other and are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmspec.control.draft_cost import DraftCosts
from mmspec.engine.tree import DraftTree


@dataclass(frozen=True)
class DrafterRequirements:
    """What a drafter needs from the target besides the emitted tokens. Each item costs time in every round.

    Attributes:
        hidden_state_indices: indices into transformers' `hidden_states`: 0 is the merged input embeddings, `i` the
            input of decoder layer `i`, the last one the output of the final norm.
        top_k: how many of the largest raw logits' ids of every scored node are copied to the host
            (`VerifyResult.top_ids`).
        max_tree_size: largest tree worth scoring, root included.
    """

    hidden_state_indices: tuple[int, ...] = ()
    top_k: int = 0
    max_tree_size: int = 16


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
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer: Any = None
    name: str = ""
    media_token_ids: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class SharedEmbeddings:
    """Input and output embeddings of the target: its own modules, not copies.

    Attributes:
        embed_tokens: ids [...] -> [..., D].
        lm_head: output of the final norm [..., D] -> logits [..., V]. Its `weight` is [V, D].
    """

    embed_tokens: nn.Module
    lm_head: nn.Module

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """[n, D], the rows of the output embedding for ids [n]."""
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight[ids]


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
class Prompt:
    """One batch of prompts after the prefill, as passed to a drafter.

    Attributes:
        input_ids: [B, L] int64 on the target's device, image placeholders and padding included.
        attention_mask: [B, L] bool, True for real tokens (left- or right-padded batches).
        visual_mask: [B, L] bool, True for visual tokens.
        position_ids: [B, L] or [axes, B, L] int64, as used by the target.
        grids: the grids that the visual tokens form; empty if the adapter cannot derive them.
        hidden_states: {index: [B, L, D]} for `DrafterRequirements.hidden_state_indices`.
        vocab_size: V of the target's logits.
        banned_ids: ids that are never drafted: placeholders, padding, ids beyond the tokenizer.
        reference_ids: token ids of texts that the output may repeat, one list per row; empty lists if none.
        noise: `noise(depth) -> [B, depth, V]`, the exponential noise that samples the next `depth` tokens of each row;
            None for greedy decoding. A drafter with probabilities proposes the argmax of `draft_probs / noise`.
        temperature: sampling temperature; 1 for greedy decoding.
        shared_embeddings: the target's input and output embeddings.
        static_shapes: shapes must not depend on timing (`deterministic=True` or `tree_size=`).
        compressor: compressor of the drafter's visual tokens, or None.
        max_new_tokens: upper bound of new tokens per row; None if unbounded.
        visual_saliency: [B, L] float32, attention that the vision tower pays to each visual token; None if no
            compressor uses it or the adapter cannot compute it.
    """

    input_ids: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    position_ids: Tensor
    grids: tuple[VisualGrid, ...] = ()
    hidden_states: Mapping[int, Tensor] = field(default_factory=dict)
    vocab_size: int = 0
    banned_ids: frozenset[int] = frozenset()
    reference_ids: Sequence[Sequence[int]] = ()
    noise: Callable[[int], Tensor] | None = None
    temperature: float = 1.0
    shared_embeddings: SharedEmbeddings | None = None
    static_shapes: bool = False
    compressor: Compressor | None = None
    max_new_tokens: int | None = None
    visual_saliency: Tensor | None = None


@dataclass
class VerifyResult:
    """Result of one verification: accepted nodes and emitted tokens.

    Attributes:
        tree: the scored tree.
        path: [B, N] int64, accepted nodes of each row, node 0 first; valid up to `counts`.
        counts: [B] int64, tokens emitted by each row; 0 for inactive rows.
        tokens: [B, N] int64, emitted tokens; valid up to `counts`.
        emitted_ids: host copy of the emitted tokens, a list per row (empty for inactive rows).
        accepted_nodes: host copy of `path`, a list per row, same lengths as `emitted_ids`.
        top_ids: [B][N][k] nested lists, ids of the largest raw logits (`DrafterRequirements.top_k`), or None.
        scored_ids: [B][N] tokens of the scored nodes, -1 for invalid ones; set together with `top_ids`.
        tree_sizes: number of valid nodes of each row's tree, root included.
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


@runtime_checkable
class Drafter(Protocol):
    """Proposes token trees. One object serves any number of calls and threads; per-call data lives in its state.

    A drafter affects speed only: its trees are sanitised and verified, so it cannot change the output. Random numbers
    that it draws from the sampling generator are restored.

    Attributes:
        name: unique name, used in messages and as the key of learned costs.
        requirements: what it needs from the target.
        vocab_size: V of the target it was trained for, or None if any vocabulary works.
    """

    name: str
    requirements: DrafterRequirements
    vocab_size: int | None

    def begin(self, prompt: Prompt) -> Any:
        """Start a call. Returns the state that `propose` and `observe` receive."""

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """Draft what follows the last emitted token of each active row.

        Args:
            state: return value of `begin`.
            max_nodes: most nodes of the tree, root included.
            active: per row, whether it is still being decoded; inactive rows need only node 0.

        Returns:
            A tree whose root (node 0) stands for the last emitted token (the caller fills in its id). Nodes are
            ordered by falling `scores`, so that every prefix is the best smaller tree.
        """

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Update the state after a verification.

        Called after every round, with or without a draft, and once after the prefill with a root-only tree whose
        `tokens` are the first output column.

        Args:
            state: return value of `begin`.
            result: accepted nodes and emitted tokens.
            hidden_states: {index: [B, N, D]} of the scored nodes; empty after the prefill (`Prompt.hidden_states`).
        """


@runtime_checkable
class CompressingDrafter(Drafter, Protocol):
    """A drafter with a compressor of its own.

    Attributes:
        compressor: used unless `patch` or the call chooses another one; None for none.
    """

    compressor: Compressor | None


@runtime_checkable
class TrainedDrafter(CompressingDrafter, Protocol):
    """A drafter with a trained head that reads visual tokens.

    Attributes:
        bundled_compressor: (config, state dict) of the compressor that it was trained with, or None. `mmspec.patch`
            builds `compressor` from it.
    """

    bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None

    @property
    def compresses_visual_tokens(self) -> bool:
        """Whether the head itself compresses visual tokens, so that no compressor may be chosen."""

    @property
    def compressor_hidden_size(self) -> int | None:
        """Hidden size that a compressor with weights must have; None if none fits (EAGLE-3 heads)."""


@runtime_checkable
class ReplicableDrafter(Drafter, Protocol):
    """A drafter that can create an independent drafter with the same learned state. Others are deep-copied.

    For drafters that hold resources which `copy.deepcopy` cannot or should not duplicate.
    """

    def replicate(self) -> Drafter:
        """A drafter in the same state that shares weights but no mutable state with this one."""


class Target(Protocol):
    """The model being decoded, behind a KV cache with one length per row."""

    vocab_size: int

    def score(self, tree: DraftTree, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward over the nodes of all rows: logits [B, N, V] and hidden states {index: [B, N, D]}."""

    def commit(self, result: VerifyResult) -> None:
        """Keep the keys and values of the accepted nodes and discard the others."""

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        """Truncate each row's cache.

        Args:
            lengths: per row, most positions after the prompt that remain.
            zero_tail: also zero what lies beyond: nan there would reach attention outputs (0 * nan is nan).
        """


@dataclass(frozen=True)
class CompressionContext:
    """Properties of a call that a cost-based compressor uses.

    Attributes:
        max_new_tokens: as in `Prompt`.
        costs: measured costs of the draft head; None if unknown, or if shapes must not depend on timing.
        exploration: 1 to keep fewer tokens than the estimate prefers, -1 to keep more, so that costs at other lengths
            are measured; else 0.
    """

    max_new_tokens: int | None = None
    costs: DraftCosts | None = None
    exploration: int = 0


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of one batch, input and output of a compressor.

    Attributes:
        inputs_embeds: [B, M, D] projected visual embeddings.
        hidden_states: [B, M, D] target hidden states that a drafter pairs with them: those one position before.
        mask: [B, M] bool, True for tokens, False for padding.
        position_ids: [B, M] or [axes, B, M] int64.
        grids: the grids that the tokens form, `start` counted in M.
        saliency: [B, M] float32, see `Prompt.visual_saliency`, or None.
        context: properties of the call, for cost-based compressors, or None.
        source_indices: set by a compressor, [B, K] int64: index in M of each output token, -1 for mixtures; None if
            unknown.
        choices: set by a compressor that chooses per row: label of each row's choice, such as "pool:49".
    """

    inputs_embeds: Tensor
    hidden_states: Tensor
    mask: Tensor
    position_ids: Tensor
    grids: tuple[VisualGrid, ...] = ()
    saliency: Tensor | None = None
    context: CompressionContext | None = None
    source_indices: Tensor | None = None
    choices: tuple[str, ...] | None = None


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
class Compressor(Protocol):
    """Reduces the visual tokens that the drafter reads. The target reads all of them, so the output cannot change."""

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


@runtime_checkable
class SaliencyCompressor(Compressor, Protocol):
    """A compressor that can use `VisualTokens.saliency`, which costs an extra attention layer per image.

    Attributes:
        attends: whether it does use it.
    """

    @property
    def attends(self) -> bool:
        """Whether saliency must be computed for it."""


@runtime_checkable
class SizedCompressor(Compressor, Protocol):
    """A compressor with weights for one hidden size."""

    @property
    def hidden_size(self) -> int:
        """D of the hidden states and embeddings that it accepts."""


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


NO_LIMIT = 1 << 30
"""`Compressor.max_tokens` of compressors that may keep every token."""


class FrameSampler(Protocol):
    """Chooses video frames. Runs before target and drafter, so that plain decoding reads the same frames."""

    def sample(self, total: int, fps: float) -> list[int]:
        """Rising indices of the frames to decode, out of `total` at `fps` frames per second (0 if unknown)."""


@runtime_checkable
class ContentAwareSampler(FrameSampler, Protocol):
    """A sampler that chooses by content: `sample` returns the candidates. The video is decoded twice."""

    def select(self, indices: list[int], thumbnails: Tensor) -> list[int]:
        """The chosen ones of `indices`, rising. `thumbnails` is [n, height, width, 3] uint8, one per index."""


__all__ = [
    "NO_LIMIT",
    "CompressingDrafter",
    "CompressionContext",
    "Compressor",
    "ContentAwareSampler",
    "Drafter",
    "DrafterRequirements",
    "FrameSampler",
    "GateObservation",
    "GatedCompressor",
    "Prompt",
    "ReplicableDrafter",
    "SaliencyCompressor",
    "SharedEmbeddings",
    "SizedCompressor",
    "Target",
    "TargetInfo",
    "TrainedDrafter",
    "VerifyResult",
    "VisualGrid",
    "VisualTokens",
]
