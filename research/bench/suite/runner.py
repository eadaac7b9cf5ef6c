"""Every peer on every prompt of a suite, interleaved; the baseline runs before and after the others of each prompt.

A prompt is one round: the baseline, the other peers in rotating order, the baseline again. Ratios are taken within a
round, to the mean of its two baseline runs. The longest prompt of a series warms every peer up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Protocol

from mmspec.app.modeling.chat import ChatTurn
from research.bench.measure import MIN_ROUNDS, gc_paused
from research.bench.peers.base import MEDIA as MEDIA
from research.bench.peers.base import TEXT, Peer, PeerError, PeerPrompt, PeerRun
from research.bench.suite.items import ImageError, SuiteItem
from research.bench.suite.prompts import History

BASELINE, BASELINE_AGAIN = "hf", "hf-again"
MAX_FAILURES = 2
"""Failures in a row after which a peer is left out of the rest of a series."""


@dataclass(frozen=True)
class CallRecord:
    """One call of one peer.

    Attributes:
        peer, form, batch: of the call; `form` is `MEDIA` or `TEXT`.
        category, item, turn: of the prompt; `item` is the id of its first row.
        error: why it failed; None if it did not, and then all that follows is set.
        run: tokens and seconds.
        base_ms_per_token, base_total_s: of the baseline around it.
        same: whether all tokens are those of the baseline.
    """

    peer: str
    form: str
    batch: int
    category: str
    item: str
    turn: int
    error: str | None = None
    run: PeerRun | None = None
    base_ms_per_token: float = 0.0
    base_total_s: float = 0.0
    same: bool | None = None


class PromptSource(Protocol):
    """Makes the prompts of a suite: `PromptBuilder`, or one of another kind of suite."""

    def build(self, items: Sequence[SuiteItem], histories: Sequence[History], turn: int, form: str) -> PeerPrompt:
        """One prompt, a row per item."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer."""


@dataclass
class SuiteRun:
    """Runs series of prompts.

    Attributes:
        baseline: plain `generate`.
        peers: the others.
        builder: makes prompts.
        max_new_tokens: of each answer.
        tick: called after every call.
        left_out: {peer: why it was left out of a series}.
        stopped: a line for each series that its deadline ended.
    """

    baseline: Peer
    peers: Sequence[Peer]
    builder: PromptSource
    max_new_tokens: int
    tick: Callable[[], object] = lambda: None
    left_out: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    _failures: dict[str, int] = field(default_factory=dict, repr=False)

    def eligible(self, form: str, batch: int, has_media: bool) -> list[Peer]:
        """Peers that run in a series: in the text form of prompts with images those that read nothing else."""
        peers = [peer for peer in self.peers if peer.max_batch is None or batch <= peer.max_batch]
        if not has_media:
            return peers
        return [peer for peer in peers if (peer.reads == TEXT) == (form == TEXT) or peer.name == "none"]

    def run_series(
        self, items: Sequence[SuiteItem], form: str, batch: int, deadline: float | None = None
    ) -> Iterator[CallRecord]:
        """All prompts of one form and batch size; items of a category that do not fill a batch are left out.

        Args:
            deadline: `time.perf_counter()` after which no prompt begins once there are `MIN_ROUNDS`; None for no limit.
        """
        peers = self.eligible(form, batch, any(item.has_media for item in items))
        groups = make_batches(items, batch)
        if not groups:
            return
        self._failures.clear()
        self._warm_up(max(groups, key=lambda group: max(len(item.turns[0]) for item in group)), peers, form)
        with gc_paused():
            for number, group in enumerate(groups):
                if number >= MIN_ROUNDS and deadline is not None and time.perf_counter() > deadline:
                    self.stopped.append(f"{form}, batch {batch}: {number} of {len(groups)} prompts, then time was up")
                    break
                yield from self._run_group(group, peers, form, number)

    def _warm_up(self, group: Sequence[SuiteItem], peers: Sequence[Peer], form: str) -> None:
        prompt = self.builder.build(group, [()] * len(group), 0, form)
        for peer in (self.baseline, *peers):
            for _ in range(peer.warm_up_calls):
                if peer.name not in self.left_out:
                    self._call(peer, prompt)
            self.tick()

    def _run_group(
        self, group: Sequence[SuiteItem], peers: Sequence[Peer], form: str, number: int
    ) -> Iterator[CallRecord]:
        """All turns of one batch of conversations; later turns follow the baseline's answers."""
        histories: list[History] = [()] * len(group)
        for turn in range(max(len(item.turns) for item in group)):
            on = [row for row, item in enumerate(group) if turn < len(item.turns)]
            items = [group[row] for row in on]
            about = (form, len(group), items[0].category, items[0].id, turn)
            try:
                prompt = self.builder.build(items, [histories[row] for row in on], turn, form)
            except ImageError as error:
                yield CallRecord(BASELINE, *about, error=str(error))
                return
            answers = yield from self._run_prompt(prompt, about, _rotate(peers, number + turn))
            if answers is None:
                return
            for row, ids in zip(on, answers, strict=True):
                histories[row] = (*histories[row], ChatTurn(group[row].turns[turn], self.builder.decode(ids)))

    def _run_prompt(
        self, prompt: PeerPrompt, about: tuple[str, int, str, str, int], peers: Sequence[Peer]
    ) -> Generator[CallRecord, None, list[list[int]] | None]:
        """One round; returns the baseline's answers, None if it failed."""
        gc.collect()
        before = self._call(self.baseline, prompt)
        if isinstance(before, str):
            yield CallRecord(BASELINE, *about, error=before)
            return None
        runs = [(peer, self._call(peer, prompt)) for peer in peers if peer.name not in self.left_out]
        after = self._call(self.baseline, prompt)
        if isinstance(after, str):
            yield CallRecord(BASELINE_AGAIN, *about, error=after)
            return None
        ms = (before.ms_per_token + after.ms_per_token) / 2
        total_s = (before.total_s + after.total_s) / 2
        first = (before.ms_per_token, before.total_s)
        yield CallRecord(BASELINE, *about, None, before, *first, same=True)
        yield CallRecord(BASELINE_AGAIN, *about, None, after, *first, same=after.output_ids == before.output_ids)
        for peer, run in runs:
            if isinstance(run, str):
                yield CallRecord(peer.name, *about, error=run)
            else:
                yield CallRecord(peer.name, *about, None, run, ms, total_s, run.output_ids == before.output_ids)
        return before.output_ids

    def _call(self, peer: Peer, prompt: PeerPrompt) -> PeerRun | str:
        """The run, or why it failed."""
        try:
            run = peer.generate(prompt, self.max_new_tokens)
        except PeerError as error:
            failures = self._failures[peer.name] = self._failures.get(peer.name, 0) + 1
            if failures >= MAX_FAILURES:
                self.left_out[peer.name] = str(error)
            return str(error)
        finally:
            self.tick()
        self._failures[peer.name] = 0
        return run

    def count_calls(self, items: Sequence[SuiteItem], form: str, batch: int) -> int:
        """Calls of a series, for a progress bar."""
        peers = self.eligible(form, batch, any(item.has_media for item in items))
        prompts = sum(max(len(item.turns) for item in group) for group in make_batches(items, batch))
        return prompts * (len(peers) + 2) + sum(peer.warm_up_calls + 1 for peer in (self.baseline, *peers))


def make_batches(items: Sequence[SuiteItem], batch: int) -> list[list[SuiteItem]]:
    """Full batches of items of one category, items with a problem left out; the categories take turns."""
    columns = []
    for _, group in groupby(items, key=lambda item: item.category):
        good = [item for item in group if item.problem is None]
        columns.append([good[start : start + batch] for start in range(0, len(good) - batch + 1, batch)])
    return [one for row in zip_longest(*columns) for one in row if one is not None]


def _rotate(peers: Sequence[Peer], number: int) -> list[Peer]:
    start = number % len(peers) if peers else 0
    return [*peers[start:], *peers[:start]]
