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
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import fuzz
import session_inputs as inputs
import tiny_models as tiny
import torch
from interrupts import run_interrupted
from session_changes import CHANGES
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import mmspec
from mmspec.engine.revision import CAPTURING_CODE
from mmspec.engine.tree_cache import CACHE_ARGUMENT

FAMILIES = ("llama", "llava", "qwen2_5_vl", "gemma3", "qwen3_5", "smolvlm")
DRAFTERS = ("none", "lookup", "hybrid", "hybrid", "auto", "quantized", "self")
CALL_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"drafter": "lookup"}, {"drafter": "none"}, {"tree_size": 9}, {"backend": "torch"}, {"enabled": False}),
    *({"reuse_prefix": True}, {"reuse_prefix": "another"}),
)
"""Options of a single call."""
RETURNS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NEAR_TIE = 1e-4
"""Differences of two logits below which plain decoding itself depends on the order of sums."""

NUM_POINTS = 20000
"""Where calls are interrupted: among the first so many functions that mmspec enters, and returns of C."""


# --- one call ---------------------------------------------------------------------------------------------------------


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
        caches: what calls have returned.
    """

    rng: random.Random
    plain: PreTrainedModel
    patched: PreTrainedModel
    prompts: list[tiny.Inputs]
    done: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    turns: list[tiny.Inputs] = field(default_factory=list)
    caches: list[inputs.KeptCache] = field(default_factory=list)

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
            given = inputs.padded(given, (width, 0) if kind < 0.22 else (0, width), special.pad)
        elif kind < 0.35 and "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"] + 0.5
        elif kind > 0.85:
            given = inputs.VARIANTS[rng.choice(list(inputs.VARIANTS))](given, rng)
        return given

    def call(self) -> None:
        """One call of both models, or two at the same time."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.1:
            return self.call_in_threads()
        given, options = self.given(), self.options()
        if kind < 0.2:
            with suppress(Exception):
                run_interrupted(
                    lambda: self.patched.generate(**given, **options), rng.randrange(NUM_POINTS), files=["/mmspec/"]
                )
            self.done.append("interrupted")
            self.counts["interrupts"] += 1
            self.share_deltas()
            return self.compare_state()
        given, more, streamers = self.extras(kind, given, options)
        seed, outcomes = rng.randrange(1000), []
        for model, one in zip((self.plain, self.patched), more, strict=True):
            torch.manual_seed(seed)
            outcomes.append(fuzz._call(model, {**given, **options, **one}, {}))
        self.compare(outcomes, given, options, more[0])
        if streamers and streamers[0].values != streamers[1].values:
            self.faults.append(f"{self.done}: streamed {streamers[0].values} became {streamers[1].values}")
        self.compare_state()
        self.keep_turn(given, outcomes)
        return None

    def extras(
        self, kind: float, given: tiny.Inputs, options: dict[str, Any]
    ) -> tuple[tiny.Inputs, list[dict[str, Any]], list[inputs.Stopping]]:
        """The inputs, what each model is given besides them, and the streamers among that."""
        rng = self.rng
        more, streamers = [dict[str, Any]() for _ in range(2)], list[inputs.Stopping]()
        if kind < 0.35 and len(given["input_ids"]) == 1 and "num_return_sequences" not in options:
            number = rng.randrange(6)
            streamers = [inputs.Stopping(number) for _ in range(2)]
            more = [{"streamer": one} for one in streamers]
        elif kind < 0.42:
            more = [{CACHE_ARGUMENT: cache} for cache in inputs.new_caches(self.plain, rng)]
        elif kind < 0.52 and self.caches:
            given, caches = rng.choice(self.caches).next_call(tiny.special_ids(self.plain.tiny_spec).text, rng)
            options.pop("num_return_sequences", None)
            more = [{CACHE_ARGUMENT: cache} for cache in caches]
        elif kind < 0.6:
            more = inputs.user_code(rng, self.plain.config.get_text_config().vocab_size).arguments
        elif kind < 0.7:
            more[1]["mmspec"] = rng.choice(CALL_OPTIONS)
        return given, more, streamers

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

        def outcome(model: PreTrainedModel, given: tiny.Inputs) -> str:
            try:
                return str(model.generate(**given, **options).tolist())
            except Exception as error:
                return repr(error)

        plain = [outcome(self.plain, given) for given in prompts]
        found: dict[int, str] = {}

        def run(number: int) -> None:
            found[number] = outcome(self.patched, prompts[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.done.append("threads")
        self.counts["calls"] += 2
        self.share_deltas()
        for number, expected in enumerate(plain):
            if found.get(number) != expected:
                self.faults.append(f"{self.done}: thread {number}: {expected} became {found.get(number)}")
        self.compare_state()

    def share_deltas(self) -> None:
        """What a call leaves for the next one, where the models have not made the same calls in the same order."""
        if hasattr(self.plain.base_model, "rope_deltas"):
            self.patched.base_model.rope_deltas = copy.deepcopy(self.plain.base_model.rope_deltas)

    def compare(
        self, outcomes: list[fuzz.CallOutcome], given: tiny.Inputs, options: dict[str, Any], more: dict[str, Any]
    ) -> None:
        """The outcomes of the plain and of the patched model."""
        stats = mmspec.stats(self.patched, last=True)
        self.done.append("call" if stats.fallback_reason is None else "fallback")
        self.counts += Counter(calls=1, fallbacks=stats.fallback_calls, reused=stats.reused_positions)
        found = fuzz.compare_outcomes(*outcomes, 0, fuzz.RECURRENT_TOLERANCE)
        if found and self.is_near_tie(*outcomes, given["input_ids"].shape[1]):
            self.counts["near-ties"] += 1
        elif found and not more and self.is_rounding(found, outcomes, given, options):
            self.counts["rounding"] += 1
        elif found:
            reused = f"reused {stats.reused_positions}, {stats.fallback_reason}"
            self.faults += [f"{self.done} {options} ({reused}): {one.kind}: {one.detail}" for one in found]

    def is_rounding(
        self,
        found: list[fuzz.Difference],
        outcomes: list[fuzz.CallOutcome],
        given: tiny.Inputs,
        options: dict[str, Any],
    ) -> bool:
        """Whether logits alone differ, and about as much from double precision as the plain model's do."""
        if options["do_sample"] or not {one.kind for one in found} <= {"logits", "scores"}:
            return False
        exact = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
        reference = fuzz._call(copy.deepcopy(self.plain).double(), {**exact, **options}, {}).tensors["logits"]
        plain, patched = (
            [float((one - right).abs().max()) for one, right in zip(outcome.tensors["logits"], reference, strict=True)]
            for outcome in outcomes
        )
        return all(ours <= 4 * theirs + 1e-5 for ours, theirs in zip(patched, plain, strict=True))

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

    def compare_state(self) -> None:
        """What a call leaves in the modules and modes: the same names, hooks and functions as without `patch`."""
        for (name, plain), patched in zip(self.plain.named_modules(), self.patched.modules(), strict=True):
            left = {*vars(patched)} ^ {*vars(plain)} - {"_mmspec"}
            left -= {"_mmspec", "_output_capturing_hooks_installed", "rope_deltas"}
            hooks = [
                [one for one in module._forward_hooks.values() if one.__module__ != CAPTURING_CODE]
                for module in (plain, patched)
            ]
            if left or hooks[0] != hooks[1]:
                self.faults.append(f"{self.done}: {name}: {left} {hooks}")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self.faults.append(f"{self.done}: left in a mode of torch")

    def keep_turn(self, given: tiny.Inputs, outcomes: list[fuzz.CallOutcome]) -> None:
        """Let a later prompt go on with the answer, with its cache or without."""
        special, sequences = tiny.special_ids(self.plain.tiny_spec), outcomes[0].sequences
        if sequences is None or len(sequences) != len(given["input_ids"]):
            return
        media = [one for one in (special.image, special.video, special.pad) if one is not None]
        answer = sequences[:, given["input_ids"].shape[1] :]
        if bool(torch.isin(answer, torch.tensor(media)).any()):
            return
        more = torch.tensor([[self.rng.choice(special.text) for _ in range(3)]] * len(answer))
        if given.get("attention_mask") is None or given["attention_mask"].shape == given["input_ids"].shape:
            self.turns.append(inputs.lengthened(given, torch.cat([sequences, more], 1)))
            caches = [one.past_key_values for one in outcomes]
            if all(type(cache) is DynamicCache for cache in caches) and "position_ids" not in given:
                self.caches.append(inputs.KeptCache(inputs.lengthened(given, sequences), caches))


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
