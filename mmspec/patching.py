"""Turns a transformers model into a sped-up one and back: the public calls.

`patch` touches one instance: it replaces `model.generate` by a wrapper and leaves everything else alone. What the
wrapper does is in `calls`.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmspec.config import (
    SpecConfig,
    checked_reference_ids,
    checked_tokenizer,
    reference_rows,
    resolve_compressor,
    resolve_drafter,
)
from mmspec.generate import DISABLED, PatchState
from mmspec.interfaces import Compressor, Drafter
from mmspec.metrics.stats import Stats
from mmspec.targets.hf import TREE_ATTENTION_KERNELS
from mmspec.targets.registry import find_adapter

logger = logging.getLogger("mmspec")

KEY = "_mmspec"


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    state = self.__dict__.get(KEY)
    if state is None:  # `model.generate` was taken before `unpatch`
        kwargs.pop("mmspec", None)
        return type(self).generate(self, *args, **kwargs)
    return state.generate(*args, **kwargs)


def patch(
    model: Any,
    drafter: str | Drafter = "auto",
    compressor: str | Compressor | None = None,
    processor: Any = None,
    *,
    reference: str | Sequence[str] | None = None,
    reference_ids: Sequence[Sequence[int]] | None = None,
    nodes: int | None = None,
    deterministic: bool = False,
    packed: bool | None = None,
) -> Any:
    """Speed up `model.generate`, leaving its output as it is, token for token. Undone by `unpatch`.

    Args:
        model: a vision-language model of transformers, of a supported family, on any device.
        drafter: `auto`, `none`, `lookup`, `recycling`, `hybrid`, the folder of a trained drafter (`mmspec train`), or an
            object with the `Drafter` protocol.
        compressor: what shows the drafter fewer visual tokens, or None.
        processor: the model's processor (or tokenizer); lets drafts avoid ids that the tokenizer does not have, and
            is needed for `reference`.
        reference: a text that the answers may resemble (one for all rows, or one per row). reference_ids: the same
            as token ids, one list per row.
        nodes: score trees of just this many nodes (1 to 64, the root counted), whatever that costs; by default a
            controller chooses every round, so that nothing becomes slower than plain decoding.
        deterministic: fix all shapes, so that a run in half precision repeats itself bit for bit on one machine.
        packed: on a CPU, float32 linear layers are computed in whichever way real calls show to be fastest. True: also
            from copies in the kernel's own order, which cost the memory of the layers once more. False: leave all
            linear layers as they are.

    Returns:
        The same model.

    Raises:
        TypeError: not a model that can generate, or an argument of another type. UnsupportedModelError: no adapter for
            its family.
        ValueError: unknown drafter or compressor, another vocabulary, or patched already with other settings.
    """
    reference_ids = checked_reference_ids(reference_ids)
    spec = (drafter, compressor, processor, reference, reference_ids, nodes, deterministic, packed)
    family = find_adapter(model)
    if is_patched(model):
        if model.__dict__[KEY].spec == spec:
            logger.info("mmspec: the model is patched with these settings already")
            return model
        old = model.__dict__[KEY].options.drafter.name
        raise ValueError(
            f"this model is already patched (drafter {old!r}); call mmspec.unpatch(model) before patching it with "
            f"drafter={getattr(drafter, 'name', drafter)!r}."
        )
    if "generate" in model.__dict__:
        raise ValueError(
            f"model.generate was replaced on this instance by {model.__dict__['generate']!r}; mmspec would hide it. "
            "Undo that first (del model.generate)."
        )
    tokenizer = checked_tokenizer(processor)
    options = SpecConfig(
        resolve_drafter(drafter, family, tokenizer),
        resolve_compressor(compressor),
        reference,
        reference_ids,
        nodes,
        deterministic,
        packed,
    )
    reference_rows(options, tokenizer, batch=None, num_return_sequences=1)
    state = PatchState(family, options, spec, processor)
    if family.attention not in TREE_ATTENTION_KERNELS and "flash" in family.attention:
        state.original_attention = family.attention
        _set_attention(model, "sdpa")
        logger.info(
            "mmspec: text attention switched from %s to sdpa, which takes a mask per node", state.original_attention
        )
    model.__dict__[KEY] = state
    wrapper = functools.wraps(type(model).generate)(_generate_of_class())
    model.__dict__["generate"] = types.MethodType(wrapper, model)
    return model


def unpatch(model: Any) -> Any:
    """Give the model its own `generate` back. Does nothing to a model that is not patched."""
    if is_patched(model):
        state = model.__dict__.pop(KEY)
        del model.__dict__["generate"]
        if state.original_attention is not None:
            _set_attention(model, state.original_attention)
    return model


def is_patched(model: Any) -> bool:
    """Whether `patch` is in force on this instance."""
    return KEY in getattr(model, "__dict__", {})


def stats(model: Any, last: bool = False) -> Stats:
    """What happened since `patch`, or in the last call.

    Raises:
        ValueError: the model is not patched.
    """
    if not is_patched(model):
        raise ValueError("mmspec.stats needs a patched model; call mmspec.patch(model) first.")
    state = model.__dict__[KEY]
    with state.lock:
        return copy.deepcopy(state.last if last else state.total)


@contextmanager
def disabled(model: Any = None) -> Iterator[None]:
    """Within it, `generate` of all patched models (or of one) is transformers' own, in this thread or task only."""
    old = DISABLED.get()
    token = DISABLED.set(None if model is None or old is None else old | {id(model)})
    try:
        yield
    finally:
        DISABLED.reset(token)


def _generate_of_class() -> Any:
    """A fresh function each time, since `functools.wraps` writes on it."""
    return types.FunctionType(_generate.__code__, _generate.__globals__, "generate")


def _set_attention(model: Any, kernel: str) -> None:
    text = model.config.get_text_config(decoder=True)
    name = next((n for n in model.config.sub_configs if getattr(model.config, n, None) is text), None)
    model.set_attn_implementation(kernel if name is None else {name: kernel})
