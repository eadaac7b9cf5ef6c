"""Noise against `torch.multinomial`, and sampled ids at every node against transformers' processors. No model."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import adversarial as adversarial
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.engine.rng import RngGuard, SamplingNoise, default_generator
from mmspec.engine.sampler import (
    HISTORY_PROCESSORS,
    STATELESS_PROCESSORS,
    TreeSampler,
)
from mmspec.engine.tree import DraftTree, root_only, sanitize

CPU = torch.device("cpu")


def step_probs(step: int, batch: int, vocab: int) -> Tensor:
    """[B, V] probabilities of a step, some of them zero; not drawn from the default generator."""
    scores = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(step))
    scores[scores < -1] = -torch.inf
    scores[:, step % vocab] = 1.0
    return (scores * 3).softmax(-1)


def sample_plain(num_steps: int, batch: int, vocab: int, seed: int) -> tuple[list[list[int]], list[Tensor]]:
    """What transformers samples, step by step, and the generator's state after each."""
    torch.manual_seed(seed)
    tokens, states = [], []
    for step in range(num_steps):
        tokens.append(torch.multinomial(step_probs(step, batch, vocab), 1).squeeze(1).tolist())
        states.append(torch.get_rng_state())
    return tokens, states


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("vocab", [2, 7, 16, 120, 2049])
def test_noise_equals_that_of_multinomial(batch: int, vocab: int) -> None:
    for seed in range(4):
        rng, num_steps, window = random.Random(seed), 24, 6
        tokens, states = sample_plain(num_steps, batch, vocab, seed)
        torch.manual_seed(seed)
        noise = SamplingNoise(batch, vocab, CPU, window)
        assert torch.equal(noise.state_after(-1), noise.initial_state)
        for step in range(num_steps):
            noise.draw(step + rng.randint(1, window))  # drawing ahead must not matter
            own = noise.at(torch.full((batch, 1), step))[:, 0]
            assert torch.equal(own, noise.at_step(step)[:, 0])
            assert (step_probs(step, batch, vocab) / own).argmax(-1).tolist() == tokens[step]
            assert torch.equal(noise.state_after(step), states[step])
            if rng.random() < 0.5:
                noise.restore_rng(step)
                assert torch.equal(torch.get_rng_state(), states[step])
            noise.release(step)
        assert len(noise._states) <= window + 1


def test_rows_read_the_noise_of_their_own_steps() -> None:
    noise = SamplingNoise(3, 11, CPU, 8)
    noise.draw(8)
    num_steps = torch.tensor([[0, 1, 2, 2], [5, 6, 7, 6], [3, 3, 4, 0]])
    got = noise.at(num_steps)
    assert got.shape == (3, 4, 11)
    for row in range(3):
        for node in range(4):
            assert torch.equal(got[row, node], noise.at_step(int(num_steps[row, node]))[row, 0])


def test_the_window_wraps_around() -> None:
    torch.manual_seed(3)
    wide, narrow = SamplingNoise(2, 9, CPU, 64), None
    wide.draw(50)
    torch.manual_seed(3)
    narrow = SamplingNoise(2, 9, CPU, 4)
    for step in range(50):
        narrow.draw(min(step + 4, 50))
        for ahead in range(step, min(step + 4, 50)):
            assert torch.equal(narrow.at_step(ahead), wide.at_step(ahead))
            assert torch.equal(narrow.state_after(ahead), wide.state_after(ahead))
        narrow.release(step)
    assert narrow._ring.shape[0] == 4, "memory does not grow with the output"


def test_steps_are_drawn_once() -> None:
    torch.manual_seed(3)
    noise = SamplingNoise(1, 5, CPU, 8)
    noise.draw(4)
    state, step = torch.get_rng_state(), noise.at_step(3).clone()
    for until in (0, 3, 4):
        noise.draw(until)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(noise.at_step(3), step)


def test_restoring_the_rng_does_not_change_later_noise() -> None:
    tokens, states = sample_plain(10, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 4)
    for step in range(10):
        noise.draw(min(10, step + 3))
        noise.restore_rng(step)
        assert (step_probs(step, 2, 13) / noise.at_step(step)[:, 0]).argmax(-1).tolist() == tokens[step]
    noise.restore_rng(6)
    assert torch.equal(torch.get_rng_state(), states[6])
    noise.restore_rng(-1)
    torch.testing.assert_close(torch.get_rng_state(), noise.initial_state, rtol=0, atol=0)


def test_immediate_noise_is_drawn_after_user_draws() -> None:
    torch.manual_seed(9)
    plain = [(torch.rand(3), torch.multinomial(step_probs(c, 2, 13), 1).squeeze(1).tolist()) for c in range(8)]
    state = torch.get_rng_state()
    torch.manual_seed(9)
    noise = SamplingNoise(2, 13, CPU, 4)
    noise.immediate = True
    sampler, sequences = TreeSampler([], noise), torch.zeros(2, 20, dtype=torch.long)
    for step, (drawn, tokens) in enumerate(plain):
        assert torch.equal(torch.rand(3), drawn)
        logits = step_probs(step, 2, 13).log()[:, None]
        sampled_ids, _, invalid = sampler.sample(logits, root_only(2), sequences, [step] * 2, 1, step + 1)
        assert sampled_ids[:, 0].tolist() == tokens and invalid is None
        noise.release(step)
    assert torch.equal(torch.get_rng_state(), state)


def test_lookahead_for_drafters() -> None:
    """The noise of each row's next steps, and no draw outside the window."""
    tokens, states = sample_plain(12, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 8)
    noise.draw(3)
    drawn = noise.lookahead([1, 3], 4, noise_end=7)
    assert drawn.shape == (2, 4, 13)
    for row, length in enumerate((1, 3)):
        for step in range(4):
            assert (
                int((step_probs(length + step, 2, 13)[row] / drawn[row, step]).argmax()) == tokens[length + step][row]
            )
    noise.restore_rng(6)
    assert torch.equal(torch.get_rng_state(), states[6])
    assert noise.lookahead([1, 3], 9, noise_end=8).shape == (2, 9, 13)
    assert noise._num_drawn == 8, "drawn beyond the steps in flight"
    noise.immediate = True
    state = torch.get_rng_state()
    assert noise.lookahead([1, 3], 4, noise_end=8).shape == (2, 4, 13)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("when", [0, 2, 5])
def test_disable_lookahead(when: int) -> None:
    """User code draws after a step: the later steps are drawn again, as plain sampling draws them."""
    for intruder in (True, False):
        torch.manual_seed(11)
        plain = []
        for step in range(9):
            plain.append(torch.multinomial(step_probs(step, 2, 13), 1).squeeze(1).tolist())
            if step == when and intruder:
                torch.rand(7)
        state = torch.get_rng_state()
        torch.manual_seed(11)
        noise = SamplingNoise(2, 13, CPU, 6)
        sampler, sequences = TreeSampler([], noise), torch.zeros(2, 20, dtype=torch.long)
        for step in range(9):
            logits = step_probs(step, 2, 13).log()[:, None]
            noise_end = step + 1 if noise.immediate else step + 5
            sampled_ids, _, _ = sampler.sample(logits, root_only(2), sequences, [step] * 2, 1, noise_end)
            assert sampled_ids[:, 0].tolist() == plain[step]
            if step == when:
                if intruder:
                    noise.restore_rng(step)
                    assert not noise.rng_changed()
                    torch.rand(7)
                    assert noise.rng_changed()
                noise.disable_lookahead(step)
                assert noise.immediate
            noise.release(step)
        assert torch.equal(torch.get_rng_state(), state)


def test_calls_that_share_a_generator_never_get_the_same_noise() -> None:
    """As in two threads: neither restores a state that the other has drawn from."""
    torch.manual_seed(3)
    one, two = SamplingNoise(2, 13, CPU, 8), SamplingNoise(2, 13, CPU, 8)
    one.draw(4)
    two.draw(4)
    assert two.rng_contended and not one.rng_contended
    one.restore_rng(1)
    assert one.rng_contended
    one.draw(8)
    two.draw(6)
    one.restore_rng(7)
    two.restore_rng(5)
    drawn = [noise.at_step(step)[:, 0] for noise, num_steps in ((one, 8), (two, 6)) for step in range(num_steps)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert all(not torch.equal(torch.empty(2, 13).exponential_(1), noise) for noise in drawn)


def _states(num_steps: int) -> list[Tensor]:
    """The generator's states after each of the first columns at seed 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = SamplingNoise(2, 13, CPU, 8)
        noise.draw(num_steps)
        return [noise.state_after(step) for step in range(num_steps)]


def test_what_a_stranger_draws_is_undone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with RngGuard(CPU, CPU) as guard:
        pass
    assert not guard.rng_was_used
    with RngGuard(CPU) as guard:
        torch.rand(3)
    assert guard.rng_was_used and torch.equal(torch.get_rng_state(), state)
    noise = SamplingNoise(2, 13, CPU, 8)
    with RngGuard(CPU, noise=noise) as guard:
        noise.draw(3)
    assert not guard.rng_was_used and torch.equal(torch.get_rng_state(), noise.state_after(2))
    with RngGuard(CPU, noise=noise) as guard:
        torch.rand(3)
        noise.draw(4)
        torch.rand(3)
    assert not noise.rng_contended and torch.equal(noise.state_after(3), _states(4)[3])
    assert guard.rng_was_used and torch.equal(torch.get_rng_state(), noise.last_state)


def test_draws_of_another_call_are_not_undone() -> None:
    """A restored generator would give that call the same noise again."""
    torch.manual_seed(3)
    other, mine = SamplingNoise(2, 13, CPU, 8), SamplingNoise(2, 13, CPU, 8)
    for noise in (None, mine):
        with RngGuard(CPU, noise=noise) as guard:
            other.draw(other._num_drawn + 2)
            left = torch.get_rng_state()
        assert not guard.rng_was_used and torch.equal(torch.get_rng_state(), left) and not other.rng_contended


def test_the_default_generator_is_the_one_multinomial_uses() -> None:
    assert default_generator(CPU) is torch.default_generator


# --- processors -------------------------------------------------------------------------------------------------------

BASE, VOCAB, PADS = 5, 24, (0, 2, 1)
"""Prompt length, and the left pads of three rows."""

Factories = dict[type, list[Callable[[], Any]]]
KNOWN: Factories = {
    hf.EpsilonLogitsWarper: [lambda: hf.EpsilonLogitsWarper(0.03), lambda: hf.EpsilonLogitsWarper(0.9)],
    hf.EtaLogitsWarper: [lambda: hf.EtaLogitsWarper(0.05)],
    hf.InfNanRemoveLogitsProcessor: [hf.InfNanRemoveLogitsProcessor],
    hf.LogitNormalization: [hf.LogitNormalization],
    hf.MinPLogitsWarper: [lambda: hf.MinPLogitsWarper(0.1), lambda: hf.MinPLogitsWarper(1.0, min_tokens_to_keep=3)],
    hf.SuppressTokensLogitsProcessor: [lambda: hf.SuppressTokensLogitsProcessor([3, 5, 8])],
    hf.TemperatureLogitsWarper: [lambda: hf.TemperatureLogitsWarper(0.6)],
    hf.TopHLogitsWarper: [lambda: hf.TopHLogitsWarper(0.4)],
    hf.TopKLogitsWarper: [lambda: hf.TopKLogitsWarper(4), lambda: hf.TopKLogitsWarper(999)],
    hf.TopPLogitsWarper: [lambda: hf.TopPLogitsWarper(0.7), lambda: hf.TopPLogitsWarper(0.1, min_tokens_to_keep=2)],
    hf.TypicalLogitsWarper: [lambda: hf.TypicalLogitsWarper(0.6)],
    hf.ExponentialDecayLengthPenalty: [lambda: hf.ExponentialDecayLengthPenalty((3, 1.4), torch.tensor([2, 9]), BASE)],
    hf.ForcedBOSTokenLogitsProcessor: [lambda: hf.ForcedBOSTokenLogitsProcessor(7)],
    hf.ForcedEOSTokenLogitsProcessor: [lambda: hf.ForcedEOSTokenLogitsProcessor(BASE + 5, torch.tensor([2, 9]))],
    hf.MinLengthLogitsProcessor: [lambda: hf.MinLengthLogitsProcessor(BASE + 4, torch.tensor([2, 9]))],
    hf.MinNewTokensLengthLogitsProcessor: [
        lambda: hf.MinNewTokensLengthLogitsProcessor(BASE, 4, torch.tensor([2, 9])),
    ],
    hf.NoBadWordsLogitsProcessor: [lambda: hf.NoBadWordsLogitsProcessor([[3], [4, 5], [4, 4, 6], [5, 4]], 2)],
    hf.NoRepeatNGramLogitsProcessor: [
        lambda: hf.NoRepeatNGramLogitsProcessor(1),
        lambda: hf.NoRepeatNGramLogitsProcessor(2),
        lambda: hf.NoRepeatNGramLogitsProcessor(3),
    ],
    hf.RepetitionPenaltyLogitsProcessor: [
        lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
        lambda: hf.RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=BASE),
        lambda: hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor(PADS)),
    ],
    hf.SequenceBiasLogitsProcessor: [
        lambda: hf.SequenceBiasLogitsProcessor([[[4], -3.0], [[5, 4], 9.0], [[4, 5, 6], 5.0]]),
    ],
    hf.SuppressTokensAtBeginLogitsProcessor: [
        lambda: hf.SuppressTokensAtBeginLogitsProcessor([1, 3, 4, 5], BASE + 3),
        lambda: hf.SuppressTokensAtBeginLogitsProcessor([1, 3, 4, 5], BASE),
    ],
}
EVERY = [(kind.__name__, i) for kind, makers in KNOWN.items() for i in range(len(makers))]


def known(name: str, number: int) -> Any:
    """A new processor."""
    return KNOWN[getattr(hf, name)][number]()


def random_ids(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Ids out of five, so that histories repeat."""
    return torch.randint(3, 8, shape, generator=rng)


class Scene:
    """Three rows with left pads and ragged lengths, and a random sanitized tree."""

    def __init__(self, seed: int, nodes: int = 8, level: bool = False) -> None:
        rng, number = random.Random(seed), torch.Generator().manual_seed(seed)
        self.lengths = [rng.randint(1, 4)] * 3 if level else [rng.randint(1, 4) for _ in range(3)]
        self.sequences = random_ids((3, BASE + 9), number)
        for row, pads in enumerate(PADS):
            self.sequences[row, :pads] = 0
            self.sequences[row, BASE + self.lengths[row] :] = 0
        root_ids = self.sequences[torch.arange(3), torch.tensor(self.lengths) + BASE - 1]
        parents = torch.tensor([[rng.randint(max(0, i - 3), max(0, i - 1)) for i in range(nodes)] for _ in range(3)])
        valid = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(3)])
        tree = DraftTree(random_ids((3, nodes), number), parents, valid)
        self.tree = sanitize(tree, root_ids, torch.ones(VOCAB, dtype=torch.bool))
        self.logits = 3 * torch.randn(3, nodes, VOCAB, generator=number)

    def history(self, row: int, node: int) -> Tensor:
        """[L] the ids before the one that is sampled at a node."""
        tail: list[int] = []
        while node > 0:
            tail.insert(0, int(self.tree.tokens[row, node]))
            node = int(self.tree.parents[row, node])
        return torch.cat([self.sequences[row, : BASE + self.lengths[row]], torch.tensor(tail, dtype=torch.long)])

    def expected(self, make: Callable[[], list[Any]], row: int, node: int) -> Tensor:
        """[V] as transformers processes it: a batch of three, with this history in its row."""
        batch, scores = self.history(row, node).repeat(3, 1), self.logits[row, node].repeat(3, 1)
        for other, pads in enumerate(PADS):
            if other != row:
                batch[other, pads:] = (batch[other, pads:] + other) % VOCAB
        return LogitsProcessorList(make())(batch, scores)[row]

    def sample(self, processors: list[Any], noise: SamplingNoise | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """`TreeSampler.sample` on this scene."""
        noise_end = max(self.lengths) + self.tree.num_nodes
        return TreeSampler(processors, noise).sample(
            self.logits, self.tree, self.sequences, self.lengths, BASE, noise_end
        )

    def valid_nodes(self) -> list[tuple[int, int]]:
        """(row, node) of all valid nodes."""
        return [(row, node) for row, node in self.tree.valid.nonzero().tolist()]


def check_scores(scene: Scene, make: Callable[[], list[Any]]) -> bool:
    """Compare all valid nodes; returns whether the processors changed anything."""
    before = [scene.logits.clone(), scene.sequences.clone()]
    sampled_ids, scores, invalid = scene.sample(make())
    assert torch.equal(scene.logits, before[0]) and torch.equal(scene.sequences, before[1]), "inputs were changed"
    assert (invalid is None or not invalid.any()) and scores.shape == scene.logits.shape
    for row, node in scene.valid_nodes():
        want = scene.expected(make, row, node)
        assert torch.allclose(scores[row, node], want, rtol=1e-6, atol=1e-6), (row, node)
        assert int(sampled_ids[row, node]) == int(want.argmax())
    return not torch.equal(scores, scene.logits)


def test_every_known_processor_is_tested() -> None:
    assert set(KNOWN) == STATELESS_PROCESSORS | HISTORY_PROCESSORS and not STATELESS_PROCESSORS & HISTORY_PROCESSORS


@pytest.mark.parametrize(("name", "number"), EVERY)
def test_processors_get_each_nodes_own_history(name: str, number: int) -> None:
    changed = [check_scores(Scene(seed), lambda: [known(name, number)]) for seed in range(6)]
    idle = {"InfNanRemoveLogitsProcessor", "ForcedBOSTokenLogitsProcessor"}
    idle |= {"SuppressTokensAtBeginLogitsProcessor", "TopKLogitsWarper"} if number else set()
    assert any(changed) != (name in idle), "this test detects nothing"


@pytest.mark.parametrize(("name", "number"), EVERY)
def test_one_node_per_row_is_one_step_of_transformers(name: str, number: int) -> None:
    """All rows at the same step, as in plain decoding; and at different steps."""
    for seed in range(3):
        for level in (True, False):
            check_scores(Scene(seed, nodes=1, level=level), lambda: [known(name, number)])


RAISE = ("EtaLogitsWarper", "TopHLogitsWarper")


def test_processors_run_in_the_given_order() -> None:
    rng, names = random.Random(0), [entry for entry in EVERY if entry[0] != "ForcedBOSTokenLogitsProcessor"]
    for seed in range(60):
        chosen = rng.sample(names, rng.randint(2, 5))
        chosen.sort(key=lambda entry: entry[0] not in RAISE)  # they raise if no id has a finite score
        check_scores(Scene(seed), lambda chosen=chosen: [known(*entry) for entry in chosen])  # type: ignore[misc]


def test_nan_and_infinity_are_removed_at_their_node() -> None:
    scene = Scene(1)
    for row, node in scene.valid_nodes()[:3]:
        scene.logits[row, node, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    _, scores, _ = scene.sample([hf.InfNanRemoveLogitsProcessor()])
    for row, node in scene.valid_nodes():
        assert torch.equal(scores[row, node], scene.expected(lambda: [hf.InfNanRemoveLogitsProcessor()], row, node))


def test_processors_of_the_user_are_left_as_they_were() -> None:
    penalty = hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor(PADS))
    before = copy.deepcopy(vars(penalty))
    Scene(0).sample([penalty])
    after = vars(penalty)
    assert torch.equal(before.pop("prompt_ignore_length"), after.pop("prompt_ignore_length")) and before == after


# --- known processors -------------------------------------------------------------------------------------------------


class Warmer(hf.TemperatureLogitsWarper):
    """A subclass of a known processor may have any behaviour."""


def test_unknown_processors_are_listed_by_name() -> None:
    log = adversarial.CallLog()
    assert TreeSampler([], None).unknown_processors == []
    assert TreeSampler([make() for makers in KNOWN.values() for make in makers], None).unknown_processors == []
    strange = [
        Warmer(0.5),
        adversarial.Twisted(log),
        adversarial.Counting(log),
        hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1),
        hf.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.ones(1, 3, dtype=torch.long)),
        hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(1, 3, dtype=torch.long)),
        lambda ids, scores: scores,
    ]
    expected = """Warmer Twisted Counting PrefixConstrainedLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor
        EncoderNoRepeatNGramLogitsProcessor function"""
    assert TreeSampler([hf.TopKLogitsWarper(3), *strange], None).unknown_processors == expected.split()


def test_everything_that_generate_builds_is_known_or_deliberately_not() -> None:
    """A processor that a new transformers version adds must be classified by hand."""
    unknown = """AlternatingCodebooks BarkEosPrioritizer ClassifierFreeGuidance DiaClassifierFreeGuidance
        DiaEOSChannelFilter DiaEOSDelayPattern EncoderNoRepeatNGram EncoderRepetitionPenalty PrefixConstrained
        SynthIDTextWatermark UnbatchedClassifierFreeGuidance Watermark WhisperTimeStamp"""
    others = {f"{name}LogitsProcessor" for name in unknown.split()} | {"LogitsProcessor", "WhisperNoSpeechDetection"}
    kinds = {kind for kind in vars(hf).values() if isinstance(kind, type) and issubclass(kind, hf.LogitsProcessor)}
    assert {kind.__name__ for kind in kinds - STATELESS_PROCESSORS - HISTORY_PROCESSORS} <= others


# --- sampled ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("level", [True, False])
def test_sampled_ids_use_the_noise_of_the_nodes_step(nodes: int, level: bool) -> None:
    make: Callable[[], list[Any]] = lambda: [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(9)]  # noqa: E731
    for seed in range(10):
        scene = Scene(seed, nodes=nodes, level=level)
        torch.manual_seed(seed)
        num_steps = [torch.empty(3, VOCAB).exponential_() for _ in range(max(scene.lengths) + nodes)]
        torch.manual_seed(seed)
        sampled_ids, scores, invalid = scene.sample(make(), SamplingNoise(3, VOCAB, CPU, 32))
        assert invalid is not None and not invalid.any() and scene.tree.depths is not None
        for row, node in scene.valid_nodes():
            want = scene.expected(make, row, node).softmax(-1)
            step = scene.lengths[row] + int(scene.tree.depths[row, node])
            assert int(sampled_ids[row, node]) == int((want / num_steps[step][row]).argmax())
            torch.testing.assert_close(scores[row, node].softmax(-1), want)


def test_root_only_samples_like_multinomial() -> None:
    """A whole call, step by step: ids and generator states."""
    tokens, states = sample_plain(12, 3, VOCAB, 4)
    torch.manual_seed(4)
    noise = SamplingNoise(3, VOCAB, CPU, 4)
    sampler, sequences = TreeSampler([], noise), torch.zeros(3, BASE + 20, dtype=torch.long)
    for step in range(12):
        logits = step_probs(step, 3, VOCAB).log()[:, None]
        sampled_ids, _, _ = sampler.sample(logits, root_only(3), sequences, [step] * 3, BASE, step + 1)
        assert sampled_ids[:, 0].tolist() == tokens[step] and torch.equal(noise.state_after(step), states[step])


def test_nodes_that_cannot_be_sampled_are_marked() -> None:
    scene = Scene(2)
    bad = scene.valid_nodes()[1::3]
    for i, (row, node) in enumerate(bad):
        if i % 2:
            scene.logits[row, node] = -torch.inf
        else:
            scene.logits[row, node, 4] = torch.nan
    _, _, invalid = scene.sample([], SamplingNoise(3, VOCAB, CPU, 32))
    assert invalid is not None
    assert [(row, node) for row, node in scene.valid_nodes() if invalid[row, node]] == bad
    sampled_ids, _, invalid = scene.sample([])
    assert torch.equal(sampled_ids, scene.logits.argmax(-1)), "greedy decoding treats nan as torch does"
    assert invalid is not None and torch.equal(invalid, scene.logits.isnan().any(-1))
    sampled_ids, _, invalid = TreeSampler([], None).sample(
        scene.logits[:, :1], root_only(3), scene.sequences, [2] * 3, BASE, 3
    )
    assert invalid is None, "plain decoding samples the same id"


def test_greedy_decoding_draws_nothing() -> None:
    state = torch.get_rng_state()
    Scene(0).sample([hf.TopKLogitsWarper(3)])
    assert torch.equal(torch.get_rng_state(), state)
