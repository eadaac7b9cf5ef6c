"""Instant heads: registered and trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, Recipe, TrainSizes, register

if TYPE_CHECKING:
    from torch import Tensor

    from mmspec.drafters.heads.base.config import HeadConfig
    from mmspec.drafters.training.batch import TrainBatch
    from mmspec.interfaces import SharedEmbeddings

INSTANT_HELP = """\
4 tokens from the last hidden state, without attention: least squares in closed form, then a few epochs; alone, with
200 requests and 80 steps by default, it takes about a minute"""


@register
class Instant(HeadMethod):
    """Heads on the target's last hidden state."""

    name = "instant"
    recipes = (Recipe("instant", INSTANT_HELP, "text_only", 4, count=200, steps=80),)
    reads_visual_tokens = False

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.instant.config import InstantConfig
        from mmspec.drafters.heads.instant.drafter import InstantDrafter
        from mmspec.drafters.heads.instant.head import InstantHead
        from mmspec.drafters.heads.instant.loss import instant_loss

        return HeadClasses(InstantConfig, InstantHead, InstantDrafter, instant_loss)

    def train_config(self, shape: HeadConfig, recipe: Recipe, sizes: TrainSizes) -> HeadConfig:
        """Its sizes follow from the target's hidden size."""
        from mmspec.drafters.heads.instant.head import instant_config

        block_size = super().train_config(shape, recipe, sizes).block_size
        return instant_config(shape.hidden_size, shape.vocab_size, block_size)

    def init_from_target(
        self, head: Any, batches: Iterator[TrainBatch], shared_embeddings: SharedEmbeddings, draft_ids: Tensor | None
    ) -> None:
        """In closed form, see `RidgeFit`."""
        from mmspec.drafters.heads.instant.fit import fit_batches

        fit_batches(head, batches, shared_embeddings)
