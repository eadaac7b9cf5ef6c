"""`OutputBuffer` against a copy of what `GenerationMixin._sample` does around its forwards.

A table of random logits replaces the model. Rows emit a random number of tokens per round.
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

from mmspec.engine.criteria import StepCriteria
from mmspec.engine.output import OutputBuffer, ReturnFlags
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import BUCKETS, bucket_size, root_only
from mmspec.interfaces import VerifyResult

VOCAB, PROMPT_LENGTH = 12, 4


class TableModel:
    """Logits of a row from its index and its last two tokens; in `holes` of 97 states nothing can be sampled."""

    def __init__(self, seed: int, batch: int, holes: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.prompt = torch.randint(0, VOCAB, (batch, PROMPT_LENGTH), generator=rng)
        self.table = 2 * torch.randn(97, VOCAB, generator=rng)
        self.table[torch.randperm(97, generator=rng)[:holes]] = -torch.inf

    def logits(self, row: int, history: list[int]) -> Tensor:
        """[V] float32."""
        return self.table[(31 * history[-1] + 7 * history[-2] + 13 * row + len(history)) % 97]


@dataclass
class Outcome:
    """All outputs of one run."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    lengths: list[int]
    state: Tensor
    watched: list[Any] = field(default_factory=list)
    puts: list[Any] = field(default_factory=list)
    error: str = ""

    def check(self, other: Outcome) -> None:
        """Assert that another run has the same outputs."""
        assert self.error == other.error
        assert torch.equal(self.sequences, other.sequences)
        assert self.lengths == other.lengths
        assert self.watched == other.watched and self.puts == other.puts
        for mine, yours in ((self.scores, other.scores), (self.logits, other.logits)):
            assert (mine is None) == (yours is None)
            if mine is not None and yours is not None and not self.error:
                assert len(mine) == len(yours) and all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
        assert torch.equal(self.state, other.state), "the generator state differs"


@dataclass
class Case:
    """One run. `criteria` and `streamer` are factories, since their objects are stateful."""

    seed: int
    batch: int = 2
    criteria: Callable[[adversarial.CallLog], list[Any]] = lambda log: []
    pad: int = 0
    sample: bool = False
    streamer: Callable[[adversarial.CallLog], Any] = lambda log: None
    return_scores: bool = False
    return_logits: bool = False
    return_cache: bool = False
    stepwise: bool = False
    window: int = 16
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    holes: int = 0


def plain(case: Case) -> Outcome:
    """`GenerationMixin._sample`, line by line, with the table as the model."""
    table_model, log, puts = TableModel(case.seed, case.batch, case.holes), adversarial.CallLog(), adversarial.CallLog()
    criteria, streamer = hf.StoppingCriteriaList(case.criteria(log)), case.streamer(puts)
    torch.manual_seed(case.seed)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    ids, unfinished, lengths = table_model.prompt, torch.ones(case.batch, dtype=torch.long), [0] * case.batch
    scores: tuple[Tensor, ...] | None = () if case.return_scores else None
    logits: tuple[Tensor, ...] | None = () if case.return_logits else None
    while True:
        raw = torch.stack([table_model.logits(row, history) for row, history in enumerate(ids.tolist())])
        scaled = raw * 1.5
        scores = None if scores is None else (*scores, scaled)
        logits = None if logits is None else (*logits, raw)
        try:
            tokens = torch.multinomial(scaled.softmax(-1), 1).squeeze(1) if case.sample else scaled.argmax(-1)
        except RuntimeError as error:
            return Outcome(ids, scores, logits, lengths, torch.get_rng_state(), log.calls, puts.calls, str(error))
        lengths = [n + int(not has_eos or on) for n, on in zip(lengths, unfinished.tolist(), strict=True)]
        if has_eos:
            tokens = tokens * unfinished + case.pad * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~criteria(ids, scores)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if unfinished.max() == 0:
            break
    return Outcome(ids, scores, logits, lengths, torch.get_rng_state(), log.calls, puts.calls)


class BufferRunner:
    """Calls the buffer as the decode loop does, with random numbers of tokens instead of a tree."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, random.Random(case.seed)
        self.table_model = TableModel(case.seed, case.batch, case.holes)
        self.log, self.puts = adversarial.CallLog(), adversarial.CallLog()
        torch.manual_seed(case.seed)
        noise = SamplingNoise(case.batch, VOCAB, torch.device("cpu"), case.window) if case.sample else None
        self.noise = noise
        self.output = OutputBuffer(
            self.table_model.prompt,
            StepCriteria(case.criteria(self.log), self.table_model.prompt),
            pad_token_id=case.pad,
            noise=noise,
            streamer=case.streamer(self.puts),
            returns=ReturnFlags(scores=case.return_scores, logits=case.return_logits, cache=case.return_cache),
            stepwise=case.stepwise,
        )
        self.rounds = 0
        self.widest = 0

    def emit(self, nodes: int) -> None:
        """One round of `nodes` nodes per row."""
        output = self.output
        output.reserve(nodes)
        max_emits = output.max_emit(nodes)
        if self.noise is not None and self.noise.immediate:
            self.emit_immediate()
            return
        assert all(0 <= limit <= nodes for limit in max_emits) and any(max_emits), "no row may emit"
        if self.noise is not None:
            self.noise.draw(output.noise_end(nodes))
        scores, logits = (torch.full((self.case.batch, nodes, VOCAB), torch.nan) for _ in range(2))
        tokens = torch.full((self.case.batch, nodes), 999)
        path = torch.zeros(self.case.batch, nodes, dtype=torch.long)
        for row, limit in enumerate(max_emits):
            wish = limit if output.finished[row] else self.rng.randint(1, nodes)
            accepted_nodes = [0, *sorted(self.rng.sample(range(1, nodes), min(limit, wish) - 1))] if limit else []
            emitted: list[int] = []
            for step, node in enumerate(accepted_nodes):
                logits[row, node] = self.table_model.logits(row, self.history(row) + emitted)
                scores[row, node] = logits[row, node] * 1.5
                if self.noise is not None and bool(scores[row, node].softmax(-1).isnan().any()):
                    self.fail()
                    return
                emitted.append(self.sample(row, len(output.emitted[row]) + step, scores[row, node]))
                tokens[row, step], path[row, step] = emitted[-1], node
                if output.stop_ids is not None and emitted[-1] in output.stop_ids and not output.finished[row]:
                    break
            max_emits[row] = len(emitted)
        counts = torch.tensor(max_emits)
        rows, walks = ([part[row, :n].tolist() for row, n in enumerate(max_emits)] for part in (tokens, path))
        output.emit(VerifyResult(root_only(self.case.batch), path, counts, tokens, rows, walks), scores, logits)
        self.widest = max(self.widest, max(output.num_emitted) - output.steps)

    def emit_immediate(self) -> None:
        """One step, drawn by `torch.multinomial`."""
        output, batch = self.output, self.case.batch
        assert len(set(output.num_emitted)) == 1, "rows must be at the same step"
        logits = torch.stack([self.table_model.logits(row, self.history(row)) for row in range(batch)])[:, None]
        scores = logits * 1.5
        tokens, _, _ = TreeSampler([], self.noise).sample(
            scores, root_only(batch), output.sequences, output.num_emitted, output.prompt_length, 0
        )
        tokens = torch.where(torch.tensor(output.finished)[:, None], output.pad_token_id, tokens)
        path, rows = torch.zeros(batch, 1, dtype=torch.long), tokens.tolist()
        result = VerifyResult(root_only(batch), path, torch.ones(batch, dtype=torch.long), tokens, rows, [[0]] * batch)
        output.emit(result, scores, logits)

    def fail(self) -> None:
        """What the loop does when a round fails at a draft."""
        if self.output.stepwise or not self.output.steps:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        self.output.disable_speculation()

    def history(self, row: int) -> list[int]:
        """Prompt and emitted tokens; checks that the lists and the tensor of the buffer agree."""
        rows = self.table_model.prompt[row].tolist() + self.output.emitted[row]
        assert self.output.sequences[row, : len(rows)].tolist() == rows
        return rows

    def sample(self, row: int, step: int, scores: Tensor) -> int:
        """The id that follows from the seed, the step and the history."""
        if self.output.finished[row]:
            return self.output.pad_token_id
        if self.noise is None:
            return int(scores.argmax())
        return int((scores.softmax(-1) / self.noise.ahead([step] * self.case.batch, 1, step + 1)[row, 0]).argmax())

    def run(self) -> Outcome:
        """Run until the batch stops or sampling fails."""
        output, error = self.output, ""
        try:
            if not max(output.num_emitted):
                self.emit(1)
            while not output.advance():
                wanted = self.rng.choice(self.case.sizes)
                nodes = 1 if output.stepwise else max(wanted, bucket_size(min(output.padding_lag + 1, BUCKETS[-1])))
                self.emit(nodes)
                self.rounds += 1
                assert self.rounds < 2000
        except RuntimeError as failed:
            if not str(failed).startswith("probability"):
                raise
            error = str(failed)
        if self.noise is not None and not self.noise.immediate:
            self.noise.close(output.steps - 1)
        sequences, scores, logits = output.result()
        state = torch.get_rng_state()
        return Outcome(
            sequences, scores, logits, output.output_lengths(), state, self.log.calls, self.puts.calls, error
        )


def assert_same(case: Case) -> BufferRunner:
    """Assert that the buffer and the copy of transformers agree; returns the runner."""
    want, runner = plain(case), BufferRunner(case)
    want.check(runner.run())
    return runner


# --- criteria and streamers -------------------------------------------------------------------------------------------


class Ending(adversarial.Watching):
    """A user criterion with an `eos_token_id`: transformers pads finished rows because of it."""

    eos_token_id = torch.tensor([5])

    def stop(self, input_ids: Tensor) -> Any:
        return input_ids[:, -1] == 5


class Shaped(adversarial.Watching):
    """Returns one element for the whole batch."""

    def stop(self, input_ids: Tensor) -> Any:
        return torch.tensor([input_ids.shape[1] >= PROMPT_LENGTH + 6 + self.seed % 5])


class Meddling(adversarial.Watching):
    """Writes into `input_ids`."""

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
        raise AssertionError("the buffer does not end the stream")


class Failing(Drawing):
    """Raises at its fourth put."""

    def put(self, value: Tensor) -> None:
        self.log.calls.append(value.tolist())
        if len(self.log.calls) == 4:
            raise adversarial.InjectedError("put 4")


USER_CRITERIA = {**adversarial.CRITERIA, "ending": Ending, "shaped": Shaped}
USER_CRITERIA.pop("tripping")


def draw_criteria(seed: int, length: int = 0) -> Callable[[adversarial.CallLog], list[Any]]:
    """Criteria in random order."""
    rng = random.Random(f"criteria {seed}")
    length = length or rng.choice((1, 2, 5, 20, 40))
    stops = rng.choice(([], [2], [2], [0], [2, 7, 9]))
    own = [rng.choice(list(USER_CRITERIA)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    late = rng.random() < 0.2

    def criteria(log: adversarial.CallLog) -> list[Any]:
        criteria_list: list[Any] = [hf.MaxLengthCriteria(PROMPT_LENGTH + length)]
        criteria_list += [hf.EosTokenCriteria(stops)] if stops else []
        criteria_list += [hf.MaxTimeCriteria(1e6)] if late else []
        criteria_list += [USER_CRITERIA[name](log, PROMPT_LENGTH, seed) for name in own]
        random.Random(seed).shuffle(criteria_list)
        return criteria_list

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
        return_scores=rng.random() < 0.3,
        return_logits=rng.random() < 0.3,
        return_cache=rng.random() < 0.3,
        stepwise=rng.random() < 0.1,
        window=rng.choice((2, 5, 16)),
        sizes=rng.choice(((1,), (1, 2, 4, 8), (8,), (3, 16))),
    )


@pytest.mark.parametrize("block", range(10))
def test_output_equals_that_of_transformers(block: int) -> None:
    for seed in range(30 * block, 30 * block + 30):
        try:
            assert_same(draw(seed))
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}") from error


def test_rows_run_ahead_in_the_random_cases() -> None:
    """Otherwise the cases above would test plain decoding only."""
    ahead = [assert_same(draw(seed)).widest for seed in range(60)]
    assert max(ahead) > 8 and sum(width > 1 for width in ahead) > 15


# --- one thing at a time ----------------------------------------------------------------------------------------------


def limited(length: int, *more: Callable[[adversarial.CallLog], Any]) -> Callable[[adversarial.CallLog], list[Any]]:
    """A length limit, and other criteria."""
    return lambda log: [hf.MaxLengthCriteria(PROMPT_LENGTH + length), *[make(log) for make in more]]


@pytest.mark.parametrize("sample", [False, True])
def test_long_outputs(sample: bool) -> None:
    """The buffer grows beyond its first size."""
    case = Case(
        3,
        criteria=limited(700),
        sample=sample,
        streamer=adversarial.RecordingStreamer,
        return_scores=True,
        sizes=(8, 16),
    )
    runner = assert_same(case)
    assert runner.output.steps == 700 and runner.rounds < 400


def test_one_row_far_ahead() -> None:
    """A row may run hundreds of steps ahead of the others."""
    case = Case(5, criteria=limited(600), sizes=(1,))
    want, runner = plain(case), BufferRunner(case)
    runner.emit(1)
    assert not runner.output.advance()
    runner.rng = random.Random(0)
    output = runner.output
    while len(output.emitted[0]) < 600:
        before = output.num_emitted
        result = _one_row(runner, 16)
        assert len(result.emitted_ids[0]) == min(16, 600 - before[0]) and not result.emitted_ids[1]
        assert not output.advance() and output.steps == 1
    assert output.max_emit(16) == [0, 16]
    want.check(runner.run())


def _one_row(runner: BufferRunner, nodes: int) -> VerifyResult:
    """A round in which only row 0 emits, as many tokens as it may."""
    output, limit = runner.output, runner.output.max_emit(nodes)[0]
    output.reserve(nodes)
    emitted: list[int] = []
    logits = torch.zeros(2, nodes, VOCAB)
    for _ in range(limit):
        logits[0, len(emitted)] = runner.table_model.logits(0, runner.history(0) + emitted)
        emitted.append(int(logits[0, len(emitted)].argmax()))
    tokens = torch.tensor([emitted + [0] * (nodes - limit), [0] * nodes])
    path = torch.arange(nodes).expand(2, nodes)
    result = VerifyResult(root_only(2), path, torch.tensor([limit, 0]), tokens, [emitted, []], [list(range(limit)), []])
    output.emit(result, logits, logits)
    return result


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("returned", [{}, {"return_cache": True}, {"return_scores": True, "return_logits": True}])
def test_finished_rows_keep_up(pad: int, returned: dict[str, Any]) -> None:
    """Their padding is synchronised only where it is returned, and then delays no step for long."""
    for seed in range(20):
        lengths = limited(40, lambda log: hf.EosTokenCriteria([2]))
        runner = assert_same(Case(seed, batch=3, criteria=lengths, pad=pad, sizes=(8,), **returned))
        assert runner.rounds <= runner.output.steps


def test_the_lag_of_finished_rows() -> None:
    case = Case(0, batch=2, criteria=limited(40, lambda log: hf.EosTokenCriteria([2])), return_cache=True)
    for sync, lag in ((True, 6), (False, 0)):
        output = OutputBuffer(
            TableModel(0, 2).prompt,
            StepCriteria(case.criteria(adversarial.CallLog()), TableModel(0, 2).prompt),
            pad_token_id=0,
            noise=None,
            returns=ReturnFlags(cache=sync),
        )
        rows = [[1, 2], [1, 3, 4, 5, 6, 7, 8, 9]]
        tokens = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
        assert output.padding_lag == 0
        counts, path = torch.tensor([2, 8]), torch.arange(8).expand(2, 8)
        accepted_nodes = [list(range(2)), list(range(8))]
        output.emit(
            VerifyResult(root_only(2), path, counts, tokens, rows, accepted_nodes),
            torch.zeros(2, 8, VOCAB),
            torch.zeros(1),
        )
        assert output.finished == [True, False]
        output.advance()
        assert output.steps == (2 if sync else 8) and output.padding_lag == lag
        assert output.max_emit(4) == [4 if sync else 0, 4] and output.max_emit(8)[0] == (8 if sync else 0)
        output.finished[1] = True
        assert output.padding_lag == lag, "if all rows are finished, the longest one counts"


def test_rows_wait_at_the_window_and_the_limit() -> None:
    noise = SamplingNoise(2, VOCAB, torch.device("cpu"), 6)
    criteria = StepCriteria([hf.MaxLengthCriteria(PROMPT_LENGTH + 9)], TableModel(0, 2).prompt)
    output = OutputBuffer(TableModel(0, 2).prompt, criteria, pad_token_id=0, noise=noise)
    assert output.max_emit(1) == [1, 1] and output.max_emit(8) == [6, 6] and output.noise_end(8) == 6
    output.emitted = [[1] * 5, [1]]
    output.steps = 1
    assert output.max_emit(8) == [2, 6] and output.noise_end(8) == 7 and output.noise_end(1) == 6
    output.noise = None
    assert output.max_emit(8) == [4, 8] and output.noise_end(8) == 13
    output.emitted[0] = [1] * 9
    assert output.max_emit(8) == [0, 8]


def test_at_least_one_token_even_if_the_prompt_is_too_long() -> None:
    """transformers decodes one token before it calls a criterion."""
    for length in (-2, 0, 1):
        assert assert_same(Case(1, criteria=limited(length))).output.steps == 1


def test_without_a_length_limit_only_the_other_criteria_stop() -> None:
    runner = assert_same(Case(2, criteria=lambda log: [hf.EosTokenCriteria([2, 7])]))
    assert runner.output.max_steps > 10**9


def test_max_time() -> None:
    def criteria(log: adversarial.CallLog) -> list[Any]:
        return [hf.MaxLengthCriteria(PROMPT_LENGTH + 20), hf.MaxTimeCriteria(0.5, initial_timestamp=0.0)]

    assert assert_same(Case(2, criteria=criteria, sizes=(8,))).output.steps == 1


def test_the_warning_about_the_models_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length criterion warns when the model's positions are exceeded, so it is called from there on."""
    warnings: list[str] = []
    monkeypatch.setattr(hf.logger, "warning_once", lambda text: warnings.append(text))
    case = Case(
        2, criteria=lambda log: [hf.MaxLengthCriteria(PROMPT_LENGTH + 9, max_position_embeddings=PROMPT_LENGTH + 5)]
    )
    assert_same(case)
    assert len(warnings) == 2 * 3 and len(set(warnings)) == 1  # steps 6, 7 and 8, in both runs


@pytest.mark.parametrize("sample", [False, True])
def test_ids_written_by_criteria_are_the_history(sample: bool) -> None:
    """As in transformers, which passes its own `input_ids`."""
    criteria = limited(20, lambda log: Meddling(log, PROMPT_LENGTH, 0))
    runner = assert_same(Case(4, criteria=criteria, sizes=(8,), sample=sample))
    assert runner.output.sequences[:, PROMPT_LENGTH : PROMPT_LENGTH + 20].unique().tolist() == [3]


@pytest.mark.parametrize("length", [6, 25])
def test_the_call_fails_at_the_step_where_nothing_can_be_sampled(length: int) -> None:
    """Not earlier, although rows run ahead; and not at all if the batch stops first.

    The cache is returned here, so that the padding of finished rows is decoded too.
    """
    failed = 0
    for seed in range(60):
        case = draw(seed)
        case = replace(case, criteria=draw_criteria(seed, length), sample=True, holes=4, return_cache=True)
        want, got = plain(case), BufferRunner(case).run()
        want.check(got)
        failed += bool(want.error)
    assert 10 < failed < 55


@pytest.mark.parametrize("name", ["gambling", "drawing"])
def test_user_code_that_draws_random_numbers(name: str) -> None:
    """Decoding is stepwise after the first foreign draw, not before."""
    stopped = 0
    for seed in range(30):
        gamble = [lambda log: adversarial.Gambling(log, PROMPT_LENGTH, 0)] if name == "gambling" else []
        streamer: Any = Drawing if name == "drawing" else (lambda log: None)
        runner = assert_same(
            Case(seed, batch=2, criteria=limited(25, *gamble), sample=True, streamer=streamer, sizes=(8,))
        )
        assert runner.noise is not None and runner.noise.immediate == runner.output.stepwise
        stopped += runner.output.steps < 25
    assert bool(stopped) == (name == "gambling")


def test_an_exception_in_user_code_leaves_the_generator_where_transformers_would() -> None:
    tripping = limited(25, lambda log: adversarial.Tripping(log, PROMPT_LENGTH, 0))
    for criteria, streamer in ((tripping, lambda log: None), (limited(25), Failing)):
        case = Case(8, criteria=criteria, sample=True, streamer=streamer, sizes=(8,))
        with pytest.raises(adversarial.InjectedError):
            plain(case)
        state, runner = torch.get_rng_state(), BufferRunner(case)
        with pytest.raises(adversarial.InjectedError):
            runner.run()
        assert runner.noise is not None
        runner.noise.close(runner.output.steps - 1)  # what the caller does in `finally`
        assert torch.equal(torch.get_rng_state(), state)


def test_output_is_the_callers_own() -> None:
    runner = BufferRunner(Case(6, criteria=limited(12), return_scores=True))
    first = runner.run()
    returned = first.sequences.clone()
    runner.output.sequences.fill_(7)
    assert torch.equal(first.sequences, returned) and first.sequences.is_contiguous()
