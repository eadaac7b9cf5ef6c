"""Public functions that patch a transformers model: `patch`, `unpatch`, `is_patched`, `stats`, `disabled`.

`patch` affects one instance: it becomes one of a subclass with another `generate` (`mmspec.targets.patched_class`), and
nothing else changes, except a flash attention kernel, which takes no mask per node. What `generate` does is in
`mmspec.generate`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

from mmspec.config import PatchArguments, resolve_config, without_removed
from mmspec.engine.undo import undo_lost, undone
from mmspec.fallback import tensor_parallel_module
from mmspec.forks import note_threads
from mmspec.generate import DISABLED, PatchState
from mmspec.interfaces import Compressor, Drafter
from mmspec.messages import description_of
from mmspec.metrics.stats import Stats
from mmspec.reference import resolve_reference_ids
from mmspec.targets.base import TREE_ATTENTION_KERNELS
from mmspec.targets.capture_hooks import has_capture_hooks, remove_capture_hooks
from mmspec.targets.module_scan import callable_name
from mmspec.targets.patched_class import KEY, change_class, own_generate, restore_class, state_of
from mmspec.targets.quantised_copy import drop_copies
from mmspec.targets.registry import UnsupportedModelError, find_adapter, unwrap
from mmspec.user_code import check_trees

logger = logging.getLogger("mmspec")


def patch_state(model: Any) -> PatchState:
    """The state of a patched model. Internal: for `compare` and the application."""
    state: PatchState = unwrap(model).__dict__[KEY]
    return state


@undone
def patch(
    model: Any,
    drafter: str | PathLike[str] | Drafter = "auto",
    compressor: str | Compressor | None = None,
    processor: Any = None,
    *,
    reference: str | Sequence[str] | None = None,
    reference_ids: Sequence[Sequence[int]] | None = None,
    tree_size: int | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    reuse_prefix: bool | str = False,
    **removed: Any,
) -> Any:
    """Make `model.generate` speculative. The output stays the same, token for token. `unpatch` reverts it.

    Args:
        model: a vision-language or text model of transformers that decodes with a key-value cache, on any device. A
            small self-test decides whether it can be decoded in trees (`mmspec.targets.selftest`). Of a `PeftModel`
            the model inside is patched, which the wrapper's `generate` calls.
        drafter: `auto`, `none`, `lookup`, `recycling`, `hybrid`, `arbitrated`, `self`, `quantized` (a copy of the
            model in 4 or 8 bits, on a CPU), `mtp` and `assistant` (those that come with the model; `mtp:32768` with an
            LM head of so many ids), `msd` and `flash` (of the bundled scenes model only), the folder or hub id of a
            draft head or of a smaller model, such a model, or an object that implements `mmspec.Drafter`.
            `auto`: a head of this model's checkpoint, or one that was trained for it and is bundled or published and in
            the local cache, else `hybrid`, on a CPU with `quantized` once the copy pays.
        compressor: name (such as "pool:49") or object that reduces the visual tokens that the drafter reads, or None.
        processor: the model's processor or tokenizer. With it drafts avoid ids that the tokenizer does not have;
            `reference` needs it.
        reference: a text that the outputs may repeat (one for all rows, or one per row).
        reference_ids: the same as token ids, one list per row.
        tree_size: score trees of exactly this many nodes (1 to 64, root included). By default a controller chooses.
        deterministic: fix all shapes, so that half-precision runs are bit-identical on one machine.
        backend: who computes the rounds. "auto": on a CPU C, for the models and heads that it knows; on a GPU
            recordings, not with `deterministic` (no GPU has been tried yet); else torch. "torch": the model and
            the heads by torch's kernels alone, nothing recorded. "c": as "auto" on a CPU, with one warning for a call
            that C does not serve, which runs in torch. "recorded": on a GPU rounds and drafts of most heads are
            recorded once for each shape and replayed (CUDA graphs), with one warning for a call that cannot be, as
            on a CPU. The first replays are compared with plain runs; a difference ends recording.
        reuse_prefix: keep what a call has computed of its prompt (at most 1 GiB), and let a later call that begins with
            the same tokens and the same picture compute the rest only: another question about a picture, the next turn
            of a chat. A prompt read in two parts rounds differently, so in half precision near-ties of the top two
            logits may fall the other way. A text instead of True names a scope, also in the options of one call: calls
            of different scopes (users of a server) share nothing, so that time tells none of another's pictures.

    Returns:
        The same model.

    Raises:
        TypeError: not a model that can generate, or an argument that is unknown or of the wrong type.
        UnsupportedModelError: the self-test fails, or the weights are spread over ranks (tensor parallelism).
        ValueError: unknown drafter or compressor, another vocabulary, or already patched with other
            settings.
    """
    note_threads()
    if unknown := sorted(without_removed(removed)):
        raise TypeError(f"patch got an unexpected keyword argument {unknown[0]!r}.")
    arguments = PatchArguments(
        drafter,
        compressor,
        processor,
        reference,
        resolve_reference_ids(reference_ids),
        tree_size=tree_size,
        deterministic=deterministic,
        backend=backend,
        reuse_prefix=reuse_prefix,
    )
    adapter = find_adapter(unwrap(model))
    if (sharded := tensor_parallel_module(adapter.model)) is not None:
        raise UnsupportedModelError(
            f"mmspec.patch does not support tensor parallelism; the weights of {sharded} are DTensors. The ranks would "
            "score trees of different sizes, by the clock of each. Use plain model.generate, or load the model on one "
            "device."
        )
    if not _is_patched_with(adapter.model, arguments):
        config = resolve_config(arguments, adapter)
        check_trees(config.drafter, adapter.vocab_size, adapter.text_config.hidden_size)
        _install(PatchState(adapter, config, arguments))
    return model


def unpatch(model: Any) -> Any:
    """Restore the model's own `generate`. Does nothing to a model that is not patched. Returns the model.

    Code that wrapped `model.generate` since `patch` keeps its wrapper, which then calls the model's own.
    """
    undo_lost()
    if is_patched(model):
        patched = unwrap(model)
        state = patch_state(model)
        _restore(state)
        state.huge_pages.give_back(weight for weight in patched.parameters() if weight.is_cpu)
        drop_copies(state.adapter)
        patched.__dict__.pop(KEY, None)  # behind all that: what is interrupted can be called again
    return model


def is_patched(model: Any) -> bool:
    """Whether this instance is patched."""
    return state_of(unwrap(model)) is not None


def stats(model: Any, last: bool = False) -> Stats:
    """A copy of the counters of all calls since `patch`, or of the last call, and what the model says of itself.

    Raises:
        ValueError: the model is not patched.
    """
    if not is_patched(model):
        raise ValueError("mmspec.stats needs a patched model; call mmspec.patch(model) first.")
    state = patch_state(model)
    with state.lock:
        found = copy.deepcopy(state.last if last else state.total)
    found.description = description_of(unwrap(model).config)
    found.copied_weight_bytes = state.huge_pages.copied_bytes
    return found


@contextmanager
def disabled(model: Any = None) -> Iterator[None]:
    """Within the context, `generate` of all patched models (or of one) is transformers' own.

    Affects the current thread or asyncio task only.
    """
    disabled_ids = DISABLED.get()
    token = DISABLED.set(None if model is None or disabled_ids is None else disabled_ids | {id(unwrap(model))})
    try:
        yield
    finally:
        DISABLED.reset(token)


def _is_patched_with(model: Any, arguments: PatchArguments) -> bool:
    """Whether the model is patched with the same arguments.

    Raises:
        ValueError: it is patched with others, or its `generate` is replaced otherwise.
    """
    if is_patched(model):
        state = patch_state(model)
        if state.arguments == arguments:
            logger.info("mmspec: the model is already patched with these settings")
            return True
        raise ValueError(
            f"this model is already patched (drafter {state.config.drafter.name!r}); call mmspec.unpatch(model) before "
            f"patching it with drafter={getattr(arguments.drafter, 'name', arguments.drafter)!r}."
        )
    replaced = model.__dict__.get("generate")
    if replaced is not None and getattr(replaced, "__func__", None) not in (type(model).generate, own_generate(model)):
        raise ValueError(
            f"model.generate is replaced on this instance by {callable_name(replaced)}, which patch would hide. "
            "Undo that first (del model.generate)."
        )
    return False


def _install(state: PatchState) -> None:
    """Replace `generate` of the model, after the self-test, and a flash attention kernel."""
    model, kernel = state.model, state.adapter.attention
    state.had_capture_hooks = has_capture_hooks(model)
    try:
        if kernel not in TREE_ATTENTION_KERNELS and "flash" in kernel:
            state.original_attention = kernel
            _set_text_attention(model, "sdpa")
            logger.info("mmspec: text attention switched from %s to sdpa, which takes a mask per node", kernel)
        _check_selftest(state)
        model.__dict__.pop("generate", None)  # the class's own, bound, as PEFT leaves it
        change_class(model, state)
    finally:
        if not is_patched(model):
            _restore(state)


def _restore(state: PatchState) -> None:
    """Undo what `_install` has changed of the model."""
    restore_class(state.model)
    if not state.had_capture_hooks:
        remove_capture_hooks(state.model)
    if state.original_attention is not None:
        _set_text_attention(state.model, state.original_attention)


def _check_selftest(state: PatchState) -> None:
    """Run the self-test where the model's state allows it; otherwise the first call does.

    Raises:
        UnsupportedModelError: it fails.
    """
    if (reason := state.policy.standing_reason()) is not None:
        state.warn_fallback(reason)
    result = state.policy.run_first_selftest()
    if result is None or not result.is_conclusive:
        return
    logger.info("mmspec: self-test %s", result.describe())
    if not result.passed:
        traits = "; ".join(f"{name}: {value}" for name, value in state.adapter.traits().items())
        raise UnsupportedModelError(
            f"{type(state.model).__name__} cannot be decoded in trees: the self-test found {result.failure} (largest "
            f"difference {result.max_difference:.1e} of the range of the logits). Traits: {traits}. Use plain "
            "model.generate, and please report this with the output of `mmspec env --model <model>`."
        )


def _set_text_attention(model: Any, kernel: str) -> None:
    text_config = model.config.get_text_config(decoder=True)
    sub_configs = model.config.sub_configs
    name = next((name for name in sub_configs if getattr(model.config, name, None) is text_config), None)
    model.set_attn_implementation(kernel if name is None else {name: kernel})
