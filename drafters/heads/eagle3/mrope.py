"""The position axes of a published EAGLE-3 head (M-RoPE), from the keys that its trainers write and the engines read.

`rope_scaling` is the key of transformers before version 5, `rope_parameters` that of later ones; either may hold the
`mrope_section`. vLLM and SGLang count positions on three axes wherever a config has one, whatever its `rope_type`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmspec.drafters.checkpoints.rope import ANGELSLIM_CLASS, has_mrope, rope_values

logger = logging.getLogger("mmspec")

INTERLEAVED_SECTION = (24, 20, 20)
"""Section of a config with `mrope_interleaved` and without one, in AngelSlim and in Qwen3-VL of transformers."""


def parse_mrope(values: Mapping[str, Any], head_values: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """`mrope_section` and `mrope_interleaved` of `HeadConfig`; an empty section for a head of one axis.

    Args:
        values: the config of the layer.
        head_values: the head's config, which names the code that trained it. That of `speculators` takes a section over
            from the target, and counts on one axis.

    Raises:
        ValueError: no section where one is needed.
    """
    rope, architectures = rope_values(values), head_values.get("architectures")
    if head_values.get("speculators_model_type") is not None:
        return (), False
    is_interleaved = rope.get("mrope_interleaved")
    if not has_mrope(rope):
        return (), False
    if is_interleaved is None and architectures == [ANGELSLIM_CLASS]:  # it knows no other layout, and has no key for it
        logger.warning(
            "mmspec: mrope_interleaved is missing and taken as true: %s of AngelSlim interleaves the position axes",
            ANGELSLIM_CLASS,
        )
        is_interleaved = True
    section = rope.get("mrope_section")
    if section is None and is_interleaved:
        section = list(INTERLEAVED_SECTION)
    if section is None:
        raise ValueError("rope_scaling of type 'mrope' needs a mrope_section, a list of three integers; got none.")
    return tuple(section), bool(is_interleaved)


def mrope_keys(section: tuple[int, ...], interleaved: bool) -> dict[str, Any]:
    """`rope_scaling` of an exported head, as SpecForge and AngelSlim write it; empty for a head of one axis."""
    if not section:
        return {}
    scaling: dict[str, Any] = {"type": "mrope", "rope_type": "mrope", "mrope_section": list(section)}
    if interleaved:  # transformers and vLLM take the type "default" along with this key
        scaling |= {"type": "default", "rope_type": "default", "mrope_interleaved": True}
    return {"rope_scaling": scaling}
