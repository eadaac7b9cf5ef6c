"""Draft heads written for serving engines: vLLM, SGLang, and the `speculators` library.

An engine feeds a head in its own way, so some heads cannot be served there; `refusal` says which and why. Each method
writes its own layouts (`HeadMethod.export`).
"""

from __future__ import annotations

import os
from pathlib import Path

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.registry import EXPORT_FORMATS, ExportInputs, method_of
from mmspec.interfaces import SharedEmbeddings, TargetInfo

PUBLISHED_SETTINGS = (
    "rope_scaling", "rotary_dim", "qk_norm", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
    "sliding_windows", "causal_layers",
)  # fmt: skip
"""Settings that heads trained here do not have."""


def export_head(
    folder: str | os.PathLike[str],
    drafter: HeadDrafter,
    target: TargetInfo,
    format_name: str,
    shared_embeddings: SharedEmbeddings | None = None,
) -> None:
    """Write a drafter's head as an engine reads it: `config.json` and `model.safetensors`.

    Args:
        folder: to write to.
        drafter: a trained drafter, on the CPU.
        target: facts about its target.
        format_name: one of `EXPORT_FORMATS`.
        shared_embeddings: of the target; some methods need them.

    Raises:
        ValueError: the engine cannot serve such a head, or it needs the target's embeddings.
    """
    if (reason := refusal(drafter, target, format_name)) is not None:
        raise ValueError(reason)
    method = method_of(drafter)
    assert method is not None
    method.export(Path(folder), ExportInputs(drafter, target, format_name, shared_embeddings))


def refusal(drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
    """Why an engine cannot serve a head; None if it can."""
    if format_name not in EXPORT_FORMATS:
        return f"the format must be one of {', '.join(EXPORT_FORMATS)}; got {format_name!r}."
    method, layers = method_of(drafter), drafter.hidden_state_indices
    if method is None:
        return f"{type(drafter).__name__} is no registered method, whose heads could be exported."
    if not method.is_of_target and (setting := _unwritten_setting(drafter)) is not None:
        return f"a head with {setting} is read from where it was published, not exported; serve those files."
    if method.reads_layers and (
        list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= target.num_layers
    ):
        return (
            f"engines read the inputs of layers 1 to {target.num_layers - 1}, in increasing order; this head was "
            f"trained with --set layers={','.join(map(str, layers))}."
        )
    return method.export_refusal(drafter, target, format_name)


def _unwritten_setting(drafter: HeadDrafter) -> str | None:
    """A setting of published heads that the exported configs have no key for here; None if there is none."""
    if drafter.own_embeddings is not None:
        return "embeddings of its own"
    config = drafter.head.config
    return next((name for name in PUBLISHED_SETTINGS if getattr(config, name, None)), None)
