"""Specs of drafters for benchmarks and studies: `DRAFTER@DEPTH+COMPRESSOR`.

DEPTH fixes the number of draft levels (passes of falcon), which are chosen by costs otherwise. COMPRESSOR
compresses the visual tokens of the drafter; `own:N` sets the budget of the one that the drafter was trained with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

import mmspec
from mmspec.app.cli.arguments import validate_drafter
from mmspec.app.errors import UsageError
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.interfaces import NO_LIMIT, Drafter
from mmspec.resolve import resolve_drafter
from mmspec.targets.registry import find_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

SPEC_PATTERN = re.compile(r"(?P<drafter>.+?)(?:@(?P<depth>\d+))?(?:\+(?P<compressor>[^/]+))?")
OWN_COMPRESSOR = "own"
MAX_FIXED_DEPTH = 63
"""Levels of the largest tree."""


@dataclass(frozen=True)
class DrafterSpec:
    """A parsed spec.

    Attributes:
        drafter: name or folder. depth: fixed number of levels. compressor: as for `mmspec.patch`.
        own_tokens: budget of the compressor that the drafter was trained with; None for that of the training.
    """

    drafter: str
    depth: int | None = None
    compressor: str | None = None
    own_tokens: int | None = None


def parse_spec(name: str) -> DrafterSpec:
    """Parse `DRAFTER[@DEPTH][+COMPRESSOR]`.

    Raises:
        UsageError: a depth or a number of tokens out of range.
    """
    found = SPEC_PATTERN.fullmatch(name)
    if found is None:
        raise UsageError(f"a drafter is DRAFTER, DRAFTER@DEPTH, DRAFTER+COMPRESSOR or all three; got {name!r}")
    depth, compressor = found["depth"], found["compressor"]
    if depth is not None and not 1 <= int(depth) <= MAX_FIXED_DEPTH:
        raise UsageError(f"a depth is 1 to {MAX_FIXED_DEPTH}; got {name!r}")
    spec = DrafterSpec(found["drafter"], None if depth is None else int(depth), compressor)
    what, _, tokens = (compressor or "").partition(":")
    if what != OWN_COMPRESSOR:
        return spec
    if not tokens.isdecimal() or int(tokens) < 1:
        raise UsageError(f"say how many tokens a drafter's own compressor keeps, as in own:16; got {name!r}")
    return replace(spec, compressor=None, own_tokens=int(tokens))


def check_spec(name: str) -> None:
    """Refuse an unknown drafter or compressor before anything is loaded."""
    spec = parse_spec(name)
    validate_drafter(spec.drafter, spec.compressor)


def patch_model(
    model: PreTrainedModel, name: str, processor: ProcessorMixin, nodes: int | None = None
) -> PreTrainedModel:
    """Patch a model as a spec says, with a fixed tree size `nodes` if given.

    Raises:
        UsageError: the drafter has no depth to fix, or no compressor of its own. Else as `mmspec.patch`.
    """
    spec = parse_spec(name)
    drafter = resolve_drafter(spec.drafter, find_adapter(model), getattr(processor, "tokenizer", processor))
    if spec.depth is not None:
        _fix_depth(drafter, spec.depth, name)
    mmspec.patch(model, drafter, spec.compressor, processor=processor, tree_size=nodes)
    if spec.own_tokens is not None:  # after `patch`, which builds a trained compressor
        _set_own_budget(drafter, spec.own_tokens, name)
    return model


def _fix_depth(drafter: Drafter, depth: int, name: str) -> None:
    if not isinstance(drafter, EagleDrafter) or drafter.max_levels < 2:
        raise UsageError(f"@DEPTH is for drafters that draft level by level, which {drafter.name!r} does not: {name}")
    drafter.min_levels = drafter.max_levels = depth
    drafter.max_depth = depth * drafter.tokens_per_level


def _set_own_budget(drafter: Drafter, tokens: int, name: str) -> None:
    own: Any = drafter.compressor
    if own is None or own.max_tokens in (0, NO_LIMIT):
        what = "comes with no compressor" if own is None else f"comes with {own.name!r}, which takes no number"
        raise UsageError(f"own:N is for drafters that were trained with a compressor; {drafter.name!r} {what}: {name}")
    has_weights = isinstance(own, nn.Module)
    if has_weights:
        own.max_tokens = tokens
    else:
        drafter.compressor = replace(own, max_tokens=tokens)
