"""EAGLE-3: registered, trained, read and written as published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.registry import ExportInputs, HeadClasses, HeadMethod, Recipe, TrainSizes, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.config import HeadConfig
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.training.batch import TrainBatch
    from mmspec.interfaces import SharedEmbeddings, TargetInfo

MIXED_HELP = """\
three hidden states, an LM head and a vocabulary of its own (EAGLE-3); visual tokens are projected or placeholder
embeddings, at random per sample, so that SGLang and vLLM can serve it"""


@register
class Eagle3(HeadMethod):
    """EAGLE-3."""

    name = "eagle3"
    recipes = (Recipe("eagle3", MIXED_HELP, "mixed"),)
    reads_layers = True
    speculators_types = ("eagle3",)
    published_keys = frozenset((
        "eagle_aux_hidden_state_layer_ids", "fc_norm", "layer_types", "norm_before_fc", "norm_before_residual",
        "norm_output", "sliding_window", "target_layer_ids", "use_sliding_window", "visual_mode",
    ))  # fmt: skip
    served = "vLLM and speculators; SGLang where it captures hidden states of the target (Qwen-VL: yes, LLaVA: no)"

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
        from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
        from mmspec.drafters.training.losses import eagle_loss

        return HeadClasses(Eagle3Config, Eagle3Head, Eagle3Drafter, eagle_loss)

    def train_config(self, shape: HeadConfig, recipe: Recipe, sizes: TrainSizes) -> HeadConfig:
        from mmspec.drafters.heads.eagle3.head import eagle3_layers

        layers = sizes.layers_or(eagle3_layers(sizes.num_layers), 3)
        size = min(sizes.draft_vocab or shape.vocab_size, shape.vocab_size)
        config = super().train_config(shape, recipe, sizes)
        return replace(config, hidden_state_layers=layers, draft_vocab_size=size)

    def init_from_target(
        self, head: Any, batches: Iterator[TrainBatch], shared_embeddings: SharedEmbeddings, draft_ids: Tensor | None
    ) -> None:
        """The target's scale and rows: a head without them spends hundreds of steps on what is known."""
        head.norm.weight.copy_(next(batches).response_scale())
        if draft_ids is not None:
            head.lm_head.weight.copy_(shared_embeddings.lm_head_rows(draft_ids).float())

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        has_layer = any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in weights)
        return 2 if has_layer or "d2t" in weights else 0

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        from mmspec.drafters.heads.eagle3.checkpoint import load_eagle3

        return load_eagle3(values, weights, target, name)

    def export_refusal(self, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
        from mmspec.drafters.heads.eagle3.checkpoint import eagle3_refusal

        return eagle3_refusal(drafter, target, format_name)

    def export(self, folder: Path, given: ExportInputs) -> None:
        from mmspec.drafters.heads.eagle3.checkpoint import export_eagle3

        export_eagle3(folder, given.drafter, given.target, given.format_name)
