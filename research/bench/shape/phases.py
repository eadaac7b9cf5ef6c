"""Checks and phases of `research.bench --shape`: device times of phases, recording, logits, noise."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from mmspec.engine import loop as loop_module
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.rng import SamplingNoise
from research.bench.peers.base import Peer, PeerPrompt
from research.bench.peers.in_process import PatchedPeer, greedy_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEVICE_PHASES = ("read", "levels", "score", "verify", "commit", "observe", "whole")
"""Draft head over new tokens; the rest of the draft; the target's forward; sampling, acceptance and the copy to the
host; the KV cache; what the drafter does with the result; on a GPU, all of these in one recorded function."""

Timestamp = float | torch.cuda.Event
"""Seconds of `time.perf_counter()`, or an event in the CUDA stream."""
NOISE_STEPS, NOISE_ROWS = 4, 3
"""Of the draws that are compared with those of torch."""


@dataclass
class PhaseTimer:
    """Device time of the phases of all rounds within `measuring`: CUDA events on a GPU, else the clock.

    Attributes:
        device: of the model.
        spans: {phase: start and end of each}.
    """

    device: torch.device
    spans: dict[str, list[tuple[Timestamp, Timestamp]]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time the parts of every `DecodeLoop` that runs meanwhile. Not for several threads."""
        run = DecodeLoop.run

        def timed_run(loop: DecodeLoop, *args: Any) -> None:
            inner = getattr(loop.drafter, "inner", loop.drafter)
            parts: list[tuple[object, str, str]] = [
                (loop.drafter, "propose", "propose"),
                (loop.drafter, "observe", "observe"),
                (loop.target, "score", "score"),
                (loop_module, "verify", "verify"),
                (loop.target, "commit", "commit"),
                (loop, "round", "round"),
            ]
            if loop.recorded is not None:
                parts.append((loop.recorded, "run", "whole"))
            if hasattr(inner, "read_pending"):
                parts += [(inner, "read_prompt", "read"), (inner, "read_pending", "read")]
            with ExitStack() as stack:
                for owner, name, phase in parts:
                    stack.enter_context(mock.patch.object(owner, name, self._timed(phase, getattr(owner, name))))
                run(loop, *args)

        with mock.patch.object(DecodeLoop, "run", timed_run):
            yield

    def milliseconds(self) -> dict[str, float]:
        """{phase: mean milliseconds of a round}, "round" included. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals = {phase: sum(_elapsed(*span) for span in spans) for phase, spans in self.spans.items()}
        totals["levels"] = totals.pop("propose", 0.0) - totals.get("read", 0.0)
        num_rounds = max(1, len(self.spans["round"]))
        return {phase: 1e3 * totals.get(phase, 0.0) / num_rounds for phase in DEVICE_PHASES}

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = function(*args, **kwargs)
            self.spans[phase].append((start, self._now()))
            return result

        return run

    def _now(self) -> Timestamp:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _elapsed(start: Timestamp, end: Timestamp) -> float:
    """Seconds between two points in time that the device has reached."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3


def phase_note(peer: PatchedPeer, prompt: PeerPrompt, new_tokens: int) -> str:
    """Milliseconds of each phase in one call of a peer. On a GPU the events add little; phases do not overlap."""
    timer = PhaseTimer(prompt.inputs["input_ids"].device)
    with timer.measuring():
        peer.generate(prompt, new_tokens)
    phases = ", ".join(f"{phase} {value:.3f}" for phase, value in timer.milliseconds().items())
    return f"{peer.name}, one call of batch {prompt.batch}: ms a round: {phases}"


def recording_note(peer: PatchedPeer, prompt: PeerPrompt, new_tokens: int) -> str:
    """Seconds that the first call takes beyond the second: capture or compilation of the rounds, and warm-up."""
    first_s, second_s = (peer.generate(prompt, new_tokens).total_s for _ in range(2))
    return f"{peer.name}: first call {max(0.0, first_s - second_s):.2f} s longer than the second ({second_s:.2f} s)"


def logits_note(model: PreTrainedModel, peer: PatchedPeer, prompt: PeerPrompt, new_tokens: int) -> str:
    """Largest difference of a peer's logits to those of `generate`, which decodes one position at a time.

    Logits are those of the emitted tokens. Texts that differ are reported, and compared up to the first difference.
    """
    options = greedy_options(model, prompt, new_tokens)
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain, own = (one.generate(**prompt.inputs, **options) for one in (model, peer.model))
    length = prompt.inputs["input_ids"].shape[1]
    steps = min(plain.sequences.shape[1], own.sequences.shape[1]) - length
    differs = (plain.sequences[:, length : length + steps] != own.sequences[:, length : length + steps]).any(0).tolist()
    equal = differs.index(True) if True in differs else steps
    pairs = zip(plain.logits[: equal + 1], own.logits[: equal + 1], strict=False)
    largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    text = "same text" if equal == steps else f"texts differ at new token {equal}"
    return f"{peer.name}: largest difference of {equal} steps' logits to `generate` {largest:.1e} ({text})"


def check_notes(model: PreTrainedModel, peers: Sequence[Peer], prompt: PeerPrompt, new_tokens: int) -> list[str]:
    """Recording, phases and logits of each patched peer, and the probe of the noise; `prompt` has the batch size."""
    lines = []
    for peer in (peer for peer in peers if isinstance(peer, PatchedPeer)):
        lines += [recording_note(peer, prompt, new_tokens), phase_note(peer, prompt, new_tokens)]
        lines.append(logits_note(model, peer, prompt, new_tokens))
    device = prompt.inputs["input_ids"].device
    verdict = "gives" if multinomial_is_reproduced(device, model.config.vocab_size) else "DOES NOT GIVE"
    lines.append(f"our noise {verdict} the samples and the generator state of torch.multinomial on {device}")
    return lines


def multinomial_is_reproduced(device: torch.device, vocab_size: int) -> bool:
    """Whether our noise gives the ids, and leaves the generator in the state, of `torch.multinomial` on this device."""
    generator = torch.Generator(device).manual_seed(0)
    probs = (3 * torch.randn(NOISE_STEPS, NOISE_ROWS, vocab_size, device=device, generator=generator)).softmax(-1)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        expected = [torch.multinomial(one, 1).squeeze(1) for one in probs]
        end = _generator_state(device)
        torch.manual_seed(0)
        noise = SamplingNoise(NOISE_ROWS, vocab_size, device, NOISE_STEPS)
        noise.draw(NOISE_STEPS)
        steps = [noise.ahead([step] * NOISE_ROWS, 1, NOISE_STEPS)[:, 0] for step in range(NOISE_STEPS)]
        found = [(one / own).argmax(-1) for one, own in zip(probs, steps, strict=True)]
        noise.close(NOISE_STEPS - 1)
        same_state = torch.equal(_generator_state(device), end)
    return same_state and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
