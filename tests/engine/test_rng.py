"""`SamplingNoise` against `torch.multinomial`, and `RngGuard`. No model."""

from __future__ import annotations

import itertools
import random
import threading
from unittest import mock

import pytest
import torch
from multinomial import sample_plain, step_probs
from torch import Tensor

from mmspec.engine.host_copy import from_host
from mmspec.engine.rng import GeneratorLock, RngGuard, SamplingNoise, default_generator
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import root_only

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("num_emitted", [[3], [2, 2, 2], [0, 3, 1]])
def test_lookahead_is_the_noise_of_the_next_steps(num_emitted: list[int]) -> None:
    """And repeats the last one that is drawn from the end of the window on. Rows at one step need no copy."""
    noise = SamplingNoise(len(num_emitted), 11, CPU, 8)
    with mock.patch("mmspec.engine.rng.from_host", wraps=from_host) as copies:
        ahead = noise.lookahead(num_emitted, 4, noise_end=6)
    assert copies.call_count == (len(set(num_emitted)) > 1)
    for row, first in enumerate(num_emitted):
        for step in range(4):
            drawn = min(first + step, min(6, max(num_emitted) + 4) - 1)
            assert torch.equal(ahead[row, step], noise.at_step(drawn)[row, 0])


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
    """The generator's states after each of the first steps at seed 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = SamplingNoise(2, 13, CPU, 8)
        noise.draw(num_steps)
        return [noise.state_after(step) for step in range(num_steps)]


def test_draws_of_other_code_are_undone() -> None:
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


def test_the_generator_lock_counts_the_updates_of_all_threads() -> None:
    lock = GeneratorLock()

    def update() -> None:
        for _ in range(500):
            with lock:
                lock.count_update()

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lock.num_updates == 2000
    with pytest.raises(AssertionError):
        lock.count_update()  # not held
