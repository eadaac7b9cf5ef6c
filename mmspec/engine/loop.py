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

from mmspec.control.tree_size import Budget
from mmspec.engine.output import ColumnClock
from mmspec.engine.sampler import Picker
from mmspec.engine.tree import BUCKETS, DraftTree, bare, bucket, force, seal
from mmspec.engine.verify import walk
from mmspec.interfaces import Drafter, Prompt, Target, Verdict
from mmspec.metrics.stats import Stats


@dataclass
class Loop:
    """Everything one call needs; nothing here outlives it."""

    target: Target
    drafter: Drafter
    clock: ColumnClock
    picker: Picker
    budget: Budget
    stats: Stats
    allowed: Tensor
    """[V] bool, ids that may be drafted."""
    began: float
    """`time.perf_counter()` when `generate` was called."""
    warn: Callable[[str], None] = field(default=lambda message: None)

    def run(self, first: Tensor, prompt: Prompt) -> None:
        """Decode until the batch stops.

        Args:
            first: [B, V] the prompt's last logits. prompt: what the drafter may read.
        """
        clock, stats = self.clock, self.stats
        batch = first.shape[0]
        stats.row_forwards = [0] * batch
        tree = bare(batch, first.device)
        verdict, scores, logits = self.settle(tree, first[:, None])
        state = self.drafter.begin(prompt)
        clock.emit(verdict, scores, logits)
        self.drafter.observe(state, verdict, {})
        started = time.perf_counter()
        stats.ttft_s += started - self.began
        while not clock.advance():
            self.target.rewind([length - 1 for length in clock.lengths])  # if rows were cut
            self.round(state)
        stats.decode_s += time.perf_counter() - started

    def round(self, state: Any) -> None:
        """One forward of the target, and what comes of it."""
        clock = self.clock
        t0 = time.perf_counter()
        tree, awake = self.propose(state)
        limits = clock.limits(tree.nodes)
        live = [limit > 0 and not ended for limit, ended in zip(limits, clock.ended, strict=True)]
        t1 = time.perf_counter()
        logits, taps = self.target.score(tree, self.drafter.needs.taps)
        try:
            verdict, scores, raw = self.settle(tree, logits, awake)
        except Exception as error:
            # A processor or the sampling failed, perhaps at a node that plain decoding would never have come to.
            if clock.lockstep:
                raise
            self.warn(f"{type(error).__name__} at a draft ({error}); the rest of this call is decoded without drafts")
            clock.retreat()
            self.target.rewind([length - 1 for length in clock.lengths], wipe=True)
            return
        t2 = time.perf_counter()
        self.target.commit(verdict)
        clock.emit(verdict, scores, raw)
        t3 = time.perf_counter()
        verdict = _of_live_rows(verdict, live)
        if not clock.retreated:  # or the drafter would be told some tokens twice
            self.drafter.observe(state, verdict, taps)
        t4 = time.perf_counter()
        seconds = (t1 - t0) + (t4 - t3), t2 - t1, t3 - t2
        self._record(verdict, awake, live, seconds)

    def _record(self, verdict: Verdict, awake: bool, live: list[bool], seconds: tuple[float, float, float]) -> None:
        """Tell the controller and the counters. seconds: draft, score, rest."""
        stats, (draft_s, score_s, rest_s) = self.stats, seconds
        nodes, rows = verdict.tree.nodes, verdict.rows
        drafted = sum(count - 1 for count, on in zip(verdict.sizes, live, strict=True) if on)
        gained = sum(len(tokens) - 1 for tokens, on in zip(rows, live, strict=True) if on)
        self.budget.record(nodes, draft_s=draft_s if awake else 0.0, score_s=score_s, rest_s=rest_s, gained=gained)
        stats.rounds += 1
        stats.nodes[nodes] += 1
        stats.draft_s += draft_s
        stats.score_s += score_s
        stats.rest_s += rest_s
        stats.row_rounds += sum(live)
        stats.drafted += drafted
        stats.accepted += gained
        for row, tokens in enumerate(rows):
            if live[row]:
                stats.row_forwards[row] += 1
                stats.lengths[len(tokens)] += 1

    def propose(self, state: Any) -> tuple[DraftTree, bool]:
        """The tree of this round, sealed, and whether the drafter was asked for it."""
        clock, budget = self.clock, self.budget
        roots = torch.tensor([row[-1] for row in clock.rows], device=self.allowed.device)
        awake = budget.awake and not clock.lockstep
        if awake:
            limits = clock.limits(budget.most)
            live = [limit > 1 and not ended for limit, ended in zip(limits, clock.ended, strict=True)]
            tree = self.drafter.propose(state, budget.most, live).trim(budget.most)
            room = sum(limit - 1 for limit, on in zip(limits, live, strict=True) if on)
            size = budget.choose(tree, sum(live), room)
            tree = tree.trim(size).pad(size)
        else:
            budget.skip()
            tree = bare(len(clock.rows))
        nodes = 1 if clock.lockstep else max(tree.nodes, bucket(min(clock.lag + 1, BUCKETS[-1])))
        tree = seal(tree.pad(nodes), roots, self.allowed)  # whatever it is, make it safe to score
        if any(clock.ended) and nodes > 1:
            ended = torch.tensor(clock.ended, device=roots.device)
            tree = force(tree, ended, torch.tensor(clock.pad, device=roots.device))
        return tree, awake

    def settle(self, tree: DraftTree, logits: Tensor, awake: bool = False) -> tuple[Verdict, Tensor, Tensor]:
        """Pick at every node, walk, and bring the outcome to the host in one copy.

        Returns the verdict, and the processed and raw scores [B, N, V] in float32.
        """
        clock, n = self.clock, tree.nodes
        clock.reserve(n)
        raw = logits.to(device=clock.sequences.device, dtype=torch.float32)
        if raw.is_inference() and clock.lockstep:
            raw = raw.clone()  # user code may write into it
        history = clock.sequences
        if clock.lockstep:  # processors may be user code
            clock.show(clock.columns)
            history = clock.history()
        picks, scores, broken = self.picker.pick(raw, tree, history, clock.lengths, clock.base, clock.horizon(n))
        if clock.lockstep:
            clock.absorb()
        ended = torch.tensor(clock.ended, device=picks.device) if any(clock.ended) else None
        if ended is not None:
            picks = torch.where(ended[:, None], clock.pad, picks)
        limits = torch.tensor(clock.limits(n), device=picks.device)
        path, counts, tokens = walk(tree, picks, limits, clock.stops, ended)
        parts = {"counts": counts[:, None], "tokens": tokens, "path": path}
        if n > 1:
            parts["sizes"] = tree.valid.sum(1, keepdim=True)
        if broken is not None:
            parts["broken"] = broken.gather(1, path)
        if awake and (k := min(self.drafter.needs.top_k, raw.shape[-1])):
            parts["nodes"] = torch.where(tree.valid, tree.tokens, -1)
            parts["top"] = raw.topk(k).indices.flatten(1)
        host = _to_host(parts)
        emitted = [count for (count,) in host["counts"]]
        if any(any(row[:count]) for row, count in zip(host.get("broken", []), emitted, strict=False)):
            raise RuntimeError(self.picker.complaint)
        verdict = Verdict(
            tree=tree,
            path=path,
            counts=counts,
            tokens=tokens,
            rows=[row[:count] for row, count in zip(host["tokens"], emitted, strict=True)],
            walked=[row[:count] for row, count in zip(host["path"], emitted, strict=True)],
            sizes=[size for (size,) in host.get("sizes", [[1]] * len(emitted))],
            top_ids=[_chunks(row, n) for row in host["top"]] if "top" in host else None,
            nodes=host.get("nodes"),
        )
        return verdict, scores, raw


def _of_live_rows(verdict: Verdict, live: list[bool]) -> Verdict:
    """What a drafter is told: padding of finished rows is nobody's words."""
    if all(live):
        return verdict
    rows, walked = (
        [part if on else [] for part, on in zip(p, live, strict=True)] for p in (verdict.rows, verdict.walked)
    )
    counts = torch.where(torch.tensor(live, device=verdict.counts.device), verdict.counts, 0)
    return replace(verdict, rows=rows, walked=walked, counts=counts)


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
