"""Visual tokens that a drafter read, and pictures with them marked. The target model always reads all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmspec.app.io.images import Media, media_images
from mmspec.app.ui.thumbnails import to_data_uri

if TYPE_CHECKING:
    from mmspec.app.ui.recorder import RoundRecorder
    from mmspec.interfaces import Drafter, VisualGrid
    from mmspec.metrics.compression_stats import CompressionRecord

FULL_VISUAL_MODES = frozenset(("decoupled", "coupled"))
"""Visual modes of trained drafters (`mmspec.drafters.heads.base.visual_inputs`) that read every visual token."""
NO_VISUAL_MODES = frozenset(("placeholder", "text_only"))
"""Visual modes that read none."""


@dataclass(frozen=True)
class VisibleTokens:
    """Visual tokens that a drafter read.

    Attributes:
        summary: one sentence.
        num_visible: visual tokens that the drafter read; None if unknown.
        num_total: visual tokens of the prompt; None if unknown.
        kept_indices: indices among the visual tokens of the prompt; None where tokens were merged or it is unknown.
        grids: of the pictures in the prompt.
    """

    summary: str
    num_visible: int | None = None
    num_total: int | None = None
    kept_indices: frozenset[int] | None = None
    grids: tuple[VisualGrid, ...] = field(default=(), repr=False)


def find_visible_tokens(
    drafter: Drafter, recorder: RoundRecorder, compression: CompressionRecord | None
) -> VisibleTokens:
    """Visual tokens that the drafter of a finished run read.

    Args:
        drafter: of the run.
        recorder: of the run.
        compression: record of the compressor in `mmspec.stats`; None if none was used.
    """
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.drafters.heads.vispec.drafter import VispecDrafter

    total = recorder.num_visual_tokens
    if not drafter.requirements.hidden_state_indices:
        return VisibleTokens("This drafter reads no visual tokens: it drafts from text alone.", 0, total, frozenset())
    if compression is not None:
        num_visual, num_visible = compression.num_visual_tokens, compression.num_compressed_tokens
        indices = None if compression.kept_indices is None else frozenset(compression.kept_indices)
        how = "merged into" if indices is None else "reduced to"
        text = f"The picture is {num_visual} tokens for the model, {how} {num_visible} for the drafter."
        return VisibleTokens(text, num_visible, num_visual, indices, recorder.grids)
    if isinstance(drafter, VispecDrafter):
        return VisibleTokens("This drafter compresses the picture itself.")
    mode = drafter.visual_mode if isinstance(drafter, HeadDrafter) else None
    if mode in FULL_VISUAL_MODES:
        text = f"The drafter reads all {total} tokens of the picture."
        return VisibleTokens(text, total, total, frozenset(range(total)), recorder.grids)
    if mode in NO_VISUAL_MODES:
        return VisibleTokens(
            "This drafter is trained to draft without the picture.", 0, total, frozenset(), recorder.grids
        )
    return VisibleTokens("It is unknown how much of the picture this drafter reads.")


def draw_visible_tokens(media: Media, visible_tokens: VisibleTokens, cropped: bool) -> list[str]:
    """The pictures as data URIs, with tokens that the drafter did not read greyed; empty where that is unknown.

    Args:
        media: picture or clip of the run.
        visible_tokens: from `find_visible_tokens`.
        cropped: the processor crops the central square.
    """
    from mmspec.vision.heatmap import heatmaps

    if not visible_tokens.kept_indices or not visible_tokens.grids:
        return []
    return [
        to_data_uri(image)
        for image in heatmaps(
            media_images(media), visible_tokens.grids, kept_indices=visible_tokens.kept_indices, row=0, cropped=cropped
        )
    ]


def uses_center_crop(processor: Any) -> bool:
    """Whether a processor crops the central square of a picture."""
    return bool(getattr(getattr(processor, "image_processor", None), "do_center_crop", False))


def visible_tokens_to_dict(visible_tokens: VisibleTokens) -> dict[str, Any]:
    """The fields as JSON values."""
    indices: Sequence[int] | None = None if visible_tokens.kept_indices is None else sorted(visible_tokens.kept_indices)
    return {
        "summary": visible_tokens.summary,
        "num_visible": visible_tokens.num_visible,
        "num_total": visible_tokens.num_total,
        "visible_indices": indices,
    }
