"""A simulated world for the economy: costs, acceptance that drifts, stalls, rows that end. No real clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Economy, Source
from mmspec.engine.tree import BUCKETS

CALL_ROUNDS = 64
"""Rounds of a call."""


@dataclass
class TrueSource:
    """How a source really is.

    Attributes:
        source: what the economy is told.
        first_s: seconds of a draft, whatever its length.
        level_s: seconds of each level.
        acceptance: of a token behind one that was accepted.
        hit: share of the rounds in which it finds a draft at all.
        score_error: factor on what its scores promise.
    """

    source: Source
    first_s: float
    level_s: float
    acceptance: float
    hit: float
    score_error: float

    def seconds(self, levels: int, rows: int) -> float:
        """Of a draft."""
        return self.first_s + levels * self.level_s * (1 + 0.1 * (rows - 1))

    def gains(self, depth: int, acceptance: float | None = None) -> list[float]:
        """[depth + 1] expected tokens beyond one by nodes, of a row that has a draft."""
        acceptance = self.acceptance if acceptance is None else acceptance
        found = [0.0]
        for level in range(depth):
            found.append(found[-1] + acceptance ** (level + 1))
        return found

    @property
    def max_depth(self) -> int:
        """Tokens of the longest draft."""
        return self.source.max_levels if self.source.max_levels > 1 else 7


@dataclass
class World:
    """Costs and sources.

    Attributes:
        rng: all that is random.
        rows: rows at the start of each call.
        plain_s: seconds of plain decoding's round.
        node_cost: of a further node, as a fraction of it.
        stall: probability of a stall.
        drift: largest change of an acceptance at a new call.
        sources: those that may draft.
        cold: factor on the first run of each kind and size; the second takes its square root.
    """

    rng: random.Random
    rows: int
    plain_s: float
    node_cost: float
    stall: float
    drift: float
    sources: list[TrueSource] = field(default_factory=list)
    cold: float = 1.0
    _runs: Counter[object] = field(default_factory=Counter)
    _known: tuple[object, tuple[float, float]] = (None, (1.0, 1.0))

    @classmethod
    def draw(cls, seed: int) -> World:
        """A random world."""
        rng = random.Random(seed)
        world = cls(
            rng,
            rng.choice([1, 1, 1, 4, 8]),
            10 ** rng.uniform(-3, 0),
            rng.choice([0.005, 0.02, 0.05, 0.11, 0.2]),
            rng.choice([0.0, 0.01, 0.05]),
            rng.choice([0.0, 0.01, 0.03]),
        )
        for number in range(rng.randint(1, 3)):
            kind = rng.choice(["ngram", "head", "copy"])
            step = world.plain_s * {"ngram": 0.005, "head": rng.uniform(0.03, 0.3), "copy": rng.uniform(0.2, 0.5)}[kind]
            prior = {"ngram": 0.3, "head": 0.7, "copy": 0.9}[kind]
            levels = {"ngram": 1, "head": 6, "copy": 15}[kind]
            told = Source(f"{kind}{number}", None, prior, step * rng.uniform(0.6, 1.5) / world.plain_s, levels)
            first_s = world.plain_s * rng.uniform(0.0, 0.05)
            one = TrueSource(told, first_s, step, 0.0, 0.0, rng.choice([1.0, 1.0, 0.8, 1.25]))
            world.sources.append(one)
        world.change()
        return world

    def change(self) -> None:
        """New acceptances."""
        for one in self.sources:
            best = {"n": (0.1, 0.8), "h": (0.2, 0.9), "c": (0.6, 0.97)}[one.source.name[0]]
            one.acceptance = self.rng.uniform(*best)
            one.hit = self.rng.uniform(0.1, 0.9) if one.source.name[0] == "n" else 1.0

    def round_s(self, rows: int, nodes: int) -> float:
        """Expected seconds without the draft."""
        return self.plain_s * (1 + self.node_cost * (rows * nodes - 1))

    def noisy(self, seconds: float, kind: object) -> float:
        """A measurement of a kind, whose first runs are slow."""
        slow = self.rng.uniform(3, 30) if self.rng.random() < self.stall else 1.0
        self._runs[kind] += 1
        slow *= self.cold ** max(0.0, 1.5 - 0.5 * self._runs[kind])
        return seconds * self.rng.uniform(0.95, 1.1) * slow

    def best_fixed(self, rows: int) -> tuple[float, float]:
        """(tokens per row, seconds) of the fixed action with the largest rate."""
        key = (rows, *((one.acceptance, one.hit) for one in self.sources))
        if key != self._known[0]:
            self._known = key, self._best_fixed(rows)
        return self._known[1]

    def _best_fixed(self, rows: int) -> tuple[float, float]:
        found = [(1.0, self.round_s(rows, 1))]
        for one in self.sources:
            gains = one.gains(one.max_depth)
            for depth in range(1, one.max_depth + 1):
                for nodes in (size for size in BUCKETS if 1 < size <= 2 * depth + 1):
                    tokens = 1 + one.hit * gains[min(depth, nodes - 1)]
                    levels = depth if one.source.max_levels > 1 else 1
                    found.append((tokens, self.round_s(rows, nodes) + one.seconds(levels, rows)))
        return max(found, key=lambda action: action[0] / action[1])


@dataclass(frozen=True)
class Played:
    """One round: what its action brings and takes on average, what the best fixed one would, and plain decoding."""

    tokens: float
    seconds: float
    best_rate: float
    plain_rate: float
    source: str | None


def play(world: World, economy: Economy, num_rounds: int) -> Iterator[Played]:
    """Rounds of calls one after the other."""
    rng = world.rng
    for number in range(num_rounds):
        if number % CALL_ROUNDS == 0:
            chooser = Chooser(economy, world.rows, sources=[one.source for one in world.sources])
            rows = world.rows
            for one in world.sources:
                one.acceptance = min(0.98, max(0.02, one.acceptance + rng.uniform(-world.drift, world.drift)))
        if rows > 1 and rng.random() < world.rows / CALL_ROUNDS:
            rows -= 1
            chooser.follow_rows(rows)
        yield _round(world, chooser, rows)


def warm_up(world: World, economy: Economy, num_rounds: int = 8) -> None:
    """A short call whose drafts are all rejected."""
    true = [(one.acceptance, one.hit) for one in world.sources]
    for one in world.sources:
        one.acceptance, one.hit = 0.0, 1.0
    list(play(world, economy, num_rounds))
    for one, values in zip(world.sources, true, strict=True):
        one.acceptance, one.hit = values


def _round(world: World, chooser: Chooser, rows: int) -> Played:
    rng = world.rng
    chooser.plan()
    true = next((one for one in world.sources if one.source is chooser.source), None)
    nodes, drafted_s, tokens, accepted, has_draft = 1, 0.0, 1.0, [0] * rows, False
    if true is not None:
        levels = chooser.levels
        depth = levels if true.source.max_levels > 1 else true.max_depth
        drafted_s = true.seconds(levels, rows)
        has_draft = rng.random() < true.hit
        gains = true.gains(depth, min(0.99, true.acceptance * true.score_error))
        padded = [rows * gain for gain in gains] + [rows * gains[-1]] * (16 - len(gains))
        nodes = chooser.choose_nodes(padded[:16] if has_draft else [], rows)
        if has_draft:
            tokens += true.gains(depth)[min(depth, nodes - 1)]
            accepted = [_accept(rng, true.acceptance, min(depth, nodes - 1)) for _ in range(rows)]
    batch = chooser.batch
    seconds = world.round_s(batch, nodes)
    chooser.record(
        nodes,
        draft_s=world.noisy(drafted_s, (chooser.source, chooser.levels, batch)) if true else 0.0,
        score_s=world.noisy(0.9 * seconds, (nodes, batch)),
        overhead_s=world.noisy(0.1 * seconds, None),
        num_accepted=accepted,
    )
    best = world.best_fixed(batch)
    name = None if true is None else true.source.name
    return Played(tokens, seconds + drafted_s, best[0] / best[1], 1 / world.round_s(batch, 1), name)


def _accept(rng: random.Random, acceptance: float, depth: int) -> int:
    count = 0
    while count < depth and rng.random() < acceptance:
        count += 1
    return count


def share(rounds: list[Played], of_plain: bool = False) -> float:
    """The rate of some rounds over that of the best fixed action of each, or of plain decoding."""
    tokens = sum(one.tokens for one in rounds)
    needed_s = sum(one.tokens / (one.plain_rate if of_plain else one.best_rate) for one in rounds)
    return needed_s / sum(one.seconds for one in rounds) if tokens else 0.0
