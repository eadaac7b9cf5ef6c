"""DSpark and DFlash: registered, trained (DSpark), read and written as published."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmspec.drafters.heads.registry import ExportInputs, HeadClasses, HeadMethod, Recipe, TrainSizes, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.config import HeadConfig
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.training.batch import TrainBatch
    from mmspec.interfaces import SharedEmbeddings, TargetInfo

DSPARK_SCALES = {"intermediate_size": 1.0, "markov_rank": 0.125}
DSPARK_SETTINGS = {"confidence_head": True}
DSPARK_HELP = """\
5 tokens per forward of a block that sees hidden states of several layers, each corrected by the token before it, with
an estimate of their acceptance (DSpark)"""
BLOCK_KEYS = frozenset((
    "aux_hidden_state_layer_ids", "block_size", "causal", "confidence_head_with_markov", "enable_confidence_head",
    "input_embedding_scale", "is_causal", "layer_types", "markov_rank", "mask_token_id", "projector_type",
    "sample_from_anchor", "sliding_window", "sliding_window_non_causal", "swa_window_size", "target_layer_ids",
    "use_swa",
))  # fmt: skip
MIXTURE_HELP = "the same, the hidden states added with learned weights (DFlare)"


@register
class Dspark(HeadMethod):
    """DSpark, and DFlash, which is the same without its two small heads.

    Attributes:
        title: its name in messages.
        projectors: values of `projector_type` of its heads.
    """

    name = "dspark"
    recipes: ClassVar[tuple[Recipe, ...]] = (
        Recipe("dspark", DSPARK_HELP, "coupled", 5, DSPARK_SCALES, DSPARK_SETTINGS),
        Recipe("dspark-mixture", MIXTURE_HELP, "coupled", 5, DSPARK_SCALES, {**DSPARK_SETTINGS, "layer_mixture": True}),
    )
    reads_layers = True
    trains_layers = True
    speculators_types: ClassVar[tuple[str, ...]] = ("dflash", "dspark")
    published_keys = BLOCK_KEYS
    title: ClassVar[str] = "DSpark"
    projectors: ClassVar[tuple[str, ...]] = ("dflash", "dspark")
    served = "vLLM and speculators; needs --target, whose embeddings are copied"

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
        from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead
        from mmspec.drafters.heads.dspark.loss import dspark_loss

        return HeadClasses(DsparkConfig, DsparkHead, DsparkDrafter, dspark_loss)

    def train_config(self, shape: HeadConfig, recipe: Recipe, sizes: TrainSizes) -> HeadConfig:
        from mmspec.drafters.heads.dspark.head import DsparkConfig

        config = super().train_config(shape, recipe, sizes)
        assert isinstance(config, DsparkConfig)
        n = sizes.num_layers
        layers = sizes.layers_or((2, n // 2, n - 3, n - 1))
        return replace(config, hidden_state_layers=layers, num_hidden_layers=sizes.head_layers)

    def init_from_target(
        self, head: Any, batches: Iterator[TrainBatch], shared_embeddings: SharedEmbeddings, draft_ids: Tensor | None
    ) -> None:
        """The target's scale: a head without it spends hundreds of steps on what is known."""
        batch = next(batches)
        head.norm.weight.copy_(batch.response_scale())
        if head.mixture is not None:
            scales = batch.layer_scales(head.config.hidden_state_layers)
            head.mixture.copy_(1 / (len(scales) * scales))

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        norms = "hidden_norm.weight", "encoder.output_norm_enc.weight"
        return 3 * (any(name in weights for name in norms) and "layers.0.self_attn.q_norm.weight" in weights)

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        from mmspec.drafters.heads.dspark.checkpoint import load_dspark

        return load_dspark(values, weights, target, name, self)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Further fields of the config of a published head, for methods that extend this one."""
        return {}

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        if not self.served:
            return HeadMethod.export_refusal(self, drafter, target, format_name)
        if format_name == "sglang":
            return "SGLang has a layout of its own for DSpark heads, which is not written; use --format vllm."
        if drafter.visual_mode != "coupled":
            return f"engines give a DSpark head all positions as context; this one was trained {drafter.visual_mode!r}."
        return None

    def export(self, folder: Path, given: ExportInputs) -> None:
        from mmspec.drafters.heads.dspark.checkpoint import export_dspark

        export_dspark(folder, given.drafter, given.target, given.embeddings())


def read_numbers(
    settings: Mapping[str, Any], keys: Iterable[str], title: str, kind: type = int, *, is_optional: bool = False
) -> dict[str, Any]:
    """Keys that hold integers of at least 1, or finite numbers above 0.

    Args:
        settings: of a published config.
        keys: that are read.
        title: of the method.
        kind: int or float.
        is_optional: whether those that are missing are left out, and not refused.

    Raises:
        ValueError: names the key and its value.
    """
    found = dict[str, Any]()
    for key in keys:
        value: Any = settings.get(key)
        if value is None and is_optional:
            continue
        is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        if not is_number or value <= 0:
            rule = "an integer of at least 1" if kind is int else "a finite number above 0"
            raise ValueError(f"{key} of a {title} head must be {rule}; got {value!r:.40}.")
        found[key] = kind(value)
    return found
