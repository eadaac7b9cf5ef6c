"""Domino: registered and read as published; it is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark
from mmspec.drafters.heads.registry import HeadClasses, register

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
GRU = "prefix_gru.weight_ih_l0"


@register
class Domino(Dspark):
    """Domino."""

    name = "domino"
    title = "Domino"
    recipes = ()
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, ("shift_label",))
    served = ""
    projectors = ("domino",)

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.domino.head import DominoConfig, DominoDrafter, DominoHead

        return HeadClasses(DominoConfig, DominoHead, DominoDrafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 4 * (GRU in weights or f"logit_head.{GRU}" in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        found = {key: settings.get(key) for key in SIZES}
        found["pure_draft_prefix_len"] = found["pure_draft_prefix_len"] or 0
        for key, value in found.items():
            if type(value) is not int or value < (key != "pure_draft_prefix_len"):
                raise ValueError(f"{key} of a domino head must be a number of at least 1; got {value!r:.40}.")
        return found
