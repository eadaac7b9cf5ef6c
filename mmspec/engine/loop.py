"""The decode loop: rounds of draft, score, accept and commit until every row is finished.

One round (`DecodeLoop.round`):

    plan = _plan(...)                   a draft tree; the root alone is plain decoding
    verified = _run_parts(plan)         sanitize: drop what must not be scored; target.score: one forward over the
                                        nodes of all rows; verify: sample an id at every node, accept the path of
                                        matching nodes, copy to the host
              recorded.run(plan)        the same as one recorded function, on a GPU where that is possible
    _commit(verified)                   target.commit: keep the accepted nodes in the KV cache, where that is not done;
                                        output.emit: append the emitted tokens to each row
    drafter.observe(result)             let the drafter follow

Between rounds the cache holds the prompt and all emitted tokens but the last, which is node 0 of the next tree; so a
round keeps as many nodes as it emits tokens. Then `output.advance` calls criteria and streamer, one output step at a
time. Where user code needs one step at a time, `step` takes the place of `round`, also in the middle of a call.
Compared with assisted generation in transformers, one object (`target`) owns the KV cache, rows have lengths of their
own, and there is no rejection sampling (`mmspec.engine.accept`).

Knows the target and the drafter by their interfaces only. Letters: B rows, N nodes,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from mmspec.economy.chooser import Chooser
from mmspec.engine.output import OutputBuffer
from mmspec.engine.recorded import RecordedRounds, can_record_rounds
from mmspec.engine.round_plan import RoundPlan
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import BUCKETS, DraftTree, bucket_size, first_chain, replace_with_chain, root_only, sanitize
from mmspec.engine.verifier import Verified, confirm, verify
from mmspec.interfaces import Drafter, ObservedRound, Observer, Prompt, Target, VerifyResult
from mmspec.interfaces.drafter import DRAFTER_CONTRACT
from mmspec.interfaces.round import RecordableTarget
from mmspec.messages import one_line
from mmspec.metrics.stats import RoundTimes, Stats

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class DecodeLoop:
    """The parts of one call of `generate`.

    Attributes:
        target: scores trees and owns the KV cache.
        drafter: proposes trees.
        prompt: as the drafter sees it.
        output: the emitted tokens; calls criteria and streamer.
        sampler: samples an id at every node.
        chooser: decides whether to draft and how many nodes to score.
        stats: counters and times of this call.
        draftable: [V] bool, ids that may be drafted.
        start_time: `time.perf_counter()` at the start of `generate`.
        warn: logs a message once per model.
        observe: called once a round, before the drafter observes it; None if nobody listens.
        isolation: context of the hooks of a user's drafter; None for one of mmspec.
        recorded: whole rounds as recorded functions; None where they are not recorded.
    """

    target: Target
    drafter: Drafter
    prompt: Prompt
    output: OutputBuffer
    sampler: TreeSampler
    chooser: Chooser
    stats: Stats
    draftable: Tensor
    start_time: float
    warn: Callable[[str], None] = field(default=lambda message: None)
    observe: Observer | None = None
    isolation: AbstractContextManager[Any] | None = None
    recorded: RecordedRounds | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._has_failed = self._has_moved = False
        self._root = root_only(len(self.output.emitted), self.draftable.device)
        if can_record_rounds(self.target, self.output, self.sampler):
            assert isinstance(self.target, RecordableTarget)
            self.recorded = RecordedRounds(self.target, self.drafter, self.output, self.sampler, self.draftable)

    def run(self, prompt_logits: Tensor, kernels: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Decode until all rows are finished.

        Args:
            prompt_logits: [B, V] logits of the last position of the prompt.
            kernels: called when the first tokens are out (`mmspec.backend.use_kernels`: who computes); its context
                is that of the drafter and of the rounds.
        """
        output = self.output
        self.stats.row_forwards = [0] * prompt_logits.shape[0]
        if self.sampler.constraints:
            output.confirm = self._confirm
        first = self._verify_first((prompt_logits[:, None], {}))
        output.emit(first.result, first.scores, first.logits)
        is_done = output.advance()
        first_token_time = time.perf_counter()
        self.stats.ttft_s += first_token_time - self.start_time
        with kernels():
            state = self._ask(self._hook, self.drafter.begin, self.prompt)
            if isinstance(self.target, RecordableTarget) and self.target.recordings is not None:
                self._ask(self._hook, self.drafter.use_recordings, state, self.target.recordings)
            self._notify(state, first.result)
            self._ask(self._hook, self.drafter.observe, state, self._result_for_drafter(first.result), {})
            while not is_done:
                self.target.crop(output.cached_lengths)  # only where a criterion has cut rows; rejected nodes: `commit`
                if output.stepwise:
                    self.step()
                else:
                    self.round(state)
                is_done = output.advance()
        self.stats.decode_s += time.perf_counter() - first_token_time
        self.stats.waits_for = self.chooser.waits_for

    def _verify_first(self, scored: tuple[Tensor, dict[int, Tensor]]) -> Verified:
        """The first tokens; by transformers' own calls if a prefix processor fails."""
        output = self.output
        try:
            if not output.stepwise:
                return verify(output, self.sampler, self._root, scored, output.row_state(1))
        except Exception as error:
            if not self.sampler.constraints:
                raise
            self._warn_at_draft(error)
            output.disable_speculation()
        return verify(output, self.sampler.own, self._root, scored, output.row_state(1))

    def _confirm(self, logits: Tensor) -> bool:
        """Whether a processor gives another result than at the draft, so that no more is drafted."""
        differs = confirm(self.output, self.sampler.own, logits)
        if differs:
            self.warn(
                "a prefix processor depends on more than the ids; the rest of this call is decoded without drafts"
            )
        return differs

    def round(self, state: Any) -> None:
        """One round: draft, score, accept, commit. `state` is the drafter's."""
        start = self._now()
        plan = self._plan(state)
        built = self._now()
        recorded, top_k = self.recorded, self._top_k(plan)
        verified: Verified | Exception | None = None if recorded is None else recorded.run(plan, top_k)
        if verified is None and plan.part is not None:  # the recording has failed
            plan, built = self._plan(state, whole=False), self._now()
        verified = verified or self._run_parts(plan)
        if isinstance(verified, Exception):
            self._disable_speculation(verified)  # nothing is committed: the next round scores the root alone
            return
        accepted = self._now()
        result, active = verified.result, self._active_rows(plan.rows.max_emit)
        self._commit(plan, verified)
        emitted = self._now()
        result = result.of_rows(active, plan.rows.on_device.finished)
        self._notify(state, result, plan.num_proposed)
        if plan.part is None:
            self._ask(self._hook, self.drafter.observe, state, self._result_for_drafter(result), verified.hidden_states)
        else:
            hidden_states = verified.hidden_states[0]
            self._ask(self._hook, self.drafter.observe_part, state, result, hidden_states, verified.kept)
        draft_s = (built - start) + (self._now() - emitted)
        times = RoundTimes(draft_s, accepted - built, emitted - accepted)
        self._record(result, active, plan, times)

    def step(self) -> None:
        """One token of every row, by the calls that transformers makes, without a draft.

        User code that is called at every step may read and write the ids, draw random numbers, or change the model.
        """
        start = time.perf_counter()
        rows = self.output.row_state(1)
        scored = self.target.score(self._root.with_root(rows.on_device.root_ids))
        verified = verify(self.output, self.sampler.own, self._root, scored, rows)
        accepted, active = time.perf_counter(), self._active_rows(rows.max_emit)
        self._commit(RoundPlan(1, rows), verified)
        result, times = verified.result, RoundTimes(0.0, accepted - start, time.perf_counter() - accepted)
        self.stats.add_round(1, result.tree_sizes, result.emitted_ids, active, times)

    def _notify(self, state: Any, result: VerifyResult, num_proposed: int | None = None) -> None:
        """Tell the observers of a round."""
        if self.observe is not None:
            self.observe(ObservedRound(self.prompt, result.own_copy(), num_proposed, state))

    def _ask(self, hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What a hook of the drafter returns. None from its first error on, which costs the call its drafts alone."""
        if self._has_failed:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self._has_failed = True
            name = getattr(self.drafter, "name", "")
            self.warn(
                f"drafter {name!r} failed ({one_line(error, 200)}); the rest of this call is decoded without drafts"
            )
            if all(self.output.emitted):  # it may have drafted in the target's cache
                self.target.crop(self.output.cached_lengths)
            return None

    def _hook(self, hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a hook of the drafter returns; the draws of a user's come from generators of its own."""
        if self.isolation is None:
            return hook(*args, **kwargs)
        with self.isolation:
            return hook(*args, **kwargs)

    def _result_for_drafter(self, result: VerifyResult) -> VerifyResult:
        """What the drafter is given of a round: a user's may write into it; no nodes if forced ones moved its own."""
        if self._has_moved:
            self._has_moved, result = False, replace(result, accepted_nodes=[[] for _ in result.accepted_nodes])
        return result if self.isolation is None else result.own_copy()

    def _now(self) -> float:
        """Seconds of a clock that stops while something is done once per shape."""
        return time.perf_counter() - self.target.setup_s

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _plan(self, state: Any, whole: bool = True) -> RoundPlan:
        """Plan and draft: what the coming round scores, a tree. If the `whole` round may be one recorded function, the
        draft may be a part of it instead."""
        draft, num_proposed, output = None, None, self.output
        if self.target.skips_rows:
            self.chooser.follow_rows(sum(limit > 0 for limit in output.max_emit(1)))
        may_gain = any(self._active_rows([limit - 1 for limit in output.max_emit(2)]))  # else drafts are for nothing
        may_gain |= self.chooser.fixed_tree_size is not None  # but all rounds have this size
        if not self._has_failed and may_gain and self.chooser.plan():
            if whole and (recorded := self._plan_part(state)) is not None:
                return recorded
            draft, num_proposed = self._ask(self._draft, state) or (None, None)
        # Finished rows whose padding is returned decode it, `padding_lag` steps so far, as a forced chain.
        num_padding_nodes = bucket_size(min(output.padding_lag + 1, BUCKETS[-1]))
        num_nodes = max(1 if draft is None else draft.num_nodes, num_padding_nodes)
        rows = output.row_state(num_nodes)
        root = self._root.with_root(rows.on_device.root_ids)
        if num_nodes == 1:
            return RoundPlan(1, rows, root, num_proposed=num_proposed)
        tree = (root if draft is None else draft).pad(num_nodes)
        return RoundPlan(num_nodes, rows, tree, num_proposed=num_proposed)

    def _draft(self, state: Any) -> tuple[DraftTree, int]:
        """The drafter's tree, trimmed or padded to the size that is worth scoring; how many nodes it proposed."""
        chooser = self.chooser
        max_emit = self.output.max_emit(chooser.max_tree_size)
        active = self._active_rows([limit - 1 for limit in max_emit])  # a row that may emit one token needs no draft
        tree = self._hook(self.drafter.propose, state, chooser.max_tree_size, list(active))
        if not isinstance(tree, DraftTree):
            raise TypeError(f"{DRAFTER_CONTRACT}; got one whose propose returned {type(tree).__name__}.")
        tree.check(len(active))
        num_proposed = tree.num_nodes
        tree = tree.trim(chooser.max_tree_size)
        if self.sampler.constraints:
            lengths, proposed = [self.output.prompt_length + n for n in self.output.num_emitted], tree
            tree = self.sampler.constrain(tree, self.output.sequences, lengths, chooser.max_tree_size)
            self._has_moved = tree.tokens is not proposed.tokens
        if self.target.chains_only:
            tree = first_chain(tree)
        max_gain = sum(limit - 1 for limit, on in zip(max_emit, active, strict=True) if on)
        size = chooser.choose_size(tree, sum(active), max_gain)
        return tree.trim(size).pad(size), num_proposed

    def _plan_part(self, state: Any) -> RoundPlan | None:
        """The draft as a part of a recorded round; None where it is a tree."""
        recorded = self.recorded
        # The tree of a draft within a recorded round stays on the device; that of a user is checked.
        if recorded is None or not recorded.can_draft or self.observe is not None or self.isolation is not None:
            return None
        if (size := self._size_in_advance()) is None:
            return None
        part = self._ask(self._hook, self.drafter.draft_part, state, size)
        if part is None or not recorded.accepts(part):
            return None
        return RoundPlan(size, self.output.row_state(size), part=part, num_proposed=size)

    def _size_in_advance(self) -> int | None:
        """Nodes of a round that is chosen before its draft; None if they depend on the draft, or none is due."""
        output, chooser = self.output, self.chooser
        if output.sync_finished_rows and any(output.finished):  # their padding is decoded as a forced chain
            return None
        limits = zip(output.max_emit(chooser.max_tree_size), output.finished, strict=True)
        gains = [limit - 1 for limit, finished in limits if limit > 1 and not finished]
        if not gains:
            return None
        size = chooser.choose_size_in_advance(self.draftable.device, len(gains), sum(gains))
        return None if size is None or size < 2 else size

    # --- the round ----------------------------------------------------------------------------------------------------

    def _run_parts(self, plan: RoundPlan) -> Verified | Exception:
        """What the parts emit, one by one: unfinished rows may wait, finished rows emit a chain of pad ids."""
        rows, tree = plan.rows, plan.tree
        assert tree is not None
        if plan.num_nodes > 1:
            there = rows.on_device
            tree = sanitize(tree, there.root_ids, self.draftable, self.output.stop_ids)
            if there.finished is not None:
                tree = replace_with_chain(tree, there.finished, self.output.pad_token_id)
        indices = self.drafter.requirements.hidden_state_indices
        scored = self.target.score(tree, indices, [limit > 0 for limit in rows.max_emit])
        try:
            return verify(self.output, self.sampler, tree, scored, rows, self._top_k(plan))
        except Exception as error:
            return error

    def _top_k(self, plan: RoundPlan) -> int:
        """Ids of the largest logits of each node that the drafter reads after this round."""
        return 0 if plan.num_proposed is None else self.drafter.requirements.top_k

    def _commit(self, plan: RoundPlan, verified: Verified) -> None:
        """Keep what was accepted: in the KV cache, and in the output."""
        if verified.committed is not None and self.recorded is not None:
            self.recorded.follow(plan, verified.result, verified.committed)
        else:
            self.target.commit(verified.result)
        self.output.emit(verified.result, verified.scores, verified.logits, plan.rows)

    def _disable_speculation(self, error: Exception) -> None:
        """After an error at a draft token, which plain decoding might never reach: drop it, and draft no more."""
        self._warn_at_draft(error)
        self.output.disable_speculation()
        self.target.crop(self.output.cached_lengths, zero_tail=True)

    def _warn_at_draft(self, error: Exception) -> None:
        name = type(error).__name__
        message = one_line(str(error) or name, 200)
        self.warn(f"{name} at a draft ({message}); the rest of this call is decoded without drafts")

    def _active_rows(self, max_emit: list[int]) -> list[bool]:
        """Rows that are not finished and may emit at least one token."""
        return [limit > 0 and not finished for limit, finished in zip(max_emit, self.output.finished, strict=True)]

    def _record(self, result: VerifyResult, active: list[bool], plan: RoundPlan, times: RoundTimes) -> None:
        """Update the economy and the counters."""
        self.chooser.record(
            result.tree.num_nodes,
            draft_s=times.draft_s,
            score_s=times.score_s,
            overhead_s=times.overhead_s,
            num_accepted=[len(ids) - 1 for ids, on in zip(result.emitted_ids, active, strict=True) if on],
            is_whole=plan.part is not None,
        )
        self.stats.add_round(result.tree.num_nodes, result.tree_sizes, result.emitted_ids, active, times)
