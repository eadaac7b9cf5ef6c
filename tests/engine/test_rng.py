"""`SamplingNoise` against `torch.multinomial`, and who draws (`mmspec.engine.draws`). No model."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from multinomial import sample_plain, step_probs
from torch import Tensor
from torch.nn import functional

from mmspec.engine.draws import DrawsRandomNumbers, ForbidDraws, PrivateDraws, default_generator
from mmspec.engine.host_copy import from_host
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import root_only

CPU = torch.device("cpu")


def at_step(noise: SamplingNoise, step: int) -> Tensor:
    """[B, 1, V] noise of a step that is drawn."""
    return noise.ahead([step] * noise.tensors[0].shape[1], 1, step + 1)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("vocab", [2, 7, 16, 120, 2049])
def test_noise_equals_that_of_multinomial(batch: int, vocab: int) -> None:
    for seed in range(4):
        rng, num_steps, window = random.Random(seed), 24, 6
        tokens, states = sample_plain(num_steps, batch, vocab, seed)
        torch.manual_seed(seed)
        noise = SamplingNoise(batch, vocab, CPU, window)
        for step in range(num_steps):
            noise.draw(step + rng.randint(1, window))  # drawing ahead must not matter
            own = noise.read(torch.full((batch, 1), step % window))[:, 0]
            assert torch.equal(own, at_step(noise, step)[:, 0])
            assert (step_probs(step, batch, vocab) / own).argmax(-1).tolist() == tokens[step]
            if rng.random() < 0.5:
                noise.claim(step)
                assert torch.equal(torch.get_rng_state(), states[step])
            noise.release(step)
            assert len(noise._states) <= window + 2
        noise.close(num_steps - 1)
        assert torch.equal(torch.get_rng_state(), states[-1]) and not noise.rng_contended


def test_rows_read_the_noise_of_their_own_steps() -> None:
    noise = SamplingNoise(3, 11, CPU, 8)
    noise.draw(8)
    num_steps = torch.tensor([[0, 1, 2, 2], [5, 6, 7, 6], [3, 3, 4, 0]])
    got = noise.read(num_steps % 8)
    assert got.shape == (3, 4, 11)
    for row in range(3):
        for node in range(4):
            assert torch.equal(got[row, node], at_step(noise, int(num_steps[row, node]))[row, 0])


@pytest.mark.parametrize("num_emitted", [[3], [2, 2, 2], [0, 3, 1]])
def test_lookahead_is_the_noise_of_the_next_steps(num_emitted: list[int]) -> None:
    """And repeats the last one that is drawn from the end of the window on. Rows at one step need no copy."""
    noise = SamplingNoise(len(num_emitted), 11, CPU, 8)
    with mock.patch("mmspec.engine.rng.from_host", wraps=from_host) as copies:
        ahead = noise.ahead(num_emitted, 4, noise_end=6)
    assert copies.call_count == (len(set(num_emitted)) > 1)
    for row, first in enumerate(num_emitted):
        for step in range(4):
            drawn = min(first + step, min(6, max(num_emitted) + 4) - 1)
            assert torch.equal(ahead[row, step], at_step(noise, drawn)[row, 0])


@pytest.mark.parametrize(("device", "waits"), [("cuda:1", False), ("cpu", True)])
def test_copies_to_a_gpu_come_from_pinned_memory(device: str, waits: bool) -> None:
    pinned, moved = mock.Mock(), torch.tensor([7])
    pinned.to.return_value = moved
    with (
        mock.patch.object(Tensor, "pin_memory", return_value=pinned),
        mock.patch.object(Tensor, "to", return_value=moved) as copy,
    ):
        assert from_host([1, 2], torch.device(device)) is moved
    if waits:
        copy.assert_called_once_with(torch.device(device), non_blocking=False)
        pinned.to.assert_not_called()
    else:
        pinned.to.assert_called_once_with(torch.device(device), non_blocking=True)


def test_the_window_wraps_around() -> None:
    torch.manual_seed(3)
    wide = SamplingNoise(2, 9, CPU, 64)
    wide.draw(50)
    torch.manual_seed(3)
    narrow = SamplingNoise(2, 9, CPU, 4)
    for step in range(50):
        narrow.draw(min(step + 4, 50))
        for ahead in range(step, min(step + 4, 50)):
            assert torch.equal(at_step(narrow, ahead), at_step(wide, ahead))
        narrow.release(step)
    assert narrow.tensors[0].shape[0] == 4, "memory does not grow with the output"


def test_steps_are_drawn_once() -> None:
    torch.manual_seed(3)
    noise = SamplingNoise(1, 5, CPU, 8)
    noise.draw(4)
    state, step = torch.get_rng_state(), at_step(noise, 3).clone()
    for until in (0, 3, 4):
        noise.draw(until)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(at_step(noise, 3), step)


def test_drawing_ahead_leaves_the_generator_where_it_is() -> None:
    """Until a step is complete; then it is where transformers leaves it."""
    tokens, states = sample_plain(10, 2, 13, 5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    noise = SamplingNoise(2, 13, CPU, 4)
    for step in range(10):
        noise.draw(min(10, step + 3))
        assert torch.equal(torch.get_rng_state(), states[step - 1] if step else before)
        noise.claim(step)
        noise.claim(step)
        assert (step_probs(step, 2, 13) / at_step(noise, step)[:, 0]).argmax(-1).tolist() == tokens[step]
        assert torch.equal(torch.get_rng_state(), states[step])


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
        sampled_ids, _, is_nan = sampler.sample(logits, root_only(2), sequences, [step] * 2, 1, step + 1)
        assert sampled_ids[:, 0].tolist() == tokens and is_nan is None
        noise.release(step)
    assert torch.equal(torch.get_rng_state(), state)


def test_lookahead_for_drafters() -> None:
    """The noise of each row's next steps, and no draw outside the window."""
    tokens, states = sample_plain(12, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 8)
    noise.draw(3)
    drawn = noise.ahead([1, 3], 4, noise_end=7)
    assert drawn.shape == (2, 4, 13)
    for row, length in enumerate((1, 3)):
        for step in range(4):
            assert (
                int((step_probs(length + step, 2, 13)[row] / drawn[row, step]).argmax()) == tokens[length + step][row]
            )
    noise.claim(6)
    assert torch.equal(torch.get_rng_state(), states[6])
    assert noise.ahead([1, 3], 9, noise_end=8).shape == (2, 9, 13)
    assert noise._num_drawn == 8, "drawn beyond the steps in flight"
    noise.immediate = True
    state = torch.get_rng_state()
    assert noise.ahead([1, 3], 4, noise_end=8).shape == (2, 4, 13)
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
                    noise.claim(step)
                    assert not noise.rng_changed()
                    torch.rand(7)
                    assert noise.rng_changed()
                noise.disable_lookahead(step)
                assert noise.immediate
            noise.release(step)
        assert torch.equal(torch.get_rng_state(), state)


def in_thread(function: Callable[[], Any]) -> Any:
    """The result of a function that another thread runs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_calls_that_share_a_generator_never_get_the_same_noise() -> None:
    torch.manual_seed(3)
    one = SamplingNoise(2, 13, CPU, 8)
    one.draw(4)
    two = in_thread(lambda: SamplingNoise(2, 13, CPU, 8))
    two.draw(4)
    assert one.rng_contended and two.rng_contended
    one.claim(1)
    one.draw(8)
    two.draw(6)
    one.close(7)
    two.close(2)
    drawn = [at_step(noise, step)[:, 0] for noise, num_steps in ((one, 8), (two, 6)) for step in range(num_steps)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert all(not torch.equal(torch.empty(2, 13).exponential_(1), noise) for noise in drawn)
    three = SamplingNoise(2, 13, CPU, 8)
    assert not three.rng_contended, "the others have ended"


def test_a_call_within_user_code_of_another_draws_as_user_code() -> None:
    torch.manual_seed(3)
    one = SamplingNoise(2, 13, CPU, 8)
    one.draw(4)
    one.claim(1)
    state = torch.get_rng_state()
    two = SamplingNoise(2, 13, CPU, 8)
    assert torch.equal(torch.get_rng_state(), state) and not two.rng_contended
    two.draw(3)
    two.close(2)
    assert one.rng_changed() and not one.rng_contended


@pytest.mark.parametrize("moment", ["before a draw", "at the end", "between two calls"])
def test_numbers_that_another_thread_draws_are_given_once(moment: str) -> None:
    torch.manual_seed(3)
    theirs: list[Tensor] = []

    def other() -> None:
        in_thread(lambda: theirs.append(torch.rand(64)))

    noise = SamplingNoise(1, 64, CPU, 8)
    noise.draw(3)
    if moment == "before a draw":
        other()
    noise.release(1)
    noise.draw(6)
    if moment == "at the end":
        other()
    noise.close(2)
    other()
    assert noise.rng_contended == (moment == "before a draw")
    theirs += [torch.rand(64) for _ in range(8)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(theirs, 2))


def test_the_steps_ahead_are_drawn_anew_when_another_thread_has_drawn() -> None:
    """It has the numbers that were foreseen for them."""
    torch.manual_seed(3)
    noise = SamplingNoise(1, 64, CPU, 8)
    noise.draw(4)
    foreseen = [at_step(noise, step).clone() for step in range(4)]
    theirs = in_thread(lambda: [torch.empty(1, 64).exponential_(1) for _ in range(2)])
    assert all(map(torch.equal, foreseen, [draw[:, None] for draw in theirs]))
    noise.draw(5)
    steps = [at_step(noise, step) for step in range(5)]
    assert not any(torch.equal(a, b) for a, b in itertools.product(steps, [draw[:, None] for draw in theirs]))


# --- who draws --------------------------------------------------------------------------------------------------------

ONES = torch.ones(2, 2, 3, 3)
DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(2, dtype=torch.float64),
    "randint": lambda: torch.randint(2, 9, (3,)),
    "randperm": lambda: torch.randperm(4),
    "like": lambda: (torch.rand_like(ONES), torch.randn_like(ONES), torch.randint_like(ONES, 9)),
    "normal": lambda: (torch.normal(ONES, ONES), torch.normal(0.0, 1.0, (3,))),
    "out": lambda: torch.rand(3, out=torch.empty(3)),
    "in place": lambda: torch.empty(3).uniform_().normal_().exponential_().random_(3).geometric_(0.5),
    "bernoulli": lambda: (torch.bernoulli(ONES / 2), ONES.bernoulli(0.5), torch.empty(3).bernoulli_(0.5)),
    "multinomial": lambda: torch.multinomial(ONES.flatten(), 2),
    "dropout": lambda: (functional.dropout(ONES, 0.5, True), functional.alpha_dropout(ONES, 0.5, True)),
    "dropout2d": lambda: functional.dropout2d(ONES, 0.5, True),
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "attention": lambda: functional.scaled_dot_product_attention(ONES, ONES, ONES, dropout_p=0.5),
    "distributions": lambda: (torch.poisson(ONES), torch.distributions.Gamma(1.0, 1.0).sample()),
    "init": lambda: torch.nn.Linear(3, 3),
    "recurrent": lambda: torch.nn.LSTM(3, 3, 2, dropout=0.5)(ONES[0]),
    "default generator": lambda: torch.rand(3, generator=torch.default_generator),
}
NO_DRAWS: dict[str, Callable[[], Any]] = {
    "own generator": lambda: torch.rand(3, generator=torch.Generator().manual_seed(3)),
    "no dropout": lambda: (functional.dropout(ONES, 0.0, True), functional.dropout(ONES, 0.5, False)),
    "attention": lambda: functional.scaled_dot_product_attention(ONES, ONES, ONES),
    "rrelu": lambda: functional.rrelu(ONES),
    "linear": lambda: functional.linear(ONES, ONES[0, 0]),
}


@pytest.mark.parametrize("inference", [False, True], ids=["eager", "inference mode"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_this_thread_are_seen_before_they_happen(name: str, inference: bool) -> None:
    state = torch.get_rng_state()
    with torch.inference_mode(inference), ForbidDraws() as watch, pytest.raises(DrawsRandomNumbers):
        DRAWS[name]()
    assert watch.has_drawn and torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode(inference), PrivateDraws():
        DRAWS[name]()
        DRAWS[name]()
    assert torch.equal(torch.get_rng_state(), state)
    DRAWS[name]()
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", NO_DRAWS)
def test_what_draws_nothing_is_let_through(name: str) -> None:
    with ForbidDraws() as watch:
        NO_DRAWS[name]()
        in_thread(lambda: torch.rand(3))
    assert not watch.has_drawn


def test_private_draws_continue_and_may_be_seeded() -> None:
    torch.manual_seed(5)
    plain = [torch.rand(3) for _ in range(3)]
    torch.manual_seed(5)
    state, private = torch.get_rng_state(), PrivateDraws()
    for expected in plain:
        with private:
            assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    state = torch.get_rng_state()
    with private:
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), plain[0])
    assert torch.equal(torch.get_rng_state(), state), "a seed is undone"
    with private:
        theirs = in_thread(lambda: torch.rand(3))
    assert not torch.equal(torch.rand(3), theirs), "a draw of another thread is not"


def test_noise_within_private_draws_is_that_of_the_call() -> None:
    tokens, states = sample_plain(6, 2, 13, 5)
    torch.manual_seed(5)
    noise = SamplingNoise(2, 13, CPU, 8)
    with PrivateDraws(expected_state=noise.expected_state):
        torch.rand(3)
        noise.draw(4)
        noise.release(3)
        torch.manual_seed(1)
        torch.rand(3)
    with PrivateDraws(expected_state=noise.expected_state):
        inner = SamplingNoise(2, 13, CPU, 8)  # of a call that a user's drafter makes
        inner.draw(4)
        inner.close(3)
        noise.draw(6)
    noise.close(5)
    assert not noise.rng_contended and torch.equal(torch.get_rng_state(), states[5])
    assert (step_probs(5, 2, 13) / at_step(noise, 5)[:, 0]).argmax(-1).tolist() == tokens[5]


def test_the_default_generator_is_the_one_multinomial_uses() -> None:
    assert default_generator(CPU) is torch.default_generator
