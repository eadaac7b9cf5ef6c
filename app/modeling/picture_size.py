"""`--max-pixels`: larger pictures are shrunk, by the processor where it knows such a limit, else before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from PIL import Image
from transformers import ProcessorMixin

from mmspec.app.io.images import Media, Video
from mmspec.vision.video.reader import fit_size


def image_limits(processor: ProcessorMixin, max_pixels: int | None) -> dict[str, Any]:
    """`images_kwargs` with which a processor shrinks pictures to `max_pixels` itself; empty if it has no such limit.

    Those of the Qwen-VL kind do: they round to whole patches, so that a picture shrunk before would get another size.
    Their `size` holds the smallest and the largest number of pixels under the names of edges.
    """
    image_processor = getattr(processor, "image_processor", None)
    kwargs_type = getattr(image_processor, "valid_kwargs", None)
    if max_pixels is None or "max_pixels" not in getattr(kwargs_type, "__annotations__", {}):
        return {}
    own = getattr(image_processor, "size", None) or {}
    least, most = own.get("shortest_edge"), own.get("longest_edge")
    if least is None or most is None:
        return {}
    return {"size": {"shortest_edge": min(least, max_pixels), "longest_edge": min(most, max_pixels)}}


def count_visual_tokens(processor: ProcessorMixin, width: int, height: int, max_pixels: int | None) -> int | None:
    """Tokens of a picture in a prompt, by its size; None where the processor does not say."""
    count = getattr(processor, "_get_num_multimodal_tokens", None)  # what vLLM plans with; of most processors
    if count is None:
        return None
    if max_pixels is not None:
        width, height = fit_size((width, height), max_pixels)
    try:
        return int(count(image_sizes=[[height, width]])["num_image_tokens"][0])
    except Exception:  # each processor has its own; the plan then counts rows
        return None


def shrink_media(media: Media, max_pixels: int, videos_only: bool = False) -> Media:
    """The same with no picture or frame of more than `max_pixels`; those of a video have one size."""
    if isinstance(media, Video):
        return replace(media, frames=tuple(shrink(frame, max_pixels) for frame in media.frames))
    if videos_only:
        return media
    if isinstance(media, Image.Image):
        return shrink(media, max_pixels)
    return [shrink(one, max_pixels) for one in media]


def shrink(image: Image.Image, max_pixels: int) -> Image.Image:
    """A picture of at most `max_pixels`, its aspect kept, by bicubic interpolation as processors do."""
    size = fit_size(image.size, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
