"""LiLiCorr: registered and read as published; it is not trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark
from mmspec.drafters.heads.registry import HeadClasses, register

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {
    "lilicorr_candidate_topk": "candidate_topk",
    "lilicorr_hidden_size": "lattice_size",
    "lilicorr_num_layers": "lattice_layers",
    "lilicorr_num_heads": "lattice_heads",
    "lilicorr_factor_dim": "factor_dim",
}
NUMBERS = {
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}
"""Keys of published configs -> fields of `LilicorrConfig`."""
CONVOLUTION = ("conv_kernel_size", "conv_group_size")


@register
class Lilicorr(Dspark):
    """LiLiCorr."""

    name = "lilicorr"
    title = "LiLiCorr"
    recipes = ()
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, NUMBERS, CONVOLUTION, ("lilicorr_enabled",))
    served = ""
    projectors = ("lilicorr",)

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.lilicorr.head import LilicorrConfig, LilicorrDrafter, LilicorrHead

        return HeadClasses(LilicorrConfig, LilicorrHead, LilicorrDrafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 5 * any(name.startswith("lilicorr.") for name in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Dspark`; none has a default: several change the scores without changing a tensor."""
        if settings.get("lilicorr_enabled") is False:
            raise ValueError("lilicorr_enabled is false, but the weights hold the tensors lilicorr.*.")
        values = {**settings, "lilicorr_hidden_size": settings.get("lilicorr_hidden_size") or settings["hidden_size"]}
        for key in (*SIZES, *NUMBERS):
            value: Any = values.get(key)
            what = "an integer of at least 1" if key in SIZES else "a finite number above 0"
            is_kind = type(value) is int or (key in NUMBERS and type(value) is float and math.isfinite(value))
            if not is_kind or not value > 0:
                raise ValueError(f"{key} of a LiLiCorr head must be {what}; got {value!r:.40}.")
        found = {field: values[key] for key, field in SIZES.items()}
        found |= {field: float(values[key]) for key, field in NUMBERS.items()}
        taps, group = (settings.get(key) or 0 for key in CONVOLUTION)
        if any(type(value) is not int or value < 0 for value in (taps, group)) or bool(taps) != bool(group):
            raise ValueError(
                f"conv_kernel_size and conv_group_size must be integers of at least 1, or both missing; got "
                f"{taps!r:.40} and {group!r:.40}."
            )
        return found | ({"conv_kernel_size": taps, "conv_group_size": group} if taps else {})
