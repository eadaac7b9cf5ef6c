"""Finds out whether modules of unknown kind give a token the same logits whatever else is in the forward.

One small tree is scored in one forward and its paths token by token. Nothing of it stays: the generators and the state
of the modules in question are put back.
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
PATHS = ((0, 1, 2, 3), (0, 4, 5), (0, 1, 6, 7))
PROMPT = 12
"""Tokens of the prompt before the tree."""
TOLERANCE = 1e-4
"""Largest difference of logits, as a share of their spread, in float32."""
HALF_MEAN, HALF_MARGIN = 1, 4
"""In half precision, in units of its resolution: the largest mean difference of a token's logits, and the largest
margin of a best token that another one replaces."""
NAMED = 3
"""Modules that a message names."""


def failure_reason(
    family: ModelAdapter, foreign: Sequence[nn.Module], model_kwargs: Mapping[str, Any], config: Any
) -> str | None:
    """Why a model with these modules must be decoded by transformers alone; None if the self-test passes.

    Args:
        foreign: modules that the test is about. model_kwargs, config: what transformers prepared for a call, of which
            the form of the inputs is taken.
    """
    names = [describe_module(family.model, module) for module in foreign[:NAMED]]
    names += [f"{len(foreign) - NAMED} more"] * (len(foreign) > NAMED)
    where = ", ".join(names)
    opaque = [name for module in foreign for name, value in vars(module).items() if _is_opaque(value)]
    if opaque:
        return f"{where}: holds an iterator or a generator ({opaque[0]}), which no test can put back"
    positions: Tensor = model_kwargs["position_ids"]
    undo = RngGuard(positions.device, family.model.device)
    try:
        with undo, _restored(foreign) as changed:
            fault = _find_failure(family, model_kwargs, config)
            fault = changed() or fault
    except Exception as error:  # user code may raise anything on inputs that it does not expect
        return f"{where}: fails the self-test ({type(error).__name__}: {error})"
    if undo.rng_was_used:
        return f"{where}: a forward that draws random numbers"
    return None if fault is None else f"{where}: {fault}"


def modules_fingerprint(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """What a result of the self-test holds for: these modules, their code, and their settings."""
    simple = (bool, int, float, str, type(None))
    return tuple(
        (
            id(module),
            type(module),
            type(module).forward,
            *(type(weight) for weight in module._parameters.values()),
            *((name, value) for name, value in vars(module).items() if isinstance(value, simple)),
        )
        for module in modules
    )


def _find_failure(family: ModelAdapter, model_kwargs: Mapping[str, Any], config: Any) -> str | None:
    device = model_kwargs["position_ids"].device
    ids, tokens = _ids(family, device)

    def target() -> HFTarget:
        kwargs = _inputs(family, ids, model_kwargs)
        return HFTarget(family, ids, kwargs, config, max_new_tokens=len(PARENTS), inference_mode=False)

    allowed = torch.ones(family.num_embeddings, dtype=torch.bool, device=device)
    apart = torch.empty(0)
    for path in PATHS:  # before the tree, so that nothing that it leaves behind is taken for the truth
        one = target()
        one.prefill()
        for node in path:
            root = sanitize(root_only(1, device), tokens[:, node], allowed)
            logits = one.score(root)[0][0, 0].float()
            if not len(apart):
                apart = logits.new_full((len(PARENTS), len(logits)), torch.nan)
            if not apart[node].isnan().all() and not _same(apart[node], logits, one.model.dtype):
                return "a forward that gives something else the next time"
            apart[node] = logits
            one.commit(_step(root))
    whole = target()
    whole.prefill()
    parents = torch.tensor([PARENTS], device=device)
    tree = sanitize(DraftTree(tokens, parents, torch.ones_like(parents, dtype=torch.bool)), tokens[:, 0], allowed)
    scored = whole.score(tree)[0][0]
    together, again = scored.float(), whole.score(tree)[0][0].float()
    if not _same(together, again, scored.dtype):
        return "a forward that gives something else the next time"
    if not _same(apart, together, scored.dtype):
        return "a forward that depends on what else is in it"
    return None


def _same(wanted: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits [..., V] differ by rounding only. In half precision near-ties may change the best token."""
    spread = wanted.amax(-1, keepdim=True) - wanted.amin(-1, keepdim=True)
    difference = (wanted - found).abs() / spread.clamp(min=torch.finfo(torch.float32).tiny)
    if bool(difference.isnan().any()):
        return bool((wanted.isnan() == found.isnan()).all())
    if dtype not in (torch.float16, torch.bfloat16):
        return bool((difference <= TOLERANCE).all())
    resolution = torch.finfo(dtype).eps
    best = wanted.topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]) / spread[..., 0]
    flipped = (wanted.argmax(-1) != found.argmax(-1)) & (margin > HALF_MARGIN * resolution)
    return not bool(flipped.any()) and bool((difference.mean(-1) <= HALF_MEAN * resolution).all())


def _ids(family: ModelAdapter, device: torch.device) -> tuple[Tensor, Tensor]:
    """A prompt [1, PROMPT] and the tokens [1, N] of the tree: ordinary ids, all different, the same in every run."""
    rng = torch.Generator().manual_seed(0)
    usable = [
        token for token in range(min(family.num_embeddings, family.vocab_size)) if token not in family.media_token_ids
    ]
    chosen = torch.randperm(len(usable), generator=rng)[None, : PROMPT + len(PARENTS)]
    ids = torch.tensor(usable)[chosen].to(device)
    return ids[:, :PROMPT], ids[:, PROMPT:]


def _inputs(family: ModelAdapter, ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers would have prepared for a prompt of text alone."""
    axes = model_kwargs["position_ids"].shape[:-2]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(*axes, *ids.shape)
    made: dict[str, Any] = {
        "position_ids": positions,
        "attention_mask": torch.ones_like(ids),
        "past_key_values": DynamicCache(config=family.text_config),
    }
    made |= {name: torch.zeros_like(ids) for name in TOKEN_TYPE_INPUTS if name in model_kwargs}
    return made | {name: model_kwargs[name] for name in ("use_cache", "logits_to_keep") if name in model_kwargs}


def _step(root: DraftTree) -> VerifyResult:
    """A verdict that walks the root and nothing else."""
    return VerifyResult(
        root, torch.zeros_like(root.tokens), torch.ones_like(root.tokens[:, 0]), root.tokens, [[0]], [[0]]
    )


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Puts attributes and buffers of modules and Python's generators back; gives a function that says what changed."""
    saved = [(module, _state(module)) for module in modules]
    numpy = sys.modules.get("numpy")
    drawn, numbers = random.getstate(), None if numpy is None else numpy.random.get_state()

    def changed() -> str | None:
        if random.getstate() != drawn or (numpy is not None and repr(numpy.random.get_state()) != repr(numbers)):
            return "a forward that draws random numbers"
        kept = any(not _equal(before, _state(module)) for module, before in saved)
        return "a forward that keeps state for the next one" if kept else None

    try:
        yield changed
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(numbers)
        for module, before in saved:
            _put_back(module, before)


def _state(module: nn.Module) -> dict[str, Any]:
    """A copy of everything a module may write to but its weights and its submodules."""
    describe_skipped = ("_modules", "_parameters", "_buffers")
    own = {name: value for name, value in module.__dict__.items() if name not in describe_skipped and _is_data(value)}
    state: dict[str, Any] = copy.deepcopy(own)
    state |= {f"_buffers.{name}": None if part is None else part.clone() for name, part in module._buffers.items()}
    return state


def _put_back(module: nn.Module, before: Mapping[str, Any]) -> None:
    now = _state(module)
    for name in set(now) - set(before):
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        container.pop(name.removeprefix("_buffers."), None)
    for name, value in before.items():
        if name in now and _equal(now[name], value):
            continue
        container = module._buffers if name.startswith("_buffers.") else module.__dict__
        name = name.removeprefix("_buffers.")
        if not _refilled(container.get(name), value):
            container[name] = value


def _refilled(current: Any, value: Any) -> bool:
    """Put a value back into the same object, which others may hold too; False where that is not possible."""
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
    """Whether using a value changes it in a way that cannot be undone."""
    return hasattr(value, "__next__") or isinstance(value, (torch.Generator, random.Random))


def _is_data(value: Any) -> bool:
    """Whether a value is data through and through, not a function, a config or another object of code."""
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
