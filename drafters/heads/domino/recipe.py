"""Domino: registered and read as published; it is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.dspark.recipe import BLOCK_KEYS, Dspark, read_numbers
from mmspec.drafters.heads.registry import HeadClasses, register

if TYPE_CHECKING:
    from torch import Tensor

SIZES, PREFIX = ("emb_dim", "gru_hidden_dim"), "pure_draft_prefix_len"
GRU = "prefix_gru.weight_ih_l0"


@register
class Domino(Dspark):
    """Domino."""

    name = "domino"
    title = "Domino"
    recipes = ()
    speculators_types = ()
    published_keys = BLOCK_KEYS.union(SIZES, (PREFIX, "shift_label"))
    served = ""
    projectors = ("domino",)

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.domino.head import DominoConfig, DominoDrafter, DominoHead

        return HeadClasses(DominoConfig, DominoHead, DominoDrafter)

    def recognise(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
        return 4 * (GRU in weights or f"logit_head.{GRU}" in weights)

    def published_settings(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        prefix = settings.get(PREFIX) or 0
        if type(prefix) is not int or prefix < 0:
            raise ValueError(f"{PREFIX} of a Domino head must be an integer of at least 0; got {prefix!r:.40}.")
        return read_numbers(settings, SIZES, self.title) | {PREFIX: prefix}
