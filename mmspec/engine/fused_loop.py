"""`FusedLoop`: the decode loop with rounds that are one recorded function each, from draft to commit.

    extend the drafter's context by the last round's tokens, draft a tree     `DraftPart`
    its ancestor mask and depths                                              `finish_draft`
    forward over the nodes                                                    `ScorePart.function`
    sample an id at every node, accept the path of matching nodes             `sample_recorded`, `accept_path_in_torch`
    keep the accepted nodes in the KV cache                                   `ScorePart.commit`

On a GPU that is one launch, one copy to the device before it and one to the host after it. What the round decides is
what `DecodeLoop.round` decides; whatever is unusual runs there: returned padding, rounds without a draft, most
processors that read the history, collected scores, user code that needs one step at a time, a tree whose size depends
on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.host_copy import from_host
from mmspec.engine.loop import DecodeLoop, RoundTimes
from mmspec.engine.output import OutputBuffer, RowState
from mmspec.engine.recordings import recordable_mode
from mmspec.engine.sampler import RoundHistory, TreeSampler
from mmspec.engine.static_cache import length_bucket
from mmspec.engine.tree import DraftTree, finish_draft, root_only
from mmspec.engine.verify import accept_path_in_torch
from mmspec.interfaces import VerifyResult
from mmspec.interfaces.fused import DraftPart, FusableDrafter, FusableTarget, ScorePart

NUM_COLUMNS = 7
"""Integers per row that every round needs: root id, emitted tokens, `max_emit`, whether to draft, committed length, and
`RoundHistory.lengths` and `ignored`."""


@dataclass(frozen=True)
class FusedRound:
    """One round as a function of tensors. Changes nothing but keys and values behind the committed positions.

    Attributes:
        draft: the draft.
        score: the forward and the commit.
        sampler: samples the ids.
        num_nodes: N.
        has_stop_ids: whether rows can end.
    """

    draft: DraftPart
    score: ScorePart
    sampler: TreeSampler
    num_nodes: int
    has_stop_ids: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One round; A is the largest depth of a draft node, plus one.

        Args:
            tensors: `draftable` [V] bool, `stop_ids` [E] int64 if there are any, the state of both parts; `NUM_COLUMNS`
                integers per row and those of the draft, [B, n] int64; its inputs; when sampling, the noise [B, A, V];
                for a repetition penalty, `RoundHistory.sequences`.

        Returns:
            [B, N] float32 largest logits, [B, 3 * A + 2] int64 as `FusedLoop` reads it, [B, A, S] hidden states at the
            accepted nodes, what the drafter keeps.
        """
        draft, score = self.draft, self.score
        parts = _Split(tensors)
        draftable = parts.take()
        stop_ids = parts.take() if self.has_stop_ids else None
        draft_state, score_state = parts.take_list(len(draft.state)), parts.take_list(len(score.state))
        numbers = parts.take()
        inputs = parts.take_list(len(draft.inputs))
        noise = None if self.sampler.noise is None else parts.take()
        root_ids, _, max_emit, is_drafting, lengths, history_lengths, ignored = numbers[:, :NUM_COLUMNS].unbind(1)
        tree, kept = draft.function(draft_state, inputs, numbers[:, NUM_COLUMNS:], noise)
        tree = tree.trim(self.num_nodes).pad(self.num_nodes)
        tree.node_mask = tree.node_mask & is_drafting[:, None].bool()
        tree = finish_draft(tree, root_ids, draftable, stop_ids, draft.max_depth)
        logits, *hidden_states = score.function(score_state, lengths, tree)
        logits = logits.float()
        assert tree.depths is not None
        if noise is not None:
            noise = noise.gather(1, tree.depths[..., None].expand(logits.shape))
        history = RoundHistory(tree, parts.take(), history_lengths, ignored) if self.sampler.reads_history else None
        sampled_ids, is_nan = self.sampler.sample_recorded(logits, noise, history)
        path, counts, tokens = accept_path_in_torch(tree, sampled_ids, max_emit, stop_ids)
        path, tokens = (_resize(part, draft.max_depth + 1) for part in (path, tokens))
        score.commit(score_state, lengths, path, counts)
        indices = draft.hidden_state_indices
        scored = draft.select_hidden_states(dict(zip(indices, hidden_states, strict=True)))
        accepted = scored.gather(1, path[..., None].expand(-1, -1, scored.shape[-1]))
        sizes = tree.node_mask.sum(1, keepdim=True)
        read = torch.cat((tokens, path, is_nan.gather(1, path), counts[:, None], sizes), dim=1)
        return logits.amax(-1), read, accepted, *kept


class FusedLoop(DecodeLoop):
    """See the module."""

    target: FusableTarget
    drafter: FusableDrafter

    def __post_init__(self) -> None:
        super().__post_init__()
        recordings, key = self.target.recordings, self.sampler.recording_key
        assert recordings is not None and key is not None
        self._recordings, self._sampler_key = recordings, key
        self._ignored = self.sampler.ignored_lengths(len(self.output.emitted))
        self._has_failed = False
        self._sized_trees: dict[int, DraftTree] = {}
        with recordable_mode():
            self._constants = [recordings.fixed("draftable", self.draftable)]
            if self.output.stop_ids is not None:
                self._constants.append(recordings.fixed("stop_ids", self.output.stop_ids))

    def round(self, state: Any) -> None:
        """See `DecodeLoop`."""
        if not self._run_fused(state, self._now()):
            super().round(state)

    def _run_fused(self, state: Any, start: float) -> bool:
        """One recorded round; False if nothing was done."""
        output, size = self.output, self._size_in_advance()
        if size is None:
            return False
        draft = self.drafter.draft_part(state, size)
        if draft is None:
            return False
        self._has_failed = draft.owner in self._recordings.unfused
        score = self.target.score_part(size, draft.hidden_state_indices)
        if score is None or self._has_failed:
            return False
        prepared = self._now()
        limits = self._limits(size)
        numbers, noise = self._row_numbers(draft, score, limits, size)
        outputs = self._replay(draft, score, size, numbers, noise)
        if outputs is None:
            return False
        _, read, hidden_states, *kept = outputs
        result, has_nan = self._read(read, size)
        scored = self._now()
        if has_nan:
            self._disable_speculation(RuntimeError(self.sampler.nan_message))
            return True
        active = self._active_rows(limits)
        self.target.commit_part([len(ids) for ids in result.emitted_ids])
        root_ids, num_emitted, max_emit = numbers[:, :3].unbind(1)
        output.emit(result, rows=RowState(root_ids, num_emitted, max_emit, limits, None))
        self.drafter.observe_part(state, result, hidden_states, kept)
        # The draft is part of the recorded function, and so of the time of its forward.
        self._record(result, active, True, RoundTimes(prepared - start, scored - prepared, self._now() - scored))
        return True

    def _size_in_advance(self) -> int | None:
        """Nodes of the coming round; None if it is not to be fused, or they depend on the draft."""
        output, controller = self.output, self.controller
        if self._has_failed or output.stepwise or not controller.should_draft:
            return None
        if output.sync_finished_rows and any(output.finished):
            return None
        gains = [limit - 1 for limit in self._limits(controller.max_tree_size) if limit > 1]
        if not gains:
            return None
        size = controller.choose_size_in_advance(self.draftable.device, len(gains), sum(gains))
        return None if size is None or size < 2 else size

    def _limits(self, num_nodes: int) -> list[int]:
        """`OutputBuffer.max_emit`; finished rows emit nothing, since their padding is not decoded."""
        limits = zip(self.output.max_emit(num_nodes), self.output.finished, strict=True)
        return [0 if finished else limit for limit, finished in limits]

    def _row_numbers(
        self, draft: DraftPart, score: ScorePart, limits: list[int], size: int
    ) -> tuple[Tensor, Tensor | None]:
        """The integers of the round in one copy to the device, and the noise of its steps."""
        output = self.output
        output.reserve(size)
        num_emitted, num_steps = output.num_emitted, draft.max_depth + 1
        start = output.prompt_length
        columns = zip(output.emitted, limits, score.lengths, self._ignored, draft.numbers, strict=True)
        rows = [
            [ids[-1], len(ids), limit, limit > 1, length, start + len(ids), ignored, *others]
            for ids, limit, length, ignored, others in columns
        ]
        if output.noise is None:
            return from_host(rows, self.draftable.device), None
        slots = output.noise.lookahead_slots(num_emitted, num_steps, output.noise_end(size))
        numbers = from_host([row + steps for row, steps in zip(rows, slots, strict=True)], self.draftable.device)
        return numbers[:, :-num_steps], output.noise.at_slots(numbers[:, -num_steps:])

    def _replay(
        self, draft: DraftPart, score: ScorePart, size: int, numbers: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        """The outputs of `FusedRound`; None after a failure."""
        function = FusedRound(draft, score, self.sampler, size, self.output.stop_ids is not None)
        state = [*self._constants, *draft.state, *score.state]
        inputs = [numbers, *draft.inputs, *(() if noise is None else (noise,))]
        if self.sampler.reads_history:
            inputs.append(_resize(self.output.sequences, length_bucket(self.output.sequences.shape[1])))
        shapes = tuple(tuple(tensor.shape) for tensor in (*self._constants, inputs[-1]))
        key = draft.key, score.key, self._sampler_key, shapes
        try:
            with recordable_mode():  # here only: what belongs to the call may be made in the user's inference mode
                return self._recordings.run(draft.owner, key, function, state, inputs)
        except Exception as error:  # of the capture or the replay: only speed is lost
            self._has_failed = True
            self._recordings.unfused.add(draft.owner)
            reason = str(error).strip().splitlines()[:1]
            self._recordings.warn(
                f"rounds are recorded in parts, not as a whole ({type(error).__name__}: {''.join(reason)})"
            )
            return None

    def _read(self, read: Tensor, size: int) -> tuple[VerifyResult, bool]:
        """The result of a round, copied to the host, and whether an emitted id is that of nan."""
        width = (read.shape[1] - 2) // 3
        rows = read.tolist()
        counts = [row[3 * width] for row in rows]
        emitted_ids = [row[:count] for row, count in zip(rows, counts, strict=True)]
        nodes = [row[width : width + count] for row, count in zip(rows, counts, strict=True)]
        has_nan = any(any(row[2 * width : 2 * width + count]) for row, count in zip(rows, counts, strict=True))
        if size not in self._sized_trees:  # the tokens stay in the recording's memory
            self._sized_trees[size] = root_only(len(rows), read.device).pad(size)
        result = VerifyResult(
            tree=self._sized_trees[size],
            path=read[:, width : 2 * width],
            counts=read[:, 3 * width],
            tokens=read[:, :width],
            emitted_ids=emitted_ids,
            accepted_nodes=nodes,
            tree_sizes=[row[3 * width + 1] for row in rows],
        )
        return result, has_nan


def can_fuse(target: object, drafter: object, output: OutputBuffer, sampler: TreeSampler) -> bool:
    """Whether `FusedLoop` may serve a call: for recordings that launch a function at once, and a head's drafts."""
    if not isinstance(target, FusableTarget) or target.recordings is None:
        return False
    return (
        not target.recordings.contain_weights  # compiled for a CPU: takes minutes, and launches cost little there
        and isinstance(drafter, FusableDrafter)
        and sampler.recording_key is not None
        and not output.stepwise
        and not output.collects
        and output.sequences.device == target.device
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


def _resize(rows: Tensor, width: int) -> Tensor:
    """[B, width]: the columns of `rows` [B, n] int64, cut or padded with 0."""
    missing = width - rows.shape[1]
    return functional.pad(rows, (0, missing)) if missing > 0 else rows[:, :width]
