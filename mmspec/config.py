"""Options of `patch` and of single calls, and their validation. Never modifies a model.

Over 350 lines: both kinds of options are declared, renamed, checked and resolved in one file, so that they agree.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmspec.control.tree_size import DEFAULT_TREE_SIZE
from mmspec.engine.tree import BUCKETS
from mmspec.interfaces import (
    AssistantParts,
    Compressor,
    Drafter,
    GridCompressor,
    SizedCompressor,
    TargetInfo,
    TrainedDrafter,
)
from mmspec.learning.protocols import GradientDrafter, LearnableDrafter
from mmspec.reference import check_reference, reference_rows, resolve_reference_ids
from mmspec.targets.assistant import assistant_parts, find_assistant, is_assistant, is_assistant_folder, load_assistant
from mmspec.targets.layer_subset import check_layer_subsets
from mmspec.targets.own_head import read_own_head

logger = logging.getLogger("mmspec")

PER_CALL_OPTIONS = (
    "enabled",
    "drafter",
    "compressor",
    "tree_size",
    "deterministic",
    "backend",
    "learn",
    "reuse_prefix",
    "reference",
    "reference_ids",
)
"""Keys of `generate(..., mmspec=dict(...))`."""
BACKEND_NAMES = ("auto", "torch", "c", "recorded")
"""Values of the option `backend`: who computes the rounds of a call."""
LEARNS_FROM_NOTHING = ("auto", "arbitrated", "instant")
"""Drafters that `learn="auto"` lets learn where they are not trained heads."""
MAX_CACHED_DRAFTERS = 4
"""Drafters chosen by name in calls that stay loaded; each may hold the weights of one decoder layer."""


@dataclass(frozen=True)
class SpecConfig:
    """Options that hold for one call.

    Attributes:
        drafter: source of draft trees.
        compressor: reduces the visual tokens that the drafter reads; None for the drafter's own, if it has one.
        reference: texts that outputs may repeat, one for all rows or one per row.
        reference_ids: the same as token ids.
        tree_size: score trees of exactly this many nodes, root included; None lets the controller choose.
        deterministic: fix all shapes, so that half-precision runs are bit-identical on one machine.
        backend: who computes the rounds, of `BACKEND_NAMES`. "torch": eager, by torch's kernels alone; "c": compiled C,
            on a CPU; "recorded": CUDA graphs, on a CPU functions compiled by inductor; "auto": C on a CPU, recorded on
            a GPU that passes a check, and torch for models and calls that neither serves.
        learn: the drafter learns from this call; in the options of `patch` also the largest share of the time that
            learning may take.
        reuse_prefix: what calls have computed of their prompts serves later calls that begin alike; a text names a
            scope, calls of other scopes share nothing with it.
    """

    drafter: Drafter
    compressor: Compressor | None = None
    reference: str | Sequence[str] | None = None
    reference_ids: Sequence[Sequence[int]] | None = None
    tree_size: int | None = None
    deterministic: bool = False
    backend: str = "auto"
    learn: bool | float = False
    reuse_prefix: bool | str = False

    def __post_init__(self) -> None:
        _check_backend(self.backend)
        if not isinstance(self.deterministic, bool):
            raise TypeError(
                f"deterministic must be True (fixed shapes) or False; got {self.deterministic!r}. Pass a bool."
            )
        check_learn(self.learn)
        if self.learn and self.deterministic:
            raise ValueError(
                "learn=True and deterministic=True exclude each other: learned weights change the shapes of later "
                "calls. Pass one of them."
            )
        if not isinstance(self.reuse_prefix, (bool, str)):
            raise TypeError(
                f"reuse_prefix must be True, False or the name of a scope; got {self.reuse_prefix!r}. Pass a bool."
            )
        check_reference(self.reference)
        _check_tree_size(self.tree_size)
        if self.compressor is not None:
            _check_compressor(self.compressor, self.drafter)

    @property
    def may_use_c(self) -> bool:
        """Whether compiled C may compute forwards and drafts, on a CPU."""
        return self.backend in ("auto", "c")

    @property
    def fixed_tree_size(self) -> int | None:
        """Size of every tree, if timing must not choose it; else None."""
        return self.tree_size or (DEFAULT_TREE_SIZE if self.deterministic else None)

    @property
    def active_compressor(self) -> Compressor | None:
        """The chosen compressor, else the drafter's own, else None."""
        return own_compressor(self.drafter) if self.compressor is None else self.compressor


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
    learn: bool | float | str = False
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


def own_compressor(drafter: Drafter) -> Compressor | None:
    """The compressor that a drafter comes with, or None."""
    own = getattr(drafter, "compressor", None)
    return own if isinstance(own, Compressor) else None


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


def target_info(adapter: Any, tokenizer: Any) -> TargetInfo:
    """Properties of a target that a drafter may check."""
    return TargetInfo(
        model_type=adapter.model_type,
        hidden_size=adapter.text_config.hidden_size,
        vocab_size=adapter.vocab_size,
        num_layers=adapter.num_layers,
        tokenizer=tokenizer,
        name=str(getattr(adapter.model.config, "_name_or_path", "") or ""),
        media_token_ids=adapter.media_token_ids,
        device=adapter.model.device.type,
        shared_embeddings=adapter.shared_embeddings,
        read_own_head=partial(read_own_head, adapter),
        find_assistant=partial(find_assistant, adapter),
    )


def resolve_drafter(
    drafter: str | os.PathLike[str] | Drafter, adapter: Any, tokenizer: Any = None, learn: bool = False
) -> Drafter:
    """The drafter with a name or in a folder, or the object itself, checked against the target.

    Raises:
        ValueError: unknown name, a drafter for another vocabulary or number of layers, or with `learn` one that cannot
            learn.
        TypeError: an object that is not a drafter.
    """
    from mmspec.drafters.registry import build_drafter

    drafter = os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter
    resolved = _build_model_drafter(drafter, adapter, tokenizer)
    if resolved is None:
        resolved = build_drafter(drafter, target_info(adapter, tokenizer), learn)
    if resolved.vocab_size is not None and resolved.vocab_size != adapter.vocab_size:
        raise ValueError(
            f"drafter {resolved.name!r} is for a vocabulary of {resolved.vocab_size} ids, the model has "
            f"{adapter.vocab_size}; use a drafter of this model, or drafter='auto'."
        )
    if learn and (reason := why_not_learnable(resolved)) is not None:
        raise ValueError(
            "learn=True needs a drafter with weights that can be learned: auto, instant, an EAGLE, MSD, FLASH or other "
            f"head with a training loss here; got {resolved.name!r}: {reason}."
        )
    if missing := missing_hidden_states(resolved, adapter):
        raise ValueError(f"{missing}. Use a drafter of this model, or drafter='auto'.")
    if resolved.requirements.layer_subsets:
        check_layer_subsets(adapter, resolved.requirements.copy_bits)
    if isinstance(resolved, TrainedDrafter) and resolved.bundled_compressor is not None:
        from mmspec.vision.registry import load_compressor

        config, state_dict = resolved.bundled_compressor
        resolved.compressor = load_compressor(config, state_dict, adapter.text_config.hidden_size)
    return resolved


def why_not_learnable(drafter: Drafter) -> str | None:
    """Why a drafter cannot learn, for messages; None if it can."""
    if not isinstance(drafter, LearnableDrafter):
        return "it has no weights"
    return drafter.cannot_learn


def check_learn(learn: object) -> None:
    """Check the option `learn` without "auto".

    Raises:
        TypeError: neither a bool nor a number.
        ValueError: a share of the time that is not above 0 and at most 1.
    """
    if isinstance(learn, bool):
        return
    if not isinstance(learn, (int, float)):
        raise TypeError(f"learn must be True (the drafter learns from the calls), False or a share; got {learn!r}.")
    if not 0 < learn <= 1:
        raise ValueError(f"learn must be a share of the time above 0 and at most 1, or True for 0.03; got {learn!r}.")


def missing_hidden_states(drafter: Drafter, adapter: Any) -> str | None:
    """Which hidden states a drafter needs that the model does not have, for messages; None if it has all."""
    indices = drafter.requirements.hidden_state_indices
    invalid = [index for index in indices if not 0 <= index <= adapter.num_layers]
    if not invalid:
        return None
    return f"drafter {drafter.name!r} needs hidden states {invalid}; this model has 0 to {adapter.num_layers}"


def _build_model_drafter(drafter: Any, adapter: Any, tokenizer: Any) -> Drafter | None:
    """The drafter of `drafter=MODEL`, a model of transformers or its folder or hub id; None for any other drafter.

    Raises:
        ValueError: the model cannot draft for the target, or its tokenizer is unknown or cannot be aligned.
        OSError: a file is missing.
    """
    from mmspec.targets.draft_model import HFDraftModel, check_draft_model, is_model, is_model_folder, load_draft_model

    if is_model(drafter) and is_assistant(drafter):
        return _assistant_drafter(assistant_parts(drafter, adapter))
    if is_model(drafter):
        source = HFDraftModel(drafter)
    else:
        from mmspec.drafters.registry import MODEL_FILES, download_drafter, model_folder

        folder = model_folder(drafter) if isinstance(drafter, str) else None
        if folder is None or not is_model_folder(folder):
            return None
        if not os.path.isdir(drafter):
            folder = download_drafter(drafter, patterns=MODEL_FILES)
        if is_assistant_folder(folder):
            return _assistant_drafter(load_assistant(folder, adapter))
        source = load_draft_model(folder, adapter)
    check_draft_model(source, adapter)
    from mmspec.drafters.model.build import build_model_drafter

    return build_model_drafter(source, target_info(adapter, tokenizer))


def _assistant_drafter(parts: AssistantParts) -> Drafter:
    from mmspec.drafters.mtp.assistant import AssistantDrafter

    return AssistantDrafter(parts)


def resolve_config(arguments: PatchArguments, adapter: Any) -> SpecConfig:
    """The options of `patch`, with the drafter and the compressor built and checked against the target.

    Raises:
        ValueError, TypeError: as `patch`.
    """
    tokenizer = resolve_tokenizer(arguments.processor)
    learn: bool | float = False
    if isinstance(arguments.learn, str):
        if arguments.learn != "auto":
            raise TypeError(f"learn must be True, False, 'auto' or a share of the time; got {arguments.learn!r}.")
    else:
        check_learn(arguments.learn)
        learn = arguments.learn
    drafter = resolve_drafter(arguments.drafter, adapter, tokenizer, bool(learn))
    if _may_learn(arguments) and not isinstance(drafter, TrainedDrafter):
        try:
            drafter, learn = resolve_drafter(arguments.drafter, adapter, tokenizer, learn=True), True
        except ValueError as error:  # "auto" is a default: what cannot learn drafts without
            logger.info("mmspec: the drafter does not learn: %s", error)
    config = SpecConfig(
        drafter=drafter,
        compressor=resolve_compressor(arguments.compressor, adapter),
        reference=arguments.reference,
        reference_ids=arguments.reference_ids,
        tree_size=arguments.tree_size,
        deterministic=arguments.deterministic,
        backend=arguments.backend,
        learn=learn,
        reuse_prefix=arguments.reuse_prefix,
    )
    if learn and config.active_compressor is not None and isinstance(drafter, GradientDrafter):
        raise ValueError(
            f"a trained head is adapted without a compressor only; got compressor {config.active_compressor.name!r}. "
            "Pass learn=False or compressor=None."
        )
    reference_rows(config.reference, config.reference_ids, tokenizer, batch=None, num_return_sequences=1)
    return config


def _may_learn(arguments: PatchArguments) -> bool:
    """Whether `learn="auto"` lets the drafter of these arguments learn if it has no trained head."""
    is_named = isinstance(arguments.drafter, str) and arguments.drafter in LEARNS_FROM_NOTHING
    return arguments.learn == "auto" and is_named and not arguments.deterministic


def resolve_compressor(compressor: str | Compressor | None, adapter: Any) -> Compressor | None:
    """The compressor with a name such as "pool:49", or the object itself if it is one; None for None.

    Raises:
        ValueError: unknown name, or it needs the grids of visual tokens of a family whose grids are unknown.
        TypeError: an object that is not a compressor.
    """
    if compressor is None:
        return None
    from mmspec.vision.registry import build_compressor

    resolved = build_compressor(compressor)
    check_grids(resolved, adapter)
    return resolved


def check_grids(compressor: Compressor, adapter: Any) -> None:
    """Refuse a compressor that merges neighbours in a grid for a model whose visual tokens have no known grid.

    Raises:
        ValueError: it is one.
    """
    needs_grids = isinstance(compressor, GridCompressor) and compressor.needs_grids
    if needs_grids and adapter.media_token_ids and not adapter.layout.has_grids:
        raise ValueError(
            f"compressor {compressor.name!r} needs the grids of visual tokens, which are unknown for model_type "
            f"{adapter.model_type!r}; choose one without grids, such as stride:{compressor.max_tokens}."
        )


def _check_compressor(compressor: Compressor, drafter: Drafter) -> None:
    """Refuse a compressor beside a head that compresses itself, or with weights for another hidden size."""
    if not isinstance(drafter, TrainedDrafter):
        return
    if drafter.compresses_visual_tokens:
        raise ValueError(f"drafter {drafter.name!r} compresses visual tokens itself; pass compressor=None.")
    size = compressor.hidden_size if isinstance(compressor, SizedCompressor) else None
    if size is None:
        return
    expected = drafter.compressor_hidden_size
    if expected is None:
        raise ValueError(
            f"compressor {compressor.name!r} has weights for hidden size {size}, drafter {drafter.name!r} reads "
            "several hidden states side by side; choose a compressor without weights."
        )
    if size != expected:
        raise ValueError(
            f"compressor {compressor.name!r} has weights for hidden size {size}, drafter {drafter.name!r} reads "
            f"hidden size {expected}; build it with hidden_size={expected}, or choose one without weights."
        )


class DrafterCache:
    """Drafters by name, so that a later call with the same name reuses the loaded weights and the learned state."""

    def __init__(self) -> None:
        self._drafters: dict[Any, Drafter] = {}
        self._lock = threading.Lock()

    def get(self, drafter: str | os.PathLike[str] | Drafter, adapter: Any, tokenizer: Any) -> Drafter:
        """As `resolve_drafter`; a folder whose content has changed is loaded again."""
        drafter = os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter
        if not isinstance(drafter, str) and isinstance(drafter, Drafter):
            return resolve_drafter(drafter, adapter, tokenizer)
        name = drafter if isinstance(drafter, str) else id(drafter)  # a model, which its drafter keeps alive
        key = name, _folder_state(drafter), id(tokenizer), adapter.vocab_size
        with self._lock:
            resolved = self._drafters.pop(key, None) or resolve_drafter(drafter, adapter, tokenizer)
            self._drafters[key] = resolved  # last in the dict: most recently used
            for old in list(self._drafters)[:-MAX_CACHED_DRAFTERS]:
                del self._drafters[old]
        return resolved


def _folder_state(folder: Any) -> tuple[Any, ...]:
    """Name, size and modification time of each file in a folder; () if it is no folder."""
    if not isinstance(folder, str) or not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries))


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
        return _with_own_compressor(config), True
    known = ", ".join(PER_CALL_OPTIONS)
    if not isinstance(overrides, Mapping):
        raise TypeError(f"generate(mmspec=...) takes a dict with any of {known}; got {overrides!r}.")
    chosen = dict(overrides)
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
    if "drafter" in chosen:
        chosen["drafter"] = cache.get(chosen["drafter"], adapter, tokenizer)
    if "compressor" in chosen:
        chosen["compressor"] = resolve_compressor(chosen["compressor"], adapter)
    return _with_own_compressor(replace(config, **chosen)), enabled


def _with_own_compressor(config: SpecConfig) -> SpecConfig:
    """Use the drafter's trained compressor where the chosen one is the untrained stand-in of the same name."""
    if config.compressor is None:
        return config
    from mmspec.vision.compressors.cost_based import CostBased

    own = own_compressor(config.drafter)
    is_stand_in = isinstance(config.compressor, CostBased) and own is not None and config.compressor.name == own.name
    return replace(config, compressor=own) if is_stand_in else config
