"""Drafters and compressors: from the names of options to objects, checked against the target."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from mmspec.forks import new_lock
from mmspec.interfaces import AssistantParts, Compressor, Drafter, TargetInfo
from mmspec.targets.assistant import assistant_parts, find_assistant, is_assistant, is_assistant_folder, load_assistant
from mmspec.targets.layer_subset import check_layer_subsets
from mmspec.targets.own_head import is_exported_head, read_own_head

MAX_CACHED_DRAFTERS = 4
"""Drafters chosen by name in calls that stay loaded; each may hold the weights of one decoder layer."""


def own_compressor(drafter: Drafter) -> Compressor | None:
    """The compressor that a drafter comes with, or None."""
    own = drafter.compressor
    return own if isinstance(own, Compressor) else None


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


def resolve_drafter(drafter: str | os.PathLike[str] | Drafter, adapter: Any, tokenizer: Any = None) -> Drafter:
    """The drafter with a name or in a folder, or the object itself, checked against the target.

    Raises:
        ValueError: unknown name, or a drafter for another vocabulary or number of layers.
        TypeError: an object that is not a drafter.
    """
    from mmspec.drafters.registry import build_drafter

    drafter = os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter
    resolved = _build_model_drafter(drafter, adapter, tokenizer)
    if resolved is None:
        resolved = build_drafter(drafter, target_info(adapter, tokenizer))
    if resolved.vocab_size is not None and resolved.vocab_size != adapter.vocab_size:
        raise ValueError(
            f"drafter {resolved.name!r} is for a vocabulary of {resolved.vocab_size} ids, the model has "
            f"{adapter.vocab_size}; use a drafter of this model, or drafter='auto'."
        )
    if missing := missing_hidden_states(resolved, adapter):
        raise ValueError(f"{missing}. Use a drafter of this model, or drafter='auto'.")
    if resolved.requirements.layer_subsets and not resolved.requirements.optional_copy:
        check_layer_subsets(adapter, resolved.requirements)
    if resolved.bundled_compressor is not None:
        from mmspec.vision.registry import load_compressor

        config, state_dict = resolved.bundled_compressor
        resolved.compressor = load_compressor(config, state_dict, adapter.text_config.hidden_size)
    return resolved


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
        if folder is not None and is_exported_head(folder, adapter):
            from mmspec.drafters.mtp.drafter import MTPDrafter

            return MTPDrafter(read_own_head(adapter, folder))
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


def resolve_compressor(compressor: str | Compressor | None, adapter: Any, drafter: Drafter) -> Compressor | None:
    """The compressor with a name such as "pool:49", or the object itself if it is one; None for None.

    "elastic" without a size is the one that the drafter was trained with.

    Raises:
        ValueError: unknown name, a drafter without an elastic compressor, or it needs the grids of visual
            tokens of a family whose grids are unknown.
        TypeError: an object that is not a compressor.
    """
    if compressor is None:
        return None
    from mmspec.vision.registry import TRAINED_GATE, build_compressor

    if compressor == TRAINED_GATE:
        own = own_compressor(drafter)
        if own is None or own.name != TRAINED_GATE:
            raise ValueError(
                f"compressor 'elastic' is one that a drafter was trained with, and {drafter.name!r} was not: take "
                "'msd-elastic', train one with --compressor elastic:N, or pass 'pool:N'."
            )
        return own
    resolved = build_compressor(compressor)
    check_grids(resolved, adapter)
    return resolved


def check_grids(compressor: Compressor, adapter: Any) -> None:
    """Refuse a compressor that merges neighbours in a grid for a model whose visual tokens have no known grid.

    Raises:
        ValueError: it is one.
    """
    if getattr(compressor, "needs_grids", False) and adapter.media_token_ids and not adapter.layout.has_grids:
        raise ValueError(
            f"compressor {compressor.name!r} needs the grids of visual tokens, which are unknown for model_type "
            f"{adapter.model_type!r}; choose one without grids, such as stride:{compressor.max_tokens}."
        )


def check_compressor(compressor: Compressor, drafter: Drafter) -> None:
    """Refuse a compressor beside a head that compresses itself, or with weights for another hidden size."""
    if drafter.compresses_visual_tokens:
        raise ValueError(f"drafter {drafter.name!r} compresses visual tokens itself; pass compressor=None.")
    size = getattr(compressor, "hidden_size", None)
    expected = drafter.compressor_hidden_size
    if size is None or expected == 0:
        return
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
    """Drafters by name, so that a later call with the same name reuses the loaded weights."""

    def __init__(self) -> None:
        self._drafters: dict[Any, Drafter] = {}
        self._lock = new_lock()

    def get(self, drafter: str | os.PathLike[str] | Drafter, adapter: Any, tokenizer: Any) -> Drafter:
        """As `resolve_drafter`; a folder whose content has changed is loaded again."""
        drafter = os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter
        if hasattr(drafter, "propose"):  # an object; a model is kept, with its drafter
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
