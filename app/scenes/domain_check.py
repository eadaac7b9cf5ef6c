"""Does a picture look like one of the scenes world? For the line that tells whoever shows the model a photograph."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.app.caption.progress import print_stderr
from mmspec.app.io.images import Media, media_images
from mmspec.app.scenes.world import IMAGE_SIZE

MIN_BACKGROUND_SHARE = 0.45
"""Of a scene at least that much is ground, in one flat colour or two; of most photographs a quarter at most."""
COLOUR_TOLERANCE = 4
"""How far a pixel's colour may be off and still count: pictures come through JPEG and video."""

OUT_OF_DOMAIN_HINT = (
    "does not look like the drawn pictures that the small built-in model was made for, so expect nonsense; "
    "name a model for photographs, as in --model llava-hf/llava-1.5-7b-hf"
)


def background_share(image: Image.Image) -> float:
    """Share of the pixels that have one of the picture's two commonest colours."""
    pixels = (
        np.asarray(image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST))
        .reshape(-1, 3)
        .astype(int)
    )
    left, share = pixels, 0.0
    for _ in range(2):
        if not len(left):
            break
        codes, counts = np.unique(left // 8 @ np.array([1024, 32, 1]), return_counts=True)
        code = int(codes[counts.argmax()])
        colour = np.median(left[left // 8 @ np.array([1024, 32, 1]) == code], axis=0)
        near = (np.abs(left - colour) <= COLOUR_TOLERANCE).all(1)
        share += near.sum() / len(pixels)
        left = left[~near]
    return float(share)


def looks_like_scene(image: Image.Image) -> bool:
    """Whether a picture has the flat ground that all scenes have."""
    return background_share(image) >= MIN_BACKGROUND_SHARE


def warn_if_out_of_domain(media: Media, name: str) -> bool:
    """Say what the model is for, if it is shown something else; whether that was said."""
    if looks_like_scene(media_images(media)[0]):
        return False
    print_stderr(f"mmspec: {name} {OUT_OF_DOMAIN_HINT}")
    return True


__all__ = ["OUT_OF_DOMAIN_HINT", "background_share", "looks_like_scene", "warn_if_out_of_domain"]
