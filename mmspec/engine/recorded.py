"""`RecordedRounds`: whole rounds of a call as recorded functions, with one copy to the device and one wait each.

What a round decides is what eager rounds decide: `RoundFunction` calls the same parts. Not recorded: collected scores,
padding of ended rows that is returned, processors that read the history (but for a repetition penalty). Where the size
of the tree depends on the draft, the draft is a function of its own, and its tree an input of the round.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import length_bucket
from mmspec.engine.output import OutputBuffer
from mmspec.engine.recordings import Recordings, recordable_mode
from mmspec.engine.round import RoundFunction
from mmspec.engine.round_plan import RoundPlan, RowTensors
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import DraftTree, root_only
from mmspec.engine.verifier import Verified, resize
from mmspec.interfaces import Drafter, Target, VerifyResult
from mmspec.interfaces.round import ROUND, DraftPart, RecordableTarget, ScorePart


class RecordedRounds:
    """The recorded rounds of one call."""

    def __init__(
        self, target: RecordableTarget, drafter: Drafter, output: OutputBuffer, sampler: TreeSampler, draftable: Tensor
    ) -> None:
        """Arguments: as in `DecodeLoop`, for which `can_record_rounds`."""
        assert target.recordings is not None
        self._target, self._drafter, self._output, self._sampler = target, drafter, output, sampler
        self._recordings: Recordings = target.recordings
        self._ignored = sampler.ignored_lengths(len(output.emitted))
        self._sized_trees: dict[int, DraftTree] = {}
        with recordable_mode():
            self._constants = [self._recordings.fixed("draftable", draftable)]
            if output.stop_ids is not None:
                self._constants.append(self._recordings.fixed("stop_ids", output.stop_ids))
            if output.noise is not None:
                output.noise.store_in(self._recordings)
                self._constants += output.noise.tensors

    @property
    def can_draft(self) -> bool:
        """Whether the drafter's drafts may be parts of rounds."""
        return type(self._drafter).draft_part is not Drafter.draft_part

    def accepts(self, part: DraftPart) -> bool:
        """Whether rounds with this draft have not failed to be recorded."""
        return part.owner not in self._recordings.in_parts

    def run(self, plan: RoundPlan, top_k: int) -> Verified | RuntimeError | None:
        """What one recorded round emits, or its error at a draft; None, and nothing is changed, if it may not be
        recorded or that fails.

        Args:
            plan: of the round.
            top_k: ids of the largest logits of each node to read.
        """
        draft, output = plan.part, self._output
        if draft is None and (ROUND in self._recordings.in_parts or plan.rows.finished):
            return None
        indices = self._drafter.requirements.hidden_state_indices if draft is None else draft.hidden_state_indices
        score = self._target.score_part(plan.num_nodes, indices)
        if score is None:
            return None
        function = RoundFunction(score, self._sampler, plan.num_nodes, output.stop_ids is not None, draft, top_k)
        outputs = self._replay(function, plan, score)
        if outputs is None:
            return None
        end = len(outputs) - score.num_kept
        (_, read, *rest), advanced = outputs[:end], outputs[end:]
        tree = self._sized_tree(plan.num_nodes) if draft is not None else _as_tree(rest)
        result, has_nan = function.reader.read(read, tree, plan.rows.max_emit)
        if has_nan:
            return RuntimeError(self._sampler.nan_message)
        if draft is None:
            return Verified(result, dict(zip(indices, rest[5:], strict=True)), committed=advanced)
        return Verified(result, {0: rest[0]}, committed=advanced, kept=tuple(rest[1:]))

    def follow(self, plan: RoundPlan, result: VerifyResult, committed: Sequence[Tensor]) -> None:
        """Let the target know what a recorded round has accepted (`Verified.committed`)."""
        rows = zip(plan.rows.root_ids, result.emitted_ids, strict=True)
        self._target.follow_part([[root, *ids[:-1]] if ids else [] for root, ids in rows], committed)

    def _replay(self, function: RoundFunction, plan: RoundPlan, score: ScorePart) -> tuple[Tensor, ...] | None:
        """The outputs of the function; None after a failure."""
        draft = plan.part
        draft_state = () if draft is None else draft.state
        state = [*self._constants, *draft_state, *score.state]
        owner = ROUND if draft is None else draft.owner
        inputs = self._inputs(function, plan, score)
        shapes = tuple(tuple(tensor.shape) for tensor in (*self._constants, inputs[-1]))
        try:
            with recordable_mode():  # here only: what belongs to the call may be made in the user's inference mode
                return self._recordings.run(owner, (function.key, shapes), function, state, inputs)
        except Exception as error:  # of the capture or the replay: only speed is lost
            self._recordings.in_parts.add(owner)
            reason = "".join(str(error).strip().splitlines()[:1])
            self._recordings.warn(f"rounds are recorded in parts, not as a whole ({type(error).__name__}: {reason})")
            return None

    def _inputs(self, function: RoundFunction, plan: RoundPlan, score: ScorePart) -> list[Tensor]:
        """What differs from round to round: the integers of the rows in one copy to the device, and draft or tree."""
        output, rows, draft = self._output, plan.rows, plan.part
        output.reserve(plan.num_nodes)
        start, device = output.prompt_length, output.sequences.device
        others = [[] for _ in score.lengths] if draft is None else draft.numbers
        table = [
            [root, emitted, limit, limit > 1, length, start + emitted, ignored, *numbers]
            for root, emitted, limit, length, ignored, numbers in zip(
                rows.root_ids, rows.num_emitted, rows.max_emit, score.lengths, self._ignored, others, strict=True
            )
        ]
        if output.noise is not None:
            noise_end = output.noise_end(plan.num_nodes)
            slots = output.noise.slots(rows.num_emitted, function.reader.max_steps, noise_end)
            table = [row + more for row, more in zip(table, slots, strict=True)]
        columns = from_host(table, device)
        root_ids, num_emitted, max_emit = columns[:, :3].unbind(1)
        rows.on_device = RowTensors(root_ids, num_emitted, max_emit, None)
        if draft is None:
            assert plan.tree is not None
            trees = [part.to(device) for part in (plan.tree.tokens, plan.tree.parents, plan.tree.node_mask)]
        else:
            trees = list(draft.inputs)
        inputs = [columns, *trees]
        if self._sampler.reads_history:
            inputs.append(resize(output.sequences, length_bucket(output.sequences.shape[1])))
        return inputs

    def _sized_tree(self, num_nodes: int) -> DraftTree:
        """A tree of this size: the tokens of one that was drafted within a round stay in the recording's memory."""
        if num_nodes not in self._sized_trees:
            root = root_only(len(self._output.emitted), self._output.sequences.device)
            self._sized_trees[num_nodes] = root.pad(num_nodes)
        return self._sized_trees[num_nodes]


def _as_tree(outputs: Sequence[Tensor]) -> DraftTree:
    """The scored tree among the outputs of a round."""
    tokens, parents, node_mask, ancestor_mask, depths = outputs[:5]
    return DraftTree(tokens, parents, node_mask, None, ancestor_mask, depths)


def can_record_rounds(target: Target, output: OutputBuffer, sampler: TreeSampler) -> bool:
    """Whether whole rounds of a call may be recorded."""
    if not isinstance(target, RecordableTarget) or target.recordings is None:
        return False
    return (
        sampler.recording_key is not None
        and not output.stepwise
        and not output.collects
        and output.sequences.device == target.device
    )
