"""The decode loop: prefill, then propose / score / verify / commit until every row is done.

    tree     = drafter.propose(...)              guesses; perhaps none, which is plain decoding
    logits   = target.score(tree)                one forward for all rows and nodes
    verdict  = pick at every node, then walk     what the target itself says, as far as the guesses reach
    target.commit(verdict); drafter.observe(...) keep what was walked
    clock.emit(verdict); clock.advance()         criteria, streamers and scores, one column at a time

Knows only the interfaces: not which model, which drafter, or how a token is picked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.control.tree_size import TreeSizeController
from mmspec.engine.output import OutputBuffer
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import BUCKETS, DraftTree, bucket_size, replace_with_chain, root_only, sanitize
from mmspec.engine.verify import accept_path
from mmspec.interfaces import Drafter, Prompt, Target, VerifyResult
from mmspec.metrics.stats import Stats


@dataclass
class DecodeLoop:
    """Everything one call needs; nothing here outlives it."""

    target: Target
    drafter: Drafter
    output: OutputBuffer
    sampler: TreeSampler
    controller: TreeSizeController
    stats: Stats
    draftable: Tensor
    """[V] bool, ids that may be drafted."""
    start_time: float
    """`time.perf_counter()` when `generate` was called."""
    warn: Callable[[str], None] = field(default=lambda message: None)

    def run(self, first: Tensor, prompt: Prompt) -> None:
        """Decode until the batch stops.

        Args:
            first: [B, V] the prompt's last logits. prompt: what the drafter may read.
        """
        clock, stats = self.output, self.stats
        batch = first.shape[0]
        stats.row_forwards = [0] * batch
        tree = root_only(batch, first.device)
        verdict, scores, logits = self.verify(tree, first[:, None])
        state = self.drafter.begin(prompt)
        clock.emit(verdict, scores, logits)
        self.drafter.observe(state, verdict, {})
        started = time.perf_counter()
        stats.ttft_s += started - self.start_time
        while not clock.advance():
            self.target.crop([length - 1 for length in clock.num_emitted])  # if rows were cut
            self.round(state)
        stats.decode_s += time.perf_counter() - started

    def round(self, state: Any) -> None:
        """One forward of the target, and what comes of it."""
        clock = self.output
        t0 = time.perf_counter()
        tree, awake = self.propose(state)
        limits = clock.max_emit(tree.num_nodes)
        live = [limit > 0 and not ended for limit, ended in zip(limits, clock.finished, strict=True)]
        t1 = time.perf_counter()
        logits, taps = self.target.score(tree, self.drafter.requirements.hidden_state_indices)
        try:
            verdict, scores, raw = self.verify(tree, logits, awake)
        except Exception as error:
            # A processor or the sampling failed, perhaps at a node that plain decoding would never have come to.
            if clock.stepwise:
                raise
            self.warn(f"{type(error).__name__} at a draft ({error}); the rest of this call is decoded without drafts")
            clock.fall_back_to_stepwise()
            self.target.crop([length - 1 for length in clock.num_emitted], zero_tail=True)
            return
        t2 = time.perf_counter()
        self.target.commit(verdict)
        clock.emit(verdict, scores, raw)
        t3 = time.perf_counter()
        verdict = _of_live_rows(verdict, live)
        if not clock.fell_back:  # or the drafter would be told some tokens twice
            self.drafter.observe(state, verdict, taps)
        t4 = time.perf_counter()
        seconds = (t1 - t0) + (t4 - t3), t2 - t1, t3 - t2
        self._record(verdict, awake, live, seconds)

    def _record(
        self, verdict: VerifyResult, awake: bool, live: list[bool], seconds: tuple[float, float, float]
    ) -> None:
        """Tell the controller and the counters. seconds: draft, score, rest."""
        stats, (draft_s, score_s, rest_s) = self.stats, seconds
        nodes, rows = verdict.tree.num_nodes, verdict.emitted_ids
        drafted = sum(count - 1 for count, on in zip(verdict.tree_sizes, live, strict=True) if on)
        gained = sum(len(tokens) - 1 for tokens, on in zip(rows, live, strict=True) if on)
        self.controller.record(
            nodes, draft_s=draft_s if awake else 0.0, score_s=score_s, overhead_s=rest_s, num_accepted=gained
        )
        stats.rounds += 1
        stats.drafted_rounds += drafted > 0
        stats.tree_size_hist[nodes] += 1
        stats.draft_s += draft_s
        stats.score_s += score_s
        stats.overhead_s += rest_s
        stats.row_rounds += sum(live)
        stats.num_draft_tokens += drafted
        stats.num_accepted_tokens += gained
        for row, tokens in enumerate(rows):
            if live[row]:
                stats.row_forwards[row] += 1
                stats.accept_length_hist[len(tokens)] += 1

    def propose(self, state: Any) -> tuple[DraftTree, bool]:
        """The tree of this round, sealed, and whether the drafter was asked for it."""
        clock, budget = self.output, self.controller
        roots = torch.tensor([row[-1] for row in clock.emitted], device=self.draftable.device)
        awake = budget.should_draft and not clock.stepwise
        if awake:
            limits = clock.max_emit(budget.max_tree_size)
            live = [limit > 1 and not ended for limit, ended in zip(limits, clock.finished, strict=True)]
            tree = self.drafter.propose(state, budget.max_tree_size, live).trim(budget.max_tree_size)
            room = sum(limit - 1 for limit, on in zip(limits, live, strict=True) if on)
            size = budget.choose_size(tree, sum(live), room)
            tree = tree.trim(size).pad(size)
        else:
            budget.skip_draft()
            tree = root_only(len(clock.emitted))
        nodes = 1 if clock.stepwise else max(tree.num_nodes, bucket_size(min(clock.padding_lag + 1, BUCKETS[-1])))
        tree = sanitize(tree.pad(nodes), roots, self.draftable)  # whatever it is, make it safe to score
        if any(clock.finished) and nodes > 1:
            ended = torch.tensor(clock.finished, device=roots.device)
            tree = replace_with_chain(tree, ended, torch.tensor(clock.pad_token_id, device=roots.device))
        return tree, awake

    def verify(self, tree: DraftTree, logits: Tensor, awake: bool = False) -> tuple[VerifyResult, Tensor, Tensor]:
        """Pick at every node, walk, and bring the outcome to the host in one copy.

        Returns the verdict, and the processed and raw scores [B, N, V] in float32.
        """
        clock, n = self.output, tree.num_nodes
        clock.reserve(n)
        raw = logits.to(device=clock.sequences.device, dtype=torch.float32)
        if raw.is_inference() and clock.stepwise:
            raw = raw.clone()  # user code may write into it
        history = clock.sequences
        if clock.stepwise:  # processors may be user code
            clock.show(clock.steps)
            history = clock.history()
        picks, scores, broken = self.sampler.sample(
            raw, tree, history, clock.num_emitted, clock.prompt_length, clock.noise_end(n)
        )
        if clock.stepwise:
            clock.absorb()
        ended = torch.tensor(clock.finished, device=picks.device) if any(clock.finished) else None
        if ended is not None:
            picks = torch.where(ended[:, None], clock.pad_token_id, picks)
        limits = torch.tensor(clock.max_emit(n), device=picks.device)
        path, counts, tokens = accept_path(tree, picks, limits, clock.stop_ids, ended)
        parts = {"counts": counts[:, None], "tokens": tokens, "path": path}
        if n > 1:
            parts["sizes"] = tree.valid.sum(1, keepdim=True)
        if broken is not None:
            parts["broken"] = broken.gather(1, path)
        if awake and (k := min(self.drafter.requirements.top_k, raw.shape[-1])):
            parts["nodes"] = torch.where(tree.valid, tree.tokens, -1)
            parts["top"] = raw.topk(k).indices.flatten(1)
        host = _to_host(parts)
        emitted = [count for (count,) in host["counts"]]
        if any(any(row[:count]) for row, count in zip(host.get("broken", []), emitted, strict=False)):
            raise RuntimeError(self.sampler.nan_message)
        verdict = VerifyResult(
            tree=tree,
            path=path,
            counts=counts,
            tokens=tokens,
            emitted_ids=[row[:count] for row, count in zip(host["tokens"], emitted, strict=True)],
            accepted_nodes=[row[:count] for row, count in zip(host["path"], emitted, strict=True)],
            tree_sizes=[size for (size,) in host.get("sizes", [[1]] * len(emitted))],
            top_ids=[_chunks(row, n) for row in host["top"]] if "top" in host else None,
            scored_ids=host.get("nodes"),
        )
        return verdict, scores, raw


def _of_live_rows(verdict: VerifyResult, live: list[bool]) -> VerifyResult:
    """What a drafter is told: padding of finished rows is nobody's words."""
    if all(live):
        return verdict
    rows, walked = (
        [part if on else [] for part, on in zip(p, live, strict=True)]
        for p in (verdict.emitted_ids, verdict.accepted_nodes)
    )
    counts = torch.where(torch.tensor(live, device=verdict.counts.device), verdict.counts, 0)
    return replace(verdict, emitted_ids=rows, accepted_nodes=walked, counts=counts)


def _to_host(parts: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """{name: [B, n]} on the device -> {name: B lists of n}, in one copy."""
    whole = torch.cat(list(parts.values()), dim=1).tolist()
    result, start = {}, 0
    for name, part in parts.items():
        end = start + part.shape[1]
        result[name] = [row[start:end] for row in whole]
        start = end
    return result


def _chunks(flat: list[int], parts: int) -> list[list[int]]:
    size = len(flat) // parts
    return [flat[i : i + size] for i in range(0, len(flat), size)]
