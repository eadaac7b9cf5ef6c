"""Check whether an image looks like a scene, for the warning that the scenes model cannot describe photographs."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.app.caption.progress import print_stderr
from mmspec.app.io.images import Media, media_images

SCENE_SIZE = 192
"""Edge of a drawn scene in pixels."""
MIN_BACKGROUND_SHARE = 0.45
"""Minimum share of pixels in the two commonest colours: backgrounds of scenes are flat; photographs reach about 25%."""
COLOUR_TOLERANCE = 4
"""Maximum difference per channel (0 to 255) to a common colour; covers JPEG and video compression."""

OUT_OF_DOMAIN_HINT = (
    "does not look like the drawn images that the small built-in model was trained on, so expect wrong answers; "
    "name a model for photographs, as in --model llava-hf/llava-1.5-7b-hf"
)


def background_share(image: Image.Image) -> float:
    """Return the share of pixels, 0 to 1, near one of the image's two commonest colours."""
    pixels = (
        np.asarray(image.convert("RGB").resize((SCENE_SIZE, SCENE_SIZE), Image.Resampling.NEAREST))
        .reshape(-1, 3)
        .astype(int)
    )
    remaining = pixels
    share = 0.0
    for _ in range(2):
        if not len(remaining):
            break
        codes, counts = np.unique(remaining // 8 @ np.array([1024, 32, 1]), return_counts=True)
        code = int(codes[counts.argmax()])
        colour = np.median(remaining[remaining // 8 @ np.array([1024, 32, 1]) == code], axis=0)
        near = (np.abs(remaining - colour) <= COLOUR_TOLERANCE).all(1)
        share += near.sum() / len(pixels)
        remaining = remaining[~near]
    return float(share)


def looks_like_scene(image: Image.Image) -> bool:
    """Return whether an image has the flat background of a scene."""
    return background_share(image) >= MIN_BACKGROUND_SHARE


def warn_if_out_of_domain(media: Media, name: str) -> bool:
    """Print a warning to stderr if the first image is not a scene.

    Args:
        media: The request's images or video frames.
        name: Name of the file, for the warning.

    Returns:
        Whether the warning was printed.
    """
    if looks_like_scene(media_images(media)[0]):
        return False
    print_stderr(f"mmspec: {name} {OUT_OF_DOMAIN_HINT}")
    return True
