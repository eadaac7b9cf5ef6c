"""LiLiCorr: registered, trained, and read as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark, read_numbers
from mmspec.drafters.heads.registry import HeadClasses, Recipe, register

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
LILICORR_HELP = """\
as dspark, and a small transformer over the likeliest tokens of all positions says which of them fit the token before
(LiLiCorr)"""


@register
class Lilicorr(Dspark):
    """LiLiCorr."""

    name = "lilicorr"
    title = "LiLiCorr"
    recipes = (Recipe("lilicorr", LILICORR_HELP, "coupled", 5, settings={"sample_from_anchor": False}),)
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, NUMBERS, CONVOLUTION, ("lilicorr_enabled",))
    served = ""
    projectors = ("lilicorr",)

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.lilicorr.head import LilicorrConfig, LilicorrDrafter, LilicorrHead, lilicorr_loss

        return HeadClasses(LilicorrConfig, LilicorrHead, LilicorrDrafter, lilicorr_loss)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 5 * any(name.startswith("lilicorr.") for name in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Dspark`; none has a default: several change the scores without changing a tensor."""
        if settings.get("lilicorr_enabled") is False:
            raise ValueError("lilicorr_enabled is false, but the weights hold the tensors lilicorr.*.")
        values = {**settings, "lilicorr_hidden_size": settings.get("lilicorr_hidden_size") or settings["hidden_size"]}
        found = {SIZES[key]: value for key, value in read_numbers(values, SIZES, self.title).items()}
        found |= {NUMBERS[key]: value for key, value in read_numbers(values, NUMBERS, self.title, float).items()}
        taps, group = (settings.get(key) or 0 for key in CONVOLUTION)
        if any(type(value) is not int or value < 0 for value in (taps, group)) or bool(taps) != bool(group):
            raise ValueError(
                f"conv_kernel_size and conv_group_size must be integers of at least 1, or both missing; got "
                f"{taps!r:.40} and {group!r:.40}."
            )
        return found | ({"conv_kernel_size": taps, "conv_group_size": group} if taps else {})
