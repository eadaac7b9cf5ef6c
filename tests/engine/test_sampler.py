"""Sampled ids at every node against transformers' processors. No model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import adversarial as adversarial
import pytest
import torch
from multinomial import sample_plain, step_probs
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import (
    HISTORY_PROCESSORS,
    STATELESS_PROCESSORS,
    TreeSampler,
    likeliest,
)
from mmspec.engine.tree import DraftTree, root_only, sanitize

CPU = torch.device("cpu")


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
        node_mask = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(3)])
        tree = DraftTree(random_ids((3, nodes), number), parents, node_mask)
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
        """(row, node) of all nodes, padding excluded."""
        return [(row, node) for row, node in self.tree.node_mask.nonzero().tolist()]


def check_scores(scene: Scene, make: Callable[[], list[Any]]) -> bool:
    """Compare all nodes, padding excluded; returns whether the processors changed anything."""
    before = [scene.logits.clone(), scene.sequences.clone()]
    sampled_ids, scores, is_nan = scene.sample(make())
    assert torch.equal(scene.logits, before[0]) and torch.equal(scene.sequences, before[1]), "inputs were changed"
    assert (is_nan is None or not is_nan.any()) and scores.shape == scene.logits.shape
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
        hf.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.ones(1, 3, dtype=torch.long)),
        hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(1, 3, dtype=torch.long)),
        lambda ids, scores: scores,
    ]
    expected = """Warmer Twisted Counting EncoderRepetitionPenaltyLogitsProcessor
        EncoderNoRepeatNGramLogitsProcessor function"""
    assert (
        TreeSampler([hf.PrefixConstrainedLogitsProcessor(list, 1), *strange], None).unknown_processors
        == expected.split()
    )


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
        sampled_ids, scores, is_nan = scene.sample(make(), SamplingNoise(3, VOCAB, CPU, 32))
        assert is_nan is not None and not is_nan.any() and scene.tree.depths is not None
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
        assert sampled_ids[:, 0].tolist() == tokens[step]
        noise.claim(step)
        assert torch.equal(torch.get_rng_state(), states[step])


def test_nodes_that_cannot_be_sampled_are_marked() -> None:
    scene = Scene(2)
    bad = scene.valid_nodes()[1::3]
    for i, (row, node) in enumerate(bad):
        if i % 2:
            scene.logits[row, node] = -torch.inf
        else:
            scene.logits[row, node, 4] = torch.nan
    _, _, is_nan = scene.sample([], SamplingNoise(3, VOCAB, CPU, 32))
    assert is_nan is not None
    assert [(row, node) for row, node in scene.valid_nodes() if is_nan[row, node]] == bad
    sampled_ids, _, is_nan = scene.sample([])
    assert torch.equal(sampled_ids, scene.logits.argmax(-1)), "greedy decoding treats nan as torch does"
    assert is_nan is not None and torch.equal(is_nan, scene.logits.isnan().any(-1))
    sampled_ids, _, is_nan = TreeSampler([], None).sample(
        scene.logits[:, :1], root_only(3), scene.sequences, [2] * 3, BASE, 3
    )
    assert is_nan is None, "plain decoding samples the same id"


def test_greedy_decoding_draws_nothing() -> None:
    state = torch.get_rng_state()
    Scene(0).sample([hf.TopKLogitsWarper(3)])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_id_is_torchs_argmax(value: float, dtype: torch.dtype) -> None:
    """Of several largest numbers the first, and nan before all numbers, where the rows are no block as well."""
    rng = torch.Generator().manual_seed(3)
    for vocab in (1, 2, 31, 500):
        scores = torch.randint(-2, 2, (2, 3, vocab), generator=rng).to(dtype)
        scores[torch.rand(scores.shape, generator=rng) < 0.3] = value
        for part in (scores, scores.flip(-1), scores.transpose(0, 1), torch.full_like(scores, value)):
            found = likeliest(part)
            assert torch.equal(found, part.argmax(-1)) and found.dtype is torch.long


def test_recordings_see_an_operator_of_torch() -> None:
    compiled = torch.compile(likeliest, backend="eager", fullgraph=True)
    scores = torch.tensor([[[0.0, 2.0, 2.0]]])
    assert compiled(scores).tolist() == [[1]]
    with pytest.raises(RuntimeError, match="grad"):
        scores.requires_grad_().numpy()
    assert likeliest(scores).tolist() == [[1]]
