"""What the decode loop needs of a drafter: `Drafter`, and the `Prompt` that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmspec.cpu.layers import DecoderShape
from mmspec.cpu.ngrams import CNgrams
from mmspec.economy.chooser import Chooser
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.compressor import Compressor, VisualGrid
from mmspec.interfaces.draft_target import LayerSubsets
from mmspec.interfaces.own_head import TargetKeys
from mmspec.interfaces.target import SharedEmbeddings, VerifyResult

if TYPE_CHECKING:
    from mmspec.engine.recordings import Recordings
    from mmspec.interfaces.round import DraftPart

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
    """

    hidden_state_indices: tuple[int, ...] = ()
    top_k: int = 0
    max_tree_size: int = 16
    layer_subsets: bool = False
    media_inputs: bool = False
    target_keys: bool = False
    copy_bits: int | None = None
    optional_copy: bool = False


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
        layer_subsets: the target with fewer layers, or its copy, if the drafter requires it and the call allows it;
            else None.
        media_inputs: the arguments of `generate` that describe images and videos, if the drafter requires them and
            every prompt has one row; else empty.
        target_keys: the target's keys and values, if the drafter requires them; else None.
        c_shape: in rounds, traits of the target's decoder if it runs in C; None if it does not.
        chains_only: in rounds, `Target.chains_only`: whether branches of the next draft are for nothing.
        rules: `rules(path) -> ids, bias`: what the prefix processors of the call let follow its only row and a path of
            drafted ids: ids that must follow, and [V] float32 to add to the scores behind them, or None where nothing
            may be drafted. A drafter may draft without them: what they forbid is dropped. None without processors.
        chooser: chooses, in each round, among the sources that the drafter enters, and how many levels they draft.
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
    layer_subsets: LayerSubsets | None = None
    media_inputs: Mapping[str, Any] = field(default_factory=dict)
    target_keys: TargetKeys | None = None
    c_shape: Callable[[], DecoderShape | None] = lambda: None
    chains_only: Callable[[], bool] = lambda: False
    rules: Callable[[Sequence[int]], tuple[list[int], Tensor | None]] | None = None
    chooser: Chooser | None = None


class Drafter:
    """Proposes token trees. One object serves any number of calls and threads; per-call data lives in its state.

    A drafter affects speed only: its trees are sanitised and verified, so it cannot change the output. Random numbers
    that it draws from the sampling generator are restored. `begin`, `propose` and `observe` make one; all else has a
    default. An object of the user that does not inherit from this class is wrapped once (`as_drafter`).

    Attributes:
        name: unique name, used in messages and as the key of learned costs.
        requirements: what it needs from the target.
        vocab_size: V of the target it was trained for, or None if any vocabulary works.
        compressor: its own, used unless `patch` or the call chooses another one; None for none.
        bundled_compressor: (config, state dict) of the compressor that a head was trained with, or None. `mmspec.patch`
            builds `compressor` from it.
    """

    name: str
    requirements: DrafterRequirements = DrafterRequirements()
    vocab_size: int | None = None
    compressor: Compressor | None = None
    bundled_compressor: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None

    @property
    def label(self) -> str:
        """The name, with what else its figures depend on."""
        return self.name

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What it computes with, a compressor of its own included, whose linear layers may run in other kernels on a
        CPU; not the target's. Ask `modules_of`."""
        return ()

    @property
    def compresses_visual_tokens(self) -> bool:
        """Whether the head itself compresses visual tokens, so that no compressor may be chosen."""
        return False

    @property
    def compressor_hidden_size(self) -> int | None:
        """Hidden size that a compressor with weights must have; None if none fits (EAGLE-3 heads), 0 if any does."""
        return 0

    # --- a call -------------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> Any:
        """Start a call. Returns the state that all other methods receive."""
        raise NotImplementedError

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
        raise NotImplementedError

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Update the state after a verification.

        Called after every round, with or without a draft, and once after the prefill with a root-only tree whose
        `tokens` are the first output column.

        Args:
            state: return value of `begin`.
            result: accepted nodes and emitted tokens.
            hidden_states: {index: [B, N, D]} of the scored nodes; empty after the prefill (`Prompt.hidden_states`).
        """
        raise NotImplementedError

    # --- between calls ------------------------------------------------------------------------------------------------

    def replicate(self) -> Drafter | None:
        """A drafter in the same state that shares weights but no mutable state with this one; None: copy it deeply."""
        return None

    # --- calls whose rounds are recorded ------------------------------------------------------------------------------

    def use_recordings(self, state: Any, recordings: Recordings) -> None:
        """Called after `begin` in calls whose rounds are recorded, with what records them and stops its clock."""

    def draft_part(self, state: Any, num_nodes: int) -> DraftPart | None:
        """The coming draft of `num_nodes` nodes at most as part of a recorded round, in place of `propose`; None if it
        must be drafted alone."""
        return None

    def observe_part(self, state: Any, result: VerifyResult, hidden_states: Tensor, kept: Sequence[Tensor]) -> None:
        """Update the state after a round with `draft_part`, in place of `observe`.

        Args:
            state: return value of `begin`.
            result: accepted nodes and emitted tokens, whose tree has a size but no tokens.
            hidden_states: [B, A, S] `select_hidden_states` at the accepted nodes.
            kept: what the part's function returned besides the tree.
        """
        raise NotImplementedError

    def counts(self, state: Any) -> CNgrams | None:
        """The counts of n-grams, with all that was observed; None if it has none. By them chains in C guess what the
        model that drafts decodes (`DraftTarget.draft_chain`)."""
        return None


MEMBERS = {"name", *(name for name in vars(Drafter) if not name.startswith("_"))} - {"label"}
"""Public members of a `Drafter` that are taken from an object as they are."""


class UserDrafter(Drafter):
    """An object of the user as a `Drafter`: what it has, it answers itself.

    Attributes:
        inner: the object.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        if name in MEMBERS and hasattr(self.inner, name):
            return getattr(self.inner, name)
        return super().__getattribute__(name)

    @property
    def label(self) -> str:
        label = getattr(self.inner, "label", None)
        return label if isinstance(label, str) else self.name


def as_drafter(drafter: Any) -> Drafter:
    """A drafter as it is, another object with its methods in a `UserDrafter`."""
    return drafter if isinstance(drafter, Drafter) else UserDrafter(drafter)


def modules_of(drafter: Drafter) -> Sequence[nn.Module]:
    """The modules that a drafter declares, or that it is."""
    one = drafter.inner if isinstance(drafter, UserDrafter) else drafter
    return (one,) if isinstance(one, nn.Module) else getattr(one, "modules", ())
