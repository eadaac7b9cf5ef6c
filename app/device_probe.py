"""`python -m mmspec.app.device_probe --device cuda:0`: are recorded rounds and drafts exact on this device?

Run in a process of its own (`mmspec.control.device_check`), because a failed capture or a device assert can end it. A
small random text model and a draft head are decoded with everything recorded, and compared with plain `generate`:

- float32, batches of one and of three rows of different lengths, greedy and sampled: identical tokens;
- bfloat16: every token's logit is within rounding of the largest, since rounding differs between numbers of rows;
- every round was a replay, as a whole and (with a processor that is not part of recordings) in parts, some drafts were
  accepted, nothing fell back;
- `torch.multinomial(probs, 1)` is the argmax of probabilities over exponential noise, generator state included.

Prints one line of JSON. Exit code: 0 passed, 1 failed, 2 no verdict (such as a device without free memory).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec.control.device_check import device_key
from mmspec.drafters.heads.eagle.config import EagleConfig
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.engine.graph import CudaGraphRecorder, Recorder, Replay, StaticFunction, record_trace
from mmspec.engine.recordings import HALF_REPLAY_TOLERANCE
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.round import ForwardFunction, RoundFunction
from mmspec.patching import patch_state

PROBE_VOCAB, PROBE_HIDDEN, PROBE_HEADS, PROBE_KV_HEADS, PROBE_LAYERS = 500, 64, 4, 2, 2
PROBE_WEIGHT_STD = 0.08
"""Of the model: attention changes the text, and yet the head below often predicts it."""
HEAD_GAIN = 3.0
"""Weight of the last token's embedding in the head's output."""
PROMPT_LENGTHS = (21, 13, 30)
NUM_PROMPTS = 3
"""Per batch size. The first is recorded, all are replayed: a value that became a constant is wrong in the others."""
BATCH_SIZES = (1, 3)
"""Of the checks in float32."""
NEW_TOKENS = 30
KINDS_OF_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95},
    "penalized": {"do_sample": True, "repetition_penalty": 1.1},
    "in parts": {"do_sample": True, "temperature": 0.9, "top_k": 50, "suppress_tokens": [0]},
}
"""Their options. The last has a processor with which rounds are recorded in parts."""
TREE_SIZE = 8
SEED = 7
PROBE_ROWS, PROBE_STEPS = 3, 4
"""Of `multinomial_is_reproduced`."""
MULTINOMIAL_SIZES = (PROBE_VOCAB, 501, 32064, 151936)
"""Vocabularies: how far a draw moves the generator depends on the number of elements."""
OCCUPIED = (
    "out of memory",
    "OutOfMemory",
    "busy or unavailable",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
"""In messages of a device that other work occupies, which says nothing about recordings."""


class ProbeFailedError(Exception):
    """Recorded rounds are not exact on the device."""


@dataclass
class ReplayCounter:
    """Records by another recorder and counts.

    Attributes:
        recorder: the other one.
        num_recorded: functions recorded.
        num_rounds: replays of a target's forward, alone or in a whole round.
        num_whole: replays of whole rounds.
        num_drafts: replays of drafts, alone or in a whole round.
    """

    recorder: Recorder
    num_recorded: int = 0
    num_rounds: int = 0
    num_whole: int = 0
    num_drafts: int = 0

    def __call__(self, function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        replay = self.recorder(function, state, inputs)
        self.num_recorded += 1
        is_round = isinstance(function, (RoundFunction, ForwardFunction))
        is_whole = isinstance(function, RoundFunction) and function.draft is not None

        def counted(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            outputs = replay(new_inputs)
            self.num_rounds += is_round
            self.num_whole += is_whole
            self.num_drafts += is_whole or not is_round
            return outputs

        return counted


@dataclass
class ProbeResult:
    """What a probe found.

    Attributes:
        key: the device and the versions, as `device_key`.
        passed: None without a verdict.
        reason: why it did not pass.
        seconds: of the probe, imports excluded.
        recorded, rounds, drafts: functions recorded, and replays of both kinds.
        plain_ms, recorded_ms: milliseconds per token of the tiny model, summed over the kinds of calls. No part of the
            verdict.
    """

    key: dict[str, Any]
    passed: bool | None = None
    reason: str | None = None
    seconds: float = 0.0
    recorded: int = 0
    rounds: int = 0
    drafts: int = 0
    plain_ms: float = 0.0
    recorded_ms: float = 0.0

    def to_json(self) -> str:
        """One line."""
        return json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in vars(self).items()})


def default_recorder(device: torch.device) -> Recorder:
    """CUDA graphs; traces on a CPU, where they have the semantics of a graph and need no compiler."""
    return CudaGraphRecorder() if device.type == "cuda" else record_trace


def probe(device: torch.device, recorder: Recorder | None = None) -> ProbeResult:
    """Run all checks.

    Args:
        device: to probe.
        recorder: None for `default_recorder`, a new one for each model.
    """
    result = ProbeResult(device_key(device))
    start = time.perf_counter()
    try:
        for size in MULTINOMIAL_SIZES:
            if not multinomial_is_reproduced(device, size):
                raise ProbeFailedError(f"torch.multinomial of {size} probabilities samples otherwise than our noise")
        for batch in BATCH_SIZES:
            _check_texts(result, device, recorder, torch.float32, batch)
        _check_texts(result, device, recorder, torch.bfloat16, 1)
        result.passed = True
    except Exception as error:
        message = (str(error).strip().splitlines() or ["no message"])[0]
        result.reason = message if isinstance(error, ProbeFailedError) else f"{type(error).__name__}: {message}"
        result.passed = None if any(part in str(error) for part in OCCUPIED) else False
    result.seconds = time.perf_counter() - start
    return result


def multinomial_is_reproduced(device: torch.device, vocab_size: int) -> bool:
    """Whether our noise gives the ids, and leaves the generator in the state, of `torch.multinomial` on this device."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(PROBE_STEPS, PROBE_ROWS, vocab_size, device=device, generator=generator)
    probs = logits.softmax(-1)
    with seeded(device):
        expected = [torch.multinomial(one, 1).squeeze(1) for one in probs]
        end = _generator_state(device)
    with seeded(device):
        noise = SamplingNoise(PROBE_ROWS, vocab_size, device, PROBE_STEPS)
        noise.draw(PROBE_STEPS)
        steps = [noise.ahead([step] * PROBE_ROWS, 1, PROBE_STEPS)[:, 0] for step in range(PROBE_STEPS)]
        found = [(one / own).argmax(-1) for one, own in zip(probs, steps, strict=True)]
        noise.close(PROBE_STEPS - 1)
        same_state = torch.equal(_generator_state(device), end)
    return same_state and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _check_texts(
    result: ProbeResult, device: torch.device, recorder: Recorder | None, dtype: torch.dtype, batch: int
) -> None:
    """Decode several prompts of one batch size, greedy and sampled (bfloat16: greedy), recorded and plain.

    Raises:
        ProbeFailedError: other tokens, or something was not recorded.
    """
    counter = ReplayCounter(recorder or default_recorder(device))
    model, head = _build_model(device, dtype), _build_head(device, dtype)
    what = f"{str(dtype).removeprefix('torch.')}, batch size {batch}"
    drafter = EagleDrafter(head, "coupled", num_layers=PROBE_LAYERS, max_depth=3, top_k=3)
    mmspec.patch(model, drafter, tree_size=TREE_SIZE, backend="recorded", learn=False)
    lanes = patch_state(model).lanes
    lanes.recorder = lambda: counter
    with warnings_as_failures():
        for index in range(NUM_PROMPTS):
            for kind in KINDS_OF_CALLS if dtype is torch.float32 else ("greedy",):
                inputs = _build_prompt(device, batch, index)
                with mmspec.disabled(model):
                    expected, plain_s = _generate(model, inputs, kind)
                found, recorded_s = _generate(model, inputs, kind)
                if index == NUM_PROMPTS - 1:  # nothing is recorded any more
                    result.plain_ms += 1e3 * plain_s / NEW_TOKENS
                    result.recorded_ms += 1e3 * recorded_s / NEW_TOKENS
                if dtype is torch.float32 and not torch.equal(found, expected):
                    raise ProbeFailedError(f"other tokens than plain generate ({what}, {kind})")
                if dtype is not torch.float32:
                    _check_greedy(model, inputs, found, what)
    stats = mmspec.stats(model)
    mmspec.unpatch(model)
    result.recorded += counter.num_recorded
    result.rounds += counter.num_rounds
    result.drafts += counter.num_drafts
    if stats.fallback_calls or lanes.failure is not None:
        raise ProbeFailedError(f"{stats.fallback_reason or lanes.failure} ({what})")
    if counter.num_rounds < stats.rounds or not counter.num_whole:
        raise ProbeFailedError(
            f"{stats.rounds} rounds had {counter.num_rounds} replays, {counter.num_whole} of them whole ({what})"
        )
    if not stats.num_accepted_tokens:
        raise ProbeFailedError(f"no draft was accepted ({what})")


def _check_greedy(model: LlamaForCausalLM, inputs: dict[str, Tensor], found: Tensor, what: str) -> None:
    """Raise `ProbeFailedError` unless each new token [B, L] has nearly the largest logit of a forward over the text."""
    length = inputs["input_ids"].shape[1]
    with mmspec.disabled(model), torch.no_grad():
        logits = model(found).logits[:, length - 1 : -1].float()
    gap = logits.max(-1).values - logits.gather(-1, found[:, length:, None])[..., 0]
    scale = logits.max() - logits.min()
    if not bool((gap <= HALF_REPLAY_TOLERANCE * scale).all()):
        raise ProbeFailedError(f"tokens of which the logit is not the largest ({what})")


def _generate(model: LlamaForCausalLM, inputs: dict[str, Tensor], kind: str) -> tuple[Tensor, float]:
    """Ids of a call, always with the same seed, and its seconds."""
    options = KINDS_OF_CALLS[kind]
    start = time.perf_counter()
    with seeded(inputs["input_ids"].device):
        ids: Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
        sum(ids.flatten().tolist())  # waits for the device
    return ids, time.perf_counter() - start


def _build_model(device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A small Llama with random weights and grouped keys, without an end token, so that all texts are long."""
    config = LlamaConfig(
        vocab_size=PROBE_VOCAB,
        hidden_size=PROBE_HIDDEN,
        intermediate_size=2 * PROBE_HIDDEN,
        num_hidden_layers=PROBE_LAYERS,
        num_attention_heads=PROBE_HEADS,
        num_key_value_heads=PROBE_KV_HEADS,
        max_position_embeddings=1024,
        initializer_range=PROBE_WEIGHT_STD,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with seeded(torch.device("cpu")):
        model = LlamaForCausalLM(config).eval().to(device, dtype)
    assert isinstance(model, LlamaForCausalLM)
    return model


def _build_head(device: torch.device, dtype: torch.dtype) -> EagleHead:
    """An EAGLE head with random weights whose output is near the last token's embedding, as is the target's."""
    config = EagleConfig(PROBE_HIDDEN, 2 * PROBE_HIDDEN, PROBE_HEADS, PROBE_KV_HEADS, PROBE_VOCAB)
    with seeded(torch.device("cpu")):
        head = EagleHead(config).eval()
    head.fc.weight.data[:, :PROBE_HIDDEN] += HEAD_GAIN * torch.eye(PROBE_HIDDEN)
    return head.to(device, dtype)


def _build_prompt(device: torch.device, batch: int, index: int) -> dict[str, Tensor]:
    """Random prompts, several rows of different lengths padded on the left."""
    lengths = [PROMPT_LENGTHS[(index + row) % len(PROMPT_LENGTHS)] for row in range(batch)]
    generator = torch.Generator().manual_seed(100 * batch + index)
    ids = torch.randint(1, PROBE_VOCAB, (batch, max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) >= torch.tensor([max(lengths) - length for length in lengths])[:, None]
    return {"input_ids": torch.where(mask, ids, 0).to(device), "attention_mask": mask.long().to(device)}


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Context with a fixed seed; the generators are as before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        yield


@contextmanager
def warnings_as_failures() -> Iterator[None]:
    """Context that raises `ProbeFailedError` at its end if mmspec logged a warning, such as that of a fallback."""
    messages: list[str] = []

    class Collect(logging.Handler):
        """Keeps warnings."""

        def emit(self, record: logging.LogRecord) -> None:
            """Keep one."""
            messages.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("mmspec")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if messages:
        raise ProbeFailedError(messages[0])


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def main(argv: Sequence[str] | None = None) -> int:
    """Probe a device and print the result; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mmspec.app.device_probe", description="Check recorded rounds on a device; prints JSON."
    )
    parser.add_argument("--device", default="cuda:0", help="such as cuda:0, or cpu (traced instead of captured)")
    result = probe(torch.device(parser.parse_args(argv).device))
    print(result.to_json(), flush=True)
    return {True: 0, False: 1, None: 2}[result.passed]


if __name__ == "__main__":
    sys.exit(main())
