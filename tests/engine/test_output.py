"""The column clock against a step-by-step copy of what transformers' `_sample` does around its forwards.

A table of random logits stands in for the model. Rows emit as many tokens per round as the dice say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import adversarial as adversarial
import pytest
import torch
from torch import Tensor
from transformers.generation import stopping_criteria as hf
from transformers.generation.streamers import BaseStreamer

from mmspec.engine.output import OutputBuffer, ReturnFlags
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import BUCKETS, bucket_size, root_only
from mmspec.interfaces import VerifyResult

VOCAB, BASE = 12, 4


class World:
    """Logits of a row from its index and its last two tokens; `holes` of 97 states have none that can be sampled."""

    def __init__(self, seed: int, batch: int, holes: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.prompt = torch.randint(0, VOCAB, (batch, BASE), generator=rng)
        self.table = 2 * torch.randn(97, VOCAB, generator=rng)
        self.table[torch.randperm(97, generator=rng)[:holes]] = -torch.inf

    def logits(self, row: int, history: list[int]) -> Tensor:
        """[V] float32."""
        return self.table[(31 * history[-1] + 7 * history[-2] + 13 * row + len(history)) % 97]


@dataclass
class Outcome:
    """Everything a caller can see of one run."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    ends: list[int]
    state: Tensor
    watched: list[Any] = field(default_factory=list)
    puts: list[Any] = field(default_factory=list)
    error: str = ""

    def check(self, other: Outcome) -> None:
        """Assert that another run gave the same."""
        assert self.error == other.error
        assert torch.equal(self.sequences, other.sequences)
        assert self.ends == other.ends
        assert self.watched == other.watched and self.puts == other.puts
        for mine, yours in ((self.scores, other.scores), (self.logits, other.logits)):
            assert (mine is None) == (yours is None)
            if mine is not None and yours is not None and not self.error:
                assert len(mine) == len(yours) and all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
        assert torch.equal(self.state, other.state), "the generator is in another state"


@dataclass
class Case:
    """One run: criteria and streamer are made afresh for every run."""

    seed: int
    batch: int = 2
    criteria: Callable[[adversarial.CallLog], list[Any]] = lambda log: []
    pad: int = 0
    sample: bool = False
    streamer: Callable[[adversarial.CallLog], Any] = lambda log: None
    keep_scores: bool = False
    keep_logits: bool = False
    keep_cache: bool = False
    lockstep: bool = False
    window: int = 16
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    holes: int = 0


def plain(case: Case) -> Outcome:
    """`GenerationMixin._sample`, line by line, with the table for a model."""
    world, log, puts = World(case.seed, case.batch, case.holes), adversarial.CallLog(), adversarial.CallLog()
    criteria, streamer = hf.StoppingCriteriaList(case.criteria(log)), case.streamer(puts)
    torch.manual_seed(case.seed)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    ids, unfinished, ends = world.prompt, torch.ones(case.batch, dtype=torch.long), [0] * case.batch
    scores: tuple[Tensor, ...] | None = () if case.keep_scores else None
    logits: tuple[Tensor, ...] | None = () if case.keep_logits else None
    while True:
        raw = torch.stack([world.logits(row, history) for row, history in enumerate(ids.tolist())])
        warm = raw * 1.5
        scores = None if scores is None else (*scores, warm)
        logits = None if logits is None else (*logits, raw)
        try:
            tokens = torch.multinomial(warm.softmax(-1), 1).squeeze(1) if case.sample else warm.argmax(-1)
        except RuntimeError as error:
            return Outcome(ids, scores, logits, ends, torch.get_rng_state(), log.calls, puts.calls, str(error))
        ends = [n + int(not has_eos or on) for n, on in zip(ends, unfinished.tolist(), strict=True)]
        if has_eos:
            tokens = tokens * unfinished + case.pad * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~criteria(ids, scores)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if unfinished.max() == 0:
            break
    return Outcome(ids, scores, logits, ends, torch.get_rng_state(), log.calls, puts.calls)


class Runner:
    """The decode loop's side of the clock, with dice instead of a tree."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, random.Random(case.seed)
        self.world = World(case.seed, case.batch, case.holes)
        self.log, self.puts = adversarial.CallLog(), adversarial.CallLog()
        torch.manual_seed(case.seed)
        noise = SamplingNoise(case.batch, VOCAB, torch.device("cpu"), case.window) if case.sample else None
        self.noise = noise
        self.clock = OutputBuffer(
            self.world.prompt,
            case.criteria(self.log),
            pad_token_id=case.pad,
            noise=noise,
            streamer=case.streamer(self.puts),
            returns=ReturnFlags(scores=case.keep_scores, logits=case.keep_logits, cache=case.keep_cache),
            stepwise=case.lockstep,
        )
        self.rounds = 0
        self.widest = 0

    def emit(self, nodes: int) -> None:
        """One round of `nodes` nodes per row."""
        clock = self.clock
        clock.reserve(nodes)
        limits = clock.max_emit(nodes)
        if self.noise is not None and self.noise.immediate:
            self.emit_live()
            return
        assert all(0 <= limit <= nodes for limit in limits) and any(limits), "nobody may move"
        if self.noise is not None:
            self.noise.draw(clock.noise_end(nodes))
        scores, logits = (torch.full((self.case.batch, nodes, VOCAB), torch.nan) for _ in range(2))
        tokens = torch.full((self.case.batch, nodes), 999)
        path = torch.zeros(self.case.batch, nodes, dtype=torch.long)
        for row, limit in enumerate(limits):
            wish = limit if clock.finished[row] else self.rng.randint(1, nodes)
            walked = [0, *sorted(self.rng.sample(range(1, nodes), min(limit, wish) - 1))] if limit else []
            emitted: list[int] = []
            for step, node in enumerate(walked):
                logits[row, node] = self.world.logits(row, self.history(row) + emitted)
                scores[row, node] = logits[row, node] * 1.5
                if self.noise is not None and bool(scores[row, node].softmax(-1).isnan().any()):
                    self.fail()
                    return
                emitted.append(self.pick(row, len(clock.emitted[row]) + step, scores[row, node]))
                tokens[row, step], path[row, step] = emitted[-1], node
                if clock.stop_ids is not None and emitted[-1] in clock.stop_ids and not clock.finished[row]:
                    break
            limits[row] = len(emitted)
        counts = torch.tensor(limits)
        rows, walks = ([part[row, :n].tolist() for row, n in enumerate(limits)] for part in (tokens, path))
        clock.emit(VerifyResult(root_only(self.case.batch), path, counts, tokens, rows, walks), scores, logits)
        self.widest = max(self.widest, max(clock.num_emitted) - clock.steps)

    def emit_live(self) -> None:
        """One column, drawn by transformers' own call."""
        clock, batch = self.clock, self.case.batch
        assert len(set(clock.num_emitted)) == 1, "rows must be level"
        logits = torch.stack([self.world.logits(row, self.history(row)) for row in range(batch)])[:, None]
        scores = logits * 1.5
        tokens, _, _ = TreeSampler([], self.noise).sample(
            scores, root_only(batch), clock.sequences, clock.num_emitted, clock.prompt_length, 0
        )
        tokens = torch.where(torch.tensor(clock.finished)[:, None], clock.pad_token_id, tokens)
        path, rows = torch.zeros(batch, 1, dtype=torch.long), tokens.tolist()
        verdict = VerifyResult(root_only(batch), path, torch.ones(batch, dtype=torch.long), tokens, rows, [[0]] * batch)
        clock.emit(verdict, scores, logits)

    def fail(self) -> None:
        """What the loop does when a round fails: perhaps plain decoding would not have come there."""
        if self.clock.stepwise or not self.clock.steps:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        self.clock.fall_back_to_stepwise()

    def history(self, row: int) -> list[int]:
        """Prompt and emitted tokens, as the clock keeps them; twice, since it keeps them twice."""
        rows = self.world.prompt[row].tolist() + self.clock.emitted[row]
        assert self.clock.sequences[row, : len(rows)].tolist() == rows
        return rows

    def pick(self, row: int, column: int, scores: Tensor) -> int:
        """The token that the seed, the column and the history say."""
        if self.clock.finished[row]:
            return self.clock.pad_token_id
        if self.noise is None:
            return int(scores.argmax())
        return int((scores.softmax(-1) / self.noise.at(torch.full((self.case.batch, 1), column))[row, 0]).argmax())

    def run(self) -> Outcome:
        """Until the batch stops, or sampling fails."""
        clock, error = self.clock, ""
        try:
            if not max(clock.num_emitted):
                self.emit(1)
            while not clock.advance():
                wanted = self.rng.choice(self.case.sizes)
                nodes = 1 if clock.stepwise else max(wanted, bucket_size(min(clock.padding_lag + 1, BUCKETS[-1])))
                self.emit(nodes)
                self.rounds += 1
                assert self.rounds < 2000
        except RuntimeError as failed:
            if not str(failed).startswith("probability"):
                raise
            error = str(failed)
        if self.noise is not None and not self.noise.immediate:
            self.noise.restore_rng(clock.steps - 1)
        sequences, scores, logits = clock.result()
        state = torch.get_rng_state()
        return Outcome(sequences, scores, logits, clock.output_lengths(), state, self.log.calls, self.puts.calls, error)


def same(case: Case) -> Runner:
    """Assert that the clock and the copy of transformers agree; the runner."""
    want, runner = plain(case), Runner(case)
    want.check(runner.run())
    return runner


# --- criteria and streamers -------------------------------------------------------------------------------------------


class Ending(adversarial.Watching):
    """A user's own way to say that there is an end token: transformers pads, though no built-in criterion does."""

    eos_token_id = torch.tensor([5])

    def stop(self, input_ids: Tensor) -> Any:
        return input_ids[:, -1] == 5


class Shaped(adversarial.Watching):
    """Answers with one element for the whole batch."""

    def stop(self, input_ids: Tensor) -> Any:
        return torch.tensor([input_ids.shape[1] >= BASE + 6 + self.seed % 5])


class Meddling(adversarial.Watching):
    """Writes into the ids that it is given."""

    def stop(self, input_ids: Tensor) -> Any:
        input_ids[:, -1] = 3
        return super().stop(input_ids)


class Drawing(BaseStreamer):
    """A streamer that draws from the default generator now and then."""

    def __init__(self, log: adversarial.CallLog) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.calls.append(value.tolist())
        if len(self.log.calls) % 4 == 3:
            self.log.calls.append(torch.rand(2).tolist())

    def end(self) -> None:
        raise AssertionError("the clock does not end the stream")


class Failing(Drawing):
    """Raises at its fourth put."""

    def put(self, value: Tensor) -> None:
        self.log.calls.append(value.tolist())
        if len(self.log.calls) == 4:
            raise adversarial.InjectedError("put 4")


OWN = {**adversarial.CRITERIA, "ending": Ending, "shaped": Shaped}
OWN.pop("tripping")


def draw_criteria(seed: int, length: int = 0) -> Callable[[adversarial.CallLog], list[Any]]:
    """Criteria in random order."""
    rng = random.Random(f"criteria {seed}")
    length = length or rng.choice((1, 2, 5, 20, 40))
    stops = rng.choice(([], [2], [2], [0], [2, 7, 9]))
    own = [rng.choice(list(OWN)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    late = rng.random() < 0.2

    def criteria(log: adversarial.CallLog) -> list[Any]:
        made: list[Any] = [hf.MaxLengthCriteria(BASE + length)]
        made += [hf.EosTokenCriteria(stops)] if stops else []
        made += [hf.MaxTimeCriteria(1e6)] if late else []
        made += [OWN[name](log, BASE, seed) for name in own]
        random.Random(seed).shuffle(made)
        return made

    return criteria


def draw(seed: int) -> Case:
    """A random case."""
    rng = random.Random(f"columns {seed}")
    streamers = (lambda log: None, lambda log: None, adversarial.RecordingStreamer, Drawing)
    return Case(
        seed=seed,
        batch=rng.choice((1, 2, 3, 5)),
        criteria=draw_criteria(seed),
        pad=rng.choice((0, 0, 2)),
        sample=rng.random() < 0.5,
        streamer=rng.choice(streamers),
        keep_scores=rng.random() < 0.3,
        keep_logits=rng.random() < 0.3,
        keep_cache=rng.random() < 0.3,
        lockstep=rng.random() < 0.1,
        window=rng.choice((2, 5, 16)),
        sizes=rng.choice(((1,), (1, 2, 4, 8), (8,), (3, 16))),
    )


@pytest.mark.parametrize("block", range(10))
def test_the_clock_keeps_the_books_of_transformers(block: int) -> None:
    for seed in range(30 * block, 30 * block + 30):
        try:
            same(draw(seed))
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}") from error


def test_those_cases_are_worth_something() -> None:
    """Rows run ahead, are cut, and wait."""
    ahead = [same(draw(seed)).widest for seed in range(60)]
    assert max(ahead) > 8 and sum(width > 1 for width in ahead) > 15


# --- one thing at a time ----------------------------------------------------------------------------------------------


def limited(length: int, *more: Callable[[adversarial.CallLog], Any]) -> Callable[[adversarial.CallLog], list[Any]]:
    """A length limit, and other criteria."""
    return lambda log: [hf.MaxLengthCriteria(BASE + length), *[make(log) for make in more]]


@pytest.mark.parametrize("sample", [False, True])
def test_long_outputs(sample: bool) -> None:
    """The buffer grows beyond its first size."""
    case = Case(
        3, criteria=limited(700), sample=sample, streamer=adversarial.RecordingStreamer, keep_scores=True, sizes=(8, 16)
    )
    runner = same(case)
    assert runner.clock.steps == 700 and runner.rounds < 400


def test_one_row_far_ahead() -> None:
    """Nothing is lost when a row runs hundreds of columns ahead of the others, and little is kept of it."""
    case = Case(5, criteria=limited(600), sizes=(1,))
    want, runner = plain(case), Runner(case)
    runner.emit(1)
    assert not runner.clock.advance()
    runner.rng = random.Random(0)
    clock = runner.clock
    while len(clock.emitted[0]) < 600:
        before = clock.num_emitted
        verdict = _one_row(runner, 16)
        assert len(verdict.emitted_ids[0]) == min(16, 600 - before[0]) and not verdict.emitted_ids[1]
        assert not clock.advance() and clock.steps == 1
    assert clock.max_emit(16) == [0, 16]
    want.check(runner.run())


def _one_row(runner: Runner, nodes: int) -> VerifyResult:
    """A round in which only row 0 emits, as much as it may."""
    clock, limit = runner.clock, runner.clock.max_emit(nodes)[0]
    clock.reserve(nodes)
    emitted: list[int] = []
    logits = torch.zeros(2, nodes, VOCAB)
    for _ in range(limit):
        logits[0, len(emitted)] = runner.world.logits(0, runner.history(0) + emitted)
        emitted.append(int(logits[0, len(emitted)].argmax()))
    tokens = torch.tensor([emitted + [0] * (nodes - limit), [0] * nodes])
    path = torch.arange(nodes).expand(2, nodes)
    verdict = VerifyResult(
        root_only(2), path, torch.tensor([limit, 0]), tokens, [emitted, []], [list(range(limit)), []]
    )
    clock.emit(verdict, logits, logits)
    return verdict


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("kept", [{}, {"keep_cache": True}, {"keep_scores": True, "keep_logits": True}])
def test_finished_rows_keep_up(pad: int, kept: dict[str, Any]) -> None:
    """Their padding is caught up with only where it is returned; then it holds up no column for long."""
    for seed in range(20):
        ends = limited(40, lambda log: hf.EosTokenCriteria([2]))
        runner = same(Case(seed, batch=3, criteria=ends, pad=pad, sizes=(8,), **kept))
        assert runner.rounds <= runner.clock.steps


def test_the_lag_of_finished_rows() -> None:
    case = Case(0, batch=2, criteria=limited(40, lambda log: hf.EosTokenCriteria([2])), keep_cache=True)
    for waits, lag in ((True, 6), (False, 0)):
        clock = OutputBuffer(
            World(0, 2).prompt,
            case.criteria(adversarial.CallLog()),
            pad_token_id=0,
            noise=None,
            returns=ReturnFlags(cache=waits),
        )
        rows = [[1, 2], [1, 3, 4, 5, 6, 7, 8, 9]]
        tokens = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
        assert clock.padding_lag == 0
        counts, path = torch.tensor([2, 8]), torch.arange(8).expand(2, 8)
        walked = [list(range(2)), list(range(8))]
        clock.emit(
            VerifyResult(root_only(2), path, counts, tokens, rows, walked), torch.zeros(2, 8, VOCAB), torch.zeros(1)
        )
        assert clock.finished == [True, False]
        clock.advance()
        assert clock.steps == (2 if waits else 8) and clock.padding_lag == lag
        assert clock.max_emit(4) == [4, 4] and clock.max_emit(8)[0] == 8
        clock.finished[1] = True
        assert clock.padding_lag == lag, "when all have ended the longest decides"


def test_rows_wait_at_the_window_and_the_limit() -> None:
    noise = SamplingNoise(2, VOCAB, torch.device("cpu"), 6)
    clock = OutputBuffer(World(0, 2).prompt, [hf.MaxLengthCriteria(BASE + 9)], pad_token_id=0, noise=noise)
    assert clock.max_emit(1) == [1, 1] and clock.max_emit(8) == [6, 6] and clock.noise_end(8) == 6
    clock.emitted = [[1] * 5, [1]]
    clock.steps = 1
    assert clock.max_emit(8) == [2, 6] and clock.noise_end(8) == 7 and clock.noise_end(1) == 6
    clock.noise = None
    assert clock.max_emit(8) == [4, 8] and clock.noise_end(8) == 13
    clock.emitted[0] = [1] * 9
    assert clock.max_emit(8) == [0, 8]


def test_at_least_one_token_even_if_the_prompt_is_too_long() -> None:
    """transformers decodes one token before it asks any criterion."""
    for length in (-2, 0, 1):
        assert same(Case(1, criteria=limited(length))).clock.steps == 1


def test_without_a_length_limit_only_the_other_criteria_stop() -> None:
    runner = same(Case(2, criteria=lambda log: [hf.EosTokenCriteria([2, 7])]))
    assert runner.clock.max_steps > 10**9


def test_max_time() -> None:
    def criteria(log: adversarial.CallLog) -> list[Any]:
        return [hf.MaxLengthCriteria(BASE + 20), hf.MaxTimeCriteria(0.5, initial_timestamp=0.0)]

    assert same(Case(2, criteria=criteria, sizes=(8,))).clock.steps == 1


def test_the_reminder_about_the_models_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length criterion also speaks up when the model's positions run out; it is asked from there on."""
    said: list[str] = []
    monkeypatch.setattr(hf.logger, "warning_once", lambda text: said.append(text))
    case = Case(2, criteria=lambda log: [hf.MaxLengthCriteria(BASE + 9, max_position_embeddings=BASE + 5)])
    same(case)
    assert len(said) == 2 * 3 and len(set(said)) == 1  # columns 6, 7 and 8, on either side


@pytest.mark.parametrize("sample", [False, True])
def test_what_criteria_write_is_what_goes_on(sample: bool) -> None:
    """As in transformers, whose own growing tensor they are given."""
    criteria = limited(20, lambda log: Meddling(log, BASE, 0))
    runner = same(Case(4, criteria=criteria, sizes=(8,), sample=sample))
    assert runner.clock.sequences[:, BASE : BASE + 20].unique().tolist() == [3]


@pytest.mark.parametrize("length", [6, 25])
def test_where_nothing_can_be_sampled_the_call_fails_in_that_column(length: int) -> None:
    """Not before, though rows ahead have seen it; and not at all if the batch stops first.

    Finished rows are looked at as far as they are kept up with, so the cache is asked for here.
    """
    failed = 0
    for seed in range(60):
        case = draw(seed)
        case = replace(case, criteria=draw_criteria(seed, length), sample=True, holes=4, keep_cache=True)
        want, got = plain(case), Runner(case).run()
        want.check(got)
        failed += bool(want.error)
    assert 10 < failed < 55


@pytest.mark.parametrize("name", ["gambling", "drawing"])
def test_user_code_that_draws_random_numbers(name: str) -> None:
    """From the first stray draw on rows move one column at a time; before it they do not."""
    stopped = 0
    for seed in range(30):
        gamble = [lambda log: adversarial.Gambling(log, BASE, 0)] if name == "gambling" else []
        streamer: Any = Drawing if name == "drawing" else (lambda log: None)
        runner = same(Case(seed, batch=2, criteria=limited(25, *gamble), sample=True, streamer=streamer, sizes=(8,)))
        assert runner.noise is not None and runner.noise.immediate == runner.clock.stepwise
        stopped += runner.clock.steps < 25
    assert bool(stopped) == (name == "gambling")


def test_an_exception_in_user_code_leaves_the_generator_where_transformers_would() -> None:
    tripping = limited(25, lambda log: adversarial.Tripping(log, BASE, 0))
    for criteria, streamer in ((tripping, lambda log: None), (limited(25), Failing)):
        case = Case(8, criteria=criteria, sample=True, streamer=streamer, sizes=(8,))
        with pytest.raises(adversarial.InjectedError):
            plain(case)
        state, runner = torch.get_rng_state(), Runner(case)
        with pytest.raises(adversarial.InjectedError):
            runner.run()
        assert runner.noise is not None
        runner.noise.restore_rng(runner.clock.steps - 1)  # what the caller does in `finally`
        assert torch.equal(torch.get_rng_state(), state)


def test_output_is_the_callers_own() -> None:
    runner = Runner(Case(6, criteria=limited(12), keep_scores=True))
    first = runner.run()
    kept = first.sequences.clone()
    runner.clock.sequences.fill_(7)
    assert torch.equal(first.sequences, kept) and first.sequences.is_contiguous()
