"""What a drafter of a patched model is and weighs, and short labels for specs of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

import mmspec
from mmspec.interfaces import Compressor, Drafter
from mmspec.interfaces.drafter import modules_of
from mmspec.patching import KEY
from research.bench.drafter_specs import SPEC_PATTERN

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def short_labels(names: Sequence[str]) -> list[str]:
    """Specs with only the last part of a folder, or the last two where one is ambiguous."""
    folders = [name[: SPEC_PATTERN.fullmatch(name).end("drafter")] for name in names]  # type: ignore[union-attr]
    last = [Path(folder).name for folder in dict.fromkeys(folders)]

    def short(folder: str) -> str:
        return Path(folder).name if last.count(Path(folder).name) == 1 else "/".join(Path(folder).parts[-2:])

    return [short(folder) + name[len(folder) :] for name, folder in zip(names, folders, strict=True)]


def get_drafter(model: PreTrainedModel) -> Drafter:
    """The drafter of a patched model."""
    return model.__dict__[KEY].config.drafter


def get_compressor(model: PreTrainedModel) -> Compressor | None:
    """The compressor of a patched model, chosen or bundled with the drafter; None if there is none."""
    config = model.__dict__[KEY].config
    return config.compressor or getattr(config.drafter, "compressor", None)


def weight_sizes(model: PreTrainedModel) -> dict[str, float | None]:
    """`draft_mib`: weights added by drafter and compressor in MiB; `of_target`: their share of the target's weights."""
    if not mmspec.is_patched(model):
        return {"draft_mib": None, "of_target": None}
    drafter = get_drafter(model)
    bundled, chosen = getattr(drafter, "compressor", None), get_compressor(model)
    modules = [part for part in modules_of(drafter) if part is not bundled]
    modules += [chosen] if isinstance(chosen, nn.Module) else []
    target = {id(weight): weight.nbytes for weight in (*model.parameters(), *model.buffers())}
    own = {id(w): w.nbytes for part in modules for w in (*part.parameters(), *part.buffers()) if id(w) not in target}
    return {"draft_mib": sum(own.values()) / 2**20, "of_target": sum(own.values()) / sum(target.values())}


def get_block_size(model: PreTrainedModel) -> int | None:
    """Tokens that one pass of the drafter drafts; None without a drafter or a head."""
    head = getattr(get_drafter(model), "head", None) if mmspec.is_patched(model) else None
    return None if head is None else getattr(head.config, "block_size", None) or 1
