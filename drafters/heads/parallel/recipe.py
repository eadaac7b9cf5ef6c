"""ParallelSpec: registered and trained."""

from __future__ import annotations

from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, Recipe, register

PARALLEL_HELP = """\
5 tokens per forward over learned mask embeddings, each corrected by the token before it (ParallelSpec, Hydra)"""


@register
class Parallel(HeadMethod):
    """ParallelSpec."""

    name = "parallel"
    recipes = (
        Recipe("parallel", PARALLEL_HELP, "decoupled", 5, {"intermediate_size": 1.0, "block_ffn_size": 0.5}),
        Recipe("parallel-free", "the same without the correction", "decoupled", 5),
    )

    def classes(self) -> HeadClasses:
        from mmspec.drafters.heads.parallel.head import ParallelConfig, ParallelDrafter, ParallelHead, parallel_loss

        return HeadClasses(ParallelConfig, ParallelHead, ParallelDrafter, parallel_loss)
