"""What `mmspec bench` and the studies measure, by name: `DRAFTER@DEPTH+COMPRESSOR`.

DEPTH fixes how many levels of its tree a drafter drafts (passes, of falcon), where it would choose else. COMPRESSOR
shows it fewer visual tokens; `own:N` lets the one that a drafter was trained with keep N. Measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

import mmspec
from mmspec.app.caption.command import validate_drafter
from mmspec.app.errors import UsageError
from mmspec.config import resolve_drafter
from mmspec.control.depth import DepthController
from mmspec.interfaces import NO_LIMIT
from mmspec.targets.registry import find_adapter

SPEC_PATTERN = re.compile(r"(?P<drafter>.+?)(?:@(?P<depth>\d+))?(?:\+(?P<compressor>[^/]+))?")
OWN_COMPRESSOR = "own"
MAX_DEPTH = 63
"""Levels of the largest tree."""


@dataclass(frozen=True)
class BenchSpec:
    """What a name asks for. `keep`: visual tokens that the drafter's own compressor shows it, None for as trained."""

    drafter: str
    depth: int | None = None
    compressor: str | None = None
    own_tokens: int | None = None


class FixedDepth(DepthController):
    """Always all levels."""

    def choose(self, batch: int) -> int:
        """The same number for every round."""
        return self.max_levels


def parse_spec(name: str) -> BenchSpec:
    """What a name asks for.

    Raises:
        UsageError: a depth or a number of tokens that cannot be.
    """
    found = SPEC_PATTERN.fullmatch(name)
    if found is None:
        raise UsageError(f"a contender is DRAFTER, DRAFTER@DEPTH, DRAFTER+COMPRESSOR or all three; got {name!r}")
    depth, compressor = found["depth"], found["compressor"]
    if depth is not None and not 1 <= int(depth) <= MAX_DEPTH:
        raise UsageError(f"a depth is 1 to {MAX_DEPTH}; got {name!r}")
    wanted = BenchSpec(found["drafter"], None if depth is None else int(depth), compressor)
    what, _, tokens = (compressor or "").partition(":")
    if what != OWN_COMPRESSOR:
        return wanted
    if not tokens.isdecimal() or int(tokens) < 1:
        raise UsageError(f"say how many tokens a drafter's own compressor keeps, as in own:16; got {name!r}")
    return replace(wanted, compressor=None, own_tokens=int(tokens))


def check_spec(name: str) -> None:
    """Refuse an unknown drafter or compressor before anything is loaded."""
    wanted = parse_spec(name)
    validate_drafter(wanted.drafter, wanted.compressor)


def short_labels(names: Sequence[str]) -> list[str]:
    """Names with the last part of their path alone, or two parts where one would not tell two folders apart."""
    folders = [name[: SPEC_PATTERN.fullmatch(name).end("drafter")] for name in names]  # type: ignore[union-attr]
    last = [Path(folder).name for folder in dict.fromkeys(folders)]

    def short(folder: str) -> str:
        return Path(folder).name if last.count(Path(folder).name) == 1 else "/".join(Path(folder).parts[-2:])

    return [short(folder) + name[len(folder) :] for name, folder in zip(names, folders, strict=True)]


def patch_model(model: Any, name: str, processor: Any, nodes: int | None = None) -> Any:
    """Patch a model with what a name asks for, trees of `nodes` if given. Drafter `none` decodes plainly all the same.

    Raises:
        UsageError: the drafter has no depth to fix, or no compressor of its own. Else as `mmspec.patch`.
    """
    wanted = parse_spec(name)
    drafter = resolve_drafter(wanted.drafter, find_adapter(model), getattr(processor, "tokenizer", processor))
    if wanted.depth is not None:
        _fix_depth(drafter, wanted.depth, name)
    mmspec.patch(model, drafter, wanted.compressor, processor=processor, tree_size=nodes)
    if wanted.own_tokens is not None:  # after `patch`, which makes a trained compressor anew
        _keep(drafter, wanted.own_tokens, name)
    return model


def get_drafter(model: Any) -> Any:
    """The drafter of a patched model."""
    return model.__dict__["_mmspec"].config.drafter


def get_compressor(model: Any) -> Any:
    """What shows the drafter of a patched model fewer visual tokens: chosen, or its own; None if nothing does."""
    config = model.__dict__["_mmspec"].config
    return config.compressor or getattr(config.drafter, "compressor", None)


def weight_sizes(model: Any) -> dict[str, float | None]:
    """MiB of weights that the drafter of a model and its compressor add, and their share of the target's; else None."""
    if not mmspec.is_patched(model):
        return {"draft_mib": None, "of_target": None}
    parts = [part for name, part in vars(get_drafter(model)).items() if name != "compressor"] + [get_compressor(model)]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    target = {id(weight): weight.nbytes for weight in (*model.parameters(), *model.buffers())}
    own = {id(w): w.nbytes for part in modules for w in (*part.parameters(), *part.buffers()) if id(w) not in target}
    return {"draft_mib": sum(own.values()) / 2**20, "of_target": sum(own.values()) / sum(target.values())}


def get_block_size(model: Any) -> int | None:
    """Tokens that one pass of a patched model's drafter says; None if it has no head, or there is no drafter."""
    head = getattr(get_drafter(model), "head", None) if mmspec.is_patched(model) else None
    return None if head is None else getattr(head.config, "block_size", None) or 1


def _fix_depth(drafter: Any, depth: int, name: str) -> None:
    chosen = getattr(drafter, "depth_controller", None)
    if not isinstance(chosen, DepthController) or chosen.max_levels < 2:
        raise UsageError(f"@DEPTH is for drafters that draft level by level, which {drafter.name!r} does not: {name}")
    drafter.depth_controller, drafter.max_lookahead = (
        FixedDepth(depth, chosen.steps_per_level),
        depth * chosen.steps_per_level,
    )


def _keep(drafter: Any, tokens: int, name: str) -> None:
    own = getattr(drafter, "compressor", None)
    if own is None or own.max_tokens in (0, NO_LIMIT):
        what = "comes with no compressor" if own is None else f"comes with {own.name!r}, which takes no number"
        raise UsageError(f"own:N is for drafters that were trained with a compressor; {drafter.name!r} {what}: {name}")
    has_weights = isinstance(own, nn.Module)
    if has_weights:
        own.max_tokens = tokens
    else:
        drafter.compressor = replace(own, max_tokens=tokens)


__all__ = [
    "BenchSpec",
    "FixedDepth",
    "check_spec",
    "get_block_size",
    "get_compressor",
    "get_drafter",
    "parse_spec",
    "patch_model",
    "short_labels",
    "weight_sizes",
]
