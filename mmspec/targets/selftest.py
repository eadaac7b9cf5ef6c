"""Self-test of modules of unknown classes: do a token's logits depend on the other tokens of a forward?

Scores a small tree in one forward, and its paths token by token, and compares the logits. Random generators and the
state of the modules under test are restored.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmspec.engine.rng import RngGuard
from mmspec.engine.tree import DraftTree, root_only, sanitize
from mmspec.interfaces import VerifyResult
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import TOKEN_TYPE_INPUTS, HFTarget
from mmspec.targets.module_scan import describe_module

PARENTS = (-1, 0, 1, 2, 0, 4, 1, 6)
"""Parent of each node of the tree."""
PATHS = ((0, 1, 2, 3), (0, 4, 5), (0, 1, 6, 7))
"""Its paths from the root to a leaf."""
PROMPT_LENGTH = 12
"""Prompt tokens before the tree."""
TOLERANCE = 1e-4
"""Largest accepted difference of float32 logits, relative to their range."""
HALF_MEAN, HALF_MARGIN = 1, 4
"""Accepted in half precision, in units of its resolution relative to the range of the logits: mean difference of a
token's logits, and margin of a best token that becomes second."""
MAX_NAMED_MODULES = 3
"""Modules that a message names."""


def failure_reason(
    adapter: ModelAdapter, foreign: Sequence[nn.Module], model_kwargs: Mapping[str, Any], config: Any
) -> str | None:
    """Why a model with these modules must be decoded by transformers alone; None if the self-test passes.

    Args:
        adapter: of the model.
        foreign: modules under test.
        model_kwargs: model inputs that transformers prepared for a call; the test's inputs have the same form.
        config: the prepared generation config.
    """
    names = [describe_module(adapter.model, module) for module in foreign[:MAX_NAMED_MODULES]]
    names += [f"{len(foreign) - MAX_NAMED_MODULES} more"] * (len(foreign) > MAX_NAMED_MODULES)
    where = ", ".join(names)
    opaque = [name for module in foreign for name, value in vars(module).items() if _is_opaque(value)]
    if opaque:
        return f"{where}: holds an iterator or a generator ({opaque[0]}), which no test can restore"
    positions: Tensor = model_kwargs["position_ids"]
    rng_guard = RngGuard(positions.device, adapter.model.device)
    try:
        with rng_guard, _restore_state(foreign) as state_change:
            failure = _find_failure(adapter, model_kwargs, config)
            failure = state_change() or failure
    except Exception as error:  # user code may raise anything on unexpected inputs
        return f"{where}: fails the self-test ({type(error).__name__}: {error})"
    if rng_guard.rng_was_used:
        return f"{where}: a forward that draws random numbers"
    return None if failure is None else f"{where}: {failure}"


def modules_fingerprint(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Key of a self-test result: the modules, their classes, forwards and simple attributes."""
    simple_types = (bool, int, float, str, type(None))
    return tuple(
        (
            id(module),
            type(module),
            type(module).forward,
            *(type(weight) for weight in module._parameters.values()),
            *((name, value) for name, value in vars(module).items() if isinstance(value, simple_types)),
        )
        for module in modules
    )


def _find_failure(adapter: ModelAdapter, model_kwargs: Mapping[str, Any], config: Any) -> str | None:
    """Score the paths token by token, then the tree at once; the difference found, or None."""
    device = model_kwargs["position_ids"].device
    prompt_ids, node_ids = _token_ids(adapter, device)

    def prefilled_target() -> HFTarget:
        kwargs = _model_inputs(adapter, prompt_ids, model_kwargs)
        target = HFTarget(adapter, prompt_ids, kwargs, config, max_new_tokens=len(PARENTS), inference_mode=False)
        target.prefill()
        return target

    draftable = torch.ones(adapter.num_embeddings, dtype=torch.bool, device=device)
    expected = torch.empty(0)
    for path in PATHS:  # before the tree, so that state left by the tree cannot affect the expected logits
        target = prefilled_target()
        for node in path:
            root = sanitize(root_only(1, device), node_ids[:, node], draftable)
            logits = target.score(root)[0][0, 0].float()
            if not len(expected):
                expected = logits.new_full((len(PARENTS), len(logits)), torch.nan)
            if not expected[node].isnan().all() and not _equal_logits(expected[node], logits, target.model.dtype):
                return "a forward that is not repeatable"
            expected[node] = logits
            target.commit(_accept_root(root))
    target = prefilled_target()
    parents = torch.tensor([PARENTS], device=device)
    tree = DraftTree(node_ids, parents, torch.ones_like(parents, dtype=torch.bool))
    tree = sanitize(tree, node_ids[:, 0], draftable)
    first = target.score(tree)[0][0]
    second = target.score(tree)[0][0]
    if not _equal_logits(first.float(), second.float(), first.dtype):
        return "a forward that is not repeatable"
    if not _equal_logits(expected, first.float(), first.dtype):
        return "a forward whose logits depend on its other tokens"
    return None


def _equal_logits(expected: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits [..., V] are equal up to rounding. In half precision the best of two near-ties may differ."""
    value_range = expected.amax(-1, keepdim=True) - expected.amin(-1, keepdim=True)
    difference = (expected - found).abs() / value_range.clamp(min=torch.finfo(torch.float32).tiny)
    if bool(difference.isnan().any()):
        return bool((expected.isnan() == found.isnan()).all())
    if dtype not in (torch.float16, torch.bfloat16):
        return bool((difference <= TOLERANCE).all())
    resolution = torch.finfo(dtype).eps
    top = expected.topk(2, dim=-1).values
    margin = (top[..., 0] - top[..., 1]) / value_range[..., 0]
    flipped = (expected.argmax(-1) != found.argmax(-1)) & (margin > HALF_MARGIN * resolution)
    return not bool(flipped.any()) and bool((difference.mean(-1) <= HALF_MEAN * resolution).all())


def _token_ids(adapter: ModelAdapter, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompt [1, PROMPT_LENGTH] and tree tokens [1, N]: distinct ids of text tokens, the same in every run."""
    rng = torch.Generator().manual_seed(0)
    usable = [
        token
        for token in range(min(adapter.num_embeddings, adapter.vocab_size))
        if token not in adapter.media_token_ids
    ]
    order = torch.randperm(len(usable), generator=rng)[None, : PROMPT_LENGTH + len(PARENTS)]
    ids = torch.tensor(usable)[order].to(device)
    return ids[:, :PROMPT_LENGTH], ids[:, PROMPT_LENGTH:]


def _model_inputs(adapter: ModelAdapter, ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model inputs that transformers would prepare for a text-only prompt."""
    axes = model_kwargs["position_ids"].shape[:-2]
    position_ids = torch.arange(ids.shape[1], device=ids.device).expand(*axes, *ids.shape)
    inputs: dict[str, Any] = {
        "position_ids": position_ids,
        "attention_mask": torch.ones_like(ids),
        "past_key_values": DynamicCache(config=adapter.text_config),
    }
    inputs |= {name: torch.zeros_like(ids) for name in TOKEN_TYPE_INPUTS if name in model_kwargs}
    return inputs | {name: model_kwargs[name] for name in ("use_cache", "logits_to_keep") if name in model_kwargs}


def _accept_root(root: DraftTree) -> VerifyResult:
    """The result of verifying a root-only tree."""
    return VerifyResult(
        root, torch.zeros_like(root.tokens), torch.ones_like(root.tokens[:, 0]), root.tokens, [[0]], [[0]]
    )


@contextmanager
def _restore_state(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Restore attributes and buffers of modules and Python's random generators afterwards.

    Yields:
        A function that describes what has changed since, or returns None.
    """
    saved = [(module, _copy_state(module)) for module in modules]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()

    def state_change() -> str | None:
        numpy_changed = numpy is not None and repr(numpy.random.get_state()) != repr(numpy_state)
        if random.getstate() != python_state or numpy_changed:
            return "a forward that draws random numbers"
        stateful = any(not _equal(before, _copy_state(module)) for module, before in saved)
        return "a forward that keeps state for the next one" if stateful else None

    try:
        yield state_change
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, before in saved:
            _restore_module(module, before)


def _copy_state(module: nn.Module) -> dict[str, Any]:
    """A copy of a module's data attributes and buffers, without parameters and submodules."""
    describe_skipped = ("_modules", "_parameters", "_buffers")
    own = {name: value for name, value in module.__dict__.items() if name not in describe_skipped and _is_data(value)}
    state: dict[str, Any] = copy.deepcopy(own)
    state |= {f"_buffers.{name}": None if part is None else part.clone() for name, part in module._buffers.items()}
    return state


def _restore_module(module: nn.Module, before: Mapping[str, Any]) -> None:
    now = _copy_state(module)
    for name in set(now) - set(before):
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        container.pop(name.removeprefix("_buffers."), None)
    for name, value in before.items():
        if name in now and _equal(now[name], value):
            continue
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        name = name.removeprefix("_buffers.")
        if not _restore_in_place(container.get(name), value):
            container[name] = value


def _restore_in_place(current: Any, value: Any) -> bool:
    """Restore a value in the same object, which may be shared; False where that is not possible."""
    if type(current) is not type(value):
        return False
    if isinstance(value, Tensor) and current.shape == value.shape and current.dtype == value.dtype:
        with torch.no_grad():
            current.copy_(value)
        return True
    if isinstance(value, (list, deque)):
        current.clear()
        current.extend(value)
        return True
    if isinstance(value, (dict, set)):
        current.clear()
        current.update(value)
        return True
    return False


def _is_opaque(value: Any) -> bool:
    """Whether using a value changes it irreversibly."""
    return hasattr(value, "__next__") or isinstance(value, (torch.Generator, random.Random))


def _is_data(value: Any) -> bool:
    """Whether a value consists of plain data, without functions or objects of other classes."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_data(part) for part in value)
    if isinstance(value, Mapping):
        return all(_is_data(part) for part in value.values())
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Tensor))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one == other or one != one)
