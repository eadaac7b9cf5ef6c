"""Adversarial user code for tests: drafters, logits processors, stopping criteria and streamers.

The drafters implement the `Drafter` protocol, but their trees may be malformed. Independent of the engine.
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

from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import DrafterRequirements, Prompt, VerifyResult

# --- drafters ---------------------------------------------------------------------------------------------------------


@dataclass
class DrafterState:
    """State of a call: the prompt, the generated tokens of each row, and the reference output if known."""

    prompt: Prompt
    rng: random.Random
    generated: list[list[int]]
    reference: list[list[int]] | None = None
    rounds: int = 0
    active: list[bool] = field(default_factory=list)


def build_raw_tree(rows: list[list[tuple[int, int]]]) -> DraftTree:
    """Unchecked trees from lists of (token, parent); short rows are padded with invalid nodes."""
    size = 1 + max(map(len, rows))
    nodes = [[(0, -1, 1), *((*node, 1) for node in row), *[(0, 0, 0)] * (size - 1 - len(row))] for row in rows]
    tokens, parents, is_node = torch.tensor(nodes).unbind(-1)
    return DraftTree(tokens.contiguous(), parents.contiguous(), is_node.bool())


class AdversarialDrafter:
    """A drafter that proposes nothing and tracks the generated tokens; base class of the others.

    `references` are the sequences that plain calls returned, in order. A call takes the next one with its prompt.
    """

    name = "empty"
    vocab_size: int | None = None

    def __init__(self, seed: int = 0, references: Sequence[Tensor] = ()) -> None:
        self.requirements = DrafterRequirements()
        self.seed, self.references, self.num_calls = seed, list(references), 0

    def _next_reference(self, ids: Tensor) -> list[list[int]] | None:
        batch, length = ids.shape
        for i, answer in enumerate(self.references[self.num_calls :], self.num_calls):
            if answer.shape[0] == batch and torch.equal(answer[:, :length], ids.cpu()):
                self.num_calls = i + 1
                return answer[:, length:].tolist()
        return None

    def begin(self, prompt: Prompt) -> DrafterState:
        batch = prompt.input_ids.shape[0]
        rng = random.Random(self.seed * 1000 + self.num_calls)
        return DrafterState(prompt, rng, [[] for _ in range(batch)], self._next_reference(prompt.input_ids))

    def propose(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        state.rounds += 1
        state.active = list(active)
        return self.propose_tree(state, max_nodes, active)

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return root_only(len(active))

    def observe(self, state: DrafterState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        for generated, new in zip(state.generated, result.emitted_ids, strict=True):
            generated.extend(new)

    def upcoming_tokens(self, state: DrafterState, row: int, count: int) -> list[int]:
        """The next `count` tokens of the reference, fewer at its end."""
        done = len(state.generated[row])
        return state.reference[row][done : done + count] if state.reference else []


class OracleDrafter(AdversarialDrafter):
    """Always correct: a chain of the next reference tokens, of random or maximal length."""

    name = "oracle"

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        depth = max_nodes - 1 if self.seed % 2 else state.rng.randint(0, max_nodes - 1)
        rows = [self.upcoming_tokens(state, row, depth) if is_active else [] for row, is_active in enumerate(active)]
        return build_raw_tree([[(token, i) for i, token in enumerate(row)] for row in rows])


class BranchingDrafter(AdversarialDrafter):
    """The reference path among wrong siblings; sometimes it is wrong from some depth on."""

    name = "bush"

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return build_raw_tree(
            [self._row(state, row, max_nodes - 1) if is_active else [] for row, is_active in enumerate(active)]
        )

    def _row(self, state: DrafterState, row: int, nodes: int) -> list[tuple[int, int]]:
        rng, path, row_nodes = state.rng, self.upcoming_tokens(state, row, nodes), []
        tip, step, vocab = 0, 0, state.prompt.vocab_size or 100
        stop = rng.randint(0, nodes)
        while len(row_nodes) < nodes:
            if step < len(path) and rng.random() < 0.5:
                token = path[step] if step != stop else (path[step] + 1) % vocab
                row_nodes.append((token, tip))
                tip, step = len(row_nodes), step + 1
            else:
                wrong = rng.choice(path) if path and rng.random() < 0.5 else rng.randrange(vocab)
                row_nodes.append((wrong, rng.randint(0, len(row_nodes))))
        return row_nodes


class WrongDrafter(AdversarialDrafter):
    """Never correct: the next token is wrong, with the correct continuation below it."""

    name = "wrong"

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        vocab, rows = state.prompt.vocab_size or 100, []
        for row, is_active in enumerate(active):
            path = self.upcoming_tokens(state, row, max_nodes - 1) if is_active else []
            false = [(path[0] + state.rng.randint(1, vocab - 1)) % vocab, *path[1:]] if path else []
            rows.append([(token, i) for i, token in enumerate(false)])
        return build_raw_tree(rows)


class MalformedDrafter(AdversarialDrafter):
    """Random trees with every fault: duplicate siblings, parents out of order, ids out of range, placeholders."""

    name = "chaos"

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        rng, batch = state.rng, len(active)
        nodes = rng.choice((1, 2, max_nodes, rng.randint(1, max_nodes), max_nodes + rng.randint(1, 70)))
        tokens = [[self._token(state, row) for _ in range(nodes)] for row in range(batch)]
        parents = [[self._parent(rng, i, nodes) for i in range(nodes)] for _ in range(batch)]
        node_mask = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(batch)])
        guesses = torch.rand(batch, nodes, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        scores = rng.choice((None, torch.full((batch, nodes), torch.nan), guesses))
        return DraftTree(torch.tensor(tokens), torch.tensor(parents), node_mask, scores)

    def _token(self, state: DrafterState, row: int) -> int:
        rng, prompt, vocab = state.rng, state.prompt, state.prompt.vocab_size or 100
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(self.upcoming_tokens(state, row, 4) or [0])
        if kind < 0.7:
            return rng.choice(sorted(prompt.banned_ids) or [0])
        if kind < 0.8:
            return rng.choice((-1, -100, vocab, vocab + 7, 2**40, -(2**40)))
        return rng.choice(prompt.input_ids[row].tolist()) if kind < 0.9 else rng.randrange(vocab)

    @staticmethod
    def _parent(rng: random.Random, i: int, nodes: int) -> int:
        if rng.random() < 0.15:
            return rng.choice((-1, -5, i, i + 1, nodes, nodes + 50, 2**40))
        return max(0, i - 1) if rng.random() < 0.6 else rng.randint(0, max(0, i - 1))


class InjectedError(RuntimeError):
    """The exception that faulty user code raises in tests."""


class RaisingDrafter(BranchingDrafter):
    """A correct drafter that raises in a random round and method of each call."""

    name = "raising"

    def begin(self, prompt: Prompt) -> DrafterState:
        state = super().begin(prompt)
        self.failing_method, self.failing_round = (
            state.rng.choice(("propose", "propose", "observe")),
            state.rng.randint(1, 6),
        )
        return state

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        if self.failing_method == "propose" and state.rounds == self.failing_round:
            raise InjectedError(f"propose, round {self.failing_round}")
        return super().propose_tree(state, max_nodes, active)

    def observe(self, state: DrafterState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        super().observe(state, result, hidden_states)
        if self.failing_method == "observe" and state.rounds == self.failing_round:
            raise InjectedError(f"observe, round {self.failing_round}")


class NoisePeekingDrafter(BranchingDrafter):
    """Reads the noise of the next steps and proposes the tokens it favours; branching when decoding greedily."""

    name = "nosy"

    def propose_tree(self, state: DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        noise, depth = state.prompt.noise, min(3, max_nodes - 1)
        if noise is None or depth < 1:
            return super().propose_tree(state, max_nodes, active)
        likely = noise(depth).argmin(-1).tolist()
        rows = [row if is_active else [] for row, is_active in zip(likely, active, strict=True)]
        return build_raw_tree([[(token, i) for i, token in enumerate(row)] for row in rows])


@dataclass
class ObservedState:
    """The hidden states of one fed token, and the ids of its largest logits."""

    call_index: int
    row: int
    step: int
    token: int
    hidden_states: dict[int, Tensor]
    top_ids: list[int]


class HiddenStateDrafter(BranchingDrafter):
    """Requires hidden states and top ids, records them for `fuzz.check_hidden_states`, and checks the results."""

    name = "tapper"

    def __init__(
        self, seed: int = 0, references: Sequence[Tensor] = (), hidden_state_indices: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        super().__init__(seed, references)
        self.requirements = DrafterRequirements(hidden_state_indices=hidden_state_indices, top_k=3)
        self.prompts: list[Prompt] = []
        self.observed: list[ObservedState] = []
        self.faults: list[str] = []

    def begin(self, prompt: Prompt) -> DrafterState:
        self.prompts.append(prompt)
        return super().begin(prompt)

    def observe(self, state: DrafterState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        for row, (accepted_nodes, new) in enumerate(zip(result.accepted_nodes, result.emitted_ids, strict=True)):
            if state.active and not state.active[row]:
                continue  # a finished row is fed padding
            self._check(state, result, row, accepted_nodes, new)
            if state.rounds and new and hidden_states:
                fed, tokens = len(state.generated[row]) - 1, [state.generated[row][-1], *new]
                for k, node in enumerate(accepted_nodes):
                    states = {i: hidden[row, node].clone() for i, hidden in hidden_states.items()}
                    top = result.top_ids[row][node] if result.top_ids is not None else []
                    self.observed.append(
                        ObservedState(len(self.prompts) - 1, row, fed + k, tokens[k], states, list(top))
                    )
        super().observe(state, result, hidden_states)

    def _check(
        self, state: DrafterState, result: VerifyResult, row: int, accepted_nodes: list[int], new: list[int]
    ) -> None:
        count, tokens = int(result.counts[row]), result.tokens[row].tolist()
        if not len(accepted_nodes) == len(new) == count:
            self.faults.append(f"row {row}: accepted {accepted_nodes}, rows {new}, counts {count} differ in length")
        if tokens[:count] != new or result.path[row].tolist()[:count] != accepted_nodes:
            self.faults.append(f"row {row}: host copies {new}, {accepted_nodes} differ from tensors {tokens[:count]}")
        nodes = [int(result.tree.tokens[row, node]) for node in accepted_nodes]
        if state.rounds and new and nodes != [state.generated[row][-1], *new[:-1]]:
            self.faults.append(f"row {row}: walked tokens {nodes}, emitted {new} after {state.generated[row][-1:]}")


DRAFTERS: dict[str, type[AdversarialDrafter]] = {
    kind.name: kind
    for kind in (
        AdversarialDrafter,
        OracleDrafter,
        BranchingDrafter,
        WrongDrafter,
        MalformedDrafter,
        RaisingDrafter,
        NoisePeekingDrafter,
        HiddenStateDrafter,
    )
}

# --- logits processors ------------------------------------------------------------------------------------------------


@dataclass
class CallLog:
    """The arguments of every call."""

    calls: list[Any] = field(default_factory=list)


class Counting(LogitsProcessor):
    """Changes nothing and records every call."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.calls.append((input_ids.tolist(), tuple(scores.shape), str(scores.dtype)))
        return scores


class Stepping(Counting):
    """Its result depends on the number of calls."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        scores[:, len(self.log.calls) * 7 % scores.shape[1]] += 3.0
        return scores


class Coupling(Counting):
    """The scores of every row depend on all rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        return scores - 0.5 * scores.mean(0, keepdim=True) + 0.3 * scores.roll(1, 0)


class Drawing(Counting):
    """Draws from torch's default generator."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(input_ids, scores)
        return scores + torch.randn_like(scores)


class Twisted(RepetitionPenaltyLogitsProcessor):
    """A subclass of a known processor with another behaviour: must not be treated like its base class."""

    def __init__(self, log: CallLog) -> None:
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
            raise InjectedError("the processor failed at call 5")
        return scores


PROCESSORS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Counting, Stepping, Coupling, Drawing, Twisted, Failing)
}


class PrefixConstraint:
    """A `prefix_allowed_tokens_fn` of row and last token, and of the number of calls if not pure. Records calls."""

    def __init__(self, log: CallLog, vocab_size: int, is_pure: bool) -> None:
        self.log, self.vocab_size, self.is_pure = log, vocab_size, is_pure

    def __call__(self, row: int, input_ids: Tensor) -> list[int]:
        self.log.calls.append((row, input_ids.tolist()))
        turn = row + int(input_ids[-1]) + (0 if self.is_pure else len(self.log.calls))
        return [token for token in range(self.vocab_size) if token < 3 or (token + turn) % 3]


# --- stopping criteria ------------------------------------------------------------------------------------------------


class Watching(StoppingCriteria):
    """Never stops and records every call."""

    def __init__(self, log: CallLog, start: int, seed: int) -> None:
        self.log, self.start, self.seed = log, start, seed

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.log.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return self.stop(input_ids)

    def stop(self, input_ids: Tensor) -> Any:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Neighbours(Watching):
    """Stops all rows when the last tokens of all rows agree modulo 5, or a row has the same token three times."""

    def stop(self, input_ids: Tensor) -> Any:
        last = input_ids[:, -1] % 5
        thrice = (input_ids[:, self.start :] == input_ids[:, -1:]).sum(-1).max() >= 3
        agree = bool((last == last[0]).all()) and input_ids.shape[0] > 1
        return torch.full((input_ids.shape[0],), agree or bool(thrice))


class Lengths(Watching):
    """Stops each row at a random length of its own."""

    def stop(self, input_ids: Tensor) -> Any:
        rng = random.Random(self.seed)
        limits = torch.tensor([self.start + rng.randint(1, 20) for _ in range(input_ids.shape[0])])
        return input_ids.shape[1] >= limits


class Gambling(Watching):
    """Stops at random, by torch's default generator."""

    def stop(self, input_ids: Tensor) -> Any:
        return torch.rand(input_ids.shape[0]) < 0.1


class Plain(Watching):
    """Returns a bool for the whole batch, as many published criteria do."""

    def stop(self, input_ids: Tensor) -> Any:
        return input_ids.shape[1] >= self.start + 5 + self.seed % 9


class Tripping(Watching):
    """Raises at its fourth call."""

    def stop(self, input_ids: Tensor) -> Any:
        if len(self.log.calls) == 4:
            raise InjectedError("the criterion failed at call 4")
        return super().stop(input_ids)


CRITERIA: dict[str, type[Watching]] = {
    kind.__name__.lower(): kind for kind in (Watching, Neighbours, Lengths, Gambling, Plain, Tripping)
}


class RecordingStreamer(BaseStreamer):
    """Records every call."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.calls.append((tuple(value.shape), str(value.dtype), value.device.type, value.tolist()))

    def end(self) -> None:
        self.log.calls.append("end")


class FailingStreamer(RecordingStreamer):
    """Raises at the third put."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.log.calls) == 3:
            raise InjectedError("the streamer failed at put 3")


class RngStreamer(RecordingStreamer):
    """Draws from torch's default generator."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        self.log.calls.append(float(torch.rand(())))


class PromptRecorder(AdversarialDrafter):
    """Records the prompts that it receives."""

    name = "prompt-recorder"

    def __init__(self) -> None:
        super().__init__()
        self.requirements = DrafterRequirements(hidden_state_indices=(0,))
        self.prompts: list[Prompt] = []

    def begin(self, prompt: Prompt) -> Any:
        self.prompts.append(prompt)
        return super().begin(prompt)
