"""Which visual tokens a drafter was shown, and the picture with them marked on it. The model itself always sees all."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmspec.app.io.images import Media, media_images

if TYPE_CHECKING:
    from mmspec.app.bench.recorder import RecordingDrafter
    from mmspec.interfaces import VisualGrid
    from mmspec.metrics.compression_stats import CompressionRecord as Kept

FULL_VISUAL_MODES, NO_VISUAL_MODES = (
    frozenset(("decoupled", "coupled")),
    frozenset(("placeholder", "text_only")),
)
"""Rules of trained drafters (`mmspec.drafters.eagle.visual_inputs`) that read every visual token, and that read none."""


@dataclass(frozen=True)
class VisibleTokens:
    """What a drafter was shown.

    Attributes:
        text: in one sentence. shown, total: visual tokens. kept: their numbers, counted from 0 over the prompt; None
            where they were mixed or cannot be told.
    """

    summary: str
    num_visible: int | None = None
    num_total: int | None = None
    kept_indices: frozenset[int] | None = None
    grids: tuple[VisualGrid, ...] = field(default=(), repr=False)


def find_visible_tokens(recorder: RecordingDrafter, compression: Kept | None) -> VisibleTokens:
    """What the drafter of a finished run was shown. seen: by a compressor, as `mmspec.stats` has it."""
    from mmspec.drafters.eagle.drafter import EagleDrafter
    from mmspec.drafters.eagle.vispec import VispecDrafter

    inner, total = recorder.inner, recorder.num_visual_tokens
    if not inner.requirements.hidden_state_indices:
        return VisibleTokens("This drafter looks at no picture: it guesses from words alone.", 0, total, frozenset())
    if compression is not None:
        given, shown = compression.num_visual_tokens, compression.num_compressed_tokens
        kept = None if compression.kept_indices is None else frozenset(compression.kept_indices)
        how = "mixed into" if kept is None else "of which it saw"
        text = f"The picture is {given} tokens to the model, {how} {shown} for the drafter."
        return VisibleTokens(text, shown, given, kept, recorder.grids)
    if isinstance(inner, VispecDrafter):
        return VisibleTokens("This drafter shrinks the picture by itself.")
    mode = inner.visual_mode if isinstance(inner, EagleDrafter) else None
    if mode in FULL_VISUAL_MODES:
        text = f"The drafter saw all {total} tokens of the picture."
        return VisibleTokens(text, total, total, frozenset(range(total)), recorder.grids)
    if mode in NO_VISUAL_MODES:
        return VisibleTokens(
            "This drafter was trained to guess without the picture.", 0, total, frozenset(), recorder.grids
        )
    return VisibleTokens("How much of the picture this drafter saw cannot be told.")


def draw_visible_tokens(media: Media, visible_tokens: VisibleTokens, cropped: bool) -> list[str]:
    """The pictures as data URIs, the tokens that the drafter did not see greyed; none where that cannot be told.

    Args:
        cropped: the processor shows the model the middle square only.
    """
    from mmspec.vision.heatmap import heatmaps

    if not visible_tokens.kept_indices or not visible_tokens.grids:
        return []
    return [
        _data_uri(made)
        for made in heatmaps(
            media_images(media), visible_tokens.grids, kept=visible_tokens.kept_indices, row=0, cropped=cropped
        )
    ]


def _data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def uses_center_crop(processor: Any) -> bool:
    """Whether a processor cuts the middle square out of a picture."""
    return bool(getattr(getattr(processor, "image_processor", None), "do_center_crop", False))


def visible_tokens_to_dict(visible_tokens: VisibleTokens) -> dict[str, Any]:
    """For JSON."""
    kept: Sequence[int] | None = None if visible_tokens.kept_indices is None else sorted(visible_tokens.kept_indices)
    return {
        "text": visible_tokens.summary,
        "shown": visible_tokens.num_visible,
        "total": visible_tokens.num_total,
        "kept": kept,
    }


__all__ = ["VisibleTokens", "draw_visible_tokens", "find_visible_tokens", "uses_center_crop", "visible_tokens_to_dict"]
