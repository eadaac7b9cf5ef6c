"""Public functions that patch a transformers model: `patch`, `unpatch`, `is_patched`, `stats`, `disabled`.

`patch` affects one instance: it replaces `model.generate` by a wrapper and changes nothing else, except a flash
attention kernel, which takes no mask per node. What the wrapper does is in `mmspec.generate`.
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
    DEPRECATED_OPTIONS,
    SpecConfig,
    rename_deprecated,
    resolve_compressor,
    resolve_drafter,
    resolve_tokenizer,
)
from mmspec.generate import DISABLED, PatchState
from mmspec.interfaces import Compressor, Drafter
from mmspec.metrics.stats import Stats
from mmspec.reference import reference_rows, resolve_reference_ids
from mmspec.targets.base import TREE_ATTENTION_KERNELS
from mmspec.targets.registry import UnsupportedModelError, find_adapter

logger = logging.getLogger("mmspec")

KEY = "_mmspec"
"""Attribute of a patched model that holds its `PatchState`."""


def patch_state(model: Any) -> PatchState:
    """The state of a patched model. Internal: for `compare` and the application."""
    state: PatchState = model.__dict__[KEY]
    return state


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    state = self.__dict__.get(KEY)
    if state is None:  # `model.generate` was bound before `unpatch`
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
    tree_size: int | None = None,
    deterministic: bool = False,
    cpu_pack_weights: bool | None = None,
    compile: bool | str = "auto",
    **deprecated: Any,
) -> Any:
    """Make `model.generate` speculative. The output stays the same, token for token. `unpatch` reverts it.

    Args:
        model: a vision-language or text model of transformers that decodes with a key-value cache, on any device. A
            small self-test decides whether it can be decoded in trees (`mmspec.targets.selftest`).
        drafter: `auto`, `none`, `lookup`, `recycling`, `hybrid`, the folder or hub id of a draft head, or an object
            that implements `mmspec.Drafter`.
        compressor: name (such as "pool:49") or object that reduces the visual tokens that the drafter reads, or None.
        processor: the model's processor or tokenizer. With it drafts avoid ids that the tokenizer does not have;
            `reference` needs it.
        reference: a text that the outputs may repeat (one for all rows, or one per row).
        reference_ids: the same as token ids, one list per row.
        tree_size: score trees of exactly this many nodes (1 to 64, root included), whatever that costs. By default a
            controller chooses in every round, so that decoding does not get slower than without drafts.
        deterministic: fix all shapes, so that half-precision runs are bit-identical on one machine.
        cpu_pack_weights: on a CPU, float32 linear layers run on whichever kernel is fastest in real calls. True: also
            on packed copies, at the cost of the layers' memory. False: leave all linear layers unchanged.
        compile: record the target's forward once for each shape and replay it. "auto": by CUDA graphs on a GPU, not on
            a CPU. True: on a CPU too, by `torch.compile`, which takes up to a minute per shape at first and a copy of
            the weights. False: never. Models or calls that cannot be recorded run as without it.
        deprecated: `nodes` and `packed`, the former names of `tree_size` and `cpu_pack_weights`.

    Returns:
        The same model.

    Raises:
        TypeError: not a model that can generate, or an argument of the wrong type.
        UnsupportedModelError: the self-test fails.
        ValueError: unknown drafter or compressor, another vocabulary, or already patched with other settings.
    """
    if deprecated:
        if unknown := sorted(set(deprecated) - set(DEPRECATED_OPTIONS)):
            raise TypeError(f"patch() got an unexpected keyword argument {unknown[0]!r}")
        current = {"tree_size": tree_size, "cpu_pack_weights": cpu_pack_weights}
        passed = {name: value for name, value in current.items() if value is not None}
        renamed = rename_deprecated(passed | deprecated, stacklevel=2)
        tree_size = renamed.get("tree_size")
        cpu_pack_weights = renamed.get("cpu_pack_weights")
    reference_ids = resolve_reference_ids(reference_ids)
    given = (drafter, compressor, processor, reference, reference_ids, tree_size, deterministic, cpu_pack_weights)
    spec = (*given, compile)
    adapter = find_adapter(model)
    if is_patched(model):
        if patch_state(model).spec == spec:
            logger.info("mmspec: the model is already patched with these settings")
            return model
        raise ValueError(
            f"this model is already patched (drafter {patch_state(model).config.drafter.name!r}); call "
            f"mmspec.unpatch(model) before patching it with drafter={getattr(drafter, 'name', drafter)!r}."
        )
    if "generate" in model.__dict__:
        raise ValueError(
            f"model.generate is replaced on this instance by {model.__dict__['generate']!r}, which patch would hide. "
            "Undo that first (del model.generate)."
        )
    tokenizer = resolve_tokenizer(processor)
    config = SpecConfig(
        drafter=resolve_drafter(drafter, adapter, tokenizer),
        compressor=resolve_compressor(compressor),
        reference=reference,
        reference_ids=reference_ids,
        tree_size=tree_size,
        deterministic=deterministic,
        cpu_pack_weights=cpu_pack_weights,
        compile=compile,
    )
    reference_rows(config.reference, config.reference_ids, tokenizer, batch=None, num_return_sequences=1)
    state = PatchState(adapter, config, spec, processor)
    if adapter.attention not in TREE_ATTENTION_KERNELS and "flash" in adapter.attention:
        state.original_attention = adapter.attention
        _set_text_attention(model, "sdpa")
        logger.info(
            "mmspec: text attention switched from %s to sdpa, which takes a mask per node", state.original_attention
        )
    _check_selftest(state)
    model.__dict__[KEY] = state
    wrapper = functools.wraps(type(model).generate)(_copy_of_generate())
    model.__dict__["generate"] = types.MethodType(wrapper, model)
    return model


def unpatch(model: Any) -> Any:
    """Restore the model's own `generate`. Does nothing to a model that is not patched. Returns the model."""
    if is_patched(model):
        state = model.__dict__.pop(KEY)
        del model.__dict__["generate"]
        if state.original_attention is not None:
            _set_text_attention(model, state.original_attention)
    return model


def is_patched(model: Any) -> bool:
    """Whether this instance is patched."""
    return KEY in getattr(model, "__dict__", {})


def stats(model: Any, last: bool = False) -> Stats:
    """A copy of the counters of all calls since `patch`, or of the last call.

    Raises:
        ValueError: the model is not patched.
    """
    if not is_patched(model):
        raise ValueError("mmspec.stats needs a patched model; call mmspec.patch(model) first.")
    state = patch_state(model)
    with state.lock:
        return copy.deepcopy(state.last if last else state.total)


@contextmanager
def disabled(model: Any = None) -> Iterator[None]:
    """Within the context, `generate` of all patched models (or of one) is transformers' own.

    Affects the current thread or asyncio task only.
    """
    disabled_ids = DISABLED.get()
    token = DISABLED.set(None if model is None or disabled_ids is None else disabled_ids | {id(model)})
    try:
        yield
    finally:
        DISABLED.reset(token)


def _check_selftest(state: PatchState) -> None:
    """Run the self-test where the model's state allows it; otherwise the first call does.

    Raises:
        UnsupportedModelError: it fails.
    """
    result = state.run_first_selftest()
    if result is None or not result.is_conclusive:
        return
    logger.info("mmspec: self-test %s", result.describe())
    if not result.passed:
        if state.original_attention is not None:
            _set_text_attention(state.model, state.original_attention)
        traits = "; ".join(f"{name}: {value}" for name, value in state.adapter.traits().items())
        raise UnsupportedModelError(
            f"{type(state.model).__name__} cannot be decoded in trees: the self-test found {result.failure} (largest "
            f"difference {result.max_difference:.1e} of the range of the logits). Traits: {traits}. Use plain "
            "model.generate, and please report this with the output of `mmspec env --model <model>`."
        )


def _copy_of_generate() -> Any:
    """A new function object per model, since `functools.wraps` sets attributes on it."""
    return types.FunctionType(_generate.__code__, _generate.__globals__, "generate")


def _set_text_attention(model: Any, kernel: str) -> None:
    text_config = model.config.get_text_config(decoder=True)
    sub_configs = model.config.sub_configs
    name = next((name for name in sub_configs if getattr(model.config, name, None) is text_config), None)
    model.set_attn_implementation(kernel if name is None else {name: kernel})
