"""Tree self-test: does one forward over a tree give the logits of decoding its paths token by token?

The judge of every model, instead of a list of names. transformers decodes each path of a small tree with its own loop
(`GenerationMixin._sample`, forced along the path); then the target scores the same trees in one forward, accepts a
different path in each row, and scores on. All logits must agree up to rounding. The prompt is text, or one row with an
image where the processor is known and the model type is not among those tested with random calls. A draw from torch's
generators ends the test before it happens; the state of the modules under test is restored.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from mmspec.engine.draws import ForbidDraws
from mmspec.engine.revision import Revision
from mmspec.engine.tree import DraftTree, sanitize
from mmspec.forks import new_lock
from mmspec.interfaces import VerifyResult
from mmspec.targets.agreement import HALF_TYPES, Rounding, equal_logits, relative_difference
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import describe_module, has_library_class
from mmspec.targets.module_state import DRAWS_RANDOM_NUMBERS, is_opaque, restore_call_state, restore_state
from mmspec.targets.patched_class import own_generate, plain_class
from mmspec.targets.recurrent import target_class
from mmspec.targets.registry import TESTED
from mmspec.targets.selftest_plan import has_media, image_inputs, plan_of, text_inputs, usable_ids

MAX_NAMED_MODULES = 3
"""Modules that a message names."""
MAX_VERDICTS = 256
_VERDICTS: dict[tuple[Any, ...], SelfTestResult] = {}
_LOCK = new_lock()
NUM_PADDING = 3
SMOOTH = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""Modules of these compute in floats: quantised ones of transformers are among its integrations."""
"""Tokens of padding behind which a model's own rounding is measured."""
MAX_ATTEMPTS = 3
"""Runs of a test during which Python's or NumPy's generator moved, before a forward is held to draw from it."""


@dataclass(frozen=True)
class SelfTestResult:
    """Verdict of one self-test.

    Attributes:
        failure: what is wrong, or None.
        is_conclusive: whether both sides ran; False if the model rejected the test's inputs.
        max_difference: largest difference of logits found, relative to their range.
        with_image: whether the prompt had an image.
        num_forwards: forwards of the text model.
        seconds: duration.
    """

    failure: str | None = None
    is_conclusive: bool = True
    max_difference: float = 0.0
    with_image: bool = False
    num_forwards: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether trees can be scored exactly."""
        return self.failure is None

    def describe(self) -> str:
        """One line for messages and `mmspec env --model`."""
        inputs = "a row with an image" if self.with_image else "text"
        cost = f"{inputs}, {self.num_forwards} forwards in {self.seconds:.2f} s"
        if self.passed:
            return f"passed (largest difference {self.max_difference:.1e} of the range of the logits; {cost})"
        return f"{'failed' if self.is_conclusive else 'could not run'}: {self.failure} ({cost})"


def run_selftest(
    adapter: ModelAdapter, inputs: Mapping[str, Any] | None = None, foreign: Sequence[nn.Module] = ()
) -> SelfTestResult:
    """Compare one forward over a tree with transformers' own decoding of its paths.

    Args:
        adapter: of the model; nothing is changed.
        inputs: arguments of `generate` for the prompt; two text rows (`text_inputs`) if None.
        foreign: modules of unknown classes; the state of users' own ones is checked and restored.
    """
    for _ in range(MAX_ATTEMPTS):
        result = _run_once(adapter, inputs, foreign, ForbidDraws())
        if result.failure != DRAWS_RANDOM_NUMBERS:  # another thread may have drawn, a forward draws every time
            break
    if not result.is_conclusive:  # the model rejects the inputs, or what watches it: then a draw shows in the logits
        result = _run_once(adapter, inputs, foreign, None)
    return result


def _run_once(
    adapter: ModelAdapter, inputs: Mapping[str, Any] | None, foreign: Sequence[nn.Module], watch: ForbidDraws | None
) -> SelfTestResult:
    """See `run_selftest`; `watch` is active meanwhile."""
    start = time.perf_counter()
    inputs = text_inputs(adapter, plan_of(adapter).prompt_lengths) if inputs is None else dict(inputs)
    is_text = not adapter.media_token_ids or not has_media(adapter, inputs["input_ids"])
    test = _TreeTest(adapter, inputs, perturbs=not foreign and _is_smooth(adapter.model))
    watched = [module for module in foreign if not has_library_class(module)]
    try:
        with (
            watch or nullcontext(),
            restore_call_state(adapter.model),
            restore_state(watched) as state_change,
            torch.no_grad(),
            torch.autocast(inputs["input_ids"].device.type, enabled=False),  # of the model, whatever its caller does
        ):
            failure = test.run()
            # Modules of libraries draw from torch's generators if at all; other threads draw from Python's.
            failure = (state_change() if watched else None) or failure
    except Exception as error:  # the model may raise anything on unexpected inputs
        failure = f"{type(error).__name__}: {error}"
        test.is_conclusive = test.reference is not None
    if watch is not None and watch.has_drawn:
        failure, test.is_conclusive = DRAWS_RANDOM_NUMBERS, True
    seconds = time.perf_counter() - start
    return SelfTestResult(failure, test.is_conclusive, test.max_difference, not is_text, test.num_forwards, seconds)


def judge(adapter: ModelAdapter, processor: Any = None) -> SelfTestResult:
    """The verdict on a model, which depends on its class and config, not on its weights; found once per process.

    Args:
        adapter: of the model.
        processor: the model's processor or tokenizer; with a processor of images a row with an image is tested, unless
            the model type is among `TESTED`.
    """
    model = adapter.model
    with_image = hasattr(processor, "image_processor") and model.config.model_type not in TESTED
    device, config = model.device.type, model.config.to_json_string(use_diff=False)
    key = plain_class(model), config, model.dtype, device, adapter.attention, with_image
    with _LOCK:
        if key not in _VERDICTS:
            inputs = image_inputs(adapter, processor) if with_image else None
            result = run_selftest(adapter, inputs)
            if inputs is not None and not result.is_conclusive:
                result = run_selftest(adapter)
            if len(_VERDICTS) >= MAX_VERDICTS:
                _VERDICTS.pop(next(iter(_VERDICTS)))
            _VERDICTS[key] = result
        return _VERDICTS[key]


def foreign_failure(adapter: ModelAdapter, foreign: Sequence[nn.Module], inputs: Mapping[str, Any]) -> str | None:
    """Why a model with modules of unknown classes must be decoded by transformers alone, naming the modules; or None.

    Args:
        adapter: of the model.
        foreign: the modules under test.
        inputs: prompt for models that reject a prompt of text alone.
    """
    names = [describe_module(adapter.model, module) for module in foreign[:MAX_NAMED_MODULES]]
    names += [f"{len(foreign) - MAX_NAMED_MODULES} more"] * (len(foreign) > MAX_NAMED_MODULES)
    where = ", ".join(names)
    opaque = [name for module in foreign for name, value in vars(module).copy().items() if is_opaque(value)]
    if opaque:
        return f"{where}: holds an iterator or a generator ({opaque[0]}), which no test can restore"
    result = run_selftest(adapter, foreign=foreign)
    if not result.is_conclusive:
        result = run_selftest(adapter, inputs, foreign)
    return None if result.passed else f"{where}: {result.failure}"


def own_rounding(adapter: ModelAdapter, revision: Revision) -> Rounding:
    """What rounding in half precision does to a model (`_TreeTest.own_rounding`), found once for each revision."""
    model = adapter.model

    def measure() -> Rounding:
        test = _TreeTest(adapter, text_inputs(adapter, plan_of(adapter).prompt_lengths), perturbs=False)
        try:
            with restore_call_state(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
                return test.own_rounding()
        except Exception:  # whatever a model raises that rejects a prompt of text
            return Rounding()

    return revision.cached("rounding", measure) if model.dtype in HALF_TYPES else Rounding()


class _ForcedPaths(LogitsProcessor):
    """Makes transformers' loop emit given tokens."""

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """-inf everywhere but at the next token of each row's path."""
        step = input_ids.shape[1] - self.prompt_length
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, self.tokens[:, step : step + 1].to(scores.device), 0.0)


def _change_last_bits(thread: int, module: nn.Module, args: Any, embedded: Tensor) -> Tensor | None:
    """A forward hook, in this thread alone: one number of 16 a step of its type larger."""
    if threading.get_ident() != thread:
        return None
    factors = torch.ones(embedded.shape[-1], device=embedded.device)
    factors[::16] += torch.finfo(embedded.dtype).eps
    return (embedded.float() * factors).to(embedded.dtype)


def _is_smooth(model: nn.Module) -> bool:
    """Whether no module may round what it reads in coarse steps, as quantisers do, on which last bits act at random."""
    return all(type(module).__module__.startswith(SMOOTH) for module in model.modules())


class _TreeTest:
    """One comparison. Attributes are results so far, also where an exception ends it."""

    def __init__(self, adapter: ModelAdapter, inputs: Mapping[str, Any], perturbs: bool) -> None:
        self.adapter = adapter
        self.inputs = inputs
        self.perturbs = perturbs  # whether what other last bits change counts as rounding
        self.plan = plan_of(adapter)
        self.num_rows: int = inputs["input_ids"].shape[0]
        device = inputs["input_ids"].device
        usable = torch.tensor(usable_ids(adapter), device=device)
        order = torch.arange(self.num_rows * self.plan.num_tokens, device=device) * 7919 % len(usable)
        self.node_ids = usable[order].view(self.num_rows, -1)  # [R, T]
        self.draftable = torch.ones(adapter.num_embeddings, dtype=torch.bool, device=device)
        self.reference: Tensor | None = None  # [R, P, S, V]
        self.max_difference = 0.0
        self.num_forwards = 0
        self.is_conclusive = True
        self.rounding: Rounding | None = None

    def run(self) -> str | None:
        """The failure found, or None."""
        self.reference = self._decode(self.inputs)
        failure: str | None = self._generate(self._score_trees, 1, self.inputs)
        return failure

    def own_rounding(self) -> Rounding:
        """What rounding in half precision does to the model: transformers' own loop, and the same behind padding; with
        smooth modules alone, also with other last bits in what is embedded.

        A module that depends on the other tokens of its forward, as the test is to find, depends on the ids of the
        padding in the prompt's: where two kinds of padding do not give the same bits, that is not held for rounding.
        """
        if self.rounding is None:
            reference = self.reference if self.reference is not None else self._decode(self.inputs)
            padded, other = (self._decode(self._padded(self.node_ids[:, node : node + 1])) for node in (0, 1))
            is_same = torch.equal(padded, other)
            self.rounding = Rounding.between(reference, padded) if is_same else Rounding()
            if is_same and self.perturbs:
                hook = partial(_change_last_bits, threading.get_ident())
                with self.adapter.model.get_input_embeddings().register_forward_hook(hook):
                    changed = self._decode(self.inputs)
                self.rounding = self.rounding.widened(Rounding.typical(reference, changed))
        return self.rounding

    def _padded(self, tokens: Tensor) -> dict[str, Any]:
        """The inputs behind padding of these ids [R, 1]."""
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        padding = tokens.expand(-1, NUM_PADDING)
        padded = torch.cat([padding, ids], 1), torch.cat([torch.zeros_like(padding).to(mask.dtype), mask], 1)
        return {**self.inputs, "input_ids": padded[0], "attention_mask": padded[1]}

    def _decode(self, inputs: Mapping[str, Any]) -> Tensor:
        """See `_decode_paths`; behind the prompts of these inputs."""
        logits: Tensor = self._generate(self._decode_paths, len(self.plan.paths), inputs)
        return logits

    def _generate(self, loop: Any, num_return_sequences: int, inputs: Mapping[str, Any]) -> Any:
        """Result of `loop(input_ids, config, model_kwargs)` on inputs that transformers has prepared."""
        model = self.adapter.model
        defaults = GenerationConfig._get_default_generation_params()
        defaults.pop("max_length", None)
        changed = {"do_sample": num_return_sequences > 1, "max_new_tokens": self.plan.num_steps, "use_cache": True}
        changed |= {"num_return_sequences": num_return_sequences, "pad_token_id": int(self.node_ids[0, 0])}
        config = GenerationConfig(**{**defaults, **changed})

        def custom_generate(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            prepared = copy.copy(generation_config)
            prepared.do_sample, prepared.return_dict_in_generate = False, True
            prepared.output_logits, prepared.output_scores = True, False
            return loop(input_ids, prepared, model_kwargs)

        return own_generate(model)(model, **inputs, generation_config=config, custom_generate=custom_generate)

    def _decode_paths(self, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> Tensor:
        """[R, P, S, V] float32 logits of transformers' own loop along each path of each row."""
        length, num_steps = input_ids.shape[1], self.plan.num_steps
        steps = [[*path, *[path[-1]] * (num_steps - len(path))] for path in self.plan.paths]
        paths = torch.tensor(steps, device=self.node_ids.device)
        tokens = self.node_ids[:, paths].flatten(0, 1)
        model = self.adapter.model
        output = type(model)._sample(
            model,
            input_ids,
            logits_processor=LogitsProcessorList([_ForcedPaths(tokens, length)]),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(length + num_steps)]),
            generation_config=config,
            **model_kwargs,
        )
        self.num_forwards += num_steps
        logits = torch.stack([logits.float() for logits in output.logits], 1)
        return logits.view(self.num_rows, len(paths), num_steps, -1)

    def _score_trees(self, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> str | None:
        """Score the first tree twice, accept a path in each row, score what follows it."""
        assert self.reference is not None
        if model_kwargs.get("position_ids") is None:
            return "a model without position ids"
        plan, rows = self.plan, range(self.num_rows)
        target = target_class(self.adapter)(
            self.adapter, input_ids, model_kwargs, config, max_new_tokens=16, inference_mode=False
        )
        prompt_logits, _ = target.prefill()
        agreed = [self._agrees(self.reference[:, 0, 0], prompt_logits)]
        tree = self._build_tree([range(len(plan.parents))] * self.num_rows, plan.parents)
        first = target.score(tree)[0].float()
        target.crop([0] * self.num_rows)
        second = target.score(tree)[0].float()
        self.num_forwards += 4
        if not self._agrees(first, second):
            return "a forward that is not repeatable"
        for index, path in enumerate(plan.paths):
            for step, node in enumerate(path):
                if node < len(plan.parents):
                    agreed.append(self._agrees(self.reference[:, index, step + 1], first[:, node]))
        target.commit(self._accept(tree))
        following = [plan.following[row % len(plan.following)] for row in rows]
        logits = target.score(self._build_tree(following, tuple(range(-1, len(following[0]) - 1))))[0]
        expected = [torch.stack([self._reference_of(row, node) for node in following[row]]) for row in rows]
        agreed.append(self._agrees(torch.stack(expected), logits))
        return None if all(agreed) else "a forward whose logits depend on its other tokens"

    def _build_tree(self, nodes: Sequence[Sequence[int]], parents: Sequence[int]) -> DraftTree:
        """The tree of the same shape in each row, of the tokens of `nodes`."""
        device = self.node_ids.device
        tokens = self.node_ids.gather(1, torch.tensor([list(row) for row in nodes], device=device))
        all_parents = torch.tensor([list(parents)] * self.num_rows, device=device)
        tree = DraftTree(tokens, all_parents, torch.ones_like(all_parents, dtype=torch.bool))
        return sanitize(tree, tokens[:, 0], self.draftable)

    def _reference_of(self, row: int, node: int) -> Tensor:
        """[V] logits of a node of a row."""
        assert self.reference is not None
        index = next(index for index, path in enumerate(self.plan.paths) if node in path)
        return self.reference[row, index, self.plan.paths[index].index(node) + 1]

    def _accept(self, tree: DraftTree) -> VerifyResult:
        """The result of accepting the plan's path in each row."""
        accepted = [list(self.plan.accepted[row % len(self.plan.accepted)]) for row in range(self.num_rows)]
        device = tree.tokens.device
        path = torch.tensor([row + [0] * (tree.num_nodes - len(row)) for row in accepted], device=device)
        counts = torch.tensor([len(row) for row in accepted], device=device)
        return VerifyResult(tree, path, counts, tree.tokens.gather(1, path), [list(row) for row in accepted], accepted)

    def _agrees(self, expected: Tensor, found: Tensor) -> bool:
        found = found.to(expected.device, torch.float32)
        difference = relative_difference(expected, found)
        if not bool(difference.isnan().any()):
            self.max_difference = max(self.max_difference, float(difference.max()))
        return equal_logits(expected, found, self.adapter.model.dtype, self.own_rounding)
