"""Options of `patch` and of single calls, and their validation. Never modifies a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mmspec.economy.chooser import DEFAULT_TREE_SIZE
from mmspec.engine.tree import BUCKETS
from mmspec.interfaces import Compressor, Drafter, Observer
from mmspec.reference import encode_reference, resolve_reference_ids
from mmspec.resolve import DrafterCache, check_compressor, own_compressor, resolve_compressor, resolve_drafter

logger = logging.getLogger("mmspec")

BACKEND_NAMES = ("auto", "torch", "c", "recorded")
"""Values of the option `backend`: who computes the rounds of a call."""
REMOVED_OPTIONS = {"learn": "n-grams of all outputs are counted without it"}
"""{option of earlier versions: what to know}."""


@dataclass(frozen=True)
class SpecConfig:
    """Options that hold for one call.

    Attributes:
        drafter: source of draft trees.
        compressor: reduces the visual tokens that the drafter reads; None for the drafter's own, if it has one.
        reference_ids: token ids of texts that outputs may repeat, one list for all prompts or one per prompt.
        tree_size: score trees of exactly this many nodes, root included; None lets the controller choose.
        deterministic: fix all shapes, so that half-precision runs are bit-identical on one machine.
        backend: who computes the rounds, of `BACKEND_NAMES`. "torch": eager, model and heads in torch; "c": C,
            on a CPU; "recorded": CUDA graphs, on a GPU; "auto": C on a CPU, recorded on a GPU, and torch for models and
            calls that neither serves.
        reuse_prefix: what calls have computed of their prompts serves later calls that begin alike; a text names a
            scope, calls of other scopes share nothing with it.
        observers: functions of an `ObservedRound` that listen to the rounds of the call.
    """

    drafter: Drafter
    compressor: Compressor | None = None
    reference_ids: Sequence[Sequence[int]] | None = None
    tree_size: int | None = None
    deterministic: bool = False
    backend: str = "auto"
    reuse_prefix: bool | str = False
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        _check_backend(self.backend)
        if not isinstance(self.deterministic, bool):
            raise TypeError(
                f"deterministic must be True (fixed shapes) or False; got {self.deterministic!r}. Pass a bool."
            )
        if not isinstance(self.reuse_prefix, (bool, str)):
            raise TypeError(
                f"reuse_prefix must be True, False or the name of a scope; got {self.reuse_prefix!r}. Pass a bool."
            )
        _check_observers(self.observers)
        _check_tree_size(self.tree_size)
        if self.compressor is not None:
            check_compressor(self.compressor, self.drafter)

    @property
    def may_use_c(self) -> bool:
        """Whether C may compute forwards and drafts, on a CPU."""
        return self.backend in ("auto", "c")

    @property
    def fixed_tree_size(self) -> int | None:
        """Size of every tree, if timing must not choose it; else None."""
        return self.tree_size or (DEFAULT_TREE_SIZE if self.deterministic else None)

    @property
    def active_compressor(self) -> Compressor | None:
        """The chosen compressor, else the drafter's own, else None."""
        return own_compressor(self.drafter) if self.compressor is None else self.compressor


PER_CALL_OPTIONS = ("enabled", *(option.name for option in fields(SpecConfig)), "reference")
"""Keys of `generate(..., mmspec=dict(...))`."""


@dataclass(frozen=True)
class PatchArguments:
    """The arguments of `patch` under their current names. Equal ones need no second `patch`.

    Attributes: see `mmspec.patch`.
    """

    drafter: str | os.PathLike[str] | Drafter
    compressor: str | Compressor | None
    processor: Any
    reference: str | Sequence[str] | None
    reference_ids: Sequence[Sequence[int]] | None
    tree_size: int | None
    deterministic: bool
    backend: str
    reuse_prefix: bool | str = False


def _check_backend(backend: object) -> None:
    """Refuse what is no value of the option `backend`.

    Raises:
        TypeError: no text.
        ValueError: another text.
    """
    if backend not in BACKEND_NAMES:
        kind = ValueError if isinstance(backend, str) else TypeError
        raise kind(f"backend must be one of {', '.join(map(repr, BACKEND_NAMES))}; got {backend!r}.")


def _check_observers(observers: object) -> None:
    """Refuse what is no sequence of functions.

    Raises:
        TypeError: it is none.
    """
    if not (isinstance(observers, (list, tuple)) and all(map(callable, observers))):
        raise TypeError(f"observers must be a list of functions of an ObservedRound; got {observers!r}.")


def resolve_tokenizer(processor: Any) -> Any:
    """The tokenizer of a processor, or the tokenizer itself; None for None.

    Raises:
        TypeError: neither a processor nor a tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        return None
    if isinstance(tokenizer, type) or not callable(tokenizer) or not hasattr(tokenizer, "__len__"):
        raise TypeError(
            "processor must be the model's processor or its tokenizer, a callable that maps text to ids; got "
            f"{processor!r}. Pass AutoProcessor.from_pretrained(...), or omit it."
        )
    return tokenizer


def _check_tree_size(tree_size: Any) -> None:
    if tree_size is None:
        return
    if isinstance(tree_size, bool) or not isinstance(tree_size, int):
        raise TypeError(f"tree_size must be an integer from 1 to {BUCKETS[-1]}, or None; got {tree_size!r}.")
    if not 1 <= tree_size <= BUCKETS[-1]:
        raise ValueError(f"tree_size must be 1 to {BUCKETS[-1]} (root included), or None; got {tree_size}.")


def without_removed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those of earlier versions, which changed no output; one log line says so for each."""
    for name in REMOVED_OPTIONS.keys() & options.keys():
        logger.warning("mmspec: the option %s is gone and does nothing: %s", name, REMOVED_OPTIONS[name])
    return {name: value for name, value in options.items() if name not in REMOVED_OPTIONS}


def resolve_config(arguments: PatchArguments, adapter: Any) -> SpecConfig:
    """The options of `patch`, with the drafter and the compressor built and checked against the target.

    Raises:
        ValueError, TypeError: as `patch`.
    """
    tokenizer = resolve_tokenizer(arguments.processor)
    drafter = resolve_drafter(arguments.drafter, adapter, tokenizer)
    reference_ids = encode_reference(arguments.reference, tokenizer)
    return SpecConfig(
        drafter=drafter,
        compressor=resolve_compressor(arguments.compressor, adapter, drafter),
        reference_ids=arguments.reference_ids if reference_ids is None else reference_ids,
        tree_size=arguments.tree_size,
        deterministic=arguments.deterministic,
        backend=arguments.backend,
        reuse_prefix=arguments.reuse_prefix,
    )


def resolve_call_config(
    config: SpecConfig, overrides: Mapping[str, Any] | None, adapter: Any, tokenizer: Any, cache: DrafterCache
) -> tuple[SpecConfig, bool]:
    """Options of one call, and whether mmspec is enabled for it.

    Args:
        config: options of `patch`.
        overrides: `generate(..., mmspec=overrides)`, any of `PER_CALL_OPTIONS`, or None.
        adapter: the model's adapter.
        tokenizer: the model's tokenizer, or None.
        cache: drafters that earlier calls chose by name.

    Raises:
        TypeError, ValueError: unknown options, or values that `patch` would refuse too.
    """
    if overrides is None:
        return config, True
    known = ", ".join(PER_CALL_OPTIONS)
    if not isinstance(overrides, Mapping):
        raise TypeError(f"generate(mmspec=...) takes a dict with any of {known}; got {overrides!r}.")
    chosen = without_removed(overrides)
    if unknown := sorted(set(chosen) - set(PER_CALL_OPTIONS)):
        raise ValueError(f"generate(mmspec=...) takes {known}; got {', '.join(unknown)}.")
    enabled = chosen.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled must be True or False; got {enabled!r}. generate(mmspec=dict(enabled=False)) decodes this call "
            "by transformers alone."
        )
    if "reference_ids" in chosen:
        chosen["reference_ids"] = resolve_reference_ids(chosen["reference_ids"])
    if "reference" in chosen:
        ids = encode_reference(chosen.pop("reference"), tokenizer)
        chosen["reference_ids"] = chosen.get("reference_ids") if ids is None else ids
    if "drafter" in chosen:
        chosen["drafter"] = cache.get(chosen["drafter"], adapter, tokenizer)
    if "compressor" in chosen:
        chosen["compressor"] = resolve_compressor(chosen["compressor"], adapter, chosen.get("drafter", config.drafter))
    return replace(config, **chosen), enabled
