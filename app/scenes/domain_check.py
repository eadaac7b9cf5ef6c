"""Does a picture look like one of the scenes world? For the line that tells whoever shows the model a photograph."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.app.caption.progress import say
from mmspec.app.io.images import Shown, pictures
from mmspec.app.scenes.world import SIDE

SHARE = 0.45
"""Of a scene at least that much is ground, in one flat colour or two; of most photographs a quarter at most."""
SLACK = 4
"""How far a pixel's colour may be off and still count: pictures come through JPEG and video."""

ADVICE = (
    "does not look like the drawn pictures that the small built-in model was made for, so expect nonsense; "
    "name a model for photographs, as in --model llava-hf/llava-1.5-7b-hf"
)


def ground_share(image: Image.Image) -> float:
    """Share of the pixels that have one of the picture's two commonest colours."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)).reshape(-1, 3).astype(int)
    left, share = pixels, 0.0
    for _ in range(2):
        if not len(left):
            break
        codes, counts = np.unique(left // 8 @ np.array([1024, 32, 1]), return_counts=True)
        code = int(codes[counts.argmax()])
        colour = np.median(left[left // 8 @ np.array([1024, 32, 1]) == code], axis=0)
        near = (np.abs(left - colour) <= SLACK).all(1)
        share += near.sum() / len(pixels)
        left = left[~near]
    return float(share)


def like_a_scene(image: Image.Image) -> bool:
    """Whether a picture has the flat ground that all scenes have."""
    return ground_share(image) >= SHARE


def advise(shown: Shown, name: str) -> bool:
    """Say what the model is for, if it is shown something else; whether that was said."""
    if like_a_scene(pictures(shown)[0]):
        return False
    say(f"mmspec: {name} {ADVICE}")
    return True


__all__ = ["ADVICE", "advise", "ground_share", "like_a_scene"]
