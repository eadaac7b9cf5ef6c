"""The random numbers of a sampled call: noise per output step, ahead of torch's default generator.

`torch.multinomial(probs, 1)` computes `argmax(probs / e)` with `e ~ Exp(1)` of shape [B, V]. `SamplingNoise` has that
`e` of each output step, in order, so that a token depends on the seed and the step, never on the draft tree.

The default generator belongs to the whole process, so its state is read and drawn from but never set: steps ahead come
from a twin of it, and when a step is complete its noise is drawn from the default generator as well. That leaves it
where transformers leaves it, and gives no number to anybody twice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.engine.draws import default_generator, unprivate
from mmspec.engine.host_copy import from_host
from mmspec.engine.recordings import Recordings
from mmspec.forks import free_in_child

_LOCK = free_in_child(threading.RLock())
"""Held while the noise of any call changes: calls in several threads must not interleave within a draw."""
_LIVE: weakref.WeakSet[SamplingNoise] = weakref.WeakSet()
"""The noise of the calls that run now."""


def read_noise(tensors: Sequence[Tensor], slots: Tensor) -> Tensor:
    """[B, n, V] noise in slots [B, n] int64 of `SamplingNoise.tensors`: all that reads noise node by node."""
    ring, rows = tensors
    return ring[slots, rows]


def _as_bytes(state: Tensor) -> bytes:
    """A generator's state, which lies on the host: no kernel, and no read of the device that a mode should see."""
    with torch._C.DisableTorchFunction():
        return state.numpy().tobytes()


class SamplingNoise:
    """Exponential noise of the steps in flight.

    Attributes:
        generator: the default generator of the sampling device.
        window: number of steps whose noise is stored at the same time.
        tensors: what `read_noise` reads: [window, B, V] float32, step s at s modulo `window`, and [B, 1] row numbers.
        immediate: the noise is not used; transformers' own calls draw, because user code draws from the same generator.
        rng_contended: another user of the generator draws as well, for example a call in another thread. From then on
            steps ahead are drawn from the default generator itself, so that no two users get the same numbers. Which
            call gets which numbers is undefined then, as it is in transformers.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device, window: int) -> None:
        self.generator = default_generator(device)
        self.window = window
        self.immediate = False
        self.rng_contended = False
        ring = torch.empty(window, batch, vocab, device=device, dtype=torch.float32)
        self.tensors: tuple[Tensor, ...] = ring, torch.arange(batch, device=device)[:, None]
        self._scratch: Tensor | None = None  # [B, V]
        self._states: dict[int, Tensor] = {}  # the default generator's state after each step that is not drawn there
        self._num_drawn = 0
        self._num_claimed = 0  # steps drawn from the default generator
        self._num_complete = 0
        self._thread = threading.get_ident()
        self._twin = torch.Generator(self.generator.device)
        with _LOCK:
            for other in [noise for noise in _LIVE if noise.generator is self.generator]:
                if other._thread != self._thread:  # else its user code has made this call, and it looks at the state
                    other._share()
                    self.rng_contended = True
            _LIVE.add(self)
            self._known_state = self.generator.get_state()
            self._twin.set_state(self._known_state)

    def draw(self, end: int) -> None:
        """Draw the steps below `end` that are not drawn yet."""
        if end <= self._num_drawn:
            return
        with _LOCK:
            self._claim(self._num_complete)
            while self._num_drawn < end:
                self._draw_step(self._num_drawn)
                self._num_drawn += 1

    def slots(self, num_emitted: Sequence[int], depth: int, noise_end: int) -> list[list[int]]:
        """[B][depth], where `read` finds the noise of the next `depth` steps of each row. Draws it.

        Args:
            num_emitted: emitted tokens of each row.
            depth: number of steps.
            noise_end: steps from here on are outside the window and repeat the last drawn one.
        """
        self.draw(min(noise_end, max(num_emitted) + depth))
        last = self._num_drawn - 1
        return [[min(first + step, last) % self.window for step in range(depth)] for first in num_emitted]

    def read(self, slots: Tensor) -> Tensor:
        """Noise [B, n, V] float32 in slots [B, n] int64: step modulo `window`.

        Steps that are not drawn give undefined values; no node there is ever emitted.
        """
        return read_noise(self.tensors, slots)

    def ahead(self, num_emitted: Sequence[int], depth: int, noise_end: int) -> Tensor:
        """Noise [B, depth, V] of the next `depth` steps of each row, never to be written to. Arguments: see `slots`."""
        ring, rows = self.tensors
        if self.immediate:  # drafting is off in this case
            return torch.ones(len(num_emitted), depth, ring.shape[2], device=ring.device)
        slots = self.slots(num_emitted, depth, noise_end)
        if len(set(num_emitted)) > 1:
            return self.read(from_host(slots, rows.device))
        found = [ring[slot] for slot in slots[0]]  # rows at one step need no copy from the host
        return found[0][:, None] if depth == 1 else torch.stack(found, dim=1)

    def store_in(self, recordings: Recordings) -> None:
        """Keep the noise, of which nothing is drawn yet, at the address that recorded functions read."""
        assert not self._num_drawn
        self.tensors = tuple(recordings.fixed(f"noise {n}", tensor) for n, tensor in enumerate(self.tensors))

    def expected_state(self) -> Tensor | None:
        """The default generator's state if only this object has drawn; None if that is not known."""
        return None if self.immediate or self.rng_contended else self._known_state

    def claim(self, step: int) -> None:
        """Leave the generator as transformers leaves it after `step`: draw the steps until there from it as well."""
        if not self.immediate:
            with _LOCK:
                self._claim(step + 1)

    def rng_changed(self) -> bool:
        """Whether other code used the generator since this object did."""
        return _as_bytes(self.generator.get_state()) != _as_bytes(self._known_state)

    def release(self, end: int) -> None:
        """Steps below `end` are complete: no row needs their noise, and the call does not end before them."""
        self._num_complete = max(self._num_complete, end)

    def disable_lookahead(self, step: int) -> None:
        """Let transformers' own calls draw from now on, as if `step` was drawn last.

        If user code drew after that step, the generator already has the right state.
        """
        if not self.immediate and not self.rng_changed():
            self.claim(step)
        self.immediate = True

    def close(self, step: int) -> None:
        """The call has ended after `step`."""
        with _LOCK:
            _LIVE.discard(self)
            if self.expected_state() is not None and not self.rng_changed():
                self._draw_claimed(step + 1)

    def _draw_step(self, step: int) -> None:
        """Fill the slot of a step: from the twin, or from the default generator if that is shared."""
        noise = self.tensors[0][step % self.window]
        if self.rng_contended:
            with unprivate():
                noise.exponential_(1, generator=self.generator)
            self._num_claimed = step + 1
        else:
            noise.exponential_(1, generator=self._twin)
            self._states[step] = self._twin.get_state()

    def _claim(self, end: int) -> None:
        """Draw the steps below `end` from the default generator, unless it is shared. Needs the lock.

        If it is found to be, the steps ahead are drawn anew: another user has the numbers that the twin foresaw.
        """
        if self.rng_contended or self.immediate:
            return
        if not self.rng_changed():
            self._draw_claimed(end)
        if self.rng_changed():
            self.rng_contended = True
            for step in range(max(self._num_complete, self._num_claimed), self._num_drawn):
                self._draw_step(step)

    def _draw_claimed(self, end: int) -> None:
        """Draw the steps below `end` that were foreseen, and know the state that this leaves."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.tensors[0][0])
        for step in range(self._num_claimed, min(end, self._num_drawn)):
            with unprivate():
                self._scratch.exponential_(1, generator=self.generator)
            self._known_state = self._states.pop(step)
            self._num_claimed = step + 1

    def _share(self) -> None:
        """Another call begins: the numbers foreseen for this one become its own. Needs the lock."""
        if not self.immediate and not self.rng_contended:
            if not self.rng_changed():
                self._draw_claimed(self._num_drawn)
            self.rng_contended = True
