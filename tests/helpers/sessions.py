"""Sessions: random calls that share one patched model, each compared with the same call of a plain copy.

Between calls weights, attributes and configs of both models change in the ways in which people change them; calls reuse
prompts and caches of earlier ones, run in two threads, and end by errors and interrupts. Compared after each call:
tokens, logits, scores, caches, errors and the state of the generator.

As a script: `python tests/helpers/sessions.py --first 0 --count 100`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import fuzz
import tiny_models as tiny
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.engine.tree_cache import CACHE_ARGUMENT

FAMILIES = ("llama", "llava", "qwen2_5_vl", "gemma3", "qwen3_5", "smolvlm")
DRAFTERS = ("none", "lookup", "hybrid", "hybrid", "auto", "quantized", "self")
RETURNS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NEAR_TIE = 1e-4
"""Differences of two logits below which plain decoding itself depends on the order of sums."""
Change = Callable[[PreTrainedModel], Any]


# --- changes between calls --------------------------------------------------------------------------------------------


def head(model: PreTrainedModel) -> nn.Linear:
    return model.get_output_embeddings()


def layer(model: PreTrainedModel, index: int = 0) -> Any:
    return model.get_decoder().layers[index]


def linear(model: PreTrainedModel) -> nn.Linear:
    """The last linear layer of the first decoder layer."""
    return [part for part in layer(model).modules() if isinstance(part, nn.Linear)][-1]


def norm(model: PreTrainedModel) -> Tensor:
    return next(part for name, part in layer(model, 1).named_parameters() if "norm" in name)


def through_numpy(model: PreTrainedModel) -> None:
    linear(model).weight.detach().numpy()[:] *= 1.25


def flip(model: PreTrainedModel) -> None:
    """A vector with the same numbers in another order."""
    norm(model).data.copy_(torch.linspace(0.5, 1.5, len(norm(model))))
    norm(model).data.copy_(norm(model).data.flip(0))


def reload(model: PreTrainedModel, assign: bool) -> None:
    state = {name: one * 1.02 if one.is_floating_point() else one for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def swap(model: PreTrainedModel) -> None:
    for one, other in zip(layer(model).parameters(), layer(model, 1).parameters(), strict=False):
        if one.shape == other.shape:
            one.data, other.data = other.data, one.data


def pruned(model: PreTrainedModel) -> None:
    prune.l1_unstructured(linear(model), "weight", 0.3)
    prune.remove(linear(model), "weight")


def step(model: PreTrainedModel) -> None:
    """A step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    generator_state = torch.get_rng_state()
    model(input_ids=torch.arange(10, 26)[None], use_cache=False).logits[0, -1].log_softmax(-1)[20].neg().backward()
    torch.set_rng_state(generator_state)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def roll_head(model: PreTrainedModel) -> None:
    head(model).weight = nn.Parameter(torch.roll(head(model).weight.detach(), 5, 0))


def rescale(model: PreTrainedModel) -> None:
    """The scale of an adapter, a number in a table."""
    for part in model.modules():
        if hasattr(part, "set_scale") and "default" in getattr(part, "scaling", ()):
            part.set_scale("default", 2.0 if part.scaling["default"] < 3 else 0.25)


CHANGES: dict[str, Change] = {
    "in place": lambda model: linear(model).weight.data.mul_(1.1),
    "a few rows of the head": lambda model: head(model).weight.data[:5].add_(0.3),
    "by numpy": through_numpy,
    "the order of a vector": flip,
    "loaded": lambda model: reload(model, False),
    "loaded and assigned": lambda model: reload(model, True),
    "layers swapped": swap,
    "pruned": pruned,
    "trained": step,
    "the head rolled": roll_head,
    "the embeddings rolled": lambda model: model.get_input_embeddings().weight.data.copy_(
        model.get_input_embeddings().weight.data.roll(1, 0)
    ),
    "a bias": lambda model: setattr(head(model), "bias", nn.Parameter(torch.linspace(-1, 1, len(head(model).weight)))),
    "types and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "shared memory": lambda model: model.share_memory(),
    "a module": lambda model: setattr(layer(model), "mlp", copy.deepcopy(layer(model).mlp)),
    "a number": lambda model: [
        setattr(part, "scaling", part.scaling * 1.1)
        for part in layer(model).modules()
        if isinstance(getattr(part, "scaling", None), float)
    ],
    "an adapter's scale": rescale,
    "the kernel of attention": lambda model: model.set_attn_implementation(
        "eager" if model.config._attn_implementation == "sdpa" else "sdpa"
    ),
}


# --- one call ---------------------------------------------------------------------------------------------------------


class EndedByUserError(Exception):
    """Raised by the streamer."""


class Stopping(BaseStreamer):
    """A streamer that raises at its nth value, or collects them."""

    def __init__(self, number: int) -> None:
        self.number, self.values = number, list[list[int]]()

    def put(self, value: Tensor) -> None:
        if len(self.values) == self.number:
            raise EndedByUserError
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])


@contextmanager
def interrupted(number: int) -> Iterator[None]:
    """Context in which the nth function of mmspec that is called raises `KeyboardInterrupt`, as a user's Ctrl-C."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> None:
        count[0] += event == "call" and "/mmspec/" in frame.f_code.co_filename
        if count[0] == number:
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


@dataclass
class Session:
    """Two equal models, one of them patched, and what is left of their calls.

    Attributes:
        rng: chooses everything.
        plain: the model as it is.
        patched: its copy.
        prompts: the inputs that calls vary.
        done: what was done, for messages.
        faults: differences that were found.
        counts: of calls, fallbacks, reused positions and near-ties.
        turns: prompts that go on where an earlier call ended.
    """

    rng: random.Random
    plain: PreTrainedModel
    patched: PreTrainedModel
    prompts: list[tiny.Inputs]
    done: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    turns: list[tiny.Inputs] = field(default_factory=list)

    def change(self) -> None:
        """Change both models."""
        name = self.rng.choice(list(CHANGES))
        self.done.append(name)
        with torch.enable_grad():
            for model in (self.plain, self.patched):
                CHANGES[name](model)

    def given(self) -> tiny.Inputs:
        """A prompt: another end, mask, padding or picture of an earlier one, or its next turn."""
        rng, special = self.rng, tiny.special_ids(self.plain.tiny_spec)
        if self.turns and rng.random() < 0.2:
            return dict(rng.choice(self.turns))
        given = {
            name: one.clone() if isinstance(one, Tensor) else one for name, one in rng.choice(self.prompts).items()
        }
        ids = given["input_ids"]
        for column in range(ids.shape[1] - 4, ids.shape[1]):
            if bool(torch.isin(ids[:, column], torch.tensor(special.text)).all()) and rng.random() < 0.5:
                ids[:, column] = rng.choice(special.text)
        kind = rng.random()
        if kind < 0.1:
            given.pop("attention_mask", None)
        elif kind < 0.25:
            width = rng.randrange(1, 4)
            for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                if name in given:
                    fill = special.pad if name == "input_ids" else 0
                    given[name] = nn.functional.pad(given[name], (width, 0), value=fill)
        elif kind < 0.35 and "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"] + 0.5
        return given

    def call(self) -> None:
        """One call of both models, or two at the same time."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.1:
            return self.call_in_threads()
        given, options = self.given(), self.options()
        if kind < 0.2:
            with interrupted(rng.randrange(1, 1500)):
                self.patched.generate(**given, **options)
            self.done.append("interrupted")
            self.counts["interrupts"] += 1
            return None
        arguments = [{**given, **options} for _ in range(2)]
        streamers = [Stopping(rng.randrange(6)) for _ in range(2)]
        streamers[1].number = streamers[0].number
        if kind < 0.35 and len(given["input_ids"]) == 1 and "num_return_sequences" not in options:
            for one, streamer in zip(arguments, streamers, strict=True):
                one["streamer"] = streamer
        elif kind < 0.5:
            for one in arguments:
                one[CACHE_ARGUMENT] = DynamicCache(config=self.plain.config.get_text_config())
        seed, outcomes = rng.randrange(1000), []
        for model, one in zip((self.plain, self.patched), arguments, strict=True):
            torch.manual_seed(seed)
            outcomes.append(fuzz._call(model, one, {}))
        self.compare(*outcomes, given["input_ids"].shape[1], options)
        if streamers[0].values != streamers[1].values:
            self.faults.append(f"{self.done}: streamed {streamers[0].values} became {streamers[1].values}")
        self.keep_turn(given, outcomes[0])
        return None

    def options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"max_new_tokens": rng.choice((1, 2, 6, 12)), "do_sample": rng.random() < 0.4}
        options["eos_token_id"] = rng.choice((None, None, 2))
        if options["do_sample"] and rng.random() < 0.3:
            options["num_return_sequences"] = 2
        return options | (RETURNS if rng.random() < 0.6 else {})

    def call_in_threads(self) -> None:
        """Two greedy calls at the same time: their tokens."""
        prompts = [self.given() for _ in range(2)]
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        plain = [self.plain.generate(**given, **options) for given in prompts]
        found: dict[int, Tensor] = {}

        def run(number: int) -> None:
            found[number] = self.patched.generate(**prompts[number], **options)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.done.append("threads")
        self.counts["calls"] += 2
        for number, expected in enumerate(plain):
            if number not in found or not torch.equal(found[number], expected):
                self.faults.append(f"{self.done}: thread {number}: {expected.tolist()} became {found.get(number)}")

    def compare(self, plain: fuzz.CallOutcome, patched: fuzz.CallOutcome, length: int, options: dict[str, Any]) -> None:
        stats = mmspec.stats(self.patched, last=True)
        self.done.append("call" if stats.fallback_reason is None else "fallback")
        self.counts += Counter(calls=1, fallbacks=stats.fallback_calls, reused=stats.reused_positions)
        found = fuzz.compare_outcomes(plain, patched, 0, fuzz.RECURRENT_TOLERANCE)
        if found and self.is_near_tie(plain, patched, length):
            self.counts["near-ties"] += 1
        elif found:
            reused = f"reused {stats.reused_positions}, {stats.fallback_reason}"
            self.faults += [f"{self.done} {options} ({reused}): {one.kind}: {one.detail}" for one in found]

    def is_near_tie(self, plain: fuzz.CallOutcome, patched: fuzz.CallOutcome, length: int) -> bool:
        """Whether greedy tokens differ first where two logits of the plain model are as good as equal."""
        logits = plain.tensors.get("logits")
        if logits is None or plain.sequences is None or patched.sequences is None:
            return False
        end = min(plain.sequences.shape[1], patched.sequences.shape[1])
        different = (plain.sequences[:, :end] != patched.sequences[:, :end]).nonzero().tolist()
        if not different:
            return False
        row, column = min(different, key=lambda place: place[1])
        best = logits[column - length][row].topk(2).values
        return bool(best[0] - best[1] < NEAR_TIE * best.abs().max().clamp(min=1))

    def keep_turn(self, given: tiny.Inputs, outcome: fuzz.CallOutcome) -> None:
        """Let a later prompt go on with the answer."""
        special = tiny.special_ids(self.plain.tiny_spec)
        if outcome.sequences is None or len(outcome.sequences) != len(given["input_ids"]):
            return
        media = [one for one in (special.image, special.video, special.pad) if one is not None]
        answer = outcome.sequences[:, given["input_ids"].shape[1] :]
        if bool(torch.isin(answer, torch.tensor(media)).any()):
            return
        more = torch.tensor([[self.rng.choice(special.text) for _ in range(3)]] * len(answer))
        ids = torch.cat([outcome.sequences, more], 1)
        turn = {**given, "input_ids": ids}
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in given:
                width = ids.shape[1] - given[name].shape[1]
                turn[name] = nn.functional.pad(given[name], (0, width), value=int(name == "attention_mask"))
        self.turns.append(turn)


def build_session(seed: int) -> Session:
    """The session of a seed, before its first call."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    plain = tiny.build_model(tiny.ModelSpec(family, seed=rng.randrange(20), layers=rng.choice((2, 3)), mixed=True))
    if importlib.util.find_spec("peft") is not None and rng.random() < 0.25:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        plain = get_peft_model(plain, config).get_base_model()
        plain.eval()
    patched = copy.deepcopy(plain)
    options: dict[str, Any] = {
        "reuse_prefix": rng.random() < 0.7,
        "backend": rng.choice(("auto", "auto", "torch", "c")),
    }
    try:
        mmspec.patch(patched, rng.choice(DRAFTERS), **options)
    except ValueError:  # `self` and `quantized` of models that they do not serve
        mmspec.patch(patched, "hybrid", **options)
    prompts = []
    for batch in (1, 1, 2):
        with suppress(ValueError):
            prompts.append(tiny.build_inputs(plain, rng.randrange(1000), batch, num_text_tokens=(24, 40)))
    return Session(rng, plain, patched, prompts)


def run_session(seed: int, num_calls: int = 10) -> Session:
    """All calls of a session; ends with its first fault."""
    session = build_session(seed)
    change_rate = session.rng.choice((0.05, 0.3, 0.6))
    for _ in range(num_calls):
        if session.rng.random() < change_rate:
            session.change()
        session.call()
        if session.faults:
            break
    mmspec.unpatch(session.patched)
    return session


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    total, num_faults = Counter[str](), 0
    for seed in range(options.first, options.first + options.count):
        session = run_session(seed, options.calls)
        total += session.counts
        num_faults += bool(session.faults)
        for fault in session.faults:
            print(f"session {seed} {type(session.plain).__name__}: {fault[:1500]}", flush=True)
    print(f"{options.count} sessions, {dict(total)}, {num_faults} with faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
