"""Noise against `torch.multinomial`, and picks at every node against transformers' own processors. No model here."""

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


def chances(column: int, batch: int, vocab: int) -> Tensor:
    """[B, V] probabilities of a column, some of them zero; not from the default generator."""
    scores = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(column))
    scores[scores < -1] = -torch.inf
    scores[:, column % vocab] = 1.0
    return (scores * 3).softmax(-1)


def sampled(columns: int, batch: int, vocab: int, seed: int) -> tuple[list[list[int]], list[Tensor]]:
    """What transformers samples, column by column, and the generator's state after each."""
    torch.manual_seed(seed)
    tokens, states = [], []
    for column in range(columns):
        tokens.append(torch.multinomial(chances(column, batch, vocab), 1).squeeze(1).tolist())
        states.append(torch.get_rng_state())
    return tokens, states


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("vocab", [2, 7, 16, 120, 2049])
def test_noise_is_that_of_multinomial(batch: int, vocab: int) -> None:
    for seed in range(4):
        rng, columns, window = random.Random(seed), 24, 6
        tokens, states = sampled(columns, batch, vocab, seed)
        torch.manual_seed(seed)
        noise = SamplingNoise(batch, vocab, CPU, window)
        assert torch.equal(noise.state_after(-1), noise.initial_state)
        for column in range(columns):
            noise.draw(column + rng.randint(1, window))  # looking ahead must not matter
            own = noise.at(torch.full((batch, 1), column))[:, 0]
            assert torch.equal(own, noise.at_step(column)[:, 0])
            assert (chances(column, batch, vocab) / own).argmax(-1).tolist() == tokens[column]
            assert torch.equal(noise.state_after(column), states[column])
            if rng.random() < 0.5:
                noise.restore_rng(column)
                assert torch.equal(torch.get_rng_state(), states[column])
            noise.release(column)
        assert len(noise._states) <= window + 1


def test_rows_look_at_columns_of_their_own() -> None:
    noise = SamplingNoise(3, 11, CPU, 8)
    noise.draw(8)
    columns = torch.tensor([[0, 1, 2, 2], [5, 6, 7, 6], [3, 3, 4, 0]])
    got = noise.at(columns)
    assert got.shape == (3, 4, 11)
    for row in range(3):
        for node in range(4):
            assert torch.equal(got[row, node], noise.at_step(int(columns[row, node]))[row, 0])


def test_the_window_wraps_around() -> None:
    torch.manual_seed(3)
    wide, narrow = SamplingNoise(2, 9, CPU, 64), None
    wide.draw(50)
    torch.manual_seed(3)
    narrow = SamplingNoise(2, 9, CPU, 4)
    for column in range(50):
        narrow.draw(min(column + 4, 50))
        for ahead in range(column, min(column + 4, 50)):
            assert torch.equal(narrow.at_step(ahead), wide.at_step(ahead))
            assert torch.equal(narrow.state_after(ahead), wide.state_after(ahead))
        narrow.release(column)
    assert narrow._ring.shape[0] == 4, "memory does not grow with the output"


def test_drawing_less_draws_nothing() -> None:
    torch.manual_seed(3)
    noise = SamplingNoise(1, 5, CPU, 8)
    noise.draw(4)
    state, column = torch.get_rng_state(), noise.at_step(3).clone()
    for until in (0, 3, 4):
        noise.draw(until)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(noise.at_step(3), column)


def test_settling_in_between_does_not_disturb_what_is_drawn_later() -> None:
    tokens, states = sampled(10, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 4)
    for column in range(10):
        noise.draw(min(10, column + 3))
        noise.restore_rng(column)
        assert (chances(column, 2, 13) / noise.at_step(column)[:, 0]).argmax(-1).tolist() == tokens[column]
    noise.restore_rng(6)
    assert torch.equal(torch.get_rng_state(), states[6])
    noise.restore_rng(-1)
    torch.testing.assert_close(torch.get_rng_state(), noise.initial_state, rtol=0, atol=0)


def test_live_noise_is_drawn_after_what_the_user_drew() -> None:
    torch.manual_seed(9)
    plain = [(torch.rand(3), torch.multinomial(chances(c, 2, 13), 1).squeeze(1).tolist()) for c in range(8)]
    state = torch.get_rng_state()
    torch.manual_seed(9)
    noise = SamplingNoise(2, 13, CPU, 4)
    noise.immediate = True
    picker, sequences = TreeSampler([], noise), torch.zeros(2, 20, dtype=torch.long)
    for column, (drawn, tokens) in enumerate(plain):
        assert torch.equal(torch.rand(3), drawn)
        logits = chances(column, 2, 13).log()[:, None]
        picks, _, broken = picker.sample(logits, root_only(2), sequences, [column] * 2, 1, column + 1)
        assert picks[:, 0].tolist() == tokens and broken is None
        noise.release(column)
    assert torch.equal(torch.get_rng_state(), state)


def test_looking_ahead_for_drafters() -> None:
    """The noise of each row's coming columns, and no draw that would not be made anyway."""
    tokens, states = sampled(12, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 8)
    noise.draw(3)
    seen = noise.lookahead([1, 3], 4, noise_end=7)
    assert seen.shape == (2, 4, 13)
    for row, length in enumerate((1, 3)):
        for step in range(4):
            assert int((chances(length + step, 2, 13)[row] / seen[row, step]).argmax()) == tokens[length + step][row]
    noise.restore_rng(6)
    assert torch.equal(torch.get_rng_state(), states[6])
    assert noise.lookahead([1, 3], 9, noise_end=8).shape == (2, 9, 13)
    assert noise._num_drawn == 8, "drawn beyond the columns in flight"
    noise.immediate = True
    state = torch.get_rng_state()
    assert noise.lookahead([1, 3], 4, noise_end=8).shape == (2, 4, 13)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("when", [0, 2, 5])
def test_giving_up_looking_ahead(when: int) -> None:
    """Someone draws after a column: everything looked ahead is drawn anew, as plain sampling would draw it."""
    for intruder in (True, False):
        torch.manual_seed(11)
        plain = []
        for column in range(9):
            plain.append(torch.multinomial(chances(column, 2, 13), 1).squeeze(1).tolist())
            if column == when and intruder:
                torch.rand(7)
        state = torch.get_rng_state()
        torch.manual_seed(11)
        noise = SamplingNoise(2, 13, CPU, 6)
        picker, sequences = TreeSampler([], noise), torch.zeros(2, 20, dtype=torch.long)
        for column in range(9):
            logits = chances(column, 2, 13).log()[:, None]
            horizon = column + 1 if noise.immediate else column + 5
            picks, _, _ = picker.sample(logits, root_only(2), sequences, [column] * 2, 1, horizon)
            assert picks[:, 0].tolist() == plain[column]
            if column == when:
                if intruder:
                    noise.restore_rng(column)
                    assert not noise.rng_changed()
                    torch.rand(7)
                    assert noise.rng_changed()
                noise.disable_lookahead(column)
                assert noise.immediate
            noise.release(column)
        assert torch.equal(torch.get_rng_state(), state)


def test_calls_that_share_a_generator_never_get_the_same_noise() -> None:
    """Two threads, say: neither puts the generator back to where the other has drawn from."""
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
    seen = [noise.at_step(column)[:, 0] for noise, columns in ((one, 8), (two, 6)) for column in range(columns)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    assert all(not torch.equal(torch.empty(2, 13).exponential_(1), noise) for noise in seen)


def _states(columns: int) -> list[Tensor]:
    """The generator's states after each of the first columns at seed 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = SamplingNoise(2, 13, CPU, 8)
        noise.draw(columns)
        return [noise.state_after(column) for column in range(columns)]


def test_what_a_stranger_draws_is_undone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with RngGuard(CPU, CPU) as undo:
        pass
    assert not undo.rng_was_used
    with RngGuard(CPU) as undo:
        torch.rand(3)
    assert undo.rng_was_used and torch.equal(torch.get_rng_state(), state)
    noise = SamplingNoise(2, 13, CPU, 8)
    with RngGuard(CPU, noise=noise) as undo:
        noise.draw(3)
    assert not undo.rng_was_used and torch.equal(torch.get_rng_state(), noise.state_after(2))
    with RngGuard(CPU, noise=noise) as undo:
        torch.rand(3)
        noise.draw(4)
        torch.rand(3)
    assert not noise.rng_contended and torch.equal(noise.state_after(3), _states(4)[3])
    assert undo.rng_was_used and torch.equal(torch.get_rng_state(), noise.last_state)


def test_what_another_call_draws_meanwhile_is_not_undone() -> None:
    """Put back, the generator would give that call the same noise again."""
    torch.manual_seed(3)
    other, mine = SamplingNoise(2, 13, CPU, 8), SamplingNoise(2, 13, CPU, 8)
    for noise in (None, mine):
        with RngGuard(CPU, noise=noise) as undo:
            other.draw(other._num_drawn + 2)
            left = torch.get_rng_state()
        assert not undo.rng_was_used and torch.equal(torch.get_rng_state(), left) and not other.rng_contended


def test_the_default_generator_is_the_one_multinomial_uses() -> None:
    assert default_generator(CPU) is torch.default_generator


# --- processors -------------------------------------------------------------------------------------------------------

BASE, VOCAB, PADS = 5, 24, (0, 2, 1)
"""Prompt length, and the left pads of three rows."""

Makers = dict[type, list[Callable[[], Any]]]
KNOWN: Makers = {
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
    """A fresh processor."""
    return KNOWN[getattr(hf, name)][number]()


def few(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Token ids out of a handful, so that histories repeat themselves."""
    return torch.randint(3, 8, shape, generator=rng)


class Scene:
    """Three rows with left pads, ragged lengths, and a random sealed tree of their continuations."""

    def __init__(self, seed: int, nodes: int = 8, level: bool = False) -> None:
        rng, number = random.Random(seed), torch.Generator().manual_seed(seed)
        self.lengths = [rng.randint(1, 4)] * 3 if level else [rng.randint(1, 4) for _ in range(3)]
        self.sequences = few((3, BASE + 9), number)
        for row, pads in enumerate(PADS):
            self.sequences[row, :pads] = 0
            self.sequences[row, BASE + self.lengths[row] :] = 0
        roots = self.sequences[torch.arange(3), torch.tensor(self.lengths) + BASE - 1]
        parents = torch.tensor([[rng.randint(max(0, i - 3), max(0, i - 1)) for i in range(nodes)] for _ in range(3)])
        valid = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(3)])
        tree = DraftTree(few((3, nodes), number), parents, valid)
        self.tree = sanitize(tree, roots, torch.ones(VOCAB, dtype=torch.bool))
        self.logits = 3 * torch.randn(3, nodes, VOCAB, generator=number)

    def history(self, row: int, node: int) -> Tensor:
        """[L] everything before the token that is picked at a node."""
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

    def pick(self, processors: list[Any], noise: SamplingNoise | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The picks, scores and broken nodes of this scene."""
        horizon = max(self.lengths) + self.tree.num_nodes
        return TreeSampler(processors, noise).sample(
            self.logits, self.tree, self.sequences, self.lengths, BASE, horizon
        )

    def living(self) -> list[tuple[int, int]]:
        """(row, node) of all valid nodes."""
        return [(row, node) for row, node in self.tree.valid.nonzero().tolist()]


def check_scores(scene: Scene, make: Callable[[], list[Any]]) -> bool:
    """Compare all valid nodes; whether anything was changed at all."""
    before = [scene.logits.clone(), scene.sequences.clone()]
    picks, scores, broken = scene.pick(make())
    assert torch.equal(scene.logits, before[0]) and torch.equal(scene.sequences, before[1]), "inputs were written into"
    assert (broken is None or not broken.any()) and scores.shape == scene.logits.shape
    for row, node in scene.living():
        want = scene.expected(make, row, node)
        assert torch.allclose(scores[row, node], want, rtol=1e-6, atol=1e-6), (row, node)
        assert int(picks[row, node]) == int(want.argmax())
    return not torch.equal(scores, scene.logits)


def test_every_known_processor_is_tested() -> None:
    assert set(KNOWN) == STATELESS_PROCESSORS | HISTORY_PROCESSORS and not STATELESS_PROCESSORS & HISTORY_PROCESSORS


@pytest.mark.parametrize(("name", "number"), EVERY)
def test_processors_see_each_nodes_own_history(name: str, number: int) -> None:
    changed = [check_scores(Scene(seed), lambda: [known(name, number)]) for seed in range(6)]
    idle = {"InfNanRemoveLogitsProcessor", "ForcedBOSTokenLogitsProcessor"}
    idle |= {"SuppressTokensAtBeginLogitsProcessor", "TopKLogitsWarper"} if number else set()
    assert any(changed) != (name in idle), "this test sees nothing"


@pytest.mark.parametrize(("name", "number"), EVERY)
def test_one_node_per_row_is_one_step_of_transformers(name: str, number: int) -> None:
    """All rows at the same column, as in plain decoding; and at columns of their own."""
    for seed in range(3):
        for level in (True, False):
            check_scores(Scene(seed, nodes=1, level=level), lambda: [known(name, number)])


RAISE = ("EtaLogitsWarper", "TopHLogitsWarper")


def test_processors_run_in_the_given_order() -> None:
    rng, names = random.Random(0), [entry for entry in EVERY if entry[0] != "ForcedBOSTokenLogitsProcessor"]
    for seed in range(60):
        chosen = rng.sample(names, rng.randint(2, 5))
        chosen.sort(key=lambda entry: entry[0] not in RAISE)  # they raise where others have left nothing
        check_scores(Scene(seed), lambda chosen=chosen: [known(*entry) for entry in chosen])  # type: ignore[misc]


def test_nan_and_infinity_are_removed_at_their_node() -> None:
    scene = Scene(1)
    for row, node in scene.living()[:3]:
        scene.logits[row, node, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    _, scores, _ = scene.pick([hf.InfNanRemoveLogitsProcessor()])
    for row, node in scene.living():
        assert torch.equal(scores[row, node], scene.expected(lambda: [hf.InfNanRemoveLogitsProcessor()], row, node))


def test_processors_of_the_user_are_left_as_they_were() -> None:
    penalty = hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor(PADS))
    before = copy.deepcopy(vars(penalty))
    Scene(0).pick([penalty])
    after = vars(penalty)
    assert torch.equal(before.pop("prompt_ignore_length"), after.pop("prompt_ignore_length")) and before == after


# --- who is known -----------------------------------------------------------------------------------------------------


class Warmer(hf.TemperatureLogitsWarper):
    """A child of a known processor may do anything."""


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
    """A processor that a new transformers adds must be sorted by hand."""
    unknown = """AlternatingCodebooks BarkEosPrioritizer ClassifierFreeGuidance DiaClassifierFreeGuidance
        DiaEOSChannelFilter DiaEOSDelayPattern EncoderNoRepeatNGram EncoderRepetitionPenalty PrefixConstrained
        SynthIDTextWatermark UnbatchedClassifierFreeGuidance Watermark WhisperTimeStamp"""
    others = {f"{name}LogitsProcessor" for name in unknown.split()} | {"LogitsProcessor", "WhisperNoSpeechDetection"}
    kinds = {kind for kind in vars(hf).values() if isinstance(kind, type) and issubclass(kind, hf.LogitsProcessor)}
    assert {kind.__name__ for kind in kinds - STATELESS_PROCESSORS - HISTORY_PROCESSORS} <= others


# --- picks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("level", [True, False])
def test_sampled_picks_use_the_noise_of_the_nodes_column(nodes: int, level: bool) -> None:
    make: Callable[[], list[Any]] = lambda: [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(9)]  # noqa: E731
    for seed in range(10):
        scene = Scene(seed, nodes=nodes, level=level)
        torch.manual_seed(seed)
        columns = [torch.empty(3, VOCAB).exponential_() for _ in range(max(scene.lengths) + nodes)]
        torch.manual_seed(seed)
        picks, scores, broken = scene.pick(make(), SamplingNoise(3, VOCAB, CPU, 32))
        assert broken is not None and not broken.any() and scene.tree.depths is not None
        for row, node in scene.living():
            want = scene.expected(make, row, node).softmax(-1)
            column = scene.lengths[row] + int(scene.tree.depths[row, node])
            assert int(picks[row, node]) == int((want / columns[column][row]).argmax())
            torch.testing.assert_close(scores[row, node].softmax(-1), want)


def test_a_bare_tree_picks_what_multinomial_would() -> None:
    """A whole call, a column at a time: tokens and generator states."""
    tokens, states = sampled(12, 3, VOCAB, 4)
    torch.manual_seed(4)
    noise = SamplingNoise(3, VOCAB, CPU, 4)
    picker, sequences = TreeSampler([], noise), torch.zeros(3, BASE + 20, dtype=torch.long)
    for column in range(12):
        logits = chances(column, 3, VOCAB).log()[:, None]
        picks, _, _ = picker.sample(logits, root_only(3), sequences, [column] * 3, BASE, column + 1)
        assert picks[:, 0].tolist() == tokens[column] and torch.equal(noise.state_after(column), states[column])


def test_nodes_that_cannot_be_sampled_are_marked() -> None:
    scene = Scene(2)
    bad = scene.living()[1::3]
    for i, (row, node) in enumerate(bad):
        if i % 2:
            scene.logits[row, node] = -torch.inf
        else:
            scene.logits[row, node, 4] = torch.nan
    _, _, broken = scene.pick([], SamplingNoise(3, VOCAB, CPU, 32))
    assert broken is not None
    assert [(row, node) for row, node in scene.living() if broken[row, node]] == bad
    picks, _, broken = scene.pick([])
    assert torch.equal(picks, scene.logits.argmax(-1)), "greedy decoding takes nan as torch does"
    assert broken is not None and torch.equal(broken, scene.logits.isnan().any(-1))
    picks, _, broken = TreeSampler([], None).sample(
        scene.logits[:, :1], root_only(3), scene.sequences, [2] * 3, BASE, 3
    )
    assert broken is None, "plain decoding would pick the same"


def test_greedy_picks_draw_nothing() -> None:
    state = torch.get_rng_state()
    Scene(0).pick([hf.TopKLogitsWarper(3)])
    assert torch.equal(torch.get_rng_state(), state)
