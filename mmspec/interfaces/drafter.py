"""What the decode loop needs of a drafter: `Drafter`, its optional extensions, and the `Prompt` that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmspec.cpu.ngrams import CNgrams
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.compressor import Compressor, VisualGrid
from mmspec.interfaces.draft_target import LayerSubsets
from mmspec.interfaces.own_head import TargetKeys
from mmspec.interfaces.target import SharedEmbeddings, VerifyResult

DRAFTER_CONTRACT = (
    "a drafter (mmspec.Drafter) has name (str), requirements (DrafterRequirements), vocab_size (int or None), "
    "begin(prompt), propose(state, max_nodes, active) -> DraftTree and observe(state, result, hidden_states)"
)
"""`Drafter` in one line, for messages; the classes are those of `mmspec`."""


@dataclass(frozen=True)
class DrafterRequirements:
    """What a drafter needs from the target besides the emitted tokens. Each item costs time in every round.

    Attributes:
        hidden_state_indices: indices into transformers' `hidden_states`: 0 is the merged input embeddings, `i` the
            input of decoder layer `i`, the last one the output of the final norm.
        top_k: how many of the largest raw logits' ids of every scored node are copied to the host
            (`VerifyResult.top_ids`).
        max_tree_size: largest tree worth scoring, root included.
        layer_subsets: whether it drafts with some layers of the target (`Prompt.layer_subsets`).
        target_keys: whether it reads the target's keys and values (`Prompt.target_keys`).
        media_inputs: whether it encodes the images and videos itself (`Prompt.media_inputs`).
        copy_bits: bits of the weights of a copy that has these layers: 4, 8, or 0 to choose; None for the target's own
            weights.
        optional_copy: whether it can do without the copy, which is then made when it asks for it (`LayerSubsets.make`).
        saved_copy: whether the copy is kept in the user's cache folder, for other processes.
    """

    hidden_state_indices: tuple[int, ...] = ()
    top_k: int = 0
    max_tree_size: int = 16
    layer_subsets: bool = False
    media_inputs: bool = False
    target_keys: bool = False
    copy_bits: int | None = None
    optional_copy: bool = False
    saved_copy: bool = False


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
        stop_ids: ids that end a row. Nodes below them are dropped: they can never be accepted.
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
        layer_subsets: the target with fewer layers, or its copy, if the drafter requires it and the call allows it;
            else None.
        media_inputs: the arguments of `generate` that describe images and videos, if the drafter requires them and
            every prompt has one row; else empty.
        target_keys: the target's keys and values, if the drafter requires them; else None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    position_ids: Tensor
    grids: tuple[VisualGrid, ...] = ()
    hidden_states: Mapping[int, Tensor] = field(default_factory=dict)
    vocab_size: int = 0
    banned_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    reference_ids: Sequence[Sequence[int]] = ()
    noise: Callable[[int], Tensor] | None = None
    temperature: float = 1.0
    shared_embeddings: SharedEmbeddings | None = None
    static_shapes: bool = False
    compressor: Compressor | None = None
    max_new_tokens: int | None = None
    visual_saliency: Tensor | None = None
    layer_subsets: LayerSubsets | None = None
    media_inputs: Mapping[str, Any] = field(default_factory=dict)
    target_keys: TargetKeys | None = None


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
            max_nodes: largest number of nodes of the tree, root included.
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


def drafter_label(drafter: Drafter) -> str:
    """A drafter's name, with what else its figures depend on if it has an attribute `label` (a string)."""
    label = getattr(drafter, "label", None)
    return label if isinstance(label, str) else drafter.name


@runtime_checkable
class ModuleDrafter(Drafter, Protocol):
    """A drafter that computes with modules, whose linear layers may run in other kernels on a CPU.

    Attributes:
        modules: its modules, those of a compressor of its own included; not the target's.
    """

    @property
    def modules(self) -> Sequence[nn.Module]: ...


def modules_of(drafter: Drafter) -> Sequence[nn.Module]:
    """The modules that a drafter declares (`ModuleDrafter`), or that it is."""
    if isinstance(drafter, nn.Module):
        return (drafter,)
    return drafter.modules if isinstance(drafter, ModuleDrafter) else ()


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
class GuidingDrafter(Drafter, Protocol):
    """A drafter that can also draft behind tokens which are not emitted yet, so that it drafts for another drafter.

    A drafter that decodes with a model (`mmspec.drafters.model.chain`) is itself sped up by one: it scores a tree of
    the guide where it would score one token. Where whole chains are drafted in one call (`DraftTarget.draft_chain`), it
    takes part by its counts of n-grams.
    """

    def counts(self, state: Any) -> CNgrams | None:
        """The counts of n-grams, with all that was observed; None if it has none."""

    def follow(self, state: Any, result: VerifyResult) -> None:
        """Move behind the tokens that the other drafter has decoded, `result.emitted_ids`; `propose` drafts from there.

        Args:
            state: return value of `begin`.
            result: which nodes of the last tree the other drafter decoded, without tensors of logits.
        """

    def rewind(self, state: Any) -> None:
        """Return to the last emitted tokens. Called before the next `observe`."""


@runtime_checkable
class GrowingDrafter(Drafter, Protocol):
    """A drafter that may come to draft better, so that drafts which did not pay are to be tried anew."""

    def has_grown(self) -> bool:
        """Whether it will draft better than in the calls since this was asked last. Asked after each call."""


@runtime_checkable
class ReplicableDrafter(Drafter, Protocol):
    """A drafter that can create an independent drafter with the same learned state. Others are deep-copied.

    For drafters that hold resources which `copy.deepcopy` cannot or should not duplicate.
    """

    def replicate(self) -> Drafter:
        """A drafter in the same state that shares weights but no mutable state with this one."""
