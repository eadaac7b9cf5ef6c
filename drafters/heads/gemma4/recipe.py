"""DSpark and DFlash of DeepSpec for Gemma 4: registered and read as published; they are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark, read_numbers
from mmspec.drafters.heads.registry import HeadClasses, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.interfaces import TargetInfo

ARCHITECTURE, ACTIVATION, CAP = "Gemma4DSparkModel", "gelu_pytorch_tanh", "final_logit_softcapping"
TARGET_KEYS = frozenset((
    "attention_k_eq_v", "global_head_dim", "head_dim", "moe_intermediate_size", "num_global_key_value_heads",
    "num_kv_shared_layers", "per_layer_config", "top_k_experts", "use_bidirectional_attention", "use_double_wide_mlp",
    "vocab_size_per_layer_input", CAP,
))  # fmt: skip
"""Keys of the target's config that the head's has too: read, seen in the tensors, or of other layers."""


@register
class Gemma4Dspark(Dspark):
    """DSpark and DFlash with layers of Gemma 4."""

    name = "dspark-gemma4"
    title = "Gemma 4 DSpark"
    recipes = ()
    speculators_types = ()
    published_keys = BLOCK_KEYS | TARGET_KEYS
    served = ""

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.gemma4.head import Gemma4Config, Gemma4DsparkDrafter, Gemma4Head

        return HeadClasses(Gemma4Config, Gemma4Head, Gemma4DsparkDrafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 5 * (values.get("architectures") == [ARCHITECTURE])

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        return read_numbers({CAP: settings.get(CAP) or None}, (CAP,), self.title, float, is_optional=True)

    def load_published(
        self, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
    ) -> HeadDrafter:
        """See `HeadMethod`. Sizes of heads are those of the tensors; values may be the keys before their norm."""
        if values.get("hidden_activation") != ACTIVATION:
            got = values.get("hidden_activation")
            raise ValueError(
                f"hidden_activation {got!r:.40} is not supported in a {self.name} head; {ACTIVATION!r} is."
            )
        query, key, heads = (
            weights.get("layers.0.self_attn.q_proj.weight"),
            weights.get("layers.0.self_attn.k_proj.weight"),
            values.get("num_attention_heads"),
        )
        if query is None or key is None or not isinstance(heads, int) or not len(key) or len(query) % heads:
            raise ValueError(
                f"a {self.name} head needs num_attention_heads and projections of queries and keys for them."
            )
        size = len(query) // heads
        weights = dict(weights)
        for tensor, value in list(weights.items()):
            if tensor.endswith("k_proj.weight") and values.get("attention_k_eq_v"):
                weights[tensor.replace("k_proj", "v_proj")] = value
            if tensor.endswith("q_norm.weight") and value.is_floating_point():
                weights[tensor] = value.float() * size**0.5
        sizes = {"head_dim": size, "num_key_value_heads": len(key) // size}
        scale = float(values["hidden_size"]) ** 0.5
        read = {**values, **sizes, "hidden_activation": None, "input_embedding_scale": scale}
        return super().load_published(read, weights, target, name)
