"""The sockets: what a target, a drafter and a compressor promise each other.

Nothing here knows transformers, a cache or the decode loop. Letters, everywhere in the project: B rows,
S committed length, N nodes of a draft tree, A accepted nodes, V vocabulary, D hidden size, M visual tokens, K kept.
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
    """What a drafter wants to be given besides the emitted tokens. Asking costs time, so ask for little.

    Attributes:
        taps: states of the target, by transformers' numbering of `hidden_states`: 0 is the merged input embeddings,
            `i` the input of decoder layer `i`, the last one the states after the final norm.
        top_k: ids of the `top_k` largest raw logits of every scored node, on the host (`VerifyResult.top_ids`).
        most: largest tree worth considering, the root counted.
    """

    hidden_state_indices: tuple[int, ...] = ()
    top_k: int = 0
    max_tree_size: int = 16


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter that was made for one target may check.

    Attributes:
        model_type, hidden_size, vocab_size, layers: of the text model. tokenizer: anything with `get_vocab`, or None.
        name: hub id or folder that the model was loaded from, or "". placeholders: ids that stand for visual tokens.
        device: kind of device that it is on, as torch names it.
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
    """What a target makes of ids and of states. Modules of the target itself, shared, never copied.

    Attributes:
        embedding: ids [...] -> [..., D]. head: states after the final norm [..., D] -> logits [..., V]; its `weight` is
            [V, D].
    """

    embed_tokens: nn.Module
    lm_head: nn.Module

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """[n, D], the rows of the head for some ids."""
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight[ids]


@dataclass(frozen=True)
class VisualGrid:
    """A run of visual tokens of one prompt row that forms a grid.

    Attributes:
        row, start: where it begins, in the prompt as `generate` was given it (pads counted).
        height, width: the grid, in tokens. A newline token (LLaVA-NeXT, OneVision) ends each of its lines if `newline`.
        source: which image or clip of the call, counted over the batch in the order of the inputs.
        role: `base` (the whole picture), `tiles` (its high resolution crops), `frame` (one time step of a clip),
            `newline` (a lone separator token, a 1 x 1 grid).
        time: frame number within its clip; 0 for pictures.
    """

    row: int
    start: int
    height: int
    width: int
    media_index: int
    role: str = "base"
    has_newlines: bool = False
    frame: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of visual tokens it covers."""
        return self.height * (self.width + int(self.has_newlines))


@dataclass(frozen=True)
class Prompt:
    """One batch of prompts after the target has read them, as a drafter sees it.

    Attributes:
        ids: [B, L] int64, the prompt with its image placeholders and pads, on the target's device.
        padding: [B, L] bool, True where a real token stands (left or right padded batches).
        visual: [B, L] bool, True where a visual token stands.
        positions: [B, L] or [axes, B, L] int64, the position ids that the target used.
        segments: the grids that the visual tokens form; empty if the family cannot tell.
        taps: {index: [B, L, D]} the states the drafter asked for (`DrafterRequirements.taps`).
        vocab_size: V of the target's logits.
        banned: ids that a draft must never contain: placeholders, padding, ids beyond the tokenizer.
        reference: token ids of texts that the answer may resemble, one list per row; empty lists if none.
        noise: `noise(depth) -> [B, depth, V]`, the exponential noise with which the next `depth` tokens of each row
            will be sampled; None when decoding greedily. A drafter with probabilities proposes the largest
            `draft_probs / noise`.
        temperature: with which tokens will be sampled; 1 when decoding greedily.
        words: the target's embedding and output head.
        fixed: shapes must not hang on timing (`deterministic=True`, or `nodes=` was given).
        compressor: what shows the drafter fewer visual tokens, if one was chosen.
        answer: new tokens that a row may be given at most; None if nobody said.
        attended: [B, L] float32, how much the vision tower attends to what each visual token shows; None if nobody
            asked, or the family cannot tell.
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
    """What a round decided: which nodes were walked and what was emitted.

    Attributes:
        tree: the tree that was scored.
        path: [B, N] int64, the nodes walked in each row, node 0 first; meaningful up to `counts`.
        counts: [B] int64, how many tokens each row emitted, 0 for rows that did not take part.
        tokens: [B, N] int64, the tokens emitted; meaningful up to `counts`.
        rows: host copy of the emitted tokens, a list per row (empty for rows that did not take part).
        walked: host copy of the walked nodes, a list per row, same lengths as `rows`.
        top_ids: [B][N][k] nested lists of the largest raw logits' ids (`DrafterRequirements.top_k`), or None.
        nodes: [B][N] the scored tokens, -1 where there is none; given with `top_ids`, else None.
        sizes: how many nodes the tree of each row has, the root counted.
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
    """A way to guess. One object serves any number of calls and threads: what belongs to a call lives in its state.

    A drafter decides only how many tokens one forward can serve. It can never change a token, so nothing it does needs
    to be right, and whatever it returns is sanitised before use. What it draws from the generator that
    tokens are sampled with is undone.
    """

    name: str
    requirements: DrafterRequirements
    vocab_size: int | None
    """V of the target it was made for, or None if any will do."""

    def begin(self, prompt: Prompt) -> Any:
        """Start a call: read the prompt, return the state that the other two methods will be given."""

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """Guess what follows the last emitted token of each live row, with at most `budget` nodes, the root counted.

        The root (node 0) stands for that last token; its id is filled in by the caller. Nodes should come in falling
        order of `scores`, so that a prefix of them is the best smaller tree. Rows that are not live want only node 0.
        """

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Learn what was emitted. `taps` are {index: [B, N, D]} of the scored nodes.

        Called after every round, also after rounds without a draft, and once after the prompt, with a verdict whose
        tree is the bare root and whose tokens are the first column (its states are in `Prompt.taps`, not given again).
        """


class Target(Protocol):
    """The model whose words are being produced, seen through a cache with a length per row."""

    vocab_size: int

    def score(self, tree: DraftTree, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward over the nodes of all rows: logits [B, N, V] and {index: [B, N, D]} states."""

    def commit(self, result: VerifyResult) -> None:
        """Keep the keys and values of the walked nodes, forget the rest."""

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        """Cut each row's cache to at most `lengths[b]` positions after the prompt.

        `wipe`: what lies beyond is zeroed too, since nan there would reach what looks past it (0 * nan is nan).
        """


@dataclass(frozen=True)
class CompressionContext:
    """What is known of a call when its visual tokens are about to be shown to a drafter.

    Attributes:
        answer: as in `Prompt`.
        rates: what reading and drafting cost here; None if that is not known, or shapes must not hang on timing.
        lean: 1 if less should be shown than seems best, -1 if more, so that the costs of other widths become known.
    """

    max_new_tokens: int | None = None
    costs: DraftCosts | None = None
    exploration: int = 0


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of one batch as a drafter may see them.

    Attributes:
        embeddings: [B, M, D] projected visual embeddings. states: [B, M, D] the target's states that a drafter joins
            them with: those one position before.
        mask: [B, M] bool, True where a token stands. positions: [B, M] or [axes, B, M] int64.
        scores: [B, M] float32, how much the vision tower attends to each, or None: see `Prompt.attended`.
        segments: the grids, `start` counted in M.
        outlook: what is known of the call, for compressors that weigh costs; None if nothing is.
        origin: of what a compressor returns, [B, M] int64: the number of the token that each one is, among those that
            the compressor was given; -1 for mixtures, None if it does not say.
        ways: in a word how each row was made, if the compressor's name does not say that.
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
    """What a `GatedCompressor` went by, and what its way is charged: sight [B, F] float32, charge [B] float32 (as loss)."""

    features: Tensor
    penalty: Tensor


@runtime_checkable
class Compressor(Protocol):
    """Shows a drafter fewer visual tokens. The target never sees its output, so the text cannot change."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def max_tokens(self) -> int:
        """How many a row is worth to it: the budget that it is given."""

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """At most `budget` tokens per row; `query` [B, D] is the prompt's last state, or None. The same operator acts
        on embeddings and states."""


@runtime_checkable
class GatedCompressor(Compressor, Protocol):
    """A compressor that chooses one of several ways for each row, and can be told what they cost."""

    @property
    def branches(self) -> Sequence[Compressor]:
        """What it chooses among."""

    def force_branch(self, branch: int) -> AbstractContextManager[list[GateObservation]]:
        """Within it every row goes this way; the list gets an entry per call of `compress`."""

    def fit_gate(self, features: Tensor, costs: Tensor) -> None:
        """Choose from now on by what each way [n, ways] cost where it saw [n, F]."""


NO_LIMIT = 1 << 30
"""What a compressor is worth (`Compressor.tokens`) that may keep every token."""


class FrameSampler(Protocol):
    """Video in, frames out. Runs before target and drafter, so that the baseline sees the same frames."""

    def sample(self, total: int, fps: float) -> list[int]:
        """Indices of the frames to read, rising, out of `total` frames at `fps` frames a second (0 if unknown)."""


@runtime_checkable
class ContentAwareSampler(FrameSampler, Protocol):
    """A sampler that looks before it chooses: `sample` says at which frames. The video is decoded twice for it."""

    def select(self, indices: list[int], thumbnails: Tensor) -> list[int]:
        """Those of `chosen` that are to be read, rising. `thumbnails`: [n, height, width, 3] uint8, what they show."""


__all__ = [
    "NO_LIMIT",
    "CompressionContext",
    "Compressor",
    "ContentAwareSampler",
    "Drafter",
    "DrafterRequirements",
    "FrameSampler",
    "GateObservation",
    "GatedCompressor",
    "Prompt",
    "SharedEmbeddings",
    "Target",
    "TargetInfo",
    "VerifyResult",
    "VisualGrid",
    "VisualTokens",
]
