"""`RoundFunction`: one round as a function of tensors, and what the host reads of it.

    read what was emitted, draft a tree                           `DraftPart`, where the draft is a function of tensors
    drop what must not be scored; ancestor mask, depths           `sanitize`
    forward over the nodes                                        `ScorePart.forward`
    sample an id at every node, accept the path of matching ids   `TreeSampler.sample_nodes`, `accept_path`
    keep the accepted nodes in the KV cache                       `ScorePart.commit`

The loop runs it as recorded by an executor (`mmspec.engine.recordings`: a CUDA graph): one
launch, one copy to the device before it and one to the host after it. Eager rounds call the same parts one by one.

The rule that makes recordings safe: a function writes nothing but its outputs, and keys and values behind the committed
positions; lengths and recurrent states advance on the host, in `DecodeLoop.round`. So it may run twice, or fail,
without effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.engine.accept import accept_path
from mmspec.engine.recordings import WrittenPlace
from mmspec.engine.rng import read_noise
from mmspec.engine.sampler import RoundHistory, TreeSampler
from mmspec.engine.tree import DraftTree, first_chain, sanitize
from mmspec.engine.verifier import RoundReader, resize
from mmspec.interfaces.round import DraftPart, ScorePart

NUM_COLUMNS = 7
"""Integers per row that every round needs: root id, emitted tokens, `max_emit`, whether to draft, committed length, and
`RoundHistory.lengths` and `ignored`."""


@dataclass(frozen=True)
class RoundFunction:
    """One round as a function of tensors.

    Attributes:
        score: the forward and the commit.
        sampler: samples the ids.
        num_nodes: N.
        has_stop_ids: whether rows can end.
        draft: the draft; None if the tree is an input.
        top_k: of `DrafterRequirements`; 0 where no draft was made.
    """

    score: ScorePart
    sampler: TreeSampler
    num_nodes: int
    has_stop_ids: bool
    draft: DraftPart | None = None
    top_k: int = 0

    @property
    def key(self) -> Hashable:
        """What distinguishes it from the other functions of a call."""
        draft = None if self.draft is None else self.draft.key
        return draft, self.score.key, self.sampler.recording_key, self.num_nodes, self.has_stop_ids, self.top_k

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One round; A is the largest depth of a node, plus one.

        Args:
            tensors: `draftable` [V] bool, `stop_ids` [E] int64 if there are any, when sampling
                `SamplingNoise.tensors`, the state of both parts; [B, n] int64, per row `NUM_COLUMNS` integers, those of
                the draft and when sampling A slots of noise; the inputs of the draft, or tokens, parents and node mask
                of the tree [B, N]; for a repetition penalty, `RoundHistory.sequences`.

        Returns:
            [B, N, 2] float32 largest logits; what `RoundReader` reads; then, with a draft, [B, A, S] hidden states that
            it reads at the accepted nodes, and what the drafter keeps; else tokens, parents, node mask, ancestor mask
            and depths of the scored tree, and [B, N, D] of each hidden state; at last what `ScorePart.commit` returns.
        """
        draft, score = self.draft, self.score
        parts = _Split(tensors)
        draftable = parts.take()
        stop_ids = parts.take() if self.has_stop_ids else None
        noise_tensors = parts.take_list(self.num_noise_tensors)
        draft_state = parts.take_list(0 if draft is None else len(draft.state))
        score_state = parts.take_list(len(score.state))
        numbers = parts.take()
        inputs = parts.take_list(3 if draft is None else len(draft.inputs))
        noise = None
        if noise_tensors:
            num_steps = self.reader.max_steps
            numbers, noise = numbers[:, :-num_steps], read_noise(noise_tensors, numbers[:, -num_steps:])
        root_ids, _, max_emit, is_drafting, lengths, history_lengths, ignored = numbers[:, :NUM_COLUMNS].unbind(1)
        kept: Sequence[Tensor] = ()
        if draft is None:
            tree = DraftTree(*inputs)
        else:
            tree, kept = draft.function(draft_state, inputs, numbers[:, NUM_COLUMNS:], noise)
            tree = (first_chain(tree) if score.chains_only else tree).trim(self.num_nodes).pad(self.num_nodes)
            tree.node_mask = tree.node_mask & is_drafting[:, None].bool()
        tree = sanitize(tree, root_ids, draftable, stop_ids, None if draft is None else draft.max_depth)
        logits, *others = score.forward(score_state, lengths, tree)
        num_hidden_states = len(score.hidden_state_indices)
        hidden_states, logged = others[:num_hidden_states], others[num_hidden_states:]
        logits = logits.float()
        assert tree.depths is not None
        if noise is not None:
            noise = noise.gather(1, tree.depths.clamp(max=noise.shape[1] - 1)[..., None].expand(logits.shape))
        history = RoundHistory(parts.take(), history_lengths, ignored) if self.sampler.reads_history else None
        sampled_ids, _, is_nan = self.sampler.sample_nodes(logits, tree, noise, history)
        path, counts, tokens = accept_path(tree, sampled_ids, max_emit, stop_ids)
        advanced = score.commit(score_state, lengths, path, counts, logged)
        read = self.reader.pack((path, counts, tokens), tree, is_nan, logits)
        if draft is None:
            assert tree.ancestor_mask is not None
            scored_tree = tree.tokens, tree.parents, tree.node_mask, tree.ancestor_mask, tree.depths
            return logits.topk(2).values, read, *scored_tree, *hidden_states, *advanced
        scored = draft.select_hidden_states(dict(zip(draft.hidden_state_indices, hidden_states, strict=True)))
        path = resize(path, self.reader.max_steps)
        scored = scored.gather(1, path[..., None].expand(-1, -1, scored.shape[-1]))
        return logits.topk(2).values, read, scored, *kept, *advanced

    @property
    def num_noise_tensors(self) -> int:
        """Tensors of the noise."""
        return 0 if self.sampler.noise is None else len(self.sampler.noise.tensors)

    def written(self, *tensors: Tensor) -> list[WrittenPlace]:
        """Keys and values that a run with these arguments has written."""
        parts = _Split(tensors)
        num_draft = 0 if self.draft is None else len(self.draft.state)
        parts.take_list(1 + self.has_stop_ids + self.num_noise_tensors + num_draft)
        state = parts.take_list(len(self.score.state))
        return self.score.places(state, parts.take()[:, 4])

    @property
    def reader(self) -> RoundReader:
        """Reads the second output."""
        return RoundReader(
            self.num_nodes, self.num_nodes if self.draft is None else self.draft.max_depth + 1, self.top_k
        )


class _Split:
    """Takes tensors from a sequence, one part after another."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def take(self) -> Tensor:
        """The next tensor."""
        return self._tensors.pop(0)

    def take_list(self, count: int) -> list[Tensor]:
        """The next `count` tensors."""
        taken, self._tensors = self._tensors[:count], self._tensors[count:]
        return taken
