"""Which visual tokens a drafter was shown, and the picture with them marked on it. The model itself always sees all."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmspec.app.io.images import Shown, pictures

if TYPE_CHECKING:
    from mmspec.app.bench.recorder import Recorder
    from mmspec.interfaces import Segment
    from mmspec.metrics.compression_stats import Shown as Kept

ALL, NONE = frozenset(("decoupled", "coupled")), frozenset(("blind", "textual"))
"""Rules of trained drafters (`mmspec.drafters.eagle.visual_inputs`) that read every visual token, and that read none."""


@dataclass(frozen=True)
class Sight:
    """What a drafter was shown.

    Attributes:
        text: in one sentence. shown, total: visual tokens. kept: their numbers, counted from 0 over the prompt; None
            where they were mixed or cannot be told.
    """

    text: str
    shown: int | None = None
    total: int | None = None
    kept: frozenset[int] | None = None
    segments: tuple[Segment, ...] = field(default=(), repr=False)


def sight_of(recorder: Recorder, seen: Kept | None) -> Sight:
    """What the drafter of a finished run was shown. seen: by a compressor, as `mmspec.stats` has it."""
    from mmspec.drafters.eagle.vispec import VispecDrafter

    inner, total = recorder.inner, recorder.visual
    if not inner.needs.taps:
        return Sight("This drafter looks at no picture: it guesses from words alone.", 0, total, frozenset())
    if seen is not None:
        given, shown = seen.visual, seen.kept
        kept = None if seen.numbers is None else frozenset(seen.numbers)
        how = "mixed into" if kept is None else "of which it saw"
        text = f"The picture is {given} tokens to the model, {how} {shown} for the drafter."
        return Sight(text, shown, given, kept, recorder.segments)
    if isinstance(inner, VispecDrafter):
        return Sight("This drafter shrinks the picture by itself.")
    rule = getattr(inner, "rule", None)
    if rule in ALL:
        text = f"The drafter saw all {total} tokens of the picture."
        return Sight(text, total, total, frozenset(range(total)), recorder.segments)
    if rule in NONE:
        return Sight("This drafter was trained to guess without the picture.", 0, total, frozenset(), recorder.segments)
    return Sight("How much of the picture this drafter saw cannot be told.")


def marked(shown: Shown, sight: Sight, cropped: bool) -> list[str]:
    """The pictures as data URIs, the tokens that the drafter did not see greyed; none where that cannot be told.

    Args:
        cropped: the processor shows the model the middle square only.
    """
    from mmspec.vision.heatmap import heatmaps

    if not sight.kept or not sight.segments:
        return []
    return [_uri(made) for made in heatmaps(pictures(shown), sight.segments, kept=sight.kept, row=0, cropped=cropped)]


def _uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def crops(processor: Any) -> bool:
    """Whether a processor cuts the middle square out of a picture."""
    return bool(getattr(getattr(processor, "image_processor", None), "do_center_crop", False))


def numbers_of(sight: Sight) -> dict[str, Any]:
    """For JSON."""
    kept: Sequence[int] | None = None if sight.kept is None else sorted(sight.kept)
    return {"text": sight.text, "shown": sight.shown, "total": sight.total, "kept": kept}


__all__ = ["Sight", "crops", "marked", "numbers_of", "sight_of"]
