"""What a user may hand in that lies, watches or meddles: drafters, logits processors, stopping criteria, streamers.

Drafters keep to the `Drafter` protocol in form only: their trees may be nonsense. Nothing here knows the engine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from mmspec.engine.tree import DraftTree, bare
from mmspec.interfaces import Needs, Prompt, Verdict

# --- drafters ---------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """What a liar remembers of one call: the prompt, what each row has said, and the right answer if it knows it."""

    prompt: Prompt
    dice: random.Random
    said: list[list[int]]
    answer: list[list[int]] | None = None
    rounds: int = 0
    live: list[bool] = field(default_factory=list)


def as_tree(rows: list[list[tuple[int, int]]]) -> DraftTree:
    """Trees from (token, parent) lists, taken as they are; short rows are filled with invalid nodes."""
    size = 1 + max(map(len, rows))
    tokens = torch.zeros(len(rows), size, dtype=torch.long)
    parents, valid = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    parents[:, 0], valid[:, 0] = -1, True
    for b, row in enumerate(rows):
        for i, (token, parent) in enumerate(row, 1):
            tokens[b, i], parents[b, i], valid[b, i] = token, parent, True
    return DraftTree(tokens, parents, valid)


class Liar:
    """A drafter that proposes nothing, and keeps the books that its children lie with.

    `answers` are whole sequences that plain calls returned, in order; a call takes the next one with its prompt.
    """

    name = "empty"
    vocab_size: int | None = None

    def __init__(self, seed: int = 0, answers: Sequence[Tensor] = ()) -> None:
        self.needs = Needs()
        self.seed, self.answers, self.calls = seed, list(answers), 0

    def _answer(self, ids: Tensor) -> list[list[int]] | None:
        batch, length = ids.shape
        for i, answer in enumerate(self.answers[self.calls :], self.calls):
            if answer.shape[0] == batch and torch.equal(answer[:, :length], ids.cpu()):
                self.calls = i + 1
                return answer[:, length:].tolist()
        return None

    def begin(self, prompt: Prompt) -> Call:
        batch = prompt.ids.shape[0]
        dice = random.Random(self.seed * 1000 + self.calls)
        return Call(prompt, dice, [[] for _ in range(batch)], self._answer(prompt.ids))

    def propose(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        state.rounds += 1
        state.live = list(live)
        return self.lie(state, budget, live)

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        return bare(len(live))

    def observe(self, state: Call, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        for said, new in zip(state.said, verdict.rows, strict=True):
            said.extend(new)

    def ahead(self, state: Call, row: int, count: int) -> list[int]:
        """The next `count` tokens of the right answer, fewer at its end."""
        done = len(state.said[row])
        return state.answer[row][done : done + count] if state.answer else []


class Oracle(Liar):
    """Always right as far as it goes: a chain of the coming tokens, of random length or as long as may be."""

    name = "oracle"

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        depth = budget - 1 if self.seed % 2 else state.dice.randint(0, budget - 1)
        rows = [self.ahead(state, row, depth) if alive else [] for row, alive in enumerate(live)]
        return as_tree([[(token, i) for i, token in enumerate(row)] for row in rows])


class Bush(Liar):
    """The right path somewhere in a bush of wrong siblings; sometimes it breaks off and goes on wrongly."""

    name = "bush"

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        return as_tree([self._row(state, row, budget - 1) if alive else [] for row, alive in enumerate(live)])

    def _row(self, state: Call, row: int, nodes: int) -> list[tuple[int, int]]:
        dice, path, made = state.dice, self.ahead(state, row, nodes), []
        tip, step, vocab = 0, 0, state.prompt.vocab_size or 100
        stop = dice.randint(0, nodes)
        while len(made) < nodes:
            if step < len(path) and dice.random() < 0.5:
                token = path[step] if step != stop else (path[step] + 1) % vocab
                made.append((token, tip))
                tip, step = len(made), step + 1
            else:
                wrong = dice.choice(path) if path and dice.random() < 0.5 else dice.randrange(vocab)
                made.append((wrong, dice.randint(0, len(made))))
        return made


class Wrong(Liar):
    """Never right: the next token is always another one, with the right continuation below it."""

    name = "wrong"

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        vocab, rows = state.prompt.vocab_size or 100, []
        for row, alive in enumerate(live):
            path = self.ahead(state, row, budget - 1) if alive else []
            false = [(path[0] + state.dice.randint(1, vocab - 1)) % vocab, *path[1:]] if path else []
            rows.append([(token, i) for i, token in enumerate(false)])
        return as_tree(rows)


class Chaos(Liar):
    """Random trees with every fault: twins, parents out of order, ids out of range, placeholders, wrong masks."""

    name = "chaos"

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        dice, batch = state.dice, len(live)
        nodes = dice.choice((1, 2, budget, dice.randint(1, budget), budget + dice.randint(1, 70)))
        tokens = [[self._token(state, row) for _ in range(nodes)] for row in range(batch)]
        parents = [[self._parent(dice, i, nodes) for i in range(nodes)] for _ in range(batch)]
        valid = torch.tensor([[dice.random() < 0.9 for _ in range(nodes)] for _ in range(batch)])
        guesses = torch.rand(batch, nodes, generator=torch.Generator().manual_seed(dice.randrange(2**31)))
        scores = dice.choice((None, torch.full((batch, nodes), torch.nan), guesses))
        return DraftTree(torch.tensor(tokens), torch.tensor(parents), valid, scores)

    def _token(self, state: Call, row: int) -> int:
        dice, prompt, vocab = state.dice, state.prompt, state.prompt.vocab_size or 100
        kind = dice.random()
        if kind < 0.6:
            return dice.choice(self.ahead(state, row, 4) or [0])
        if kind < 0.7:
            return dice.choice(sorted(prompt.banned) or [0])
        if kind < 0.8:
            return dice.choice((-1, -100, vocab, vocab + 7, 2**40, -(2**40)))
        return dice.choice(prompt.ids[row].tolist()) if kind < 0.9 else dice.randrange(vocab)

    @staticmethod
    def _parent(dice: random.Random, i: int, nodes: int) -> int:
        if dice.random() < 0.15:
            return dice.choice((-1, -5, i, i + 1, nodes, nodes + 50, 2**40))
        return max(0, i - 1) if dice.random() < 0.6 else dice.randint(0, max(0, i - 1))


class Broken(RuntimeError):
    """What a faulty part of a user's code raises here."""


class Raising(Bush):
    """A useful drafter that raises at a random round, in a random method, of each call."""

    name = "raising"

    def begin(self, prompt: Prompt) -> Call:
        state = super().begin(prompt)
        self.where, self.when = state.dice.choice(("propose", "propose", "observe")), state.dice.randint(1, 6)
        return state

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        if self.where == "propose" and state.rounds == self.when:
            raise Broken(f"propose, round {self.when}")
        return super().lie(state, budget, live)

    def observe(self, state: Call, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        super().observe(state, verdict, taps)
        if self.where == "observe" and state.rounds == self.when:
            raise Broken(f"observe, round {self.when}")


class Nosy(Bush):
    """Asks for the noise of the coming columns, and proposes what it favours; a bush when nothing is sampled."""

    name = "nosy"

    def lie(self, state: Call, budget: int, live: Sequence[bool]) -> DraftTree:
        noise, depth = state.prompt.noise, min(3, budget - 1)
        if noise is None or depth < 1:
            return super().lie(state, budget, live)
        likely = noise(depth).argmin(-1).tolist()
        rows = [row if alive else [] for row, alive in zip(likely, live, strict=True)]
        return as_tree([[(token, i) for i, token in enumerate(row)] for row in rows])


@dataclass
class Seen:
    """The states of one fed token, and the ids of the largest logits there."""

    call: int
    row: int
    column: int
    token: int
    taps: dict[int, Tensor]
    top: list[int]


class Tapper(Bush):
    """Asks for taps and the largest logits, keeps them for `cases.check_taps`, and checks the verdicts."""

    name = "tapper"

    def __init__(self, seed: int = 0, answers: Sequence[Tensor] = (), taps: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__(seed, answers)
        self.needs = Needs(taps=taps, top_k=3)
        self.prompts: list[Prompt] = []
        self.seen: list[Seen] = []
        self.faults: list[str] = []

    def begin(self, prompt: Prompt) -> Call:
        self.prompts.append(prompt)
        return super().begin(prompt)

    def observe(self, state: Call, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        for row, (walked, new) in enumerate(zip(verdict.walked, verdict.rows, strict=True)):
            if state.live and not state.live[row]:
                continue  # what a finished row is fed says nothing about its text
            self._check(state, verdict, row, walked, new)
            if state.rounds and new and taps:
                fed, tokens = len(state.said[row]) - 1, [state.said[row][-1], *new]
                for k, node in enumerate(walked):
                    states = {i: tap[row, node].clone() for i, tap in taps.items()}
                    top = verdict.top_ids[row][node] if verdict.top_ids is not None else []
                    self.seen.append(Seen(len(self.prompts) - 1, row, fed + k, tokens[k], states, list(top)))
        super().observe(state, verdict, taps)

    def _check(self, state: Call, verdict: Verdict, row: int, walked: list[int], new: list[int]) -> None:
        count, tokens = int(verdict.counts[row]), verdict.tokens[row].tolist()
        if not len(walked) == len(new) == count:
            self.faults.append(f"row {row}: walked {walked}, rows {new}, counts {count} differ in length")
        if tokens[:count] != new or verdict.path[row].tolist()[:count] != walked:
            self.faults.append(f"row {row}: host copies {new}, {walked} differ from tensors {tokens[:count]}")
        nodes = [int(verdict.tree.tokens[row, node]) for node in walked]
        if state.rounds and new and nodes != [state.said[row][-1], *new[:-1]]:
            self.faults.append(f"row {row}: walked tokens {nodes}, emitted {new} after {state.said[row][-1:]}")


DRAFTERS: dict[str, type[Liar]] = {
    kind.name: kind for kind in (Liar, Oracle, Bush, Wrong, Chaos, Raising, Nosy, Tapper)
}

# --- logits processors ------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """What a watcher was called with, call by call."""

    calls: list[Any] = field(default_factory=list)


class Counting(LogitsProcessor):
    """Changes nothing, and notes every call."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.calls.append((input_ids.tolist(), tuple(scores.shape), str(scores.dtype)))
        return scores


class Stepping(Counting):
    """What it does depends on how often it was called."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        scores[:, len(self.log.calls) * 7 % scores.shape[1]] += 3.0
        return scores


class Coupling(Counting):
    """Every row looks at the scores of all rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        return scores - 0.5 * scores.mean(0, keepdim=True) + 0.3 * scores.roll(1, 0)


class Drawing(Counting):
    """Draws from torch's default generator."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        return scores + torch.randn_like(scores)


class Twisted(RepetitionPenaltyLogitsProcessor):
    """A known processor's child that does something else: must not be taken for its parent."""

    def __init__(self, log: Log) -> None:
        super().__init__(1.5)
        self.log = log

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.calls.append(input_ids.tolist())
        return scores.roll(len(self.log.calls) % 3, -1)


class Failing(Counting):
    """Raises at its fifth call."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        if len(self.log.calls) == 5:
            raise Broken("the processor broke at call 5")
        return scores


PROCESSORS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Counting, Stepping, Coupling, Drawing, Twisted, Failing)
}


class Prefix:
    """A `prefix_allowed_tokens_fn`: by row and last token if pure, else also by the number of calls. Notes calls."""

    def __init__(self, log: Log, vocab: int, pure: bool) -> None:
        self.log, self.vocab, self.pure = log, vocab, pure

    def __call__(self, row: int, input_ids: Tensor) -> list[int]:
        self.log.calls.append((row, input_ids.tolist()))
        turn = row + int(input_ids[-1]) + (0 if self.pure else len(self.log.calls))
        return [token for token in range(self.vocab) if token < 3 or (token + turn) % 3]


# --- stopping criteria ------------------------------------------------------------------------------------------------


class Watching(StoppingCriteria):
    """Never stops, and notes every call."""

    def __init__(self, log: Log, start: int, seed: int) -> None:
        self.log, self.start, self.seed = log, start, seed

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.log.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return self.stop(input_ids)

    def stop(self, input_ids: Tensor) -> Any:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Neighbours(Watching):
    """Stops all rows when the last tokens of all rows agree modulo 5, or one row said the same token three times."""

    def stop(self, input_ids: Tensor) -> Any:
        last = input_ids[:, -1] % 5
        thrice = (input_ids[:, self.start :] == input_ids[:, -1:]).sum(-1).max() >= 3
        agree = bool((last == last[0]).all()) and input_ids.shape[0] > 1
        return torch.full((input_ids.shape[0],), agree or bool(thrice))


class Lengths(Watching):
    """Stops each row at a random length of its own."""

    def stop(self, input_ids: Tensor) -> Any:
        dice = random.Random(self.seed)
        limits = torch.tensor([self.start + dice.randint(1, 20) for _ in range(input_ids.shape[0])])
        return input_ids.shape[1] >= limits


class Gambling(Watching):
    """Stops at random, by torch's default generator."""

    def stop(self, input_ids: Tensor) -> Any:
        return torch.rand(input_ids.shape[0]) < 0.1


class Plain(Watching):
    """Returns a bool for the whole batch, as many a criterion on the web does."""

    def stop(self, input_ids: Tensor) -> Any:
        return input_ids.shape[1] >= self.start + 5 + self.seed % 9


class Tripping(Watching):
    """Raises at its fourth call."""

    def stop(self, input_ids: Tensor) -> Any:
        if len(self.log.calls) == 4:
            raise Broken("the criterion broke at call 4")
        return super().stop(input_ids)


CRITERIA: dict[str, type[Watching]] = {
    kind.__name__.lower(): kind for kind in (Watching, Neighbours, Lengths, Gambling, Plain, Tripping)
}


class Recorder(BaseStreamer):
    """Notes what it is handed."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.calls.append((tuple(value.shape), str(value.dtype), value.device.type, value.tolist()))

    def end(self) -> None:
        self.log.calls.append("end")


class Fuse(Recorder):
    """Raises at the third put."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.log.calls) == 3:
            raise Broken("the streamer broke at put 3")


class Dealer(Recorder):
    """Draws from torch's default generator."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        self.log.calls.append(float(torch.rand(())))
