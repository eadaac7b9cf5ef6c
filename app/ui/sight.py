"""Which visual tokens a drafter was shown, and the picture with them marked on it. The model itself always sees all."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mmspec.app.images import Shown, pictures
from mmspec.app.rounds import Recorder
from mmspec.drafters.vispec import VispecDrafter
from mmspec.interfaces import Compressor, Segment, VisualTokens

CELL = 14
"""Pixels of one token's square, about."""
SIDE = 320
"""Pixels of a marked picture."""
ALL, NONE = frozenset(("decoupled", "coupled")), frozenset(("blind", "textual"))
"""Rules of trained drafters (`mmspec.drafters.rules`) that read every visual token, and that read none."""


class Watch:
    """A compressor that notes what another one keeps. Reads nothing from the device before it is asked."""

    def __init__(self, inner: Compressor) -> None:
        self.inner, self.name, self.tokens = inner, inner.name, inner.tokens
        self._seen: tuple[VisualTokens, VisualTokens] | None = None

    def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
        """See `mmspec.interfaces.Compressor`."""
        few = self.inner.compress(visual, query, budget)
        self._seen = visual, few
        return few

    @property
    def kept(self) -> tuple[int, int, list[int] | None] | None:
        """(tokens given to it, tokens it gave, their numbers or None if it mixed them) of the first row."""
        if self._seen is None:
            return None
        visual, few = self._seen
        before, after = (_places(part) for part in (visual, few))
        number = {place: at for at, place in enumerate(before)}
        # One that keeps tokens hands on their very embeddings; a mixture may stand at a place without being its token.
        same = all(place in number for place in after) and len(number) == len(before)
        numbers = [number[place] for place in after] if same else None
        if numbers and not bool((visual.embeddings[0, numbers] == few.embeddings[0, : len(after)]).all()):
            numbers = None
        return len(before), len(after), numbers


def _places(tokens: VisualTokens) -> list[Any]:
    """Position of each token of the first row; with several axes, one tuple each."""
    positions, on = tokens.positions, tokens.mask[0].tolist()
    rows = [positions[0].tolist()] if positions.dim() == 2 else positions[:, 0].tolist()
    return [place for place, there in zip(zip(*rows, strict=True), on, strict=True) if there]


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


def sight_of(recorder: Recorder, watch: Watch | None) -> Sight:
    """What the drafter of a finished run was shown."""
    inner, total = recorder.inner, recorder.visual
    seen = watch.kept if watch is not None else None
    if not inner.needs.taps:
        return Sight("This drafter looks at no picture: it guesses from words alone.", 0, total, frozenset())
    if seen is not None:
        given, shown, numbers = seen
        kept = None if numbers is None else frozenset(numbers)
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
    if sight.kept is None or not sight.kept or not sight.segments:
        return []
    images, made, start = pictures(shown), list[str](), 0
    for segment in sorted(sight.segments, key=lambda one: (one.row, one.start)):
        place, start = start, start + segment.length
        if segment.row == 0 and segment.role in ("base", "frame") and segment.source < len(images):
            step = segment.time if segment.role == "frame" else segment.source
            image = images[min(step, len(images) - 1)]
            made.append(_uri(_greyed(_square(image) if cropped else image, grid(segment, place, sight.kept))))
    return made


def grid(segment: Segment, start: int, kept: frozenset[int]) -> np.ndarray:
    """[height, width] bool, which cells of a grid were seen. start: number of its first token."""
    line = segment.width + int(segment.newline)
    return np.array([[start + y * line + x in kept for x in range(segment.width)] for y in range(segment.height)])


def _square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _greyed(image: Image.Image, seen: np.ndarray) -> Image.Image:
    """The picture with the cells that were not seen faded, and a thin line around those that were."""
    height, width = seen.shape
    cell = max(CELL, SIDE // max(height, width))
    small = np.asarray(image.convert("RGB").resize((width * cell, height * cell)), dtype=np.float32)
    mask = seen.repeat(cell, 0).repeat(cell, 1)
    grey = 0.25 * small.mean(2, keepdims=True) + 150
    drawn = np.where(mask[..., None], small, grey)
    edge = (np.arange(drawn.shape[0])[:, None] % cell == 0) | (np.arange(drawn.shape[1])[None] % cell == 0)
    drawn[edge & mask] = (47, 158, 82)
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))


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


__all__ = ["Sight", "Watch", "crops", "grid", "marked", "numbers_of", "sight_of"]
