"""The random numbers of a sampled call: noise per output step, and the state of torch's default generators.

`torch.multinomial(probs, 1)` computes `argmax(probs / e)` with `e ~ Exp(1)` of shape [B, V]. `SamplingNoise` draws that
`e` once per output step, in order, from the generator that transformers samples with, so that a token depends on the
seed and the step, never on the draft tree. Steps may be drawn ahead; at the end the generator is put back to the state
after the last step that was output.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.engine.host_copy import from_host


class GeneratorLock:
    """Lock for changes to torch's default generators, with a count of the changes under it.

    The generators are global to the process, so the lock is as well: calls in several threads must not interleave
    within a draw, and `RngGuard` must know whether another call changed a generator.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_updates = 0

    def __enter__(self) -> GeneratorLock:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def num_updates(self) -> int:
        """Changes counted so far, by all calls in all threads."""
        with self._lock:
            return self._num_updates

    def count_update(self) -> None:
        """Count one change. Call it while the lock is held."""
        assert self._lock.locked()
        self._num_updates += 1


GENERATOR_LOCK = GeneratorLock()
"""The lock of this process."""


class SamplingNoise:
    """Exponential noise of the steps in flight, with the generator's state after each step.

    Attributes:
        generator: the default generator of the sampling device.
        window: number of steps whose noise is stored at the same time.
        immediate: the noise is not used; transformers' own calls draw, because user code draws from the same generator.
        in_foreign_code: a drafter that is not part of mmspec is running; its draws are undone by `RngGuard`.
        rng_contended: another user of the generator drew in between, for example a call in another thread. From then on
            no state is restored, because the other call would repeat its numbers. Which call gets which numbers is
            undefined then, as it is in transformers.
        initial_state: state of the generator before the first step.
        last_state: state of the generator when this object last used it.
        num_rng_updates: how often this object changed the generator.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device, window: int) -> None:
        self.generator = default_generator(device)
        self.window = window
        self.immediate = False
        self.in_foreign_code = False
        self.rng_contended = False
        self.initial_state = self.last_state = self.generator.get_state()
        self.num_rng_updates = 0
        self._ring = torch.empty(window, batch, vocab, device=device, dtype=torch.float32)
        self._states: dict[int, Tensor] = {}  # generator state after each step
        self._num_drawn = 0
        self._first_state = 0  # states of earlier steps are released
        self._rows = torch.arange(batch, device=device)[:, None]

    def draw(self, end: int) -> None:
        """Draw the steps below `end` that are not drawn yet."""
        if end <= self._num_drawn:
            return
        with GENERATOR_LOCK:
            self._set_state(self.state_after(self._num_drawn - 1))
            self._count_update()
            while self._num_drawn < end:
                self._ring[self._num_drawn % self.window].exponential_(1, generator=self.generator)
                self._states[self._num_drawn] = self.generator.get_state()
                self._num_drawn += 1
            self.last_state = self._states[self._num_drawn - 1]

    def at(self, steps: Tensor) -> Tensor:
        """Noise [B, N, V] float32 of steps [B, N] int64: entry (b, n) is row b of the draw of step `steps[b, n]`.

        Steps that are not drawn give undefined values; no node there is ever emitted.
        """
        return self._ring[steps % self.window, self._rows]

    def at_step(self, step: int) -> Tensor:
        """Noise [B, 1, V] of one step for all rows, a view."""
        return self._ring[step % self.window][:, None]

    def lookahead(self, num_emitted: Sequence[int], depth: int, noise_end: int) -> Tensor:
        """Noise [B, depth, V] of the next `depth` steps of each row, for drafters (`Prompt.noise`).

        Args:
            num_emitted: emitted tokens of each row.
            depth: number of steps.
            noise_end: steps from here on are outside the window and repeat the last drawn one.
        """
        device = self._ring.device
        if self.immediate:  # drafting is off in this case
            return torch.ones(len(num_emitted), depth, self._ring.shape[2], device=device)
        self.draw(min(noise_end, max(num_emitted) + depth))
        if len(set(num_emitted)) == 1:  # no copy to the device at all
            steps = torch.arange(num_emitted[0], num_emitted[0] + depth, device=device).expand(len(num_emitted), depth)
        else:
            steps = from_host(num_emitted, device)[:, None] + torch.arange(depth, device=device)
        return self.at(steps.clamp(max=self._num_drawn - 1))

    def lookahead_slots(self, num_emitted: Sequence[int], depth: int, noise_end: int) -> list[list[int]]:
        """The same as [B][depth] numbers for `at_slots`, so that a caller can copy them together with others."""
        self.draw(min(noise_end, max(num_emitted) + depth))
        last = self._num_drawn - 1
        return [[min(first + step, last) % self.window for step in range(depth)] for first in num_emitted]

    def at_slots(self, slots: Tensor) -> Tensor:
        """Noise [B, depth, V] of `lookahead_slots` [B, depth] int64 on the device."""
        return self._ring[slots, self._rows]

    def state_after(self, step: int) -> Tensor:
        """Generator state after the draw of `step`; -1 is the state before the first."""
        return self._states[step] if step >= 0 else self.initial_state

    def restore_rng(self, step: int) -> None:
        """Set the generator to the state in which transformers leaves it after `step`."""
        with GENERATOR_LOCK:
            self._set_state(self.state_after(step))

    def rng_changed(self) -> bool:
        """Whether the generator was used by other code since this object last used it."""
        return not torch.equal(self.generator.get_state(), self.last_state)

    def release(self, end: int) -> None:
        """Release the states of steps below `end`, which can no longer be the last step."""
        for step in range(self._first_state, end):
            self._states.pop(step, None)
        self._first_state = max(self._first_state, end)

    def disable_lookahead(self, step: int) -> None:
        """Let transformers' own calls draw from now on, as if `step` was drawn last.

        If user code drew after that step, the generator already has the right state; else the state is restored.
        """
        if not self.immediate and not self.rng_changed():
            self.restore_rng(step)
        self.immediate = True

    def _count_update(self) -> None:
        GENERATOR_LOCK.count_update()
        self.num_rng_updates += 1

    def _set_state(self, state: Tensor) -> None:
        """Set the generator's state, unless other code used the generator. Needs the lock."""
        self.rng_contended = self.rng_contended or (not self.in_foreign_code and self.rng_changed())
        if not self.rng_contended:
            self._count_update()
            self.generator.set_state(state)
            self.last_state = state


class RngGuard:
    """Context manager that undoes draws from the default generators of some devices.

    Nothing is undone if another call of mmspec changed a generator in the meantime, in another thread: restoring the
    state would give that call the same noise twice.

    Attributes:
        rng_was_used: whether a draw was undone.
    """

    def __init__(self, *devices: torch.device, noise: SamplingNoise | None = None) -> None:
        """Guard the generators of `devices`.

        Args:
            devices: devices whose default generators are guarded; duplicates are ignored.
            noise: the call's noise. It may draw within the context, and these draws stay.
        """
        self.rng_was_used = False
        self._noise = noise
        self._generators = [default_generator(device) for device in dict.fromkeys(devices)]

    def __enter__(self) -> RngGuard:
        self._updates_at_entry = self._num_foreign_updates()
        self._states = [generator.get_state() for generator in self._generators]
        if self._noise is not None:
            self._noise.in_foreign_code = True
        return self

    def __exit__(self, *error: object) -> None:
        noise = self._noise
        if noise is not None:
            noise.in_foreign_code = False
        if self._num_foreign_updates() != self._updates_at_entry:
            return
        for generator, state in zip(self._generators, self._states, strict=True):
            if noise is not None and not noise.immediate and generator.device == noise.generator.device:
                state = noise.last_state
            if not torch.equal(generator.get_state(), state):
                self.rng_was_used = True
                generator.set_state(state)

    def _num_foreign_updates(self) -> int:
        """Generator changes by other calls."""
        own = 0 if self._noise is None else self._noise.num_rng_updates
        return GENERATOR_LOCK.num_updates - own


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.multinomial` uses on `device` if none is passed."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]
