"""What is known of the rounds of one drafter on one model: `Economy`, its tables and what it expects of a source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.economy.tables import NODE_COST, Seconds, Yields, checked
from mmspec.engine.tree import BUCKETS, bucket_size
from mmspec.forks import Locked

PRIOR_ROUNDS, FIRST_PRIOR_ROUNDS = 8.0, 3.0
"""Rounds that what earlier calls, or a single one, have found counts for at the start of a call: texts differ."""
MIN_TRUST, MAX_TRUST = 0.05, 1.5
"""Bounds of the ratio of accepted tokens to those that scores predicted."""

MAKE_ROUNDS = 60
"""Rounds of plain decoding, which reads all weights too, that making a copy of them is expected to take: 40 to 100."""
MAX_CREDIT = 3.0
"""Rounds of plain decoding that trials may lose before they are earned, and that are saved up for them."""
RECENT_DECAY = 0.7
"""Factor on the evidence of the last few rounds at each further one."""
SURPRISE, MIN_VARIANCE = 3.0, 0.25
"""Standard errors by which the last few contradict those before, and least variance of the tokens of a round."""
IDLE_DECAY = 0.995
"""Factor on the evidence of a source at each round that another one has drafted: what it brings may have changed."""
RESTORED = 4.0
"""What the counts of another process count for: texts differ."""


@dataclass(frozen=True)
class Source:
    """A way to draft.

    Attributes:
        name: under which it is measured.
        variant: what its drafter knows it by.
        acceptance: of a level's tokens, before anything is counted.
        step_s: seconds of a level before it is measured, as a fraction of plain decoding's round.
        max_levels: most levels of a draft (tokens of a chain); 1 where drafts are not cut into levels.
        tokens_per_level: tokens by which a level extends a path.
        min_levels: fewest levels.
    """

    name: str
    variant: Any = None
    acceptance: float = 0.3
    step_s: float = 0.05
    max_levels: int = 1
    tokens_per_level: int = 1
    min_levels: int = 1


@dataclass(frozen=True)
class Option:
    """A source in the coming round; None is plain decoding."""

    source: Source | None
    levels: int
    tokens: float
    seconds: float
    spread: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Offer:
    """Something that is made once and then drafts: it is made when it would have saved what making it takes.

    Attributes:
        source: how it is expected to draft.
        make: makes it, and returns the sources that there are then; none if it cannot be made.
        what: it is, for messages.
    """

    source: Source
    make: Callable[[], Sequence[Source]]
    what: str


@dataclass
class Rounds:
    """What the rounds of a source have brought: decayed sums.

    What the last few bring may contradict all before: then these count for nothing any more.

    Attributes:
        tokens: per row that was drafted for.
        squares: of these.
        sizes: {(levels, nodes): rounds}; what these take is looked up, so that a stall in one of them does not count.
        last: number of the last one, of all rounds.
        calls: in which it has drafted.
        recent: number and tokens of the last few, which fade faster.
    """

    tokens: float = 0.0
    squares: float = 0.0
    sizes: dict[tuple[int, int], float] = field(default_factory=dict)
    last: int = 0
    calls: int = 0
    recent: tuple[float, float] = (0.0, 0.0)

    @property
    def count(self) -> float:
        """Number of rounds."""
        return sum(self.sizes.values())

    def scaled(self, factor: float) -> Rounds:
        """The same with less evidence."""
        sizes = {size: factor * count for size, count in self.sizes.items() if factor * count > 1e-3}
        return Rounds(factor * self.tokens, factor * self.squares, sizes, self.last, self.calls)

    def faded(self, num_rounds: int) -> Rounds:
        """What is known after so many rounds in all, of which all since the last one were of others."""
        if num_rounds == self.last:
            return self
        return replace(self.scaled(IDLE_DECAY ** (num_rounds - self.last)), last=num_rounds)

    def for_a_call(self, num_rounds: int) -> Rounds:
        """What is known at the start of a call, after so many rounds in all."""
        limit = PRIOR_ROUNDS - (PRIOR_ROUNDS - FIRST_PRIOR_ROUNDS) / max(1, self.calls)
        return self.faded(num_rounds).scaled(min(1.0, limit / max(self.count, 1e-9)))

    def add(self, tokens: float, size: tuple[int, int], decay: float) -> bool:
        """One more round; whether the last few contradict those before."""
        found = self.scaled(decay)
        self.tokens, self.squares, self.sizes = found.tokens + tokens, found.squares + tokens * tokens, found.sizes
        self.sizes[size] = self.sizes.get(size, 0.0) + 1
        number, total = self.recent = RECENT_DECAY * self.recent[0] + 1, RECENT_DECAY * self.recent[1] + tokens
        before = self.count - number
        if before > 1:
            mean = (self.tokens - total) / before
            variance = max(MIN_VARIANCE, self.squares / self.count - (self.tokens / self.count) ** 2)
            if (1 + RECENT_DECAY) * number * (mean - total / number) ** 2 > SURPRISE**2 * variance:
                self.sizes = self.scaled(number / self.count).sizes
                self.tokens, self.squares = total, total * total / number + number * variance
                return True
        return False


class Economy(Locked):
    """What is known of the rounds of one drafter on one model and device. Calls and threads share it.

    Attributes:
        device: "cpu" or "other".
        rounds_s: seconds of rounds without their drafts, by ("score" or "rest", rows, nodes).
        drafts_s: seconds of drafts, by (source, rows, levels).
        yields: by (source, depth), and by (source, "trust") of what scores predict.
        rounds: {source: rounds over all calls, whatever their number of rows}.
        credit: rounds of plain decoding that trials may lose now.
        saved_s: what the offer of the drafter would have saved so far.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.rounds_s, self.drafts_s = Seconds(NODE_COST[device]), Seconds(1.0)
        self.yields = Yields(weight=4.0, decay=0.97)
        self.rounds: dict[str, Rounds] = {}
        self.credit = MAX_CREDIT
        self.num_rounds = 0
        self.saved_s = 0.0

    def snapshot(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        with self.lock:
            sources = []
            for name, one in self.rounds.items():
                (levels, nodes), _ = max(one.sizes.items(), key=lambda item: item[1])
                sources.append([name, levels, nodes, one.tokens / one.count, one.squares / one.count])
        seconds = {"rounds": self.rounds_s.snapshot(), "drafts": self.drafts_s.snapshot()}
        return seconds | {"yields": self.yields.snapshot(), "sources": sources}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take over what another process has measured, all or nothing.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        found = Economy(self.device)  # may fail, so not yet here
        for one in (found, self):
            one.rounds_s.restore(content["rounds"])
            one.drafts_s.restore(content["drafts"])
            one.yields.restore(content["yields"], RESTORED)
            for name, levels, nodes, tokens, squares in content["sources"]:
                if not (isinstance(name, str) and all(type(size) is int and size > 0 for size in (levels, nodes))):
                    raise ValueError(f"rounds are of a source and sizes; got {[name, levels, nodes]!r:.80}")
                sums = RESTORED * checked(tokens), RESTORED * checked(squares)
                one.rounds.setdefault(name, Rounds(*sums, {(levels, min(nodes, BUCKETS[-1])): RESTORED}))

    def sources(self) -> list[Source]:
        """Those of which something is known, as far as it is: nothing is assumed of what was not measured."""
        depths = {name: [depth for one, depth in self.yields.counted if one == name] for name in list(self.rounds)}
        levels = {
            name: 1 + max((depth for depth in known if isinstance(depth, int)), default=0)
            for name, known in depths.items()
        }
        return [Source(name, step_s=math.inf, max_levels=levels[name]) for name in levels]

    def round_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of a round without its draft; None before any was measured."""
        score_s = self.rounds_s.get("score", rows, nodes)
        return None if score_s is None else score_s + (self.rounds_s.get("rest", rows, nodes) or 0.0)

    def draft_s(self, source: Source, rows: int, levels: int) -> float:
        """Seconds of a draft."""
        known = self.drafts_s.get(source.name, rows, levels)
        if known is not None and self.drafts_s.is_known(source.name, rows):
            return known
        assumed = levels * source.step_s * (self.round_s(rows, 1) or 0.0)
        return assumed if known is None else min(known, assumed)

    def make_s(self, rows: int) -> float:
        """Seconds that making a copy of the weights takes, as far as is known."""
        return self.rounds_s.get("make", 1, 1) or MAKE_ROUNDS * (self.round_s(rows, 1) or math.inf)

    def trust(self, source: Source) -> float:
        """Ratio of accepted tokens to those that the scores of a source predict."""
        return min(MAX_TRUST, max(MIN_TRUST, self.yields.rate((source.name, "trust"), 1.0)))

    def count_trust(self, source: Source, right: float, expected: float) -> None:
        """Count what scores predicted, and what of it came true; nothing lets what is known fade."""
        self.yields.add([((source.name, "trust"), min(right, 2 * expected), expected)])

    def best_levels(self, source: Source, rows: int, max_nodes: int) -> tuple[int, float, float]:
        """(levels, expected tokens, expected seconds) of the number of levels with the most tokens per second."""
        best, best_rate, tokens, path, acceptance = (1, 1.0, 1.0), 0.0, 1.0, 1.0, source.acceptance
        for level in range(1, source.max_levels + 1):
            for depth in range((level - 1) * source.tokens_per_level, level * source.tokens_per_level):
                acceptance = self.yields.rate((source.name, depth), acceptance)
                path *= acceptance
                tokens += path
            nodes = bucket_size(min(max_nodes, BUCKETS[-1], 1 + level * source.tokens_per_level))
            seconds = (self.round_s(rows, nodes) or 1.0) + self.draft_s(source, rows, level)
            if level >= source.min_levels and tokens / seconds > best_rate:
                best, best_rate = (level, tokens, seconds), tokens / seconds
            if level >= source.min_levels and level * source.tokens_per_level >= max_nodes - 1:
                break
        return best
