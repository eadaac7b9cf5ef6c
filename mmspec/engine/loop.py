"""The decode loop: rounds of draft, score, accept and commit until every row is finished.

One round (`DecodeLoop.round`):

    tree = _build_tree(...)             sanitized draft tree; the root alone is plain decoding
    logits = target.score(tree)         one forward over the nodes of all rows
    result = _sample_and_accept(...)    sample an id at every node, accept the path of matching nodes, copy to the host
    target.commit(result)               keep the accepted nodes in the KV cache
    output.emit(result)                 append the emitted tokens to each row
    drafter.observe(result)             let the drafter follow

Between rounds the cache holds the prompt and all emitted tokens but the last, which is node 0 of the next tree; so a
round keeps as many nodes as it emits tokens. Then `output.advance` calls criteria and streamer, one output step at a
time. Compared with assisted generation in transformers, one object (`target`) owns the KV cache, rows have lengths of
their own, and there is no rejection sampling (`mmspec.engine.verify`).

Depends only on the interfaces: not on the model, the drafter, or how an id is sampled. Letters: B rows, N nodes,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.control.tree_size import TreeSizeController
from mmspec.engine.output import OutputBuffer, RowState
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import BUCKETS, DraftTree, bucket_size, first_chain, replace_with_chain, root_only, sanitize
from mmspec.engine.verify import accept_path
from mmspec.interfaces import Drafter, Prompt, Target, VerifyResult
from mmspec.metrics.stats import Stats


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round, by phase.

    Attributes:
        draft_s: `Drafter.propose` and `observe`, and the checks of the tree.
        score_s: the target's forward, sampling, acceptance, and the copy to the host.
        overhead_s: everything else.
    """

    draft_s: float
    score_s: float
    overhead_s: float


@dataclass
class DecodeLoop:
    """The parts of one call of `generate`.

    Attributes:
        target: scores trees and owns the KV cache.
        drafter: proposes trees.
        output: the emitted tokens; calls criteria and streamer.
        sampler: samples an id at every node.
        controller: decides whether to draft and how many nodes to score.
        stats: counters and times of this call.
        draftable: [V] bool, ids that may be drafted.
        start_time: `time.perf_counter()` at the start of `generate`.
        warn: logs a message once per model.
    """

    target: Target
    drafter: Drafter
    output: OutputBuffer
    sampler: TreeSampler
    controller: TreeSizeController
    stats: Stats
    draftable: Tensor
    start_time: float
    warn: Callable[[str], None] = field(default=lambda message: None)

    def __post_init__(self) -> None:
        self._root = root_only(len(self.output.emitted), self.draftable.device)

    def run(self, prompt_logits: Tensor, prompt: Prompt) -> None:
        """Decode until all rows are finished.

        Args:
            prompt_logits: [B, V] logits of the last position of the prompt.
            prompt: the prompt, for the drafter.
        """
        self.stats.row_forwards = [0] * prompt_logits.shape[0]
        result, processed_scores, raw_logits = self._sample_and_accept(
            self._root, prompt_logits[:, None], self.output.row_state(1)
        )
        state = self.drafter.begin(prompt)
        self.output.emit(result, processed_scores, raw_logits)
        self.drafter.observe(state, result, {})
        first_token_time = time.perf_counter()
        self.stats.ttft_s += first_token_time - self.start_time
        while not self.output.advance():
            self.target.crop(self._cached_lengths())  # only where a criterion has cut rows; rejected nodes: `commit`
            self.round(state)
        self.stats.decode_s += time.perf_counter() - first_token_time

    def round(self, state: Any) -> None:
        """One round: draft, score, accept, commit. `state` is the drafter's."""
        start = self._now()
        tree, row_state, has_draft = self._build_tree(state)
        active = self._active_rows(row_state.host_max_emit)
        built = self._now()
        logits, hidden_states = self.target.score(tree, self.drafter.requirements.hidden_state_indices)
        try:
            result, processed_scores, raw_logits = self._sample_and_accept(
                tree, logits, row_state, with_top_ids=has_draft
            )
        except Exception as error:
            if self.output.stepwise:
                raise
            self._disable_speculation(error)  # nothing is committed: the next round scores the root alone
            return
        accepted = self._now()
        self.target.commit(result)
        self.output.emit(result, processed_scores, raw_logits, row_state)
        emitted = self._now()
        result = _drop_inactive_rows(result, active, row_state)
        if not self.output.speculation_disabled:  # tokens were dropped then, and the drafter would receive some twice
            self.drafter.observe(state, result, hidden_states)
        draft_s = (built - start) + (self._now() - emitted)
        self._record(result, active, has_draft, RoundTimes(draft_s, accepted - built, emitted - accepted))

    def _now(self) -> float:
        """Seconds of a clock that stops while something is done once per shape."""
        return time.perf_counter() - self.target.setup_s

    def _build_tree(self, state: Any) -> tuple[DraftTree, RowState, bool]:
        """The tree to score, the rows before it, and whether the drafter was called for it.

        Unfinished rows may have to wait for others (`max_emit` 0), and finished rows emit a chain of pad ids; a call of
        one row needs neither.
        """
        draft = None
        if self.controller.should_draft and not self.output.stepwise:
            draft = self._draft(state)
        else:
            self.controller.skip_draft()
        num_nodes = max(1 if draft is None else draft.num_nodes, self._num_padding_nodes())
        row_state = self.output.row_state(num_nodes)
        root = self._root.with_root(row_state.root_ids)
        if num_nodes == 1:
            return root, row_state, draft is not None
        tree = sanitize(
            (root if draft is None else draft).pad(num_nodes), row_state.root_ids, self.draftable, self.output.stop_ids
        )
        if row_state.finished is not None:
            tree = replace_with_chain(tree, row_state.finished, self.output.pad_token_id)
        return tree, row_state, draft is not None

    def _num_padding_nodes(self) -> int:
        """Nodes that finished rows need for a chain of pad ids.

        With `output_scores`, `output_logits` or a returned cache, pad steps of finished rows must be decoded as well,
        `padding_lag` of them so far; they ride along as a forced chain. In stepwise decoding every row emits one id per
        round, so the root alone serves.
        """
        output = self.output
        return 1 if output.stepwise else bucket_size(min(output.padding_lag + 1, BUCKETS[-1]))

    def _sample_and_accept(
        self, tree: DraftTree, logits: Tensor, row_state: RowState, with_top_ids: bool = False
    ) -> tuple[VerifyResult, Tensor, Tensor]:
        """Sample an id at every node, accept the matching path, and copy the result to the host in one transfer.

        Args:
            tree: the sanitized tree that was scored.
            logits: [B, N, V] the target's logits.
            row_state: the rows before this round.
            with_top_ids: also return the largest logits' ids, as many as the drafter requires.

        Returns:
            The result; the processed scores [B, N, V], which are the logits after the processors (`scores` in what
            transformers returns); the raw logits [B, N, V]. Both float32.

        Raises:
            RuntimeError: no id can be sampled at an accepted node.
        """
        output = self.output
        output.reserve(tree.num_nodes)
        raw_logits = logits.to(device=output.sequences.device, dtype=torch.float32)
        if raw_logits.is_inference() and output.stepwise:
            raw_logits = raw_logits.clone()  # user code may write into it
        sampled_ids, processed_scores, is_nan = self._sample(tree, raw_logits, row_state)
        path, counts, tokens = self._accept(tree, sampled_ids, row_state)
        on_device = {"tokens": tokens}
        if tree.num_nodes > 1:
            on_device |= {"path": path, "counts": counts[:, None], "tree_sizes": tree.node_mask.sum(1, keepdim=True)}
        if is_nan is not None:
            on_device["is_nan"] = is_nan.gather(1, path)
        if with_top_ids and (top_k := min(self.drafter.requirements.top_k, raw_logits.shape[-1])):
            on_device["scored_ids"] = torch.where(tree.node_mask, tree.tokens, -1)
            on_device["top_ids"] = raw_logits.topk(top_k).indices.flatten(1)
        host = _copy_to_host(on_device)
        if tree.num_nodes == 1:  # the path is known on the host
            counts_on_host = [[min(1, limit)] for limit in row_state.host_max_emit]
            host |= {
                "counts": counts_on_host,
                "path": [[0]] * len(counts_on_host),
                "tree_sizes": [[1]] * len(counts_on_host),
            }
        num_emitted = [count for (count,) in host["counts"]]
        if any(any(row[:count]) for row, count in zip(host.get("is_nan", []), num_emitted, strict=False)):
            raise RuntimeError(self.sampler.nan_message)
        result = VerifyResult(
            tree=tree,
            path=path,
            counts=counts,
            tokens=tokens,
            emitted_ids=[row[:count] for row, count in zip(host["tokens"], num_emitted, strict=True)],
            accepted_nodes=[row[:count] for row, count in zip(host["path"], num_emitted, strict=True)],
            tree_sizes=[size for (size,) in host["tree_sizes"]],
            top_ids=[_split(row, tree.num_nodes) for row in host["top_ids"]] if "top_ids" in host else None,
            scored_ids=host.get("scored_ids"),
        )
        return result, processed_scores, raw_logits

    def _draft(self, state: Any) -> DraftTree:
        """The drafter's tree, trimmed or padded to the size that is worth scoring."""
        controller = self.controller
        max_emit = self.output.max_emit(controller.max_tree_size)
        active = self._active_rows([limit - 1 for limit in max_emit])  # a row that may emit one token needs no draft
        tree = self.drafter.propose(state, controller.max_tree_size, active).trim(controller.max_tree_size)
        if self.target.chains_only:
            tree = first_chain(tree)
        max_gain = sum(limit - 1 for limit, on in zip(max_emit, active, strict=True) if on)
        size = controller.choose_size(tree, sum(active), max_gain)
        return tree.trim(size).pad(size)

    def _sample(self, tree: DraftTree, logits: Tensor, row_state: RowState) -> tuple[Tensor, Tensor, Tensor | None]:
        """`TreeSampler.sample`. In stepwise decoding processors may be user code, which reads and writes the ids."""
        output = self.output
        history = output.sequences
        if output.stepwise:
            output.hooks.before_user_code(output.steps)
            history = output.user_input_ids()
        noise_end = output.noise_end(tree.num_nodes)
        sampled = self.sampler.sample(
            logits, tree, history, output.num_emitted, output.prompt_length, noise_end, row_state.num_emitted
        )
        if output.stepwise:
            output.apply_user_edits()
        return sampled

    def _accept(self, tree: DraftTree, sampled_ids: Tensor, row_state: RowState) -> tuple[Tensor, Tensor, Tensor]:
        """`accept_path` within the limits of each row. In finished rows the pad id replaces every sampled id."""
        if row_state.finished is not None:
            sampled_ids = torch.where(row_state.finished[:, None], self.output.pad_token_id, sampled_ids)
        return accept_path(tree, sampled_ids, row_state.max_emit, self.output.stop_ids, row_state.finished)

    def _disable_speculation(self, error: Exception) -> None:
        """After an error at a draft token, which plain decoding might never reach: drop it, and draft no more."""
        self.warn(f"{type(error).__name__} at a draft ({error}); the rest of this call is decoded without drafts")
        self.output.disable_speculation()
        self.target.crop(self._cached_lengths(), zero_tail=True)

    def _cached_lengths(self) -> list[int]:
        """Positions after the prompt that the cache of each row holds: all emitted tokens but the last."""
        return [length - 1 for length in self.output.num_emitted]

    def _active_rows(self, max_emit: list[int]) -> list[bool]:
        """Rows that are not finished and may emit at least one token."""
        return [limit > 0 and not finished for limit, finished in zip(max_emit, self.output.finished, strict=True)]

    def _record(self, result: VerifyResult, active: list[bool], has_draft: bool, times: RoundTimes) -> None:
        """Update the controller and the counters."""
        stats = self.stats
        num_nodes = result.tree.num_nodes
        num_drafted = sum(size - 1 for size, on in zip(result.tree_sizes, active, strict=True) if on)
        num_accepted = sum(len(ids) - 1 for ids, on in zip(result.emitted_ids, active, strict=True) if on)
        self.controller.record(
            num_nodes,
            draft_s=times.draft_s if has_draft else 0.0,
            score_s=times.score_s,
            overhead_s=times.overhead_s,
            num_accepted=num_accepted,
        )
        stats.rounds += 1
        stats.drafted_rounds += num_drafted > 0
        stats.row_rounds += sum(active)
        stats.tree_size_hist[num_nodes] += 1
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        stats.draft_s += times.draft_s
        stats.score_s += times.score_s
        stats.overhead_s += times.overhead_s
        for row, ids in enumerate(result.emitted_ids):
            if active[row]:
                stats.row_forwards[row] += 1
                stats.accept_length_hist[len(ids)] += 1


def _drop_inactive_rows(result: VerifyResult, active: list[bool], row_state: RowState) -> VerifyResult:
    """The result for the drafter: without the padding that finished rows emit."""
    if all(active):
        return result
    return replace(
        result,
        emitted_ids=[ids if on else [] for ids, on in zip(result.emitted_ids, active, strict=True)],
        accepted_nodes=[nodes if on else [] for nodes, on in zip(result.accepted_nodes, active, strict=True)],
        counts=result.counts if row_state.finished is None else torch.where(row_state.finished, 0, result.counts),
    )


def _copy_to_host(on_device: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """{name: [B, n] on the device} -> {name: B lists of n}, in one transfer."""
    tensors = list(on_device.values())
    rows = (torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0]).tolist()
    result = {}
    start = 0
    for name, tensor in on_device.items():
        end = start + tensor.shape[1]
        result[name] = [row[start:end] for row in rows]
        start = end
    return result


def _split(flat: list[int], num_parts: int) -> list[list[int]]:
    """A list cut into `num_parts` lists of equal length."""
    size = len(flat) // num_parts
    return [flat[i : i + size] for i in range(0, len(flat), size)]
